"""Time and memory of conversions on this machine's disk, compared with ``cp -r`` and with other tools.

    make bench                       4 GB, medians of 5; figures go into benchmarks/disk.md
    make bench ARGS='--quick'        300 MB, once, printed only

Contenders take turns in every round, in a different order each time, and a ratio is the median over rounds of the
ratios within a round, because disks of virtual machines are never quiet. The source is in the page cache if memory
allows (warm), for all contenders alike; caches cannot be dropped here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.generate import SOURCE, V2, Llama, generate, llama_of, parse_size
from benchmarks.measure import (
    CommandFailed,
    Measured,
    Verdict,
    alternate,
    end_cleanly,
    goals_table,
    inner_seconds,
    load,
    machine,
    median,
    ratio_of_rounds,
    run,
    say,
    spread,
    table,
    warm_memory,
    write_figures,
)

DOCUMENT = Path(__file__).with_suffix(".md")
MIB = 1 << 20
MEMORY = Path("/dev/shm")
PEER_PYTHON = "PADDLENLP_PYTHON"
MEMORY_OF_PEERS = 6
"""Upper bound for the memory of loading everything, as a multiple of the checkpoint's size."""


@dataclass(frozen=True)
class Conversion:
    """A conversion as a contender."""

    name: str
    to: str | None
    strategy: str | None = V2
    memory: str = "1GiB"
    goal: float = 0
    """Largest wanted ratio to ``cp -r`` with an fsync of every file."""
    limit: float | None = None
    """The largest that has been measured, where the goal cannot be reached."""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "sharding_strategy": self.strategy,
            "memory": self.memory,
            **dict(self.options),
        }


AGAINST_COPY = (
    Conversion("tp, pp, sharding change", "tp=4,pp=1,sharding=4", goal=1.3),
    Conversion("the same in 256 MiB", "tp=4,pp=1,sharding=4", memory="256MiB", goal=1.3),
    Conversion("only pp changes", "tp=2,pp=4,sharding=2", goal=1.0, limit=1.3),
    Conversion("only sharding changes", "tp=2,pp=2,sharding=4", goal=1.0, limit=1.3),
    Conversion("stage 1 v2 to v1", "tp=2,pp=2,sharding=2", strategy="stage1v1", goal=1.0, limit=1.3),
)
MEMORY_GOAL, MEMORY_LIMIT = 1.1, 1.7
"""Ratio to ``cp -r`` on a file system in memory."""
CPU_GOAL, CPU_LIMIT = 1.5, 1.7
"""Ratio of processor time to that of ``cp -r``, where the storage copies everything."""
SMALL_CPU_GOAL, SMALL_CPU_LIMIT = 1.05, 1.15
"""Ratio of the processor time of a conversion in 256 MiB to that in 1 GiB."""
CPU_PER_GB_GOAL, CPU_PER_GB_LIMIT = 0.6, 1.1
"""Processor seconds for each GB that is written, where all axes change."""
ALL_COPIED = 0.99
VERIFY_GOAL, VERIFY_LIMIT = 1.5, 2.6
"""Ratio of a comparison to reading both checkpoints."""
THREADS_LIMIT, RAY_LIMIT = 1.3, 1.6
"""How many times faster two workers are in memory, of the 1.8 that are wanted."""
TO_HUGGING_FACE = Conversion(
    "to Hugging Face", None, strategy=None, goal=1.1, limit=3.7, options=(("format", "huggingface"),)
)
TO_SINGLE_CARD = Conversion("to a single card", "tp=1", strategy=None, memory="256MiB")


@dataclass(frozen=True)
class Figures:
    """Resources of all runs of one conversion."""

    cpu_seconds: float
    peak_bytes: int
    budget_bytes: int
    read: float
    """Bytes read, or copied by the disk, as a multiple of the source's size, including replicas for comparison."""
    written: float
    copied: float | None

    HEAD: ClassVar = ("CPU s", "private MiB / budget", "read or copied", "written", "copied by the disk")

    @classmethod
    def of(cls, conversion: Conversion, runs: Sequence[Measured], source_bytes: int) -> Figures:
        answer = json.loads(runs[-1].output)
        return cls(
            median(runs, "cpu_seconds"),
            max(found.private_bytes for found in runs),
            answer["plan"]["budget_bytes"],
            (answer["moved"]["read_bytes"] + answer["moved"].get("copied_bytes", 0)) / source_bytes,
            answer["moved"]["written_bytes"] / _target_bytes(answer),
            copied_share(answer),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.cpu_seconds:.1f}",
            f"{self.peak_bytes / MIB:.0f} / {self.budget_bytes / MIB:.0f}",
            f"{self.read:.3f}",
            f"{self.written:.3f}",
            "–" if self.copied is None else f"{self.copied:.2f}",
        )


class Bench:
    """A benchmark run: its folder, number of rounds and results."""

    def __init__(self, scratch: Path, model: Llama, rounds: int) -> None:
        self.scratch, self.model, self.rounds = scratch, model, rounds
        self.source, self.target = scratch / "source", scratch / "target"
        self.verdicts: list[Verdict] = []

    def prepare(self) -> None:
        say(f"writing a llama of {self.model.parameters / 1e6:.0f} M parameters, {SOURCE} {V2}")
        generate(self.model, self.source, SOURCE, V2)

    @property
    def source_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.source.iterdir())

    def fresh(self, contender: Callable[[], Measured]) -> Callable[[], Measured]:
        """Remove the target of the previous contender before a contender runs."""

        def go() -> Measured:
            shutil.rmtree(self.target, ignore_errors=True)
            os.sync()
            warm_memory(self.source_bytes)
            return contender()

        return go

    def ours(self, conversion: Conversion, source: Path | None = None) -> Callable[[], Measured]:
        command = [sys.executable, "-m", "benchmarks.steps", str(source or self.source), str(self.target)]
        arguments = conversion.arguments
        if arguments.get("cluster") == "ray":  # until it runs, memory is cold again
            arguments["warm"] = self.source_bytes
        return self.fresh(lambda: run([*command, json.dumps(arguments)]))

    def command(self, *command: str) -> Callable[[], Measured]:
        return self.fresh(lambda: run(command))

    # ------------------------------------------------------------------------------------------- the sections

    def against_copy(self) -> str:
        """Time compared with ``cp -r``, bytes, memory, share moved by the storage."""
        copy = f"cp -r {self.source} {self.target}"
        durable = f"{copy} && find {self.target} -type f -exec sync {{}} +"
        contenders = {
            "`cp -r`": self.command("sh", "-c", copy),
            "`cp -r`, then fsync": self.command("sh", "-c", durable),
            **{c.name: self.ours(c) for c in AGAINST_COPY},
        }
        self.command("sh", "-c", durable)()  # whoever writes first after the source takes longer
        runs = alternate(contenders, self.rounds, say)
        plain, synced = list(runs.values())[:2]
        rows = [
            ("`cp -r`", spread(plain), "1.00", "–", f"{median(plain, 'cpu_seconds'):.1f}", *["–"] * 4),
            (
                "`cp -r`, then fsync",
                spread(synced),
                f"{ratio_of_rounds(synced, plain):.2f}",
                "1.00",
                f"{median(synced, 'cpu_seconds'):.1f}",
                *["–"] * 4,
            ),
        ]
        figures = [Figures.of(c, runs[c.name], self.source_bytes) for c in AGAINST_COPY]
        for c, figure in zip(AGAINST_COPY, figures, strict=True):
            found = runs[c.name]
            ratio, against_synced = ratio_of_rounds(found, plain), ratio_of_rounds(found, synced)
            rows.append((c.name, spread(found), f"{ratio:.2f}", f"{against_synced:.2f}", *figure.cells))
            self._judge(f"{c.name}: time ÷ `cp -r` with fsync", c.goal, against_synced, c.limit)
        self._judge_worst(figures)
        self._judge_processor(runs, figures)
        head = ("", "seconds", "÷ `cp -r`", "÷ with fsync", *Figures.HEAD)
        return f"{table(head, rows)}\n\n{self._steps(runs)}"

    def _judge(self, what: str, goal: float, found: float, limit: float | None = None) -> None:
        """Compare a figure with the largest wanted one, or with its limit."""
        self.verdicts.append(Verdict.at_most(what, goal, found, limit=limit))

    def _judge_processor(self, runs: dict[str, list[Measured]], figures: Sequence[Figures]) -> None:
        """Processor time where the storage copies everything, and in a small budget."""
        plain = runs["`cp -r`"]
        for c, figure in zip(AGAINST_COPY, figures, strict=True):
            if figure.copied is not None and figure.copied >= ALL_COPIED:
                ratio = ratio_of_rounds(runs[c.name], plain, "cpu_seconds")
                self._judge(f"{c.name}: CPU ÷ `cp -r`'s", CPU_GOAL, ratio, CPU_LIMIT)
        small = ratio_of_rounds(runs[AGAINST_COPY[1].name], runs[AGAINST_COPY[0].name], "cpu_seconds")
        self._judge("CPU in 256 MiB ÷ in 1 GiB", SMALL_CPU_GOAL, small, SMALL_CPU_LIMIT)
        found = runs[AGAINST_COPY[0].name]
        written_gb = _target_bytes(json.loads(found[-1].output)) / 1e9
        each = median(found, "cpu_seconds") / written_gb
        self._judge(f"{AGAINST_COPY[0].name}: CPU s per GB written", CPU_PER_GB_GOAL, each, CPU_PER_GB_LIMIT)

    def _judge_worst(self, figures: Sequence[Figures]) -> None:
        memory = max(f.peak_bytes / f.budget_bytes for f in figures)
        read, written = max(f.read for f in figures), max(f.written for f in figures)
        self.verdicts += [
            Verdict("private memory ÷ budget, the worst", "≤ 1", f"{memory:.2f}", memory <= 1),
            Verdict("bytes read or copied ÷ source, the worst", "≤ 1.05", f"{read:.3f}", read <= 1.05),
            Verdict("bytes written ÷ target, the worst", "1.00", f"{written:.3f}", round(written, 2) == 1),
        ]

    def _steps(self, runs: dict[str, list[Measured]]) -> str:
        """Time of each step in the last run of each conversion."""
        rows = []
        for c in AGAINST_COPY:
            seconds = json.loads(runs[c.name][-1].output)["seconds"]
            rows.append((c.name, *(f"{seconds.get(step, 0):.2f}" for step in STEPS)))
        return "Seconds of the steps in the last round:\n\n" + table(("", *STEPS), rows)

    def export(self) -> str:
        """A conversion that casts and transposes, to a durable copy of the model that it writes."""
        model = self.scratch / "model"
        c = TO_HUGGING_FACE
        run([*STEPS_OF, str(self.source), str(model), json.dumps(c.arguments)])
        durable = f"cp -r {model} {self.target} && find {self.target} -type f -exec sync {{}} +"
        copied, ours = "`cp -r` of the model, then fsync", c.name
        runs = alternate({copied: self.command("sh", "-c", durable), ours: self.ours(c)}, self.rounds, say)
        ratio = ratio_of_rounds(runs[ours], runs[copied])
        self._judge(f"{c.name}: time ÷ `cp -r` of the model with fsync", c.goal, ratio, c.limit)
        rows = [
            (name, spread(found), f"{of:.2f}", f"{median(found, 'cpu_seconds'):.1f}")
            for (name, found), of in zip(runs.items(), (1, ratio), strict=True)
        ]
        gigabytes = sum(path.stat().st_size for path in model.iterdir()) / 1e9
        shutil.rmtree(model)
        head = (f"{gigabytes:.2f} GB in bfloat16", "seconds", "÷ with fsync", "CPU s")
        return (
            f"{table(head, rows)}\n\nThe conversion reads master weights, twice as many bytes as it writes."
        )

    def against_peers(self) -> str:
        """Time and memory compared with loading everything."""
        room = _available_bytes() // MEMORY_OF_PEERS
        source = self.source
        note = ""
        model = self.model if room >= self.source_bytes else llama_of(room)
        if model != self.model:
            source = self.scratch / "smaller"
            generate(model, source, SOURCE, V2)
            note = (
                f"The source has only {model.sharded_bytes / 1e9:.2f} GB: loading everything takes up to "
                f"{MEMORY_OF_PEERS} times its size. "
            )
        contenders = {"paddle-reshard": self.ours(TO_SINGLE_CARD, source)}
        if importlib.util.find_spec("paddle"):
            naive = (sys.executable, "-m", "benchmarks.naive", str(source), str(self.target))
            contenders[NAIVE] = self.command(*naive)
            contenders[NAIVE_34] = self.command(*naive, "--as-3.4")
            note += (
                "Paddle 3.4 is emulated with 3.3: `paddle.load(num_workers=8)` by reads of 1 MiB and more in 8 "
                "threads, in chunks of 32 MiB, `paddle.save` by pickle's protocol 5 on arrays that are not copied if "
                "they are float32. "
            )
        peer = os.environ.get(PEER_PYTHON)
        script = str(Path(__file__).parents[1] / "tests" / "peers" / "checkpoint_converter.py")
        if peer:
            contenders["PaddleNLP CheckpointConverter"] = self.fresh(
                lambda: inner_seconds(run([peer, script, str(source)]))
            )
            note += (
                "CheckpointConverter only loads into the memory of a running job: its time is that of the load, "
                "without imports and without writing; ours includes reading, converting, writing and flushing to "
                "the disk."
            )
        else:
            note += (
                f"PaddleNLP's CheckpointConverter was not run: set {PEER_PYTHON} to a Python with paddlenlp 3.0.0b4 "
                "and paddlepaddle 3.0.0."
            )
        runs = alternate(contenders, min(self.rounds, 3), say)
        mine = runs["paddle-reshard"]
        rows = []
        for name, found in runs.items():
            times = ratio_of_rounds(found, mine)
            lean = max(r.private_bytes for r in mine) / max(r.private_bytes for r in found)
            peak = max(r.private_bytes for r in found) / (1 << 20)
            rows.append((name, spread(found), f"{times:.1f}", f"{peak:.0f}", f"{lean:.3f}"))
            if found is not mine:
                fast, slow, small, large = (3, None, 0.01, 0.02) if name == NAIVE_34 else (5, 4.4, 0.1, None)
                self.verdicts += [
                    Verdict.at_least(f"times faster than {name}", fast, times, 1, slow),
                    Verdict.at_most(f"memory ÷ that of {name}", small, lean, 3, large),
                ]
        head = ("to a single card", "seconds", "÷ ours", "private MiB", "ours ÷ this")
        return f"{table(head, rows)}\n\n{note}"

    def in_memory(self, section: Callable[[Bench], str]) -> str:
        """A section about the same checkpoint on a file system in memory, without waiting for a disk."""
        wanted = 4 * self.source_bytes  # source and target, and as much for the processes
        if not MEMORY.is_dir() or min(_available_bytes(), shutil.disk_usage(MEMORY).free) < wanted:
            return f"Not run: {wanted / 1e9:.0f} GB of memory are not free."
        scratch = Path(tempfile.mkdtemp(prefix="paddle-reshard-", dir=MEMORY))
        try:
            bench = Bench(scratch, self.model, self.rounds)
            shutil.copytree(self.source, bench.source)
            text = section(bench)
            self.verdicts += bench.verdicts
            return text
        finally:
            shutil.rmtree(scratch)

    def without_disk(self) -> str:
        """Time compared with ``cp -r``, for a scratch folder in memory."""
        conversions = [c for c in AGAINST_COPY if c.memory == Conversion.memory]
        contenders = {
            "`cp -r`": self.command("cp", "-r", str(self.source), str(self.target)),
            **{c.name: self.ours(c) for c in conversions},
        }
        runs = alternate(contenders, self.rounds, say)
        plain = runs["`cp -r`"]
        rows = [("`cp -r`", spread(plain), "1.00", f"{median(plain, 'cpu_seconds'):.1f}")]
        for c in conversions:
            found = runs[c.name]
            ratio = ratio_of_rounds(found, plain)
            rows.append((c.name, spread(found), f"{ratio:.2f}", f"{median(found, 'cpu_seconds'):.1f}"))
            self._judge(f"{c.name}: time ÷ `cp -r`, both in memory", MEMORY_GOAL, ratio, MEMORY_LIMIT)
        return table(("in memory", "seconds", "÷ `cp -r`", "CPU s"), rows)

    def workers(self) -> str:
        """One worker on one core compared with two on two, in memory: more workers do not make a disk faster."""
        conversion = AGAINST_COPY[0]
        counted = {
            f"{engine}, {count}": self.ours(
                Conversion(
                    conversion.name,
                    conversion.to,
                    options=(("cluster", engine), ("workers", count), ("cores", count)),
                )
            )
            for engine in ("inline", "ray")
            for count in (1, 2)
        }
        runs = {
            name: [json.loads(r.output)["seconds"] for r in found]
            for name, found in alternate(counted, self.rounds, say).items()
        }
        rows = []
        for engine in ("inline", "ray"):
            one, two = ([r["move"] - r["first group"] for r in runs[f"{engine}, {n}"]] for n in (1, 2))
            start = statistics.median(r["first group"] for n in (1, 2) for r in runs[f"{engine}, {n}"])
            gain = statistics.median(a / b for a, b in zip(one, two, strict=True))
            seconds = (f"{statistics.median(each):.2f}" for each in (one, two))
            rows.append((engine, f"{start:.2f}", *seconds, f"{gain:.2f}"))
            limit = THREADS_LIMIT if engine == "inline" else RAY_LIMIT
            self.verdicts.append(Verdict.at_least(f"{engine}: 1 → 2 workers", 1.8, gain, limit=limit))
        head = ("engine", "to the first group", "from there, 1 worker", "2 workers", "times faster")
        return (
            f"{table(head, rows)}\n\nSeconds of moving, in memory. Every worker has its own core, which on Ray it "
            "shares with Ray's processes. Ray is started before the clock, its workers after it."
        )

    def verification(self) -> str:
        """A comparison of two checkpoints, to reading both; and on one and two workers of Ray, in memory."""
        made = self.scratch / "made"
        self.fresh(
            lambda: run([*STEPS_OF, str(self.source), str(made), json.dumps(AGAINST_COPY[0].arguments)])
        )()
        compare = [*STEPS_OF, str(self.source), str(made)]
        ray = {
            f"on Ray, {n}": partial(
                run, [*compare, json.dumps(_verifying(cluster="ray", workers=n, cores=n))]
            )
            for n in (1, 2)
        }
        reading = f"cat {self.source}/* {made}/* > /dev/null"
        runs = alternate(
            {
                "reading both": self.command("sh", "-c", reading),
                "`verify A B`": self.fresh(lambda: run([*compare, json.dumps(_verifying())])),
                **ray,
            },
            self.rounds,
            say,
        )
        plain, own = runs["reading both"], runs["`verify A B`"]
        ratio = ratio_of_rounds(own, plain)
        self._judge("`verify A B`: time ÷ reading both", VERIFY_GOAL, ratio, VERIFY_LIMIT)
        one, two = (
            [seconds["move"] - seconds["first group"] for seconds in _seconds(runs[f"on Ray, {n}"])]
            for n in (1, 2)
        )
        gain = statistics.median(a / b for a, b in zip(one, two, strict=True))
        self.verdicts.append(
            Verdict.at_least("`verify A B` on Ray: 1 → 2 workers", 1.8, gain, limit=RAY_LIMIT)
        )
        rows = [
            ("reading both", spread(plain), "1.00", f"{median(plain, 'cpu_seconds'):.1f}"),
            ("`verify A B`", spread(own), f"{ratio:.2f}", f"{median(own, 'cpu_seconds'):.1f}"),
        ]
        shutil.rmtree(made)
        return (
            f"{table(('in memory', 'seconds', '÷ reading', 'CPU s'), rows)}\n\nOn Ray, from the first group: "
            f"{statistics.median(one):.2f} s with 1 worker, {statistics.median(two):.2f} s with 2, each with its own "
            "core."
        )


NAIVE = "`paddle.load`, concat, `paddle.save`"
NAIVE_34 = "`paddle.load(num_workers=8)`, concat, `paddle.save` of protocol 5 (emulated)"
STEPS_OF = (sys.executable, "-m", "benchmarks.steps")


def _verifying(**options: Any) -> dict[str, Any]:
    return {"verify": True, **options}


def _seconds(runs: Sequence[Measured]) -> list[dict[str, float]]:
    return [json.loads(found.output)["seconds"] for found in runs]


STEPS = ("import", "plan", "move", "verify", "publish")


def copied_share(answer: dict[str, Any]) -> float | None:
    """Share of the written bytes that the storage copied by itself."""
    copied = answer["moved"].get("copied_bytes")
    return None if copied is None else copied / max(answer["moved"]["written_bytes"], 1)


def standalone(bench: Bench, module: str, *arguments: str) -> str:
    """The table of a separate benchmark, whose verdicts are added to those of ``bench``."""
    found = run([sys.executable, "-m", f"benchmarks.{module}", "--json", *arguments])
    answer = json.loads(found.output.splitlines()[-1])  # Ray may print before it
    bench.verdicts += [Verdict(**verdict) for verdict in answer["verdicts"]]
    return str(answer["table"])


def _target_bytes(answer: dict[str, Any]) -> int:
    plan = answer["plan"]
    return sum(file["size_bytes"] for file in (*plan["files"], *plan["carried"]))


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


SECTIONS = (
    "copy",
    "export",
    "memory",
    "peers",
    "workers",
    "verify",
    "driver",
    "planning",
    "metadata",
    "tensors",
    "shares",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="4GB", help="size of the source checkpoint")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; at most 3 for slow contenders"
    )
    parser.add_argument("--quick", action="store_true", help="300 MB, one round, printed only")
    parser.add_argument(
        "--only", choices=SECTIONS, action="append", help="run only this section, printed only"
    )
    parser.add_argument("--scratch", type=Path, default=Path(".bench"), help="folder to create and remove")
    arguments = parser.parse_args()
    size, rounds = ("300MB", 1) if arguments.quick else (arguments.size, arguments.rounds)
    chosen: Sequence[str] = arguments.only or SECTIONS
    if arguments.scratch.exists():
        parser.error(f"{arguments.scratch} exists; remove it unless another run is in progress")
    arguments.scratch.mkdir(parents=True)
    end_cleanly()
    # Users run bytecode that was compiled when the package was installed, or by an earlier run.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str((arguments.scratch / "bytecode").resolve())
    try:
        text = report(Bench(arguments.scratch, llama_of(parse_size(size)), rounds), chosen)
    except CommandFailed as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(arguments.scratch)
    if arguments.quick or arguments.only:
        print(text)
    else:
        write_figures(DOCUMENT, text)
        say(f"{DOCUMENT} holds the figures")


def report(bench: Bench, chosen: Sequence[str]) -> str:
    """Run the chosen sections; the goals come first."""
    facts = [*machine(bench.scratch), load("before")]
    bench.prepare()
    facts.append(
        f"source: a llama of {bench.model.parameters / 1e6:.0f} M parameters, {SOURCE}, {V2}, "
        f"{bench.source_bytes / 1e9:.2f} GB; {bench.rounds} rounds; warm (source in the page cache)"
    )
    quick = ["--quick"] if bench.rounds == 1 else []
    alone = partial(standalone, bench)
    titles: dict[str, tuple[str, Callable[[], str]]] = {
        "copy": ("Against `cp -r` of the same bytes", bench.against_copy),
        "export": ("As a Hugging Face model", bench.export),
        "memory": ("The same without a disk", partial(bench.in_memory, Bench.without_disk)),
        "peers": ("Against loading everything", bench.against_peers),
        "workers": ("One worker, two workers", partial(bench.in_memory, Bench.workers)),
        "verify": ("Comparing two checkpoints", partial(bench.in_memory, Bench.verification)),
        "driver": ("The driver of a cluster, whose workers do nothing", partial(alone, "driver", *quick)),
        "planning": ("Planning", partial(alone, "planning", *quick)),
        "metadata": (
            "Reading large metadata",
            partial(alone, "metadata", "--rounds", str(bench.rounds), *quick),
        ),
        "tensors": ("Many tensors", partial(alone, "tensors", "--rounds", str(bench.rounds), *quick)),
        "shares": ("Bytes that an object store moves by itself", partial(alone, "shares")),
    }
    parts = []
    for name in chosen:
        say(titles[name][0])
        parts.append(f"### {titles[name][0]}\n\n{titles[name][1]()}")
    if bench.verdicts:
        parts = ["### Goals", goals_table(bench.verdicts), *parts]
    facts.append(load("after"))
    return "\n\n".join(["\n".join(f"- {fact}" for fact in facts), *parts])


if __name__ == "__main__":
    main()
