"""The manifests and examples hold what the tools they are for accept."""

from __future__ import annotations

import json
import py_compile
import re
import shlex
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from paddle_reshard.pipeline.cli import main as cli
from paddle_reshard.pipeline.cli.commands import conversion
from tests.conftest import REPO

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "1.37"
COMMANDS = cli.cli.commands


def fits(kind: str, data: dict[str, Any]) -> bool:
    """Whether a manifest is what the API server takes: every field known, every value of its type."""
    if kind == "rayjob":
        ours = json.loads((SCHEMAS / "rayjob.json").read_text())
        if not jsonschema.Draft202012Validator(ours).is_valid(data):
            return False
        return all(fits("kubernetes", pod) for pod in _pod_templates(data))
    try:
        kubernetes_validate.validate(data, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError):
        return False
    return True


def _pod_templates(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates inside a RayJob, each as an object that the core API knows."""
    cluster = data["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    templates = [group["template"] for group in groups]
    templates += [data["spec"]["submitterPodTemplate"]] if "submitterPodTemplate" in data["spec"] else []
    return [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": t} for t in templates]


def manifest(name: str, number: int = 0) -> dict[str, Any]:
    found = list(yaml.safe_load_all((REPO / "deploy" / name).read_text("utf-8")))[number]
    assert isinstance(found, dict)
    return found


MANIFESTS = [
    ("kuberay-rayjob.yaml", "rayjob"),
    ("kubernetes-cronjob.yaml", "kubernetes"),
    ("kubernetes-elastic-job.yaml", "kubernetes"),
]


@pytest.mark.parametrize(("name", "kind"), MANIFESTS)
def test_manifests_fit_their_schemas(name: str, kind: str) -> None:
    assert fits(kind, manifest(name))


@pytest.mark.parametrize(("name", "kind"), MANIFESTS)
def test_the_schemas_notice_a_slip_anywhere(name: str, kind: str) -> None:
    slips = 0
    for damaged in _slips(manifest(name)):
        assert not fits(kind, damaged)
        slips += 1
    assert slips > 10


def _slips(value: Any) -> Any:
    """The value with one field misspelled, for every object whose fields are given by its type."""
    free = ("labels", "selector", "rayStartParams", "requests", "limits", "resources", "emptyDir")
    if isinstance(value, dict):
        yield {**value, "mispeled": 1}
        for name, inner in value.items():
            if name not in free:
                yield from ({**value, name: slip} for slip in _slips(inner))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], slip, *value[place + 1 :]] for slip in _slips(inner))


def check(words: list[str]) -> None:
    """Let the command itself read the arguments of a documented line."""
    command = COMMANDS[words[0]]
    context = command.make_context(words[0], words[1:])
    rest = context.params.get("arguments")
    if rest is not None:
        assert isinstance(command, click.Command)
        conversion.convert.make_context("convert", list(rest))


def test_manifests_call_commands_that_exist() -> None:
    cron = manifest("kubernetes-cronjob.yaml")["spec"]["jobTemplate"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert cron["command"] == ["paddle-reshard"]
    check(cron["args"])
    (node,) = manifest("kubernetes-elastic-job.yaml")["spec"]["template"]["spec"]["containers"]
    assert node["command"] == ["paddle-reshard"]
    check(node["args"])
    words = shlex.split(manifest("kuberay-rayjob.yaml")["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "paddle_reshard"]
    check(words[3:])


def test_pods_of_a_training_job_find_the_first_of_them() -> None:
    name = "kubernetes-elastic-job.yaml"
    job, service = manifest(name), manifest(name, 1)
    assert fits("kubernetes", service)
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["metadata"]["name"] == pod["spec"]["subdomain"]
    variables = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    assert variables["PADDLE_MASTER"].startswith(f"{job['metadata']['name']}-0.{pod['spec']['subdomain']}:")
    assert variables["PADDLE_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])


def test_manifests_hold_no_secret() -> None:
    for name, _ in MANIFESTS:
        text = (REPO / "deploy" / name).read_text("utf-8")
        assert "secretRef" in text or "elastic" in name  # whose run is on a volume
        assert not re.search(r"^\s*(-\s*)?(value|stringData|data):", text, re.MULTILINE)


def test_examples_compile(tmp_path: Path) -> None:
    for path in (REPO / "examples").glob("*.py"):
        py_compile.compile(str(path), cfile=str(tmp_path / "x.pyc"), doraise=True)
