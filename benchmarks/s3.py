"""Conversions on a real S3 server: Ceph with its gateway, started here from Debian's packages.

    make s3                       real and generated checkpoints; figures go into benchmarks/s3.md
    make s3 ARGS='--quick'        300 MB, one round, printed only

Client and server share the machine's cores, so the ratios are meaningful, the rates are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import s3fs

from benchmarks.disk import copied_share
from benchmarks.generate import SOURCE, V2, generate, llama_of, parse_size
from benchmarks.measure import (
    CommandFailed,
    Measured,
    Verdict,
    alternate,
    end_cleanly,
    goals_table,
    load,
    machine,
    median,
    ratio_of_rounds,
    run,
    say,
    spread,
    table,
    write_figures,
)

DOCUMENT = Path(__file__).with_suffix(".md")
SCRIPT = Path(__file__).with_name("ceph.sh")
REAL = Path("tests/golden/cases/mp2pp2sh2_s1v2_meta_ema/checkpoint-3")
BUCKET = "checkpoints"
ALL_AXES = ("--to", "tp=4,pp=1,sharding=4", "--sharding-strategy", V2)
ONLY_PP = ("--to", "tp=2,pp=4,sharding=2", "--sharding-strategy", V2)
OVER_TLS = "writer-tls"
SMALL_CPU_SECONDS, SMALL_RATIO, SMALL_LIMIT = 2.0, 1.0, 1.5
"""Goals for a checkpoint of 3 MB: processor time, time ÷ s3fs, and the largest ratio that has been measured."""
RATIO_LIMIT, ARRAY_LIMIT_MS = 1.2, 0.8
"""The largest measured: time of a whole conversion ÷ s3fs's; processor time of a read of one array."""
GATEWAY_DOWN_SECONDS = 2.0
KILLED_AT = 0.4
KILLS_GROUP_BYTES = 1_500_000
"""Cuts the conversion of the small real checkpoint into several groups."""
MANIFEST, MARKER, OWN = "paddle_reshard.json", "saved_signal_", ".paddle_reshard_"


# -------------------------------------------------------------------------------------------------- server


class Ceph:
    """The server: a monitor, a store and a gateway."""

    def __init__(self, home: Path) -> None:
        self.home, self.port, self.tls_port = home, _free_port(), _free_port()

    def start(self) -> None:
        self._script("start", str(self.port), str(_free_port()), str(self.tls_port))

    def stop(self) -> None:
        self._script("stop")

    def kill_gateway(self) -> None:
        os.kill(int((self.home / "state" / "client.rgw.s3.pid").read_text()), signal.SIGKILL)

    def start_gateway(self) -> None:
        self._script("gateway")

    def _script(self, action: str, *arguments: str) -> None:
        subprocess.run([SCRIPT, action, self.home, *arguments], check=True, stdout=subprocess.DEVNULL)

    def options(self, user: str, tls: bool = False) -> dict[str, Any]:
        """What s3fs needs to act as a user."""
        certificate = str((self.home / "state" / "certificate.pem").resolve())
        return {
            "key": user,
            "secret": f"{user}-secret",
            "endpoint_url": f"https://127.0.0.1:{self.tls_port}" if tls else f"http://127.0.0.1:{self.port}",
            "client_kwargs": {"verify": certificate} if tls else {},
            "use_listings_cache": False,
        }

    def traffic(self) -> tuple[int, int]:
        """Bytes that clients have read from the gateway and sent to it since it was started."""
        counters = self._ask("perf dump")["rgw"]
        return counters["get_b"], counters["put_b"]

    def _ask(self, command: str) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str((self.home / "state" / "client.rgw.s3.asok").resolve()))
            connection.sendall(json.dumps({"prefix": command}).encode() + b"\0")
            with connection.makefile("rb") as answer:
                return json.loads(answer.read(int.from_bytes(answer.read(4), "big")))


def _free_port() -> int:
    """A free port below those of outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def let_reader_read(writer: s3fs.S3FileSystem) -> None:
    """Let the reader read the bucket; its key cannot write."""
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
        "Action": ["s3:GetObject", "s3:ListBucket"],
        "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    writer.call_s3("put_bucket_policy", Bucket=BUCKET, Policy=policy)


# ----------------------------------------------------------------------------------------------------- run


@dataclass
class Session:
    """A server with checkpoints, and the results."""

    ceph: Ceph
    scratch: Path
    rounds: int
    checks: list[tuple[str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        for user in ("writer", "reader"):
            (self.scratch / user).write_text(json.dumps(self.ceph.options(user)))
        (self.scratch / OVER_TLS).write_text(json.dumps(self.ceph.options("writer", tls=True)))
        self.store = s3fs.S3FileSystem(**self.ceph.options("writer"))

    def command(self, *arguments: str, user: str = "writer") -> list[str]:
        """A command line of ours."""
        options = ["--storage-options", f"@{self.scratch / user}", "--json"]
        return [sys.executable, "-m", "paddle_reshard", *arguments, *options]

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def remove(self, location: str) -> None:
        if not location.startswith("s3://"):
            shutil.rmtree(location, ignore_errors=True)
        elif self.store.exists(location):
            self.store.rm(location, recursive=True)

    def check(self, what: str, holds: bool, found: str) -> None:
        """Record the outcome of a check. A failed check fails the run."""
        say(f"  {'ok' if holds else 'NOT OK'}: {what}: {found}")
        self.checks.append((what, found if holds else f"**failed**: {found}"))
        if not holds:
            self.failed.append(what)

    def equal(self, a: str | Path, b: str | Path) -> bool:
        """Whether two checkpoints hold the same values, bit for bit."""
        answer = subprocess.run(
            self.command("verify", str(a), str(b)), capture_output=True, text=True, check=False
        )
        return answer.returncode == 0 and bool(json.loads(answer.stdout)["equal"])

    def objects(self, location: str) -> dict[str, str]:
        """Name → ETag of every object below a URL."""
        found = self.store.find(location, detail=True) if self.store.exists(location) else {}
        return {path.rsplit("/", 1)[1]: entry["ETag"] for path, entry in found.items()}


def real_checkpoint(s: Session) -> None:
    """Convert a checkpoint of the real trainer between S3 and disk, and back to its original topology."""
    source, disk = s.url("real/checkpoint-3"), str(s.scratch / "real-disk")
    s.store.put(f"{REAL}/", f"{source}/", recursive=True)
    ways = {
        "S3 to S3, to a single card": (source, s.url("real/one")),
        "S3 to disk, to a single card": (source, disk),
        "disk to S3, to a single card": (str(REAL), s.url("real/two")),
    }
    for name, (start, end) in ways.items():
        run(s.command("convert", start, end, "--to", "tp=1"))
        s.check(f"real checkpoint: {name}", s.equal(REAL, end), "equal to the source, bit for bit")
    one, two = (s.objects(s.url(name)) for name in ("real/one", "real/two"))
    same = one.keys() == two.keys() and all(one[name] == two[name] for name in one if name != MANIFEST)
    s.check(
        "the same target from S3 and from disk", same, "every object except the manifest has the same ETag"
    )
    back = s.url("real/back")
    run(s.command("convert", s.url("real/one"), back, "--to", SOURCE, "--sharding-strategy", V2))
    s.check("and back to 8 ranks", s.equal(REAL, back), "equal to the source, bit for bit")


def refusals(s: Session) -> None:
    """Keys without the necessary permissions are rejected before any work."""
    for what, user, reason in (
        ("a read-only key", "reader", "denied"),
        ("a wrong secret", "stranger", "denied"),
    ):
        options = (
            {**s.ceph.options("writer"), "secret": "wrong"} if user == "stranger" else s.ceph.options(user)
        )
        (s.scratch / user).write_text(json.dumps(options))
        target = s.url(f"refused/{user}")
        start = time.perf_counter()
        answer = subprocess.run(
            s.command("convert", s.url("large/source"), target, *ALL_AXES, user=user),
            capture_output=True,
            text=True,
            check=False,
        )
        took = time.perf_counter() - start
        message = answer.stderr.strip().removeprefix("paddle-reshard: ")
        holds = answer.returncode == 1 and reason in message and not s.objects(target)
        s.check(what, holds, f"refused after {took:.1f} s, nothing written: “{message}”")
    readable = subprocess.run(
        s.command("inspect", s.url("large/source"), user="reader"), capture_output=True, check=False
    )
    s.check("a read-only key, for reading", readable.returncode == 0, "inspect works")


@dataclass(frozen=True)
class Way:
    """A contender: plain s3fs, or a conversion with the plain contender that moves the same bytes as its baseline."""

    name: str
    locations: tuple[str, ...]
    options: tuple[str, ...] = ()
    baseline: str = ""
    user: str = "writer"

    def command(self, s: Session) -> list[str]:
        if self.baseline:
            return s.command("convert", *self.locations, *self.options, user=self.user)
        return [sys.executable, "-m", "benchmarks.s3_plain", str(s.scratch / self.user), *self.locations]


@dataclass
class Timed:
    """The runs of a contender, and the traffic of the last run: bytes that clients read from the gateway and sent."""

    runs: list[Measured]
    traffic: tuple[int, int]


HEAD = (
    "",
    "seconds",
    "client CPU s",
    "read",
    "written",
    "÷ s3fs",
    "copied by the store",
    "retries",
    "private MiB / budget",
)


def timings(s: Session, local: Path) -> str:
    """The generated checkpoint: conversions and plain s3fs, in turns."""
    source, target = s.url("large/source"), s.url("large/target")
    disk, between = str(s.scratch / "out"), str(s.scratch / "between")
    both, down, up = "s3fs: download, upload", "s3fs: download", "s3fs: upload"
    both_tls, all_tls = f"{both}, over TLS", "S3 to S3 over TLS: tp, pp, sharding change"
    ways = (
        Way(both, (source, target, between)),
        Way(both_tls, (source, target, between), user=OVER_TLS),
        Way(all_tls, (source, target), ALL_AXES, both_tls, OVER_TLS),
        Way(down, (source, disk)),
        Way(up, (str(local), target)),
        Way("S3 to S3: tp, pp, sharding change", (source, target), ALL_AXES, both),
        Way("S3 to S3: only pp changes", (source, target), ONLY_PP, both),
        Way("S3 to disk: tp, pp, sharding change", (source, disk), ALL_AXES, down),
        Way("disk to S3: tp, pp, sharding change", (str(local), target), ALL_AXES, up),
    )
    timed = run_in_turns(s, ways, (target, disk, between))
    size = folder_bytes(local)
    for way in ways:
        if way.baseline:
            judge(s, way, timed)
            s.remove(way.locations[1])
            run(way.command(s))
            s.check(way.name, s.equal(local, way.locations[1]), "equal to the source, bit for bit")
    small, small_ways = small_conversions(s, between)
    s.remove(disk)
    rows = [row(way, timed, size) for way in ways]
    return table(HEAD, [*rows, *(row(way, small, folder_bytes(REAL)) for way in small_ways)])


def small_conversions(s: Session, between: str) -> tuple[dict[str, Timed], tuple[Way, ...]]:
    """The checkpoint of the real trainer, whose bytes cost nothing: what every conversion costs besides."""
    source, target = s.url("real/checkpoint-3"), s.url("real/small")
    both, to_one = "3 MB: s3fs: download, upload", ("--to", "tp=1")
    ways: list[Way] = []
    for user, over in (("writer", ""), (OVER_TLS, ", over TLS")):
        ways.append(Way(f"{both}{over}", (source, target, between), user=user))
        ways.append(Way(f"3 MB: S3 to S3{over}", (source, target), to_one, f"{both}{over}", user))
    timed = run_in_turns(s, ways, (target, between))
    for way in ways:
        if way.baseline:
            runs = timed[way.name].runs
            ratio = ratio_of_rounds(runs, timed[way.baseline].runs)
            used = median(runs, "cpu_seconds")
            s.verdicts.append(Verdict.at_most(f"{way.name}: client CPU s", SMALL_CPU_SECONDS, used))
            s.verdicts.append(
                Verdict.at_most(f"{way.name}: time ÷ s3fs's", SMALL_RATIO, ratio, limit=SMALL_LIMIT)
            )
    return timed, tuple(ways)


def run_in_turns(s: Session, ways: Sequence[Way], locations: Sequence[str]) -> dict[str, Timed]:
    """Run every contender in every round, each into empty targets."""
    traffic: dict[str, tuple[int, int]] = {}

    def contender(way: Way) -> Measured:
        for location in locations:
            s.remove(location)
        os.sync()
        before = s.ceph.traffic()
        measured = run(way.command(s))
        after = s.ceph.traffic()
        traffic[way.name] = (after[0] - before[0], after[1] - before[1])
        return measured

    runs = alternate({way.name: partial(contender, way) for way in ways}, s.rounds, say)
    return {way.name: Timed(runs[way.name], traffic[way.name]) for way in ways}


def judge(s: Session, way: Way, timed: dict[str, Timed]) -> None:
    """Compare time and memory with the goals."""
    runs = timed[way.name].runs
    ratio = ratio_of_rounds(runs, timed[way.baseline].runs)
    peak, budget = memory_of(runs)
    s.verdicts.append(Verdict.at_most(f"{way.name}: time ÷ {way.baseline}", 1.0, ratio, limit=RATIO_LIMIT))
    s.verdicts.append(Verdict.at_most(f"{way.name}: private memory, MiB", budget, peak, decimals=0))


def row(way: Way, timed: dict[str, Timed], size: int) -> tuple[str, ...]:
    """A line of the table."""
    runs, traffic = timed[way.name].runs, timed[way.name].traffic
    common = (
        way.name,
        spread(runs),
        f"{median(runs, 'cpu_seconds'):.1f}",
        *(f"{n / size:.2f}" for n in traffic),
    )
    if not way.baseline:
        return (*common, "1.00", "–", "–", "–")
    answer = json.loads(runs[-1].output)
    share, retries = copied_share(answer), retries_of(answer)
    peak, budget = memory_of(runs)
    return (
        *common,
        f"{ratio_of_rounds(runs, timed[way.baseline].runs):.2f}",
        "–" if share is None else f"{share:.2f}",
        "–" if retries is None else str(retries),
        f"{peak} / {budget}",
    )


def memory_of(runs: Sequence[Measured]) -> tuple[int, int]:
    """Largest private memory and budget, in MiB."""
    budget = json.loads(runs[-1].output)["plan"]["budget_bytes"]
    return max(r.private_bytes for r in runs) >> 20, budget >> 20


def indexing(s: Session) -> None:
    """Index files of a store that answers late, which `benchmarks.indexing` starts: the client's time per read."""
    command = [sys.executable, "-m", "benchmarks.indexing", "--files", "64", "--workers", "--in-flight"]
    found = re.findall(r"([\d.]+) ms of this process each", run([*command, "64", "64", "64"]).output)
    each = statistics.median(map(float, found))
    what = "indexing: client CPU ms per array, median of 3"
    s.verdicts.append(Verdict.at_most(what, 0.3, each, limit=ARRAY_LIMIT_MS))


def in_little_memory(s: Session, local: Path) -> None:
    """Convert with the smallest budget."""
    target = s.url("large/lean")
    what = "S3 to S3 in 256 MiB: tp, pp, sharding change"
    command = s.command("convert", s.url("large/source"), target, *ALL_AXES, "--memory", "256MiB")
    try:
        peak, budget = memory_of([run(command)])
    except CommandFailed as error:
        s.check(what, False, str(error).splitlines()[-1])
        return
    holds = peak <= budget and s.equal(local, target)
    s.check(what, holds, f"equal to the source, {peak} MiB of private memory at most")
    s.remove(target)


def retries_of(answer: dict[str, Any]) -> int | None:
    """Number of retried requests, if the report has it."""
    found = answer["moved"].get("retries")
    return sum(found.values()) if isinstance(found, dict) else found


def gateway_dies(s: Session, local: Path) -> None:
    """The gateway is killed in the middle of a conversion and comes back: retries, and the same result."""
    target = s.url("large/survivor")
    what = f"gateway killed when {KILLED_AT:.0%} of the bytes were uploaded, back after {GATEWAY_DOWN_SECONDS:.0f} s"
    ended = threading.Event()
    accident = threading.Thread(target=_kill_gateway, args=(s, folder_bytes(local), ended))
    accident.start()
    try:
        answer = json.loads(run(s.command("convert", s.url("large/source"), target, *ALL_AXES)).output)
    except CommandFailed as error:
        s.check(what, False, str(error).splitlines()[-1])
    else:
        found = f"{retries_of(answer)} requests retried; equal to the source, bit for bit"
        s.check(what, s.equal(local, target), found)
    finally:
        ended.set()
        accident.join()
    s.remove(target)


def _kill_gateway(s: Session, size: int, ended: threading.Event) -> None:
    already = s.ceph.traffic()[1]
    while s.ceph.traffic()[1] - already < KILLED_AT * size:
        if ended.wait(0.02):
            return
    s.ceph.kill_gateway()
    time.sleep(GATEWAY_DOWN_SECONDS)
    s.ceph.start_gateway()


def folder_bytes(folder: Path) -> int:
    """Size of all files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def killed_and_resumed(s: Session, local: Path) -> None:
    """Kill -9 in the middle, then the same command with --resume."""
    whole, target = s.url("large/whole"), s.url("large/resumed")
    size = folder_bytes(local)
    undisturbed = run(s.command("convert", s.url("large/source"), whole, *ALL_AXES)).seconds
    command = s.command("convert", s.url("large/source"), target, *ALL_AXES)
    already = s.ceph.traffic()[1]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and s.ceph.traffic()[1] - already < KILLED_AT * size:
        time.sleep(0.02)
    alive = process.poll() is None
    process.kill()
    process.wait()
    visible = sorted(s.objects(target))
    foreign = [name for name in visible if not name.startswith(OWN)]
    marked = [name for name in visible if name == MANIFEST or name.startswith(MARKER)]
    s.check(
        f"killed (-9) when {KILLED_AT:.0%} of the bytes were uploaded",
        alive and not marked,
        f"nothing looks finished; visible are {len(visible) - len(foreign)} objects that resuming needs, and "
        + (", ".join(foreign) or "no others"),
    )
    try:
        seconds = run([*command, "--resume"]).seconds
    except CommandFailed as error:
        s.check("resumed", False, str(error).splitlines()[-1])
        return
    same = s.objects(target) == s.objects(whole) and s.equal(local, target)
    s.check(
        "resumed",
        same,
        f"{seconds:.1f} s instead of {undisturbed:.1f} s; every object has the ETag of an undisturbed run",
    )
    s.remove(whole)
    s.remove(target)


def killed_at_every_request(s: Session, replacing: bool) -> None:
    """Kill -9 before every single request that changes the store, then resume: the objects of an undisturbed run."""
    whole, target = s.url("kills/whole"), s.url("kills/resumed")
    request = {
        "to": "tp=1",
        "workers": 1,
        "storage_options": s.ceph.options("writer"),
        "overwrite": replacing,
    }
    command = [sys.executable, "-m", "tests.resume.driver"]
    wrong: list[str] = []
    kills = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        stdin, stdout = cast("IO[str]", driver.stdin), cast("IO[str]", driver.stdout)

        def convert(to: str, resume: bool = False, **order: Any) -> dict[str, Any]:
            order = {"source": str(REAL), "target": to, "group_bytes": KILLS_GROUP_BYTES, **order}
            print(json.dumps({**order, "request": {**request, "resume": resume}}), file=stdin, flush=True)
            return json.loads(stdout.readline())

        def fill(to: str) -> None:
            s.remove(to)
            if replacing:
                s.store.put(f"{REAL}/", f"{to}/", recursive=True)

        fill(whole)
        effects = convert(whole)["effects"]
        wanted = s.objects(whole)
        for number, effect in enumerate(effects, 1):
            fill(target)
            kills += convert(target, kill_at=number) == {"killed": 9}
            again = convert(target, resume=True)
            if "error" in again or s.objects(target) != wanted:
                wrong.append(f"{effect}: {again.get('error', 'other objects')}")
        stdin.close()
    what = "replacing a checkpoint" if replacing else "creating a checkpoint"
    s.check(
        f"{what}, killed (-9) before each of {kills} requests that change the store, and resumed",
        kills > 40 and not wrong,
        wrong[0] if wrong else "every object has the ETag of an undisturbed run",
    )
    s.remove(whole)
    s.remove(target)


def report(ceph: Ceph, scratch: Path, size: str, rounds: int) -> tuple[str, list[str]]:
    """Run everything. Returns the text and the failed checks."""
    facts = [*machine(scratch), load("before")]
    say("starting Ceph")
    ceph.start()
    s = Session(ceph, scratch, rounds)
    s.store.mkdir(BUCKET)
    let_reader_read(s.store)
    say("real checkpoint")
    real_checkpoint(s)
    local = scratch / "source"
    generate(llama_of(parse_size(size)), local, SOURCE, V2)
    s.store.put(f"{local}/", f"{s.url('large/source')}/", recursive=True)
    say("keys")
    refusals(s)
    say("times")
    times = timings(s, local)
    say("indexing")
    indexing(s)
    say("memory and trouble")
    in_little_memory(s, local)
    gateway_dies(s, local)
    killed_and_resumed(s, local)
    for replacing in (False, True):
        killed_at_every_request(s, replacing)
    gigabytes = folder_bytes(local) / 1e9
    facts.append("Ceph 16 (one monitor, one store on a file, one gateway) on the same machine")
    facts.append(f"generated source: {SOURCE}, {V2}, {gigabytes:.2f} GB; {rounds} rounds")
    facts.append(load("after"))
    parts = [
        "\n".join(f"- {fact}" for fact in facts),
        "### Checks",
        "\n".join(f"- {what}: {outcome}" for what, outcome in s.checks),
        "### Times",
        goals_table(s.verdicts),
        times,
    ]
    return "\n\n".join(parts), s.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1GB", help="size of the generated checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; figures are medians")
    parser.add_argument("--quick", action="store_true", help="300 MB, one round, printed only")
    parser.add_argument(
        "--scratch", type=Path, default=Path(".s3"), help="working folder, in which Ceph stays installed"
    )
    arguments = parser.parse_args()
    size, rounds = ("300MB", 1) if arguments.quick else (arguments.size, arguments.rounds)
    scratch: Path = arguments.scratch / "work"
    if scratch.exists():
        parser.error(f"{scratch} exists; remove it unless another run is in progress")
    scratch.mkdir(parents=True)
    # As after an installation: without bytecode, a quarter of the time until the first request is spent on compiling.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str((scratch / "bytecode").resolve())
    end_cleanly()
    ceph = Ceph(arguments.scratch / "ceph")
    try:
        text, failed = report(ceph, scratch, size, rounds)
    except (CommandFailed, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    finally:
        ceph.stop()
        shutil.rmtree(scratch)
        shutil.rmtree(ceph.home / "state", ignore_errors=True)
    if arguments.quick:
        print(text)
    else:
        write_figures(DOCUMENT, text)
        say(f"{DOCUMENT} holds the figures")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
