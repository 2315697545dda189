"""Make cases of the corpus again and compare: ``make again``, or ``make again ARGS='moe/moe_mp2'``.

``cases.json`` describes the job of every case. A case that is made again has the same files with the same entries:
keys and their order, parameter names, dtypes, shapes. Its tensors are those of the case bit for bit on a processor
like the one on which it was made; other processors sum in another order, and some steps leave tensors close. Of cases
whose values to begin with nobody knows, the entries alone are compared. Ends with 1 if anything is wrong.
"""

import argparse
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from tests.conftest import COMMITTED, CORPUS, REPO, case_directory
from tests.lab.draws import files
from tests.lab.job import BY_KEY, LIBRARY, OWN, UNKNOWN, Job, described
from tests.lab.laboratory import Laboratory
from tests.parity.lab import LabError, alone, say
from tests.parity.tensors import Tensor, read_tensors

FOLDER = REPO / ".again"
SAMPLE = (
    "dense/sh2_s3_seg512",
    "families/glm_ocr_single",
    "moe/ep2_mp2",
    "recipes/ernie_ep2_sh2_s1v2_meta_ema_rms",
    "states/dsv3_mtp_sh2_s1v2_meta_ema",
    "states/lora_single",
)
"""Stage 3, images, experts, a recipe, an average with multi-token prediction, LoRA."""
FAR = 0.02
"""A relative distance that another processor's sums do not make in some steps."""


def main() -> int:
    """Make what is asked for; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="make again", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=SAMPLE)
    wanted, jobs, wrong = parser.parse_args().cases, described(), 0
    if unknown := set(wanted) - jobs.keys():
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with alone(FOLDER), Laboratory() as lab:
            for name in wanted:
                found = again(name, jobs, lab, FOLDER / name)
                say(f"{name}: {found[0]}")
                if len(found) == 1 and (CORPUS / f"{name}.tar.xz").exists():
                    shutil.rmtree(FOLDER / name, ignore_errors=True)
                for line in found[1:6]:
                    say(f"    {line}")
                wrong += len(found) > 1
    except LabError as error:
        say(f"again: {error}")
        return 2
    return 1 if wrong else 0


def again(name: str, jobs: dict[str, Job], lab: Laboratory, out: Path) -> list[str]:
    """Make a case again in a folder; the first line says what was compared, the others what is wrong."""
    job, first = jobs[name], {}
    if job.library != LIBRARY:
        return [f"not made by this laboratory's trainer: {job.library}"]
    if job.start not in (BY_KEY, OWN, UNKNOWN):
        first["init"] = FOLDER / "values.npz"
        if words := lab.run(jobs[job.start], out, dump=first["init"]):
            return ["the values to begin with", words]
    if words := lab.run(job, out, **first):
        return ["the trainer refused", words]
    _keep_the_case(out)
    if not ((CORPUS / f"{name}.tar.xz").exists() or (COMMITTED / Path(name).name).exists()):
        return [f"made in {out}; the corpus has none"]
    case = case_directory(name)
    if name.startswith("exports/"):  # of these the corpus has no checkpoint
        mine, real = (tensors_of_folder(folder / "hf-export") for folder in (out, case))
        equal, close, far = compared(mine, real)
        return [f"{equal} tensors of the library's export are equal, {close} close", *far]
    mine, real = (_checkpoint(folder) for folder in (out, case))
    wrong = files.differences_of_structure(
        files.structure_of(mine, job), files.structure_of(real, job), set()
    )
    same = [
        path for path in _compared(real) if (mine / path).exists() and _bytes_equal(mine / path, real / path)
    ]
    told = f"{len(same)} of {len(_compared(real))} files have the same bytes"
    if UNKNOWN in (job.start, getattr(jobs.get(job.start), "start", "")):
        wrong += _other_tensors(out, case)
        return [f"{told}; all have the same entries, with other values", *wrong]
    equal, close, far = compared(*(read_tensors(folder / "truth.safetensors") for folder in (out, case)))
    return [f"{told}; {equal} tensors are equal, {close} close", *wrong, *far]


def compared(mine: dict[str, Tensor], real: dict[str, Tensor]) -> tuple[int, int, list[str]]:
    """Count the tensors that are equal and that are close, and name those that are neither."""
    far = [f"{key}: only in one of them" for key in mine.keys() ^ real.keys()]
    equal = close = 0
    for key in mine.keys() & real.keys():
        if mine[key] == real[key]:
            equal += 1
        elif mine[key][:2] != real[key][:2]:
            far.append(f"{key}: {mine[key][:2]}, not {real[key][:2]}")
        elif (distance := _distance(mine[key], real[key])) > FAR:
            far.append(f"{key}: at a distance of {distance:.3f}")
        else:
            close += 1
    return equal, close, far


def _distance(mine: Tensor, real: Tensor) -> float:
    x, y = (
        files.floats(np.frombuffer(of.data, "<u2" if of.dtype == "BF16" else "<f4")) for of in (mine, real)
    )
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def tensors_of_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder."""
    return {
        key: one for path in sorted(folder.glob("*.safetensors")) for key, one in read_tensors(path).items()
    }


def _other_tensors(out: Path, case: Path) -> list[str]:
    """Compare keys, dtypes and shapes."""
    mine, real = (
        {key: one[:2] for key, one in read_tensors(folder / "truth.safetensors").items()}
        for folder in (out, case)
    )
    keys = sorted(mine.keys() | real.keys())
    return [f"{key}: {mine.get(key)}, not {real.get(key)}" for key in keys if mine.get(key) != real.get(key)]


def _keep_the_case(out: Path) -> None:
    """Leave what a case of the corpus holds; logs and a model's config beside the checkpoint go."""
    for path in out.iterdir():
        if path.is_file() and not path.name.startswith("truth"):
            path.unlink()


def _checkpoint(folder: Path) -> Path:
    return next(folder.glob("checkpoint-*"))


def _compared(checkpoint: Path) -> list[Path]:
    """What a job writes of its model: neither random states, nor the trainer's arguments, which name folders."""
    paths = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    return [
        path for path in paths if not path.name.startswith(("rng_state", "training_args", "trainer_state"))
    ]


def _bytes_equal(mine: Path, real: Path) -> bool:
    return mine.read_bytes() == real.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
