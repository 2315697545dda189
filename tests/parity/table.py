"""Upstream's table of losses, with our conversions: the real trainer goes on in another strategy.

``python -m tests.parity.table [row ...]``, ``--list``, ``--report`` (write losses.md of what there is),
``--again`` (repeat what failed). The README beside this file says what a row proves. Every run of the trainer leaves
a ``result.json`` below ``.parity/table``; one that is there, of the same inputs, is not made again.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.lab.job import FILES_OF_RANKS, Job
from tests.lab.laboratory import Laboratory
from tests.parity.checks import run_trainer
from tests.parity.lab import PARITY, LabError, alone, say
from tests.parity.run import TIMEOUT_SECONDS
from tests.parity.table_report import is_exact, write_report
from tests.parity.table_rows import (
    EXPERT_PARALLEL_ROWS,
    FLEX_ROWS,
    MODELS,
    ROWS,
    STRATEGIES,
    Row,
    keeps_average,
)
from tests.parity.tensors import Tensor, differences, read_tensors

TABLE = PARITY / "table"
DRIVER = Path(__file__).resolve().parent / "table_driver.py"
COMMAND = Path(sys.executable).with_name("paddle-reshard")
CHECKPOINT = "checkpoint-3"
TRUTH = "truth.safetensors"
# What the trainer reads; the rest of a conversion says when it was made.
NOT_READ = ("manifest", "report", "ledger")
ALL_ROWS = [*ROWS, *EXPERT_PARALLEL_ROWS, *FLEX_ROWS]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Bench:
    """Where the runs are made, and whether those that failed are made once more."""

    lab: Laboratory
    root: Path
    again: bool = False


def main(arguments: list[str]) -> int:
    """Follow the rows asked for, or all; the result is the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = {argument for argument in arguments if argument.startswith("--")}
    names = [argument for argument in arguments if not argument.startswith("--")]
    rows = {row.name: row for row in ALL_ROWS}
    if "--list" in options:
        say("\n".join(rows))
        return 0
    unknown = [name for name in names if name not in rows] + sorted(options - {"--report", "--again"})
    if unknown:
        say(f"unknown: {', '.join(unknown)}; --list names the rows")
        return 2
    failed = 0
    try:
        with alone(TABLE):
            if "--report" not in options:
                wanted = [rows[name] for name in names] or ALL_ROWS
                with Laboratory() as lab:
                    bench = Bench(lab, TABLE, "--again" in options)
                    failed = sum(not follow(bench, row) for row in wanted)
            if not names or "--report" in options:  # the document is of all rows, not of a few
                write_report(Path(__file__).with_name("losses.md"), collected())
    except LabError as error:
        say(f"parity: {error}")
        return 2
    return 1 if failed else 0


def follow(bench: Bench, row: Row) -> bool:
    """Make the runs of a row, compare, and keep what was found; say whether it is as it must be."""
    started = time.monotonic()
    found: dict[str, Any] = {"row": asdict(row), "name": row.name}
    try:
        found |= _followed(bench, row)
    except LabError as error:
        found |= {"says": str(error)}
    # A strategy that the trainer does not even begin with says nothing about us.
    judged = not found.get("says", "").startswith("base ")
    path = bench.root / "rows" / f"{slug(row.name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    good = is_exact(found)
    verdict = "exact " if good else "FAILED" if judged else "says  "
    words = found.get("says") or "; ".join(found["found"][:3])
    say(f"{verdict}  {row.name} ({time.monotonic() - started:.0f} s) {words[:300]}")
    return good or not judged


def _followed(bench: Bench, row: Row) -> dict[str, Any]:
    base = _base(bench, row.model, row.before)
    carrier = _base(bench, row.model, row.after) / "out" / CHECKPOINT
    checkpoint, averages = base / "out" / CHECKPOINT, keeps_average(row.before)
    own = _going_on(bench, row.model, row.before, f"own/{row.before}", checkpoint, averages)
    name = f"{row.before} to {row.after}" + (" ema" if row.ema else "")
    truth = base / "out" / TRUTH
    true = _going_on(bench, row.model, row.after, f"truth/{name}", carrier, row.ema, truth)
    source, convert_seconds = _converted(bench, row, checkpoint)
    way = "ours to flex" if row.flex else "ours"
    run = _going_on(bench, row.model, row.after, f"{way}/{name}", source, row.ema, flex=row.flex)
    return _compared(base, own, true, run) | {"convert_seconds": convert_seconds}


def _compared(base: Path, own: Path, true: Path, run: Path) -> dict[str, Any]:
    """Compare a run, as it begins and as it ends, with the one that began with the truth."""
    began = {path: read_tensors(path / "loaded" / TRUTH) for path in (true, run)}
    held = _with_tied(read_tensors(base / "out" / TRUTH))
    wanted = {key: tensor for key, tensor in held.items() if key in began[true]}
    ended = {path: read_tensors(path / "out" / TRUTH) for path in (true, run)}
    told = {path: json.loads((path / "result.json").read_bytes()) for path in (base, own, true, run)}
    found = [f"loaded: {difference}" for difference in differences(began[run], wanted)]
    found += [f"overwritten: {difference}" for difference in differences(began[true], wanted)]
    found += [f"after the last step: {difference}" for difference in differences(ended[run], ended[true])]
    if told[run]["losses"] != told[true]["losses"]:
        found.append(f"losses {told[run]['losses']}, not {told[true]['losses']}")
    return {
        "tensors": len(ended[run]),
        "found": found,
        "loss_before": told[base]["losses"]["3"],
        "losses": told[run]["losses"],
        "losses_of_own": told[own]["losses"],
        "resume_seconds": told[run]["seconds"],
        "versions": told[run]["versions"],
    }


def _with_tied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let a tied head be found under its own name too, as a job with stages has it."""
    for alias, key in TIED.items():
        if not any(name.startswith(alias) for name in tensors):
            tensors |= {alias + name[len(key) :]: t for name, t in tensors.items() if name.startswith(key)}
    return tensors


def _base(bench: Bench, model: str, strategy: str) -> Path:
    """Train three steps from the model's common initial weights; return the folder of the run."""
    job = _job(strategy, keeps_average(strategy), flex=False)
    options = ["--steps", "3"]
    initial = bench.root / slug(model) / "base" / "init.npz"
    if strategy == "single":
        options += ["--dump_init", str(initial)]
    else:
        _base(bench, model, "single")
        options += ["--init", str(initial)]
    run = _run(bench, model, job, f"base/{strategy}", options, {}, {})
    if strategy == "single":
        _name_tied(initial)
    return run


def _name_tied(initial: Path) -> None:
    """Give the initial weights of a tied head their own name, for the stage that holds a copy."""
    with np.load(initial) as arrays:
        weights = {key: arrays[key] for key in arrays.files}
    for alias, key in TIED.items():
        if alias not in weights:
            np.savez(initial, **weights, **{alias: weights[key]})


def _going_on(
    bench: Bench,
    model: str,
    strategy: str,
    name: str,
    checkpoint: Path,
    ema: bool,
    truth: Path | None = None,
    flex: bool = False,
) -> Path:
    """Resume and train steps 4 to 6; return the folder of the run."""
    job = _job(strategy, ema, flex, save_steps=1000)
    environment = {"TABLE_RESUME": str(checkpoint)}
    inputs = {"checkpoint": _digest(checkpoint)}
    if truth is not None:
        environment["TABLE_TRUTH"] = str(truth)
        inputs["truth"] = _digest(truth)
    return _run(bench, model, job, name, ["--steps", "6"], environment, inputs)


def _job(strategy: str, ema: bool, flex: bool, **arguments: Any) -> Job:
    job = STRATEGIES[strategy]
    if flex:
        own = {name: value for name, value in job.arguments.items() if name not in FILES_OF_RANKS}
        job = replace(job, format="flex", arguments=own)
    return replace(job, ema=ema, arguments={**job.arguments, **arguments})


def _run(
    bench: Bench,
    model: str,
    job: Job,
    name: str,
    options: list[str],
    environment: Mapping[str, str],
    inputs: Mapping[str, str],
) -> Path:
    """Run the trainer, unless it has run with the same inputs; return the folder of the run."""
    of_model = MODELS[model]
    arguments = job.trainer_arguments() | of_model.arguments
    run = bench.root / slug(model) / slug(name)
    result = run / "result.json"
    asked = {
        "arguments": arguments,
        "model": of_model.config,
        "family": of_model.family,
        "batch": of_model.global_batch,
        "environment": job.environment,
        "options": [option for option in options if not option.startswith("/")],
        "inputs": dict(inputs),
    }
    if result.exists():
        done = json.loads(result.read_bytes())
        if done["asked"] == asked and not (bench.again and "says" in done):
            return _come_to_its_end(run, done)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    done = {"asked": asked}
    started = time.monotonic()
    try:
        run_trainer(
            bench.lab,
            slug(name),
            run / "out",
            driver=DRIVER,
            options=[
                *options,
                "--family",
                of_model.family,
                "--global_batch",
                str(of_model.global_batch),
            ],
            ranks=job.topology.ranks,
            arguments=arguments,
            model=of_model.config,
            timeout_seconds=TIMEOUT_SECONDS,
            environment={
                **job.environment,
                **environment,
                "TABLE_TOLD": str(run / "told.json"),
                **({"TABLE_LOADED": str(run / "loaded")} if "TABLE_RESUME" in environment else {}),
            },
        )
        done |= json.loads((run / "told.json").read_bytes())
    except LabError as error:
        done["says"] = str(error)
    done["seconds"] = time.monotonic() - started
    result.write_text(json.dumps(done, indent=1))
    return _come_to_its_end(run, done)


def _come_to_its_end(run: Path, done: Mapping[str, Any]) -> Path:
    if "says" in done:
        raise LabError(f"{run.parent.name} {run.name}: {done['says']}")
    return run


def _converted(bench: Bench, row: Row, source: Path) -> tuple[Path, float]:
    """Convert with the command line; return where to, and the seconds that it took, its start included."""
    job = STRATEGIES[row.after]
    folder = bench.root / slug(row.model) / "converted" / slug(f"{row.name} converted")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [str(COMMAND), "convert", str(source), str(folder / CHECKPOINT), "--quiet"]
    if row.flex:
        command += ["--format", "flex"]
    else:
        command += ["--to", str(job.topology)]
        command += ["--sharding-strategy", job.strategy] if job.strategy.startswith("stage") else []
        if job.segment:
            (folder / "layout.json").write_text(json.dumps({"stage3_segment_size": job.segment}))
            command += ["--layout", str(folder / "layout.json")]
    if MODELS[row.model].replicas_drift:
        command += ["--replicas", "report"]
    started = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if ended.returncode:
        raise LabError(f"paddle-reshard: {' '.join(ended.stderr.split())[-1500:]}")
    return folder / CHECKPOINT, seconds


def collected() -> list[dict[str, Any]]:
    """Everything that was found of the rows."""
    rows = []
    for row in ALL_ROWS:
        path = TABLE / "rows" / f"{slug(row.name)}.json"
        done = json.loads(path.read_bytes()) if path.exists() else {"name": row.name, "row": asdict(row)}
        rows.append(done)
    return rows


def _digest(path: Path) -> str:
    """Return one checksum of a file, or of all files of a checkpoint that the trainer reads."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        if not any(word in file.name for word in NOT_READ):
            digest.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return digest.hexdigest()


def slug(name: str) -> str:
    """How the folder of a run, or of a strategy's runs, is called."""
    return "-".join("".join(c if c.isalnum() or c in "_/" else " " for c in name).split()).replace("-/", "/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
