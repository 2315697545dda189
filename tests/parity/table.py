"""Upstream's table of losses, with our conversions: the real trainer goes on in another strategy.

``python -m tests.parity.table [row ...]``, ``--list``, ``--report`` (write losses.md of what there is),
``--again`` (repeat what failed). The README beside this file says what a row proves. Every run of the trainer leaves
a ``result.json`` below ``.parity/table``; one that is there, of the same inputs, is not made again.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tests.lab.job import FILES_OF_RANKS, Job
from tests.parity.lab import PARITY, Lab, LabError, alone, open_lab, run_trainer, say
from tests.parity.measure import drift, largest_ulps
from tests.parity.run import TIMEOUT_SECONDS
from tests.parity.table_report import is_exact, write_report
from tests.parity.table_rows import (
    DRIFT_ROWS,
    EXPERT_PARALLEL_ROWS,
    FLEX_ROWS,
    MODELS,
    READ_BY_CONVERTER,
    ROWS,
    STRATEGIES,
    UPSTREAM,
    Row,
    keeps_average,
)
from tests.parity.tensors import Tensor, read_tensors

TABLE = PARITY / "table"
DRIVER = Path(__file__).resolve().parent / "table_driver.py"
COMMAND = Path(sys.executable).with_name("paddle-reshard")
CHECKPOINT = "checkpoint-3"
TRUTH = "truth.safetensors"
# What the trainer reads; the rest of a conversion says when it was made.
NOT_READ = ("manifest", "report", "ledger")
OUR_ROWS = [*ROWS, *EXPERT_PARALLEL_ROWS, *FLEX_ROWS]
ALL_ROWS = [*OUR_ROWS, *UPSTREAM]
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Bench:
    """Where the runs are made, and whether those that failed are made once more."""

    lab: Lab
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
                bench = Bench(open_lab(), TABLE, "--again" in options)
                wanted = [rows[name] for name in names] or OUR_ROWS
                failed = sum(not follow(bench, row) for row in wanted)
                if not names:
                    _upstreams(bench)
            if not names or "--report" in options:  # the document is of all rows, not of a few
                write_report(Path(__file__).with_name("losses.md"), *collected())
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
    judged = row.way.startswith("ours") and not found.get("says", "").startswith("base ")
    path = bench.root / "rows" / f"{slug(row.name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    good = is_exact(found)
    verdict = "exact " if good else "FAILED" if judged else "says  "
    say(f"{verdict}  {row.name} ({time.monotonic() - started:.0f} s) {found.get('says', '')[:300]}")
    return good or not judged


def _without_conversion(bench: Bench, row: Row) -> tuple[Path, Path, Path]:
    """Train in the first strategy, go on in it, and go on in the second from the truth; return the three runs."""
    base = _base(bench, row.model, row.before)
    carrier = _base(bench, row.model, row.after) / "out" / CHECKPOINT
    averages = keeps_average(row.before)
    own = _going_on(bench, row.model, row.before, f"own/{row.before}", base / "out" / CHECKPOINT, averages)
    name = f"truth/{row.before} to {row.after}" + (" ema" if row.ema else "")
    return base, own, _going_on(bench, row.model, row.after, name, carrier, row.ema, base / "out" / TRUTH)


def _followed(bench: Bench, row: Row) -> dict[str, Any]:
    base, own, true = _without_conversion(bench, row)
    convert_seconds = None
    if row.way in ("ours", "ours to flex"):
        source, convert_seconds = _converted(bench, row, base / "out" / CHECKPOINT)
    elif row.way == "flex":
        base_of_flex = _base(bench, row.model, row.before, flex=True)
        if _digest(base_of_flex / "out" / TRUTH) != _digest(base / "out" / TRUTH):
            raise LabError("saving another format has changed the training: nothing to compare with")
        source = base_of_flex / "out" / CHECKPOINT
    else:
        source = base / "out" / CHECKPOINT
    flex = row.way in ("flex", "ours to flex")
    name = f"{row.way}/{row.before} to {row.after}" + (" ema" if row.ema else "")
    run = _going_on(bench, row.model, row.after, name, source, row.ema, flex=flex)
    return _compared(row, base, own, true, run) | {"convert_seconds": convert_seconds}


def _compared(row: Row, base: Path, own: Path, true: Path, run: Path) -> dict[str, Any]:
    """Compare a run with the one that began with the truth (bits) and the one that never changed (drift)."""
    held = _with_tied(read_tensors(base / "out" / TRUTH))
    loaded = read_tensors(run / "loaded" / TRUTH)
    overwritten = read_tensors(true / "loaded" / TRUTH)
    ends = {
        name: read_tensors(path / "out" / TRUTH)
        for name, path in (("own", own), ("true", true), ("run", run))
    }
    missing = sorted((loaded.keys() ^ overwritten.keys()) | (loaded.keys() - held.keys()))
    missing += sorted(ends["run"].keys() ^ ends["true"].keys())
    told = {path: json.loads((path / "result.json").read_bytes()) for path in (base, own, true, run)}
    return {
        "missing": missing,
        "tensors": len(ends["run"]),
        "not_loaded": largest_ulps(loaded, held),
        "not_overwritten": largest_ulps(overwritten, held),
        "different": largest_ulps(ends["run"], ends["true"]) | dict.fromkeys(missing, -1),
        "drift": drift(_with_tied(ends["own"]), ends["run"]),
        "loss_before": told[base]["losses"]["3"],
        "losses": told[run]["losses"],
        "losses_of_truth": told[true]["losses"],
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


def _base(bench: Bench, model: str, strategy: str, flex: bool = False) -> Path:
    """Train three steps from the model's common initial weights; return the folder of the run."""
    job = _job(strategy, keeps_average(strategy), flex)
    options = ["--steps", "3"]
    initial = bench.root / slug(model) / "base" / "init.npz"
    if strategy == "single" and not flex:
        options += ["--dump_init", str(initial)]
    else:
        _base(bench, model, "single")
        options += ["--init", str(initial)]
    name = f"{'base of flex' if flex else 'base'}/{strategy}"
    run = _run(bench, model, job, name, options, {}, {})
    if strategy == "single" and not flex:
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
    folder = bench.root / slug(row.model) / "converted" / slug(f"{row.way} {row.before} to {row.after}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [str(COMMAND), "convert", str(source), str(folder / CHECKPOINT), "--quiet"]
    if row.way == "ours to flex":
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


def _upstreams(bench: Bench) -> None:
    """Make the runs that need nothing of ours: more pairs for the drift, and upstream's own ways."""
    for row in DRIFT_ROWS:
        try:
            _without_conversion(bench, row)
        except LabError as error:
            say(f"no pair for the drift: {error}")
    _upstreams_converter(bench)
    for row in UPSTREAM:
        follow(bench, row)


def _upstreams_converter(bench: Bench) -> None:
    """Let PaddleNLP's CheckpointConverter read what every strategy has saved, and keep what it says."""
    python = bench.lab.root / "venv-nlp" / "bin" / "python"
    if not python.exists():
        say(f"CheckpointConverter: there is no {python}")
        return
    path = bench.root / "converter.json"
    found = json.loads(path.read_bytes()) if path.exists() else {}
    for model, strategy in READ_BY_CONVERTER:
        base = _base(bench, model, strategy)
        for averages in (True, False) if keeps_average(strategy) else (False,):
            checkpoint = base / "out" / CHECKPOINT
            if not averages:
                checkpoint = bench.root / "without averages" / slug(model) / slug(strategy) / CHECKPOINT
                shutil.rmtree(checkpoint, ignore_errors=True)
                shutil.copytree(base / "out" / CHECKPOINT, checkpoint, ignore=shutil.ignore_patterns("ema*"))
            name = f"{model}: {strategy}" + (", with averages" if averages else "")
            if found.get(name, {}).get("of") != _digest(checkpoint):
                says = _converter_says(python, checkpoint, base / "out" / TRUTH)
                found[name] = {"of": _digest(checkpoint), "says": says}
                path.write_text(json.dumps(found, indent=1))
            say(f"CheckpointConverter: {name}: {found[name]['says']}")


def _converter_says(python: Path, checkpoint: Path, truth: Path) -> str:
    ended = subprocess.run(
        [str(python), str(Path(__file__).with_name("checkpoint_converter.py")), str(checkpoint), str(truth)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PEER")]
    return lines[-1] if lines else ended.stderr[-300:]


def collected() -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], dict[str, dict[str, str]]]:
    """Everything that was found: rows, how far strategies drift apart, what CheckpointConverter says."""
    rows = []
    for row in ALL_ROWS:
        path = TABLE / "rows" / f"{slug(row.name)}.json"
        done = json.loads(path.read_bytes()) if path.exists() else {"name": row.name, "row": asdict(row)}
        rows.append(done)
    pairs = {model: _pairs(model) for model in MODELS}
    converter = TABLE / "converter.json"
    return rows, pairs, json.loads(converter.read_bytes()) if converter.exists() else {}


def _pairs(model: str) -> list[dict[str, Any]]:
    """How far apart two jobs end that began with the same state in two strategies; no conversion is among them."""
    folder = TABLE / slug(model)
    starts: dict[str, list[Path]] = {"the initial weights": sorted((folder / "base").glob("*"))}
    for own in sorted((folder / "own").glob("*")):
        starts[own.name] = [own, *sorted((folder / "truth").glob(f"{own.name}-to-*"))]
    found = []
    for start, runs in starts.items():
        ended = []
        for run in runs:
            done = json.loads((run / "result.json").read_bytes()) if (run / "result.json").exists() else {}
            if "losses" in done and "says" not in done:
                strategy = start if run.parent.name == "own" else run.name.split("-to-")[-1]
                state = _with_tied(read_tensors(run / "out" / TRUTH))
                ended.append((strategy.removesuffix("-ema"), done["losses"], state))
        for (one, losses, state), (other, other_losses, other_state) in combinations(ended, 2):
            apart = max(abs(losses[step] - other_losses[step]) for step in losses)
            of_kinds = drift(state, other_state)
            found.append({"start": start, "one": one, "other": other, "loss": apart, "kinds": of_kinds})
    return found


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
