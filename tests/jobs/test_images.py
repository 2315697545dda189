"""The image holds what the package needs, and the workflows and overlays are what their tools accept."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPO
from tests.jobs.test_manifests import check, fits, manifest

WORKFLOWS = sorted((REPO / ".github/workflows").glob("*.yml"))


def test_workflows_fit_their_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    makefile = (REPO / "Makefile").read_text("utf-8")
    steps = [
        step for job in yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values() for step in job["steps"]
    ]
    for step in steps:
        if step.get("run", "").startswith("make "):
            assert f"\n{step['run'].removeprefix('make ')}:" in makefile


def test_the_image_is_built_from_all_that_the_package_needs() -> None:
    """What setuptools reads: the import root with the folders that it links to, and what the metadata name."""
    allowed = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    linked = {path.resolve().name for path in (REPO / "src/paddle_reshard").iterdir() if path.is_symlink()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} | linked == allowed
    assert not any(fnmatch.fnmatch(name, ".git*") for name in allowed)


def test_the_overlay_makes_a_schedule_that_its_tools_accept() -> None:
    overlay = manifest("example/kustomization.yaml")
    (patch,) = overlay["patches"]
    base = manifest("kubernetes-cronjob.yaml")
    assert patch["target"] == {"kind": base["kind"], "name": base["metadata"]["name"]}
    (change,) = yaml.safe_load(patch["patch"])
    patched = apply(base, change["path"].strip("/").split("/"), change["value"])
    assert fits("kubernetes", patched)
    check(change["value"])
    (image,) = overlay["images"]
    assert image["name"] in (REPO / "deploy/kubernetes-cronjob.yaml").read_text("utf-8")


def apply(value: Any, path: list[str], new: Any) -> Any:
    """JSON Patch's `replace`: the place must be there."""
    if not path:
        return new
    if isinstance(value, list):
        place = int(path[0])
        return [apply(inner, path[1:], new) if n == place else inner for n, inner in enumerate(value)]
    return {**value, path[0]: apply(value[path[0]], path[1:], new)}
