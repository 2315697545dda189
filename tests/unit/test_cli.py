"""The command line is a contract: these lines are called by scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import RuleError
from tests.conftest import COMMITTED
from tests.jobs.command import run as run_alone
from tests.jobs.command import run_here as run

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


@pytest.fixture(scope="module")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cli") / "one-card"
    done = run("convert", DEMO, target, "--to", "tp=1")
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("name", ["delta", "convert"])
def test_a_folder_may_be_called_like_a_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(DEMO)
    monkeypatch.chdir(tmp_path)
    done = run("inspect", name)
    assert (done.returncode, "tp=2,pp=2,sharding=2" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("@nofile", "nofile: No such file or directory"),
        ('{"key": "hunter2" "x": 1}', "the text is no JSON object (it breaks at line 1 column 19)"),
        ("[1]", "the text is JSON, but no object"),
    ],
)
def test_storage_options_that_cannot_be_read_are_told_without_them(given: str, message: str) -> None:
    done = run("inspect", DEMO, "--storage-options", given)
    assert (done.returncode, message in done.stderr, "hunter2" in done.stderr) == (2, True, False), (
        done.stderr
    )


def test_the_folder_of_a_run_is_distinguished_from_its_checkpoints() -> None:
    done = run("inspect", DEMO.parent)
    assert done.returncode == 1
    assert f"{DEMO.parent}: this folder contains checkpoints" in done.stderr
    assert "such as checkpoint-3" in done.stderr


def test_plan_moves_nothing_and_says_what_convert_would_write(tmp_path: Path, one_card: Path) -> None:
    done = run("plan", DEMO, tmp_path / "x", "--to", "tp=1", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
    planned = {f["path"]: f["size_bytes"] for f in data["files"] + data["carried"]}
    written = {p.name: p.stat().st_size for p in one_card.iterdir() if p.name != "paddle_reshard.json"}
    assert planned == written
    assert 0 < data["peak_bytes"] <= data["budget_bytes"] == 1 << 30
    assert data["not_carried"][0]["path"] == "rng_state_0.pth"


def test_convert_prints_one_json_object(tmp_path: Path) -> None:
    done = run_alone("convert", DEMO, tmp_path / "x", "--to", "pp=2", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0
    assert done.stderr == ""
    assert data["moved"]["written_bytes"] == data["plan"]["write_bytes"]


def test_verify_keeps_its_progress_in_a_file_until_it_has_ended(one_card: Path, tmp_path: Path) -> None:
    progress = tmp_path / "compared.jsonl"
    done = run("verify", DEMO, one_card, "--resume", progress)
    assert done.returncode == 0, done.stderr
    assert "equal; 273 tensors" in done.stdout
    assert not progress.exists()


def test_verify_that_could_not_compare_is_trouble_as_for_cmp_and_diff(one_card: Path, tmp_path: Path) -> None:
    shutil.copytree(one_card, tmp_path / "cut", copy_function=shutil.copyfile)
    size_bytes = (tmp_path / "cut" / "optimizer.pdopt").stat().st_size
    os.truncate(tmp_path / "cut" / "optimizer.pdopt", size_bytes // 2)
    (tmp_path / "no-manifest").mkdir()
    for arguments in (
        ("verify", one_card, tmp_path / "cut"),
        ("verify", one_card, tmp_path / "nowhere"),
        ("verify", one_card, one_card, "--states", "momentum"),
        ("verify", tmp_path / "no-manifest"),
        ("verify", one_card, "--memory", "2GiB"),
    ):
        assert run(*arguments).returncode == 2, arguments
    told = run("verify", one_card, tmp_path / "cut").stderr
    assert "optimizer.pdopt at byte " in told
    assert f"truncated: the file has {size_bytes // 2} bytes, what it announces here needs at least " in told
    damaged = run("verify", tmp_path / "cut")
    assert damaged.returncode == 1
    assert f"truncated: has {size_bytes // 2} bytes, the manifest says {size_bytes}" in damaged.stdout


def test_a_variable_that_a_check_of_one_target_does_not_need_is_no_mistake(
    one_card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_RESHARD_MEMORY", "2GiB")
    monkeypatch.setenv("PADDLE_RESHARD_STORAGE_OPTIONS", "{}")
    assert run("verify", one_card).returncode == 0
    assert run("verify", DEMO, one_card).returncode == 0


def test_a_misspelt_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, told in (
        (("clean", tmp_path / "nowhere"), "neither an unfinished conversion nor anything else"),
        (("ls", tmp_path / "nowhere"), "no such folder"),
        (("ls", tmp_path / "empty"), "no checkpoint-<step> folders here"),
        (("ls", DEMO), "no checkpoint-<step> folders here"),
    ):
        done = run(*arguments)
        assert (done.returncode, told in done.stderr) == (1, True), done.stderr


def test_a_mistake_in_the_source_is_told_before_one_in_the_target(one_card: Path, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "nowhere", one_card, "--to", "tp=1")
    assert (done.returncode, f"{tmp_path / 'nowhere'}: no such folder" in done.stderr) == (1, True)
    done = run("plan", tmp_path / "nowhere", one_card, "--to", "tp=1")
    assert (done.returncode, f"{tmp_path / 'nowhere'}: no such folder" in done.stderr) == (1, True)
    occupied = run("convert", DEMO, one_card, "--to", "tp=1").stderr
    assert "is not empty" in occupied and "--overwrite" in occupied


def test_a_plan_for_a_place_says_what_is_free_there(tmp_path: Path) -> None:
    line = re.search(r"^free\t(.*)$", run("plan", DEMO, tmp_path / "x", "--to", "tp=1").stdout, re.MULTILINE)
    assert line is not None
    assert re.fullmatch(r"[\d.]+ [KMGT]iB", line[1])
    assert "\nfree\t" not in run("plan", DEMO, "--to", "tp=1").stdout


def test_a_command_alone_prints_its_help_in_lines() -> None:
    done = run_alone()
    assert "Look:\n  inspect " in done.stderr
    assert "Error" not in done.stderr


def test_verify_reports_each_state_that_one_side_lacks_once(tmp_path: Path) -> None:
    paddle_reshard.convert(DEMO, tmp_path / "unified", format="unified", drop=["ema"])
    different = run("verify", DEMO, tmp_path / "unified")
    assert different.returncode == 1
    assert different.stdout.splitlines()[0] == "ema_master_weight of lm_head.weight and 38 more: only in A"
    assert different.stdout.count("only in") == 1
    assert "--states LIST to compare chosen states, or --subset if B may hold" in different.stdout
    exchanged = run("verify", tmp_path / "unified", DEMO, "--subset")
    assert exchanged.returncode == 1
    assert "or exchange A and B and give --subset if A may hold" in exchanged.stdout
    for fewer in (("--subset",), ("--states", "param,moment1")):
        assert run("verify", DEMO, tmp_path / "unified", *fewer).returncode == 0
    assert len(json.loads(run("verify", DEMO, tmp_path / "unified", "--json").stdout)["differences"]) == 39


@pytest.mark.parametrize(
    "option", ["--states=param", "--subset", "--config=x", "--allow-missing=x", "--memory=2GiB"]
)
def test_verify_of_one_target_takes_no_option_of_two(
    option: str, one_card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("{}")
    monkeypatch.chdir(tmp_path)
    done = run("verify", one_card, option)
    assert done.returncode == 2
    assert f"{option.split('=')[0]} is for two checkpoints" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--to", "tp=3"], 1, "tp=3 does not divide"),
        (["--to", "tp=2,pp=2,vpp=2"], 1, "pp > 2"),
        (["--to", "pp=2,sharding=2", "--sharding-strategy", "stage2"], 1, "refuses sharding stage 2 and 3"),
        (["--to", "tp=2,sharding=2", "--sharding-strategy", "stage3"], 1, "stage3 with tp=2"),
        (["--to", "sharding=2", "--sharding-strategy", "none"], 1, "needs a sharding strategy"),
        (["--to", "tp=2", "--sharding-strategy", "stage1v2"], 1, "needs sharding > 1"),
        (["--to", "ep=2"], 1, "ep=2"),
        (["--to", "tp=1", "--cluster", "slurm"], 2, "unknown cluster 'slurm'"),
        (["--to", "tp=1", "--workers", "0"], 2, "--workers"),
        (["--to", "tp=1", "--device", "gpu"], 2, "requires --cluster ray"),
        (["--to", "tp=1", "--cluster", "ray:127.0.0.1:1"], 1, "cannot join Ray"),
        (["--to", "cp=2"], 2, "unknown axis 'cp'"),
        (["--to", "tp=two"], 2, "'two'"),
        (["--to", "tp=0"], 2, "axis tp has size 0"),
        (["--to", "tp=1", "--memory", "1MiB"], 2, "256MiB"),
        (["--to", "tp=1", "--format", "zip"], 2, "'zip'"),
        (["--to", "tp=1", "--rules", "missing.json"], 2, "missing.json"),
        ([], 2, "--to"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence_and_a_status(
    arguments: list[str], status: int, message: str, tmp_path: Path
) -> None:
    done = run("convert", DEMO, tmp_path / "x", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


def test_target_names_can_come_from_a_job_of_the_target_topology(tmp_path: Path) -> None:
    meta = json.loads((DEMO / "model_meta.json").read_text())
    for cell in meta["sharding_metas"].values():
        names = cell["structure_name_mapping"]
        for key in names:
            names[key] = f"renamed_{names[key]}"
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    done = run("convert", DEMO, tmp_path / "x", "--to", "tp=2,pp=2", "--layout", tmp_path / "meta.json")
    assert done.returncode == 0, done.stderr
    assert b"renamed_linear_0.w_0" in (tmp_path / "x" / "optimizer.tp00_pp00.pdopt").read_bytes()
    wrong = run("convert", DEMO, tmp_path / "y", "--to", "tp=2,pp=4", "--layout", tmp_path / "meta.json")
    assert wrong.returncode == 1
    assert "disagree about the cell" in wrong.stderr


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"sequence_parallell": True}, ("--to", "tp=2,pp=2"), "unknown entry 'sequence_parallell'"),
        ({"sharding_metas": 1}, ("--to", "tp=2,pp=2"), "sharding_metas is missing or is not an object"),
        ({"sharding_metas": {"tp00_pp00": {}}}, ("--to", "tp=1"), "structure_name_mapping is missing"),
        ({"sharding_metas": None}, ("--to", "tp=1"), "sharding_metas is missing or is not an object"),
        ({"comm_overlap": True}, ("--format", "auto-parallel"), "--layout (comm_overlap) without --to"),
        ({}, ("--format", "flex", "--to", "tp=2,pp=2"), "omit sharding_metas"),
        ({}, ("--format", "unified"), "--layout does not apply to --format unified"),
    ],
)
def test_a_model_meta_is_a_layout_where_it_can_be_one(
    changes: dict[str, Any], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "meta.json").write_text(
        json.dumps({**json.loads((DEMO / "model_meta.json").read_text()), **changes})
    )
    done = run("plan", DEMO, *options, "--layout", tmp_path / "meta.json")
    assert (done.returncode, message in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_names_that_two_parameters_share_are_refused() -> None:
    """Where only parameters are written, nothing else would tell: their states are later found by name."""
    meta = json.loads((DEMO / "model_meta.json").read_text())
    stages = [cell["structure_name_mapping"] for cell in meta["sharding_metas"].values()]
    names = stages[0]
    norm, other = (
        f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")
    )
    names[other] = names[norm]
    shared = rf"^{other}: has the parameter name {names[norm]} .*and so has {norm}; only tied"
    with pytest.raises(RuleError, match=shared):
        paddle_reshard.plan(DEMO, to="tp=2,pp=2", layout=meta)
    of_all = {key: f"{key}_0.w_0" for of_stage in stages for key in of_stage}
    for of_other in (of_all[other], of_all[norm]):
        of_program = {"structure_name_mapping": {**of_all, other: of_other}}
        options: Any = {"format": "auto-parallel", "layout": {"sharding_metas": {"tp00_pp00": of_program}}}
        if of_other == of_all[norm]:
            with pytest.raises(RuleError, match=rf"^{other}: has the parameter name"):
                paddle_reshard.plan(DEMO, drop="ema", **options)
        else:
            paddle_reshard.plan(DEMO, drop="ema", **options)


def test_settings_may_be_added_to_a_model_meta(tmp_path: Path) -> None:
    """The names are of a job whose segmentation is none that the model's class makes."""
    settings: dict[str, Any] = {"segmentation": [0, 2], "sort_parameters": False}
    wanted: dict[str, Any] = {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v1"}
    paddle_reshard.convert(DEMO, tmp_path / "job", layout=settings, **wanted)
    meta = json.loads((tmp_path / "job/model_meta.json").read_text())
    with pytest.raises(RuleError, match="disagree about the cell"):
        paddle_reshard.plan(DEMO, layout=meta, **wanted)
    paddle_reshard.convert(DEMO, tmp_path / "made", layout={**meta, **settings}, **wanted)
    job, made = (
        {p.name: p.read_bytes() for p in (tmp_path / name).glob("*.pd*")} for name in ("job", "made")
    )
    assert made == job
    (target,) = json.loads((tmp_path / "made/paddle_reshard.json").read_text())["request"]["targets"]
    assert target["layout"]["name"] == "layout"
    assert json.loads(target["layout"]["text"]) == {**meta, **settings}


def test_a_layout_is_a_file_or_the_json_itself(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"segmentation": [0, 2]}))
    for number, given in enumerate((layout, layout.read_text())):
        made = tmp_path / str(number)
        done = run("convert", DEMO, made, "--to", "pp=2", "--layout", given)
        assert done.returncode == 0, done.stderr
        assert b"model.layers.1." in (made / "model_state.pp01.pdparams").read_bytes()
    for text in ('{"segmentation": ', "{}}"):
        wrong = run("convert", DEMO, tmp_path / "y", "--to", "pp=2", "--layout", text)
        assert (wrong.returncode, "is no JSON object" in wrong.stderr) == (2, True)
    layout.write_text(json.dumps({"segmentations": "uniform"}))
    wrong = run("convert", DEMO, tmp_path / "y", "--to", "pp=2", "--layout", layout)
    assert wrong.returncode == 2
    assert "unknown entry 'segmentations'" in wrong.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = (
        "import time; from paddle_reshard.clusters.inline import InlineEngine as Engine; run = Engine.run; "
        "wait = lambda: any(time.sleep(0.05) for _ in range(1200)); "  # as in tests/resume/test_signals.py
        "Engine.run = lambda *a: (r for r in run(*a) if print('moving', flush=True) or wait()); "
        "from paddle_reshard.pipeline.cli.main import main; main()"
    )
    command = [sys.executable, "-c", slow, "convert", DEMO, tmp_path / "x", "--to", "tp=1", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "moving\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert not list(tmp_path.iterdir())


def test_what_was_planned_is_run_and_nothing_else_is(tmp_path: Path) -> None:
    saved, target = tmp_path / "saved.plan", tmp_path / "target"
    planned = json.loads(run("plan", DEMO, target, "--to", "tp=2", "--save", saved, "--json").stdout)
    other = run("convert", DEMO, target, "--to", "tp=1", "--plan", saved)
    assert (other.returncode, f"holds the plan {planned['plan_id']}" in other.stderr) == (1, True)
    assert not target.exists()
    done = run("convert", DEMO, target, "--to", "tp=2", "--plan", saved, "--json")
    assert json.loads(done.stdout)["plan"]["plan_id"] == planned["plan_id"]
    assert target.exists()


def test_wrong_options_are_told_as_they_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``-to`` is no cluster of letters, and a variable is named only if the value came from there."""
    assert (
        "No such option '-to'. Did you mean '--to'?"
        in run("convert", DEMO, tmp_path / "x", "-to", "tp=1").stderr
    )
    given = run("inspect", DEMO, "--storage-options", "@nofile").stderr
    assert "nofile: No such file" in given and "env var" not in given
    monkeypatch.setenv("PADDLE_RESHARD_STORAGE_OPTIONS", "@nofile")
    assert "(env var: 'PADDLE_RESHARD_STORAGE_OPTIONS')" in run("inspect", DEMO).stderr


def test_comparisons_fold_what_one_side_lacks(tmp_path: Path) -> None:
    """A line for a state, and the way out, also beside fingerprints and in ``diff``."""
    paddle_reshard.convert(DEMO, tmp_path / "model", format="huggingface")
    paddle_reshard.fingerprint(DEMO, output=tmp_path / "sums.json")
    told = run("verify", tmp_path / "model", "--against", tmp_path / "sums.json").stdout.splitlines()
    assert len(told) == 8
    assert told[-3] == "moment2 of lm_head.weight and 38 more: only in the fingerprints"
    assert told[-2].endswith("or --subset if the checkpoint may hold fewer tensors")
    assert told[-1].startswith("different: 234 tensors without a counterpart, no others differ; 39 tensors, ")
    assert "moment2 of lm_head.weight and 38 more: only in A" in run("diff", DEMO, tmp_path / "model").stdout
    paddle_reshard.fingerprint(tmp_path / "model", output=tmp_path / "few.json")
    told = run("verify", DEMO, "--against", tmp_path / "few.json").stdout
    assert "moment2 of lm_head.weight and 38 more: only in the checkpoint" in told


def test_ulps_over_a_change_of_sign_are_no_number_to_read(tmp_path: Path) -> None:
    paddle_reshard.convert(DEMO, tmp_path / "model", format="huggingface", dtype="float32")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x80
    file.write_bytes(content)
    assert "over 1,000,000" in run("diff", tmp_path / "model", tmp_path / "other").stdout
