"""The converters that are compared: each is a function from a case and a topology to what a job of it then holds.

A converter gets a folder of its own and returns :class:`Brought`, or raises :class:`Refused` with its own words.
Another one is one more function of this kind, in ``OF_FORMAT``.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.lab.draws.files import memory_of
from tests.lab.job import Job, Topology
from tests.lab.laboratory import Laboratory
from tests.parity.lab import python_of
from tests.parity.tensors import Tensor, read_tensors
from tests.peers.cases import Case

HERE = Path(__file__).parent
SECONDS = 300
OURS, OF_NLP = "paddle-reshard", "PaddleNLP's `CheckpointConverter`"


class Refused(Exception):
    """A converter, or the trainer that was to load, did not reach its end."""


@dataclass(frozen=True)
class Brought:
    """What a job of the target topology holds in the end."""

    memory: Mapping[str, Tensor]
    seconds: float
    """Of converting and loading, without the imports of libraries and the building of the model."""
    peak_mib: int
    """Resident memory of the largest process, with its libraries."""


Converter = Callable[[Case, Topology, Laboratory, Path], Brought]


def trainer(case: Case, topology: Topology, lab: Laboratory, folder: Path) -> Brought:
    """The trainer of the target topology resumes from the checkpoint as it is."""
    return _resumed(case.target(topology), lab, folder, _copied(case, folder), names=False)


def ours(case: Case, topology: Topology, lab: Laboratory, folder: Path) -> Brought:
    """``convert``, then the trainer of the target topology resumes from the conversion.

    It is in the source's format, except that the trainer loads no unified checkpoint of these models with tp. A
    FlexCheckpoint for tp is laid out by rank: of whole tensors the trainer cuts fused ones as if they were not fused.
    """
    job, made = case.target(topology), folder / "converted" / case.checkpoint.name
    made.parent.mkdir(parents=True)
    if job.format == "unified" and topology.tp > 1:
        job = replace(job, format="hybrid-plain")
    if job.format == "flex" and topology.tp > 1:
        job = replace(job, by_rank=True)
    # Copies of routers and norms drift apart between the tp ranks of some jobs; the comparison takes each of them.
    options = {**job.target(), **_config_of(case, folder), "replicas": "report"}
    told = _process([sys.executable, "-m", "tests.peers.convert", case.checkpoint, made, json.dumps(options)])
    if job.format == "hybrid" and topology.sharding == 1:  # as ``launch`` says: no load_sharded_model
        more = {"load_checkpoint_format": "sharding_io"}
        job = replace(job, format="hybrid-plain", arguments={**job.arguments, **more})
    then = _resumed(job, lab, folder, made, names=True)
    return Brought(then.memory, told["seconds"] + then.seconds, max(told["peak_mib"], then.peak_mib))


def load_state_dict(case: Case, topology: Topology, _: Laboratory, folder: Path) -> Brought:
    """Plain Paddle fills tensors that as many processes have cut along their first axis; no model is built."""
    script, out = HERE / "load_state_dict.py", folder / "held.safetensors"
    command = [python_of("pf"), script, case.checkpoint, topology.ranks, out]
    return _brought(_process(command), read_tensors(out))


def checkpoint_converter(case: Case, _: Topology, __: Laboratory, folder: Path) -> Brought:
    """PaddleNLP's class fills the states of one card, in its own environment."""
    script, out = HERE / "checkpoint_converter.py", folder / "held.safetensors"
    command = [python_of("nlp"), script, _copied(case, folder), case.folder / "truth.safetensors", out]
    return _brought(_process(command), read_tensors(out))


def converters_of(case: Case, topology: Topology) -> dict[str, Converter]:
    """What can be asked to bring a case to a topology, by the name in the table."""
    more = {OF_NLP: checkpoint_converter} if "hybrid" in case.job.format and topology.ranks == 1 else {}
    return {**OF_FORMAT[case.job.format], **more, OURS: ours}


OF_FORMAT: Mapping[str, Mapping[str, Converter]] = {
    "flex": {"the trainer's loader": trainer, "`load_state_dict` of plain Paddle": load_state_dict},
    "unified": {"the trainer's loader": trainer},
    "hybrid": {"the trainer's `sharding_io`": trainer},
    "hybrid-plain": {"the trainer's loader": trainer},
}


def _copied(case: Case, folder: Path) -> Path:
    place = folder / "source" / case.checkpoint.name
    if not place.exists():
        shutil.copytree(case.checkpoint, place)
    return place


def _config_of(case: Case, folder: Path) -> dict[str, str]:
    """A FlexCheckpoint has no ``config.json``: the one that the model wrote as the trainer's loader was tried."""
    if (case.checkpoint / "config.json").exists():
        return {}
    return {"config": str(next(folder.parent.glob("*/resumed/config.json")))}


def _resumed(job: Job, lab: Laboratory, folder: Path, checkpoint: Path, names: bool) -> Brought:
    out = folder / "resumed"
    if words := lab.run(job, out, checkpoint, names=names):
        raise Refused(words)
    logs = "".join(path.read_text(errors="replace") for path in out.glob("rank*.log"))
    loaded = re.findall(r"LOADED (\S+) s (\d+) MiB", logs)
    seconds, peaks = zip(*((float(one), int(two)) for one, two in loaded), strict=True)
    return Brought(memory_of(out, job), max(seconds), max(peaks))


def _brought(told: Mapping[str, Any], memory: Mapping[str, Tensor]) -> Brought:
    return Brought(memory, told["seconds"], told["peak_mib"])


def _process(command: list[Any]) -> dict[str, Any]:
    """Run a converter in a process of its own, whose last line is JSON."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=SECONDS)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise Refused((done.stderr.strip().splitlines() or ["no word"])[-1])
    told = json.loads(lines[-1])
    if told.get("refused"):
        raise Refused(told["refused"])
    return told
