"""A job that loses and gains cards: killed, and started again by the same script, it goes on with other ranks.

``python -m tests.elastic.run [--kept] [job ...]`` (``make elastic``); the README beside this file says what it proves.
If every row of all jobs has passed, their tables go into losses.md. ``--kept`` makes no start again that an earlier run
has finished.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measure import table, write_figures
from tests.parity.command_line import ALWAYS, GLOBAL_BATCH, RANK, write_inputs
from tests.parity.lab import PARITY, REPO, LabError, alone, python_of, say
from tests.parity.run import EMA_STATES, differences_of_reports
from tests.parity.tensors import Tensor, differences, read_tensors
from tests.storage.servers import Store, running_store

WORK = PARITY / "elastic"
START = Path(os.environ.get("ELASTIC_START", Path(__file__).with_name("start.sh")))
RESHARD = Path(os.environ.get("ELASTIC_RESHARD", Path(sys.executable).with_name("paddle-reshard")))
NODES = 2
PORTS = range(10_000, 14_000, 50)
STORE_OFFSET, MASTER_OFFSET, STORE_PORTS = 1000, 500, 512
SAVE = 2
TIMEOUT_SECONDS = 900
BUCKET = "elastic"
HEAD = ("start", "ranks", "topology", "steps", "losses", "apart", "limit", "tensors", "averages", "ends")
SMALL = {"num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 48}
TRUTH, REPORT, TABLE = "truth.safetensors", "truth_report.json", "table.md"

TP2 = "--tensor_model_parallel_size 2"
PP2 = "--pipeline_model_parallel_size 2"
PP3 = "--pipeline_model_parallel_size 3"
EP2 = "--use_expert_parallel true --expert_model_parallel_size 2"
EP4 = "--use_expert_parallel true --expert_model_parallel_size 4"
STAGE1 = "--sharding stage1 --split_param true"
SHARDING2 = f"{STAGE1} --sharding_parallel_size 2"
SHARDING4 = f"{STAGE1} --sharding_parallel_size 4"


@dataclass(frozen=True)
class Cards:
    """What a user edits when the number of cards changes."""

    ranks: int
    to: str
    arguments: str
    data_ranks: int = 1
    """Ranks with samples of their own, among which the batch is divided."""


@dataclass(frozen=True)
class Start:
    """One start of a job and how it ends."""

    cards: Cards
    killed: int | None = None
    """The step after which every process is killed; without, the job trains to its end."""
    moments: bool = True
    """Whether the job keeps the moments that it loads: if not, its losses must show that."""


@dataclass(frozen=True)
class Job:
    """A job and its starts, of which each goes on from what the one before has saved."""

    script: Path
    arguments: str
    end: int
    """The last step."""
    starts: tuple[Start, ...]
    again: int
    """Which of the starts is made again from S3, and again without moments."""
    close: float
    """Largest difference of a loss from that of the job that never stopped, once the topology has changed."""
    averages: bool = False
    model: Mapping[str, Any] | None = None


ON_4 = Cards(4, "tp=2,pp=2", f"{TP2} {PP2}")
ON_2 = Cards(2, "sharding=2", SHARDING2, 2)
ON_6 = Cards(6, "pp=3,sharding=2", f"{PP3} {SHARDING2}", 2)
EXPERTS_ON_4 = Cards(4, "ep=4,sharding=4", f"{EP4} {SHARDING4}", 4)
EXPERTS_ON_2 = Cards(2, "ep=2,sharding=2", f"{EP2} {SHARDING2}", 2)
# The command line trains an adapter where nothing says otherwise. At this rate, losses show a few steps' updates.
OF_TRAINER = "--fine_tuning Full --learning_rate 1e-2 --save_checkpoint_format sharding_io"
JOBS = {
    "paddleformers-cli, llama": Job(
        RANK,
        f"{ALWAYS} {OF_TRAINER} --bf16 true --fp16_opt_level O2 "
        f"--model_name_or_path {WORK}/in/model "
        f"--train_dataset_path {WORK}/in/train.jsonl --eval_dataset_path {WORK}/in/eval.jsonl",
        10,
        (
            Start(ON_4, killed=3),
            Start(ON_4, killed=5),
            Start(ON_2, killed=7),
            Start(ON_6, killed=9),
            Start(ON_4),
        ),
        again=2,
        close=2e-3,
    ),
    "ernie_pretrain, experts": Job(
        Path(__file__).with_name("recipe_rank.py"),
        "--logging_steps 1000 --zcc_save_ema_coef 0.9 --use_moe true --moe_group ep",
        4,
        (
            Start(EXPERTS_ON_4, killed=3),
            Start(EXPERTS_ON_2),
        ),
        again=1,
        close=2e-3,
        averages=True,
        model={"num_hidden_layers": 4},
    ),
}


def main(wanted: list[str]) -> int:
    """Run the jobs asked for, or all; 0 if every start went on where the one before was saved."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kept = "--kept" in wanted
    wanted = [name for name in wanted if name != "--kept"]
    unknown = set(wanted) - JOBS.keys()
    if unknown:
        say(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
        return 2
    failed = 0
    try:
        with alone(WORK), running_store() as store:
            if not kept:
                for folder in (WORK / "in", *map(_folder, wanted or JOBS)):
                    shutil.rmtree(folder, ignore_errors=True)
            if not (WORK / "in").exists():
                write_inputs(WORK / "in", **SMALL)
            store.client.create_bucket(Bucket=BUCKET)
            python = python_of("pf")
            for name in wanted or JOBS:
                failed += _follow(name, Bench(python, JOBS[name], _folder(name), store))
    except LabError as error:
        say(f"elastic: {error}")
        return 2
    if not failed and all((_folder(name) / TABLE).exists() for name in JOBS):
        tables = [(_folder(name) / TABLE).read_text() for name in JOBS]
        write_figures(Path(__file__).with_name("losses.md"), "\n\n".join(tables))
    return 1 if failed else 0


def _folder(job: str) -> Path:
    return WORK / f"job-{list(JOBS).index(job)}"


def _follow(name: str, bench: "Bench") -> int:
    """Run a job and say what was found; if nothing was wrong, leave its table. The number of failed rows."""
    rows = []
    for row in bench.follow():
        say(f"{'FAILED' if row.found else 'passed'}  {name}: {row.line}")
        for problem in row.found[:8]:
            say(f"        {problem}")
        rows.append(row)
    failed = sum(bool(row.found) for row in rows)
    minutes = sum(row.done.seconds for row in rows) / 60
    say(f"{name}: {len(rows) - failed} passed, {failed} failed, {minutes:.0f} minutes")
    if not failed:
        rows_of_table = table(HEAD, [_cells(row) for row in rows])
        took = f"{minutes:.0f} minutes on {os.cpu_count()} cores."
        text = f"### {name}\n\n{rows_of_table}\n\n{took}"
        (bench.work / TABLE).write_text(text)
    return failed


@dataclass(frozen=True)
class Done:
    """What one start left behind."""

    name: str
    start: Start
    since: int
    """The step of the checkpoint that it had to go on from; 0 for none."""
    losses: dict[int, float]
    seconds: float


@dataclass(frozen=True)
class Row:
    """A start beside another that trained the same steps, and everything that was wrong with it."""

    what: str
    done: Done
    apart: float
    allowed: float
    tensors: int
    averages: int
    found: list[str]

    @property
    def line(self) -> str:
        """For a terminal."""
        cards, losses = self.done.start.cards, ", ".join(map(str, self.done.losses.values()))
        return (
            f"{self.what} on {cards.ranks} ranks ({cards.to}): steps {_steps(self.done)}, losses {losses}, "
            f"{self.apart:.1e} apart, {self.tensors} tensors equal, {self.done.seconds:.0f} s"
        )


@dataclass(frozen=True)
class Bench:
    """Where a job runs."""

    python: Path
    job: Job
    work: Path
    store: Store

    def follow(self) -> Iterator[Row]:
        """Make all starts, compare each, and make one of them again from S3, with moments and without."""
        job, run = self.job, str(self.work / "run")
        first = job.starts[0].cards
        whole = self.start("never-stopped", str(self.work / "never-stopped" / "run"), Start(first), 0)
        yield self.compare(whole, whole, "never stopped", 0)
        made: list[Done] = []
        saved = 0
        for number, start in enumerate(job.starts):
            done = self.start(f"start-{number}", run, start, saved)
            what = f"goes on from step {saved}" if saved else "starts"
            unchanged = all(earlier.cards == first for earlier in job.starts[: number + 1])
            yield self.compare(done, whole, what, 0 if unchanged else job.close)
            made.append(done)
            saved = (start.killed or job.end) // SAVE * SAVE
        again = made[job.again]
        self.upload(Path(run), again.since)
        run = f"s3://{BUCKET}/{self.work.name}"
        done = self.start("from-s3", run, again.start, again.since)
        yield self.compare(done, again, f"goes on from step {again.since}, from S3", 0)
        lost = self.start("without-moments", run, replace(again.start, moments=False), again.since)
        yield self.compare(lost, whole, "the same without its moments, which must show", job.close)

    def compare(self, done: Done, other: Done, what: str, allowed: float) -> Row:
        """Compare steps, losses, and the tensors that the ranks held after loading."""
        start, found = done.start, []
        steps = list(range(done.since + 1, (start.killed or self.job.end) + 1))
        if steps != list(done.losses):
            found.append(f"trained the steps {list(done.losses)}, not {steps}")
        common = done.losses.keys() & other.losses.keys()
        apart = max((abs(done.losses[step] - other.losses[step]) for step in common), default=float("inf"))
        if (apart <= allowed) is not start.moments:
            found.append(f"losses are {apart:.1e} apart, where {allowed:.1e} is the limit: {other.losses}")
        tensors: Mapping[str, Tensor] = {}
        if done.since:
            held = self.saver(done) / "state" / str(done.since)
            loaded = self.work / done.name / "state" / str(done.since)
            tensors = read_tensors(loaded / TRUTH)
            found += differences(tensors, read_tensors(held / TRUTH))
            found += differences_of_reports(loaded / REPORT, held / REPORT)
        averages = sum(key.endswith(EMA_STATES) for key in tensors)
        if self.job.averages and done.since and not averages:
            found.append("the trainer holds no average")
        return Row(what, done, apart, allowed, len(tensors), averages, found)

    def saver(self, done: Done) -> Path:
        """The folder of the start that saved the checkpoint which this one loaded."""
        for number, start in enumerate(self.job.starts):
            if (start.killed or self.job.end) > done.since:
                return self.work / f"start-{number}"
        raise AssertionError(f"nobody saved step {done.since}")

    def upload(self, run: Path, newest: int) -> None:
        """Put the checkpoints up to one into the bucket, as they are."""
        for step in range(SAVE, newest + 1, SAVE):
            for path in (run / f"checkpoint-{step}").rglob("*"):
                if path.is_file():
                    key = f"{self.work.name}/{path.relative_to(run)}"
                    self.store.client.upload_file(str(path), BUCKET, key)

    def start(self, name: str, run: str, start: Start, since: int) -> Done:
        """Run the start script on every node, until the job is killed or has trained."""
        folder = self.work / name
        losses, seconds, began = folder / "losses", folder / "seconds", time.monotonic()
        if seconds.exists():
            return Done(name, start, since, _losses(losses), float(seconds.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # A job whose checkpoints lie in a store saves on a disk first, from where something carries them there.
        out = folder / "run" if run.startswith("s3://") else Path(run)
        arguments = (
            f"{self.job.arguments} {start.cards.arguments} --output_dir {out} --max_steps {self.job.end} "
            f"--save_steps {SAVE} --gradient_accumulation_steps {GLOBAL_BATCH // start.cards.data_ranks}"
        )
        with tempfile.TemporaryDirectory(prefix="elastic_", dir="/dev/shm") as box:
            port = _free_ports(start.cards.ranks)
            environment = _shared_environment(port, box) | {
                "RUN_NAME": name,
                "RUN_OUT": str(folder / "state"),
                "RUN_LOSSES": str(losses),
                "RUN_KILLED": str(start.killed),
                "RUN_WITHOUT": "" if start.moments else "moments",
                "RUN_MODEL": json.dumps(self.job.model),
                "DUMP_AFTER": " ".join(map(str, range(SAVE, self.job.end + 1, SAVE))),
                "PYTHONPATH": str(REPO / "src"),
                "AWS_ENDPOINT_URL": self.store.url,
                "AWS_ACCESS_KEY_ID": self.store.key,
                "AWS_SECRET_ACCESS_KEY": self.store.secret,
                "RESHARD": str(RESHARD),
                "PYTHON": str(self.python),
                "SCRIPT": str(self.job.script),
                "ARGUMENTS": arguments,
                "RUN": run,
                "TO": start.cards.to,
                "CARDS": str(start.cards.ranks // NODES),
                "MASTER": f"127.0.0.1:{port + MASTER_OFFSET}",
            }
            locals_of = [self.work / f"node-{node}" for node in range(NODES)]
            ended = _run_nodes(environment, folder, locals_of, losses, start)
        if ended:
            logs = "\n".join(
                _end_of(path) for path in [*folder.glob("node-*.log"), *folder.glob("*/workerlog.*")]
            )
            raise LabError(f"{folder}: {ended}\n{logs}")
        seconds.write_text(str(time.monotonic() - began))
        return Done(name, start, since, _losses(losses), float(seconds.read_text()))


def _shared_environment(port: int, box: str) -> dict[str, str]:
    """What all ranks are told beside who they are: the folder of their messages, the first of the free ports."""
    own = ("PADDLE_", "PYTHONPATH", "PYTHONDONTWRITE")
    shared = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return shared | {
        "SHIM_BOX": box,
        "SHIM_STORE_PORT": str(port + STORE_OFFSET),
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "0",
        # Compiling the trainer's modules takes a rank most of its time; the environment itself stays as it is.
        "PYTHONPYCACHEPREFIX": str(PARITY / "bytecode"),
    }


def _free_ports(ranks: int) -> int:
    """Find a base at which all the ports are free that a run may listen on."""
    start = os.getpid() % len(PORTS)
    for base in (*PORTS[start:], *PORTS[:start]):
        wanted = [*range(base, base + ranks), base + MASTER_OFFSET]
        wanted += range(base + STORE_OFFSET, base + STORE_OFFSET + STORE_PORTS, 8)
        if all(_is_free(port) for port in wanted):
            return base
    raise LabError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _steps(done: Done) -> str:
    return f"{min(done.losses, default=0)}–{max(done.losses, default=0)}"


def _losses(path: Path) -> dict[int, float]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {step: loss for step, loss in map(json.loads, lines)}


def _run_nodes(
    environment: Mapping[str, str], folder: Path, locals_of: list[Path], losses: Path, start: Start
) -> str:
    """Start every node and kill it, or see it end; what went wrong, if anything."""
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, local in enumerate(locals_of):
            of_node = {"NODE": str(number), "LOCAL": str(local), "LOGS": str(folder / f"logs-{number}")}
            with (folder / f"node-{number}.log").open("wb") as log:
                nodes.append(
                    subprocess.Popen(
                        ["sh", str(START)],
                        cwd=folder,
                        env={**environment, **of_node},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            ends = [node.poll() for node in nodes]
            if start.killed in _losses(losses):
                return ""
            if any(ends) or None not in ends:
                as_wanted = ends == [0] * NODES and start.killed is None
                return "" if as_wanted else f"the nodes ended with {ends}"
            time.sleep(0.1)
        return f"not done after {TIMEOUT_SECONDS} s"
    finally:
        for process in [process for node in nodes for process in _tree(node.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for node in nodes:
            node.wait()


def _tree(process: int) -> list[int]:
    """A process and all below it: the launcher gives every rank a session of its own."""
    found = [process]
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        found += [below for child in children.read_text().split() for below in _tree(int(child))]
    return found


def _end_of(log: Path) -> str:
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if "INFO" not in line and line.strip()
    ]
    return f"{log.name}: {' / '.join(lines[-4:])[-600:]}"


def _cells(row: Row) -> list[str]:
    start, losses = row.done.start, " ".join(f"{loss:.8f}" for loss in row.done.losses.values())
    ends = "killed" if start.killed else "done"
    apart = "0" if row.apart == 0 else f"{row.apart:.1e}"
    limit = ("0" if row.allowed == 0 else f"{row.allowed:.0e}") if start.moments else f"> {row.allowed:.0e}"
    counts = [str(number) if row.done.since else "–" for number in (row.tensors, row.averages)]
    return [
        row.what,
        str(start.cards.ranks),
        start.cards.to,
        _steps(row.done),
        losses,
        apart,
        limit,
        *counts,
        ends,
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
