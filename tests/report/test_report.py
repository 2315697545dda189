"""Reports: what they say is what the files hold, whatever tensors and files are called."""

from __future__ import annotations

import calendar
import json
import platform
import re
import shlex
import shutil
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

import paddle_reshard
from benchmarks.planning import job
from benchmarks.synthetic import LLAMA_7B, LLAMA_70B, EmptySource, catalog_of, files_of
from paddle_reshard.pipeline.changes.change import Altered
from paddle_reshard.pipeline.convert.plan import ConversionPlan, plan_checkpoint
from paddle_reshard.pipeline.core.events import GroupEnded, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.examine.diff import DiffReport, TensorDifference
from paddle_reshard.pipeline.examine.verify import VerifyReport
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.planning.compare import Difference
from paddle_reshard.pipeline.report.command import Command
from paddle_reshard.pipeline.report.describe import (
    describe_comparison,
    describe_conversion,
    describe_plan,
    picture_of,
)
from paddle_reshard.pipeline.report.html_report import HtmlReport, save_report
from paddle_reshard.pipeline.report.next_steps import after_conversion
from paddle_reshard.pipeline.report.run_record import MOST_SAMPLES, MOST_STRETCHES, RunRecord
from paddle_reshard.pipeline.request.parse import parse_request
from paddle_reshard.storage.s3 import target as s3
from tests.conftest import case_directory
from tests.golden.compare_one_card import load, read_one_card
from tests.jobs.command import run_here
from tests.report.pages import Page
from tests.spoiled import of_another_step

MOST_BYTES = 5_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>&\u2028'\""
SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
PROOF = "Proof that the plan is complete"
SUFFIXES = {"w_0": "master_weight", "ema_w_0": "ema_master_weight"}


def command(name: str, *arguments: object, status: int = 0) -> dict[str, Any]:
    """Run a command with ``--json``."""
    done = run_here(name, *arguments, "--json")
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def load_truth(path: Path) -> dict[str, int]:
    """Bytes of each tensor, as the trainer had it in memory."""
    return {name: len(entry["data"]) for name, entry in deserialize(path.read_bytes())}


# ----------------------------------------------------------------------------------- what lies where, and moves


def test_the_target_of_a_conversion_holds_what_its_files_hold(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    source, target, report = folder / "checkpoint-3", folder / "one-card", folder / "<b>.html"
    shutil.copytree(SOURCE, source, copy_function=shutil.copyfile)
    done = command("convert", source, target, "--to", "tp=1", "--report", report)
    page = Page(report)
    page.check_closed()
    assert "img" not in page.tags() and str(source) in page.text
    expected = {}
    for name, content in read_one_card(target).items():
        key, _, suffix = name.rpartition(".")
        state = SUFFIXES.get(suffix, suffix.removesuffix("_0"))
        expected[(name, "param", 0) if suffix == "weight" else (key, state, 0)] = len(content)
    assert page.held("target") == expected
    moved = page.moves()
    assert {target for _, target in moved} == {0}
    values = sum(memory for memory, _ in moved.values())
    assert values == sum(expected.values())
    assert done["moved"]["copied_bytes"] == sum(copied for _, copied in moved.values())
    proof = {name: value for name, value in page.table(PROOF)}
    files = [path for path in target.iterdir() if path.name != "paddle_reshard.json"]
    total = sum(path.stat().st_size for path in files)
    assert proof["proof"] == f"each of {total:,} bytes in {len(files)} files is written once"
    assert proof["values"] == f"{values:,} bytes"
    run = page.data["run"]
    assert [step[0] for step in run["steps"]] == ["plan", "move", "verify", "publish"]
    assert sum(stretch[3] for stretch in run["stretches"]) == done["plan"]["groups"]
    assert sum(stretch[5] for stretch in run["stretches"]) == done["plan"]["read_bytes"]
    assert all(0 <= start <= stop <= run["seconds"] for _, start, stop, *_ in run["stretches"])
    figure, note = page.tile("Memory")  # the large figure is that of the process
    resident = max(nbytes for _, nbytes in run["resident"])
    assert figure == f"{resident / (1 << 20):.1f} MiB"
    assert resident > done["plan"]["peak_bytes"]
    assert f"a group at most {done['plan']['peak_bytes'] / (1 << 20):.1f} MiB" in note


def test_the_ranks_of_a_source_hold_what_their_files_hold(tmp_path: Path) -> None:
    source = case_directory("mp2pp2") / "checkpoint-3"
    command("plan", source, "--to", "pp=2", "--report", tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    (block,) = page.data["picture"]["source"]["blocks"]
    assert block["axes"] == {"dp": 1, "pp": 2, "sharding": 1, "tp": 2, "ep": 1}
    held = {one: nbytes for one, nbytes in page.held("source").items() if one[1] == "param"}
    expected: dict[tuple[str, str, int], int] = defaultdict(int)
    files = [0] * block["count"]
    for path in source.iterdir():
        if path.suffix in (".pdparams", ".pdopt") and path.name.startswith(("model_state", "optimizer")):
            files[page.rank("source", path.name)] += 1
        if path.name.startswith("model_state"):
            for key, value in load(path).items():
                if key != "StructuredToParameterName@@":
                    array = value[1] if isinstance(value, tuple) else value
                    expected[key, "param", page.rank("source", path.name)] += array.nbytes
    assert held == expected
    assert page.data["picture"]["source"]["files"] == files


def test_pairs_of_ranks_add_up_to_what_each_side_holds(tmp_path: Path) -> None:
    """Every value of the target comes from somewhere, and only from ranks that have it."""
    command("plan", SOURCE, "--to", "pp=4,sharding=2", "--report", tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    to: dict[int, int] = defaultdict(int)
    for (_, target), (memory, copied) in page.moves().items():
        to[target] += memory + copied
    held: dict[int, int] = defaultdict(int)
    for (_, _, place), nbytes in page.held("target").items():
        held[place] += nbytes
    assert to == held
    by_state = [sum(column) for column in zip(*page.data["picture"]["target_bytes"], strict=True)]
    assert by_state == [held[place] for place in range(len(by_state))]


LIMITS = PartLimits(s3.SMALLEST_PART_BYTES, s3.MOST_PARTS, s3.COPIES)


def synthetic(dims: Any, source: HybridTarget, to: str, limits: PartLimits) -> ConversionPlan:
    store = EmptySource(files_of(dims, source), json.dumps(dims.config).encode())
    request = parse_request({"to": to})
    return plan_checkpoint(Altered.of(store, catalog_of(dims, source)), request, limits)


def test_what_an_object_store_copies_is_apart(tmp_path: Path) -> None:
    dims = replace(LLAMA_7B, layers=2)
    planned = synthetic(dims, job("none", pp=2), "pp=1", LIMITS)
    save_report(describe_plan(planned, picture_of(planned)), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    moved = page.moves()
    assert (
        sum(copied for _, copied in moved.values())
        == planned.plan.copied_bytes
        > 0.9 * planned.plan.read_bytes
    )
    held = sum(page.held("target").values())
    # A copied part has headers of arrays in it, a few bytes for each.
    assert 0 <= sum(map(sum, moved.values())) - held < 1e-4 * held


def test_thousands_of_ranks_fit_a_page_that_opens_at_once(tmp_path: Path) -> None:
    dims = replace(LLAMA_70B, layers=8)
    planned = synthetic(dims, job(tp=8, pp=4, sharding=64), "tp=4,pp=4,sharding=32", PartLimits())
    save_report(describe_plan(planned, picture_of(planned)), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert page.size_bytes < MOST_BYTES
    picture = page.data["picture"]
    assert [len(picture[side]["labels"]) for side in ("source", "target")] == [2048, 512]
    moved = sum(map(sum, zip(picture["moves"]["memory"], picture["moves"]["copied"], strict=True)))
    held = sum(picture["target_held"]["nbytes"])
    assert moved == held == sum(map(sum, picture["target_bytes"]))


def test_every_target_of_several_is_apart(tmp_path: Path) -> None:
    targets = [
        f"{tmp_path}/a:hybrid:tp=2",
        f"{tmp_path}/b:huggingface",
        f"{tmp_path}/c:flex:max-shard-size=500KB",
    ]
    options = [word for target in targets for word in ("--target", target)]
    planned = command("plan", SOURCE, *options, "--prove", "--report", tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    shares = {left["reason"]: f"{left['elements']:,} elements" for left in planned["coverage"]["left_out"]}
    proof = [value for name, value in page.table(PROOF) if name == "left out"]
    assert len(proof) == len(planned["coverage"]["left_out"])
    assert all(any(share in value and reason in value for value in proof) for reason, share in shares.items())
    picture = page.data["picture"]
    blocks = picture["target"]["blocks"]
    assert [block["title"] for block in blocks] == [one["format"] for one in planned["targets"]]
    assert [block["axes"] and block["axes"]["tp"] for block in blocks] == [2, None, None]
    # An export holds each parameter once, in two bytes.
    (export,) = [
        place for place, label in enumerate(picture["target"]["labels"]) if "model.safetensors" in label
    ]
    parameters = {key: nbytes for (key, _, place), nbytes in page.held("target").items() if place == export}
    truth = load_truth(SOURCE.parent / "truth.safetensors")
    assert parameters == {key: nbytes for key, nbytes in truth.items() if key in parameters}
    assert parameters.keys() == {key for key in truth if key.endswith(".weight")}


def test_a_plan_that_is_not_complete_says_so(tmp_path: Path) -> None:
    planned = paddle_reshard.plan(SOURCE, to="tp=1")
    kept = np.arange(len(planned.plan.ops)) > 0
    lacking = replace(planned.plan, ops=planned.plan.ops[kept], op_groups=planned.plan.op_groups[kept])
    proof = paddle_reshard.prove(replace(planned, plan=lacking))
    save_report(describe_plan(planned, None, proof=proof), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "not complete" in page.text
    rows = page.table(PROOF)
    assert rows[0] == ["proof", f"NOT COMPLETE: {proof.problem_count} problems"]
    assert ["problem", proof.problems[0]] in rows


# ------------------------------------------------------------------------------------------------ hostile names


def difference(key: str) -> TensorDifference:
    values = (float("inf"), 0.25, 3, 0.5, (0,), (1.0, float("nan")))
    return TensorDifference(key, "param", ("float32", "float32"), 4, 1, 1, 0, *values)


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    planned = paddle_reshard.plan(SOURCE, to="tp=1")
    picture = replace(picture_of(planned), joined=HOSTILE)
    picture = replace(picture, keys=(HOSTILE, *picture.keys[1:]))
    said = replace(describe_plan(planned, picture), targets=(HOSTILE,), remarks=(HOSTILE,), error=HOSTILE)
    save_report(said, tmp_path / "plan.html")
    compared = DiffReport(1, 4, 16, (difference(HOSTILE),), (Difference(HOSTILE, HOSTILE),))
    save_report(describe_comparison(compared, (HOSTILE, "b"), None), tmp_path / "diff.html")
    for name in ("plan", "diff"):
        page = Page(tmp_path / f"{name}.html")
        page.check_closed()
        assert "img" not in page.tags()
        assert HOSTILE in page.text
    table = page.data["findings"][0]
    row = dict(zip(table["headings"], table["rows"][0], strict=True))
    assert row["tensor"] == HOSTILE
    assert row["largest"] is None


def test_no_credentials_of_urls_are_in_it(tmp_path: Path) -> None:
    report = VerifyReport(1, 1, 1, (), 1.0, None)
    urls = "s3://key:secret@host/bucket/a", "gs://key:secret@bucket/b?token=secret#secret"
    save_report(describe_comparison(report, urls, None), tmp_path / "report.html")
    assert "secret" not in (tmp_path / "report.html").read_text()
    assert "s3://host/bucket/a" in Page(tmp_path / "report.html").text


# ------------------------------------------------------------------------------------------------- commands


def test_every_command_that_finds_something_out_writes_a_page(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    paddle_reshard.convert(SOURCE, one, to="tp=1")
    earlier = case_directory("single") / "checkpoint-3"
    pages = tmp_path / "pages"
    pages.mkdir()

    def page(name: str, *arguments: object, status: int = 0) -> tuple[dict[str, Any], Page]:
        found = command(name, *arguments, "--report", pages / "page.html", status=status)
        made = Page(pages / "page.html")
        made.check_closed()
        (pages / "page.html").unlink()
        return found, made

    found, made = page("verify", SOURCE, one)
    assert "equal" in made.text
    assert f"{found['compared_elements']:,}" in made.text
    assert "intact" in page("verify", one)[1].text
    found, made = page("diff", earlier, SOURCE, "--states", "param,moment1", status=1)
    table = made.data["findings"][0]
    column = {heading: number for number, heading in enumerate(table["headings"])}
    assert [(row[0], row[1], row[column["ulps"]]) for row in table["rows"]] == [
        (one["key"], one["state"], one["ulps"]) for one in found["differing"]
    ]
    by_layer = made.data["charts"][1]["bars"]
    assert [bar[0] for bar in by_layer] == [one["name"] for one in found["by_layer"]]
    found, made = page("ema", SOURCE, SOURCE, two, "--uniform", "--to", "tp=1")
    assert [block["title"] for block in made.data["picture"]["source"]["blocks"]] == ["hybrid", "SRC0"]
    assert made.table(PROOF)[0][1].startswith("each of ")
    found, made = page("plan", SOURCE, "--to", "tp=1")
    convert, _ = made.commands()
    assert shlex.split(convert)[1:] == ["convert", str(SOURCE), "DST", "--to", "tp=1"]
    assert sum(memory for memory, _ in made.moves().values()) == sum(
        nbytes for row in picture_of(paddle_reshard.plan(SOURCE, to="tp=1")).target_bytes for nbytes in row
    )


def test_python_writes_the_pages_that_commands_write(tmp_path: Path) -> None:
    target, events = tmp_path / "one-card", []
    with paddle_reshard.HtmlReport(tmp_path / "python.html", events.append) as page:
        report = paddle_reshard.convert(SOURCE, target, to="tp=1", observe=page)
        page.show(report)
    command("convert", SOURCE, target, "--to", "tp=1", "--overwrite", "--report", tmp_path / "cli.html")
    python, cli = (Page(tmp_path / f"{name}.html") for name in ("python", "cli"))
    python.check_closed()
    assert python.data["picture"] == cli.data["picture"]
    assert [step[0] for step in python.data["run"]["steps"]] == ["plan", "move", "verify", "publish"]
    assert any(isinstance(event, GroupEnded) for event in events)
    with paddle_reshard.HtmlReport(str(tmp_path / "compared.html")) as page:
        compared = paddle_reshard.verify(SOURCE, target, observe=page)
        page.show(compared, SOURCE, target)
    found = Page(tmp_path / "compared.html")
    assert str(SOURCE) in found.text
    assert str(target) in found.text
    assert found.data["budget_bytes"] == 1 << 30
    assert sum(stretch[5] for stretch in found.data["run"]["stretches"]) == compared.read_bytes
    planned = paddle_reshard.plan(SOURCE, to="tp=1")
    with paddle_reshard.HtmlReport(tmp_path / "plan.html") as page:
        page.show(planned, proof=paddle_reshard.prove(planned))
    assert Page(tmp_path / "plan.html").data["picture"] == cli.data["picture"]
    with pytest.raises(paddle_reshard.UsageError, match="does not exist"):
        paddle_reshard.HtmlReport(tmp_path / "nowhere" / "page.html")
    broken = of_another_step(tmp_path)
    with (
        pytest.raises(paddle_reshard.ReshardError) as refused,
        paddle_reshard.HtmlReport(tmp_path / "failed.html") as page,
    ):
        page.show(paddle_reshard.convert(broken, tmp_path / "no", to="tp=1", observe=page))
    assert str(refused.value) in Page(tmp_path / "failed.html").text


def test_a_conversion_that_is_refused_half_way_says_where_and_why(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    found = command(
        *("convert", of_another_step(tmp_path), tmp_path / "target", "--to", "tp=1", "--report", report),
        status=1,
    )
    page = Page(report)
    assert found["error"] in page.text
    assert "not converted" in page.text
    assert page.table(PROOF)[0][1].startswith("each of ")
    assert page.data["run"]["steps"][-1][::2] == ["move", None]
    assert not (tmp_path / "target").exists()


def test_a_conversion_that_stopped_half_way_says_how_far_it_came_and_continues(tmp_path: Path) -> None:
    report, target = tmp_path / "report.html", tmp_path / "target"

    def stop(event: object) -> None:
        if isinstance(event, Progress) and event.done_bytes > 1 << 20:
            raise OSError("the machine goes down")

    words = Command("convert", (str(SOURCE), str(target)), (("--to", "tp=1"),))
    with pytest.raises(OSError, match="goes down"), HtmlReport(report, stop, words) as page:
        paddle_reshard.convert(SOURCE, target, to="tp=1", observe=page)
    found = Page(report)
    share, note = found.tile("Came as far as")
    groups = paddle_reshard.plan(SOURCE, to="tp=1").plan.groups
    assert 0 < int(share.removesuffix(" %")) < 100
    assert f"of {groups} groups; ended in the step move" in note
    resume, made = found.commands()
    assert (resume, made) == (f"{made} --resume", f"paddle-reshard convert {SOURCE} {target} --to tp=1")
    assert command(*shlex.split(resume)[1:])["moved"]["resumed_groups"] >= 1


def test_a_page_says_when_where_and_by_what_it_was_made_and_its_next_step_works(tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    command("plan", SOURCE, "--to", "tp=1", "--save", tmp_path / "one.plan", "--report", report)
    page = Page(report)
    following, made = page.commands()
    assert made == (
        f"paddle-reshard plan {SOURCE} --to tp=1 --json --save {tmp_path}/one.plan --report {report}"
    )
    assert following == f"paddle-reshard convert {SOURCE} DST --to tp=1"
    (at,) = re.findall(rf"(\S+ \S+) UTC on {re.escape(platform.node())}, paddle-reshard", page.text)
    assert abs(time.time() - calendar.timegm(time.strptime(at, "%Y-%m-%d %H:%M:%S"))) < 86400
    target = str(tmp_path / "target")
    command(*(word.replace("DST", target) for word in shlex.split(following)[1:]), "--report", report)
    *following_all, _ = Page(report).commands()
    assert [shlex.split(one)[1] for one in following_all] == ["launch", "verify"]
    for one in following_all:
        command(*shlex.split(one)[1:])


def test_no_secret_of_a_command_line_is_on_a_page(tmp_path: Path) -> None:
    report, target = tmp_path / "page.html", tmp_path / "target"
    command(
        *("convert", SOURCE, target, "--to", "tp=1", "--report", report),
        *("--storage-options", '{"key": "hunter2", "target": {"secret": "hunter2"}}'),
    )
    assert "hunter2" not in report.read_text()
    made = Page(report).commands()[-1]
    assert "--storage-options @FILE" in made


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (["--weights", "0.25,0.75"], "with weights 0.25, 0.75"),
        (["--decay", "0.5"], "with decay 0.5"),
        (["--uniform"], "with equal weights"),
    ],
)
def test_an_average_names_all_that_it_is_made_of(how: list[str], words: str, tmp_path: Path) -> None:
    other = case_directory("single") / "checkpoint-3"
    target = tmp_path / "average"
    command("ema", other, SOURCE, target, *how, "--to", "tp=1", "--report", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    (heading,) = page.texts["h1"]
    assert page.texts["code"][:3] == [str(other), str(SOURCE), str(target)]
    assert " ".join(heading.split()).startswith("average of")
    assert words in " ".join(heading.split())


def test_what_a_comparison_found_comes_first(tmp_path: Path) -> None:
    other, report = case_directory("single") / "checkpoint-3", tmp_path / "page.html"
    found = command("verify", other, SOURCE, "--report", report, status=1)
    page = Page(report)
    titles = [attributes.get("id") for tag, attributes in page.elements if tag == "section"]
    assert titles[:3] == [None, "findings", "run"]
    assert [row[0] for row in page.table("Differences")] == [one["tensor"] for one in found["differences"]]
    command("diff", other, SOURCE, "--report", report, status=1)
    (table, _) = Page(report).data["findings"]
    assert table["headings"][:6] == ["tensor", "state", "relative", "largest", "mean", "ulps"]


@pytest.mark.parametrize(("path", "reason"), [("no/report.html", "does not exist"), (".", "is a folder")])
def test_a_page_that_cannot_be_written_is_an_error_before_anything_is_done(
    path: str, reason: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    found = command("convert", SOURCE, target, "--to", "tp=1", "--report", tmp_path / path, status=2)
    assert reason in found["error"]
    assert not target.exists()


# --------------------------------------------------------------------------------------------------- the record


def test_the_record_of_a_long_run_stays_small_and_loses_no_byte(tmp_path: Path) -> None:
    now = 0.0
    record = RunRecord(private_bytes=lambda: 1 << 30, clock=lambda: now)
    record(StepStarted("move", 10))
    groups = 20_000
    for number in range(groups):
        now = 1.0 + number / 10
        record(GroupEnded(number, f"worker {number % 3}", 0.25, 0.0, 100, 7, 11, 3))
        record(Progress(11))
    record(StepEnded("move", "done"))
    run = record.data()
    assert len(run.stretches) <= MOST_STRETCHES
    assert len(run.resident) <= MOST_SAMPLES
    assert sum(one.groups for one in run.stretches) == groups
    assert sum(one.read_bytes for one in run.stretches) == 7 * groups
    width = run.curves.seconds[1] - run.curves.seconds[0]
    assert sum(run.curves.written) * width == pytest.approx(11 * groups)
    assert set(run.curves.memory) <= {100}
    assert run.steps[0].stop == now


def test_groups_in_one_process_share_its_memory() -> None:
    now = 0.0
    record = RunRecord(clock=lambda: now)
    for worker, stop in (("thread_0", 4.0), ("thread_1", 5.0), ("thread_0", 9.0)):
        now = stop
        record(GroupEnded(0, worker, 3.0, 0.0, 100, 1, 1, 0))
    curves = record.data().curves
    memory = dict(zip(curves.seconds, curves.memory, strict=True))
    assert {nbytes for at, nbytes in memory.items() if 2.2 < at < 3.8} == {200}
    assert {nbytes for at, nbytes in memory.items() if 6.2 < at < 8.8} == {100}
    assert {nbytes for at, nbytes in memory.items() if 5.2 < at < 5.8} == {0}


def test_a_report_can_be_made_of_a_result_alone(tmp_path: Path) -> None:
    done = paddle_reshard.convert(SOURCE, tmp_path / "target", to="tp=1")
    save_report(describe_conversion(done, None, None), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    page.check_closed()
    assert page.data["picture"] is None
    assert "rng_state_0.pth" in page.text


def test_the_page_of_an_export_offers_first_what_shows_that_it_is_right(tmp_path: Path) -> None:
    done = paddle_reshard.convert(SOURCE, tmp_path / "model", format="huggingface")
    step = after_conversion(done)[0]
    assert step.command == f"paddle-reshard verify {SOURCE} {tmp_path / 'model'} --states param"
    assert paddle_reshard.verify(SOURCE, tmp_path / "model", states=["param"])
