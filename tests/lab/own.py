"""A class of one's own in the real trainer: describes itself, is converted and resumed: ``make own``.

Jobs on one card and of two expert ranks show what they call their parameters; then a job of tp 2, pp 2 and ep 2, whose
checkpoints hold the description of all three, is treated as a drawn job. The library exports the job on one card, by
the class's AOA statements; our export and import are held against that. ``trainer/own.py`` is the class.
"""

import json
import lzma
import shutil
import sys
from pathlib import Path

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


def jobs(tied: bool) -> dict[str, Job]:
    """The jobs of the class, by name."""
    v2 = {"strategy": "stage1v2", "format": "hybrid"}
    return {
        "one": Job("own", tied=tied, export=True),
        "ep2": Job("own", tied=tied, topology=Topology(sharding=2, ep=2), **v2),
        "sharding4": Job("own", tied=tied, topology=Topology(sharding=4), **v2),
        "source": Job("own", tied=tied, topology=Topology(tp=2, pp=2, ep=2), format="hybrid"),
    }


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


def main() -> int:
    """Run, convert, compare and resume; ``--keep`` renews what tests read."""
    wrong: list[str] = []
    facts: dict[str, list[object]] = {}
    try:
        with alone(FOLDER), Laboratory() as lab:
            for tied, target in ((True, "sharding4"), (False, "one")):
                folder, known = FOLDER / target, jobs(tied)
                shutil.rmtree(folder, ignore_errors=True)
                for name in ("one", "ep2"):
                    wrong += filter(None, [lab.run(known[name], folder / name / "job")])
                draw = Draw(0, known["source"], known[target], known["ep2"], resumes=True)
                outcome = check(draw, lab, folder / "draw")
                wrong += [*outcome.wrong, *outcome.refused.values()]
                say(f"tied={tied} {draw.source} -> {draw.target}: {outcome.tensors} tensors equal to memory")
                wrong += published(folder / "one" / "job", folder / "rules.json", folder / "published")
                for name, out in (("one", "one/job"), ("ep2", "ep2/job"), ("source", "draw/source")):
                    ranks = sorted((folder / out).glob("facts_*.json"))
                    facts[f"{name}{' tied' * tied}"] = [json.loads(path.read_text()) for path in ranks]
    except LabError as error:
        say(f"own: {error}")
        return 2
    for line in wrong:
        say(line)
    if "--keep" in sys.argv[1:] and not wrong:
        keep(FOLDER / "sharding4" / "draw", "drawn_own")
        export = FOLDER / "one" / "published" / "own_export"
        shutil.copytree(FOLDER / "one" / "one" / "job" / "hf-export", export)
        shutil.copy(FOLDER / "one" / "rules.json", export)
        pack(export, FACTS.with_name("own_export.tar.xz"))
        FACTS.write_bytes(lzma.compress(json.dumps(facts).encode(), preset=9))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
