"""Every case of the corpus has a description, and it says what the case's own ``case.json`` says of the job."""

from __future__ import annotations

import json
import tarfile
from functools import cache
from typing import Any

import pytest

from tests.conftest import COMMITTED, CORPUS
from tests.lab.job import LIBRARY, Job, described

JOBS = described()
NOT_SAID = {"_vpp": 1, "_tie": False}
"""Of the laboratory: a job without them has these."""
SAVED_BY_OPTION = {"recipes/ernie_ep2_fc_sh2_s1v2"}
"""Its format was no argument of the trainer."""


@cache
def told() -> dict[str, dict[str, Any]]:
    """Case → its ``case.json``, of those that have one."""
    found = {f"dense/{path.parent.name}": path.read_bytes() for path in COMMITTED.glob("*/case.json")}
    for path in sorted(CORPUS.glob("*/*.tar.xz")):
        case = path.name.removesuffix(".tar.xz")
        with tarfile.open(path) as packed:  # it comes before the checkpoint
            first = next((entry for entry in packed if entry.isfile()), None)
            if first is not None and first.name == f"{case}/case.json":
                member = packed.extractfile(first)
                assert member is not None
                found[f"{path.parent.name}/{case}"] = member.read()
    return {name: json.loads(content) for name, content in found.items()}


def options(case: dict[str, Any]) -> dict[str, str]:
    words = case.get("cmd", ["", ""])[2:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_all_cases_are_described_and_no_others() -> None:
    archives = {
        f"{path.parent.name}/{path.name.removesuffix('.tar.xz')}" for path in CORPUS.glob("*/*.tar.xz")
    }
    cases = archives | {f"dense/{path.name}" for path in COMMITTED.iterdir()}

    assert cases == {name for name in JOBS if not name.startswith("bases/")}
    assert {job.start for job in JOBS.values()} - {"own", "unknown"} <= JOBS.keys()


@pytest.mark.parametrize("library", [True, False], ids=["this library", "others"])
def test_a_description_is_what_the_case_says(library: bool) -> None:
    compared = 0
    for name, case in told().items():
        job = JOBS[name]
        if (job.library == LIBRARY) != library or "cmd" not in case:
            continue
        said = json.loads(options(case)["--args"])
        assert job.topology.ranks == case["n"], name
        assert arguments(name, job, said) == said, name
        model = json.loads(options(case)["--model"])
        assert {key: job.model.get(key) for key in model} == model, name
        assert job.frozen or "--freeze" not in options(case), name
        assert bool(job.lora) == ("--lora" in options(case)), name
        compared += 1
    assert compared > (150 if library else 18)


def arguments(name: str, job: Job, said: dict[str, Any]) -> dict[str, Any]:
    """The trainer's arguments of a description, without those whose value is the default where a case is silent."""
    if job.library != LIBRARY:
        return dict(job.arguments)
    defaults = {**NOT_SAID, "max_grad_norm": 1.0, "convert_from_hf": False}
    given = {
        key: value
        for key, value in job.trainer_arguments().items()
        if key in said or (value is not None and defaults.get(key) != value)
    }
    if name in SAVED_BY_OPTION:
        given = {key: value for key, value in given.items() if "checkpoint_format" not in key}
    return given
