"""A class of one's own in the real trainer: describes itself, is converted and resumed: ``make own``.

Jobs on one card and of two expert ranks show what they call their parameters; then a job of tp 2, pp 2 and ep 2, whose
checkpoints hold the description of all three, is treated as a drawn job. The library exports the job on one card, by
the class's AOA statements; our export and import are held against that. ``trainer/own.py`` is the class.
"""

import json
import lzma
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle_reshard
from tests.conftest import REPO
from tests.lab.corpus import tensors_of_folder
from tests.lab.draws.check import Draw, check
from tests.lab.draws.keep import keep
from tests.lab.job import Job, Topology
from tests.lab.laboratory import Laboratory
from tests.lab.pack import pack
from tests.parity.lab import LabError, alone, say
from tests.parity.tensors import differences

FOLDER = REPO / ".own"
FACTS = REPO / "tests" / "facts" / "own.json.xz"


@dataclass(frozen=True)
class Run:
    """A model of the class, and the jobs between which its checkpoint goes."""

    name: str
    target: str
    third: str
    tied: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)

    def jobs(self) -> dict[str, Job]:
        """The jobs of the class, by name."""
        of = {"model": self.model, "tied": self.tied}
        v2 = {"strategy": "stage1v2", "format": "hybrid", **of}
        return {
            "one": Job("own", export=True, **of),
            "ep2": Job("own", topology=Topology(sharding=2, ep=2), **v2),
            "sharding4": Job("own", topology=Topology(sharding=4), **v2),
            "source": Job("own", topology=Topology(tp=2, pp=2, ep=2), format="hybrid", **of),
        }


RUNS = (
    Run("tied", "sharding4", "ep2", tied=True),
    Run("untied", "one", "ep2"),
    *(
        Run(
            kind,
            "ep2",
            "sharding4",
            model={"expert_kind": kind, "mtp_num_hidden_layers": 1, "norm_before_mtp": kind == "local"},
        )
        for kind in ("stacked", "local")
    ),
)


def published(job: Path, rules: Path, over: Path) -> list[str]:
    """How our export of a job differs from the library's, and what an import of the library's gives back."""
    real = tensors_of_folder(job / "hf-export")
    [checkpoint] = job.glob("checkpoint-*")
    paddle_reshard.convert(checkpoint, over / "export", format="huggingface", rules=rules)
    job_of_stages = {"to": "tp=2,pp=2,ep=2", "layout": {"sequence_parallel": False}}
    paddle_reshard.convert(job / "hf-export", over / "import", rules=rules, **job_of_stages)
    paddle_reshard.convert(over / "import", over / "back", format="huggingface", rules=rules)
    return [
        f"{name}: {difference}"
        for name in ("export", "back")
        for difference in differences(tensors_of_folder(over / name), real)
    ]


def check_run(run: Run, lab: Laboratory, folder: Path) -> tuple[list[str], dict[str, list[object]]]:
    """Let the jobs describe themselves, convert and resume; return what is wrong, and what the ranks held."""
    known = run.jobs()
    shutil.rmtree(folder, ignore_errors=True)
    wrong = [*filter(None, (lab.run(known[name], folder / name / "job") for name in ("one", "ep2")))]
    draw = Draw(0, known["source"], known[run.target], known[run.third], resumes=True)
    outcome = check(draw, lab, folder / "draw")
    wrong += [*outcome.wrong, *outcome.refused.values()]
    say(f"{run.name}: {draw.source} -> {draw.target}: {outcome.tensors} tensors equal to memory")
    wrong += published(folder / "one" / "job", folder / "rules.json", folder / "published")
    facts: dict[str, list[object]] = {}
    for name, out in (("one", "one/job"), ("ep2", "ep2/job"), ("source", "draw/source")):
        ranks = sorted((folder / out).glob("facts_*.json"))
        facts[f"{name} {run.name}"] = [json.loads(path.read_text()) for path in ranks]
    return wrong, facts


def main() -> int:
    """Run, convert, compare and resume what is named, or all; ``--keep`` renews what tests read of it."""
    named = [name for name in sys.argv[1:] if name != "--keep"]
    runs = [run for run in RUNS if run.name in named or not named]
    wrong: list[str] = []
    facts = json.loads(lzma.decompress(FACTS.read_bytes()))
    try:
        with alone(FOLDER), Laboratory() as lab:
            for run in runs:
                found, held = check_run(run, lab, FOLDER / run.name)
                wrong, facts = [*wrong, *found], facts | held
    except LabError as error:
        say(f"own: {error}")
        return 2
    for line in wrong:
        say(line)
    if "--keep" not in sys.argv[1:] or wrong:
        return 1 if wrong else 0
    for run in runs:
        if run.name == "untied":
            export = FOLDER / run.name / "published" / "own_export"
            shutil.copytree(FOLDER / run.name / "one" / "job" / "hf-export", export)
            shutil.copy(FOLDER / run.name / "rules.json", export)
            pack(export, FACTS.with_name("own_export.tar.xz"))
        else:
            keep(FOLDER / run.name / "draw", f"drawn_own_{run.name}".removesuffix("_tied"))
    FACTS.write_bytes(lzma.compress(json.dumps(facts).encode(), preset=9))
    return 0


if __name__ == "__main__":
    sys.exit(main())
