"""``plan --cards``: what it offers can be planned and what it refuses cannot; sizes are those of real files."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from tests.conftest import case_directory, checkpoint_of
from tests.jobs.command import run_here
from tests.oracle import unpickle
from tests.published import checked
from tests.sampling import exhaustive

ALL_AXES = "mp2pp2sh2_s1v2_meta_ema"
CASES = (ALL_AXES, "nlp_mp2", "sh2_s3_seg512", "moe/ep2_mp2sh2_s1v2_meta", "pp4vpp2")
FURTHER = (
    *("mp2_tied", "sh2_s2", "sh2_s1v1_meta_fp32", "mp2pp2_sp", "mp2sh2_s1v2_meta_mid"),
    *("moe/nlp_dsv2_ep_dp2sh2_s1v2_meta", "moe/ep2_sh2_s1v2_meta_ema"),
)
TEXT = ("LR_Scheduler", "StructuredToParameterName@@")


def array_bytes(value: Any) -> int:
    """Bytes of an entry of a file, whatever holds its arrays."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(array_bytes, value.values()))
    return sum(map(array_bytes, value)) if isinstance(value, tuple) else 0


def sizes_by_rank(folder: Path) -> dict[str, dict[str, int]]:
    """Ending of the names of a rank's files → state → bytes of the arrays."""
    ranks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in folder.iterdir():
        if match := re.fullmatch(r"(model_state|optimizer|ema)\.?(.*)\.pd(params|opt)", path.name):
            kind, rank = match[1], match[2]
            content = unpickle(path)
            names = content.get("StructuredToParameterName@@", {}) if kind == "model_state" else {}
            tied = names.keys() - {name: key for key, name in names.items()}.values()
            held = {name: value for name, value in content.items() if name not in {*TEXT, *tied}}
            if kind == "optimizer":
                ranks[rank]["master_weights"] += array_bytes(held.pop("master_weights", {}))
            state = {"optimizer": "moments", "model_state": "parameters"}.get(kind, kind)
            ranks[rank][state] += array_bytes(held)
    return ranks


@pytest.mark.parametrize("case", [*CASES, *map(exhaustive, FURTHER)])
def test_the_fullest_rank_holds_what_its_real_files_hold(case: str) -> None:
    source = checkpoint_of(case)
    found = paddle_reshard.inspect(source)
    assert found.topology is not None
    layout = {"stage3_segment_size": 512} if "seg512" in case else None  # a setting of the job, in no file
    own = paddle_reshard.plan(source, cards=found.topology.world_size, layout=layout).nearest
    assert own is not None
    assert own.strategy == (found.sharding_strategy or "none")
    if layout is None:
        assert (own.command, own.read_bytes, own.written_bytes, own.lost) == ("", 0, 0, ())

    ranks = sizes_by_rank(source)
    states = max(rank["master_weights"] + rank["moments"] for rank in ranks.values())
    assert own.fullest.master_weights + own.fullest.moments == states
    assert own.fullest.ema == max(rank["ema"] for rank in ranks.values())
    if not (source / "model_meta.json").exists() and found.sharding_strategy != "stage3":
        assert own.fullest.parameters == max(rank["parameters"] for rank in ranks.values())


@pytest.mark.parametrize(
    ("case", "to"),
    [
        ("moe/ep2_mp2sh2_s1v2_meta", "pp=2,sharding=2,ep=2"),
        (ALL_AXES, "tp=2,sharding=2"),
        ("mp2_tied", "pp=2,sharding=2"),
    ],
)
def test_the_fullest_rank_of_an_offer_holds_what_its_files_will_hold(
    case: str, to: str, tmp_path: Path
) -> None:
    source = checkpoint_of(case)
    (offer,) = (one for one in paddle_reshard.plan(source, cards=4) if str(one.topology) == to)
    assert offer.strategy == "stage1v2"  # whose buffers and padding depend on the order of parameters
    paddle_reshard.convert(source, tmp_path / "target", to=to, replicas="report")
    ranks = sizes_by_rank(tmp_path / "target").values()
    assert offer.fullest.master_weights + offer.fullest.moments == max(
        rank["master_weights"] + rank["moments"] for rank in ranks
    )
    assert offer.written_bytes == sum(sum(rank.values()) for rank in ranks)


def test_parameters_that_are_in_no_file_are_on_the_card() -> None:
    source = checkpoint_of(ALL_AXES)
    metas = json.loads((source / "model_meta.json").read_text())["sharding_metas"].values()
    expected = max(
        2 * sum(int(np.prod(shape)) for shape, *_ in cell["param_meta"].values()) for cell in metas
    )
    found = paddle_reshard.plan(source, cards=8).nearest
    assert found is not None
    assert found.fullest.parameters == expected


@pytest.mark.parametrize("case", [*CASES, *map(exhaustive, FURTHER)])
def test_what_is_offered_can_be_planned_and_what_is_refused_cannot(case: str) -> None:
    source = checkpoint_of(case)
    cards = paddle_reshard.plan(source, cards=4)
    assert cards.alternatives
    for one in cards.alternatives:
        planned = paddle_reshard.plan(source, to=asdict(one.topology))
        (target,) = planned.targets
        assert (target.spec.data()["sharding_strategy"], one.topology.world_size) == (one.strategy, 4)
        literals = int(planned.plan.literals.sizes.sum())
        files = sum(file.size_bytes for file in planned.plan.target_files)
        if one.command:
            assert one.written_bytes == files - literals
            assert {name for name, _ in target.not_carried} >= {name for name, _ in one.lost} - {
                "the average"
            }
    for refused in cards.refused:
        with pytest.raises(paddle_reshard.PlanError, match=re.escape(refused.reason)):
            paddle_reshard.plan(source, to=refused.topology)


def test_a_job_starts_from_the_target_with_the_arguments_that_launch_prints(tmp_path: Path) -> None:
    cards = paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=4)
    alone = [one for one in cards.alternatives if one.topology.dp == 1]
    for number, one in enumerate(alone[::2]):
        target = tmp_path / str(number)
        paddle_reshard.convert(checkpoint_of(ALL_AXES), target, to=one.topology)
        expected = {**one.arguments, "resume_from_checkpoint": str(target)}
        assert dict(paddle_reshard.launch(target).arguments) == expected


def without_average(folder: Path) -> Path:
    source = Path(shutil.copytree(checkpoint_of(ALL_AXES), folder))
    for path in source.glob("ema.*"):
        path.unlink()
    return source


def test_the_nearest_keeps_tensor_and_pipeline_parallelism(tmp_path: Path) -> None:
    cards = paddle_reshard.plan(without_average(tmp_path / "source"), cards=4)
    assert cards.nearest is cards.alternatives[0]
    assert str(cards.nearest.topology) == "tp=2,pp=2"
    assert {str(one.topology) for one in cards.alternatives} >= {
        "pp=4", "sharding=4", "tp=2,sharding=2", "dp=4",
    }  # fmt: skip
    assert {str(one.topology) for one in cards.refused} == {"tp=4"}  # two heads of keys and values
    assert paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=8).nearest.command == ""  # type: ignore[union-attr]


def test_a_job_that_goes_on_with_its_average_is_nearer_than_one_that_ignores_it() -> None:
    cards = paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=4)
    assert cards.nearest is cards.alternatives[0]
    assert str(cards.nearest.topology) == "tp=2,sharding=2"
    for one in cards.alternatives:  # the trainer reads ema.* with load_sharded_model alone
        ignored = "load_sharded_model" not in one.arguments
        assert ("the average" in dict(one.lost)) == ignored == one.ignores_average, one.topology
    assert paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=1).nearest.ignores_average


def test_a_format_of_whole_tensors_is_read_as_it_is() -> None:
    cards = paddle_reshard.plan(checkpoint_of("dense/uc_single"), cards=2)
    assert not cards.any_topology  # its trainer reads it in those without tp only
    assert cards.nearest is None
    said = dict(cards.facts())["as it is"]
    assert "in those without tp" in said and "launch" in said
    assert paddle_reshard.plan(checkpoint_of("dense/nlp_uc_mp2pp2"), cards=2).any_topology


def test_the_command_prints_a_table_of_plain_numbers() -> None:
    ran = run_here("plan", checkpoint_of(ALL_AXES), "--cards", 4)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split("\t") for line in ran.stdout.splitlines()]
    table = [row for row in rows if len(row) == len(rows[0])]
    assert table[1][0] == "tp=2,sharding=2"
    assert table[1][-1] == "nearest"
    assert all(float(cell) >= 0 for row in table[1:] for cell in row[2:10])
    assert any("--tensor_model_parallel_size 2" in row[-1] for row in rows)


def test_the_json_is_as_published() -> None:
    found = checked(run_here("plan", checkpoint_of(ALL_AXES), "--cards", 4, "--json"))
    (nearest,) = [one for one in found["alternatives"] if one["nearest"]]
    assert nearest["arguments"]["tensor_model_parallel_size"] == 2
    assert nearest["card_bytes"]["total"] == sum(nearest["card_bytes"].values()) / 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "tp=2"], "use only one of the two"),
        (["target"], "--cards lists topologies"),
        (["--format", "huggingface"], "has no topology"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(arguments: list[str], sentence: str) -> None:
    ran = run_here("plan", checkpoint_of(ALL_AXES), *arguments, "--cards", 4)
    assert ran.returncode != 0
    assert sentence in ran.stderr


def test_a_report_shows_ranks_and_the_lines_to_copy(tmp_path: Path) -> None:
    page = tmp_path / "cards.html"
    ran = run_here("plan", checkpoint_of(ALL_AXES), "--cards", 4, "--report", page, "--quiet")
    assert ran.returncode == 0, ran.stderr
    text = page.read_text()
    drawn = text[text.index('<section id="grids"') :]
    shown = paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=4).distinct()
    assert drawn.count("<figure") == len(shown)
    assert drawn.count("<i></i>") == 4 * drawn.count("<figure")
    for one in shown:
        assert html.escape(one.command, quote=False) in drawn
        assert html.escape(one.launch_line).replace("&#x27;", "&#39;") in drawn


def test_convert_takes_the_nearest_topology_and_says_so(tmp_path: Path) -> None:
    convert = ["convert", checkpoint_of(ALL_AXES), tmp_path / "target", "--to", 4]
    ran = run_here(*convert)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith("tp=2,sharding=2, the nearest of 9 possible topologies for 4 cards: ")
    assert str(paddle_reshard.inspect(tmp_path / "target").topology) == "tp=2,sharding=2"
    again = run_here(*convert, "--resume")
    assert (again.returncode, "2 of 2 groups" in again.stdout) == (0, True), again.stderr


@pytest.mark.parametrize("format", ["hybrid", "flex"])
def test_a_number_of_cards_is_its_nearest_topology_in_every_record(format: str, tmp_path: Path) -> None:
    source = checkpoint_of(ALL_AXES)
    nearest = paddle_reshard.plan(source, cards=4, format=format).nearest
    assert nearest is not None
    asked: dict[str, Any] = {"number": 4, "text": " 4 ", "topology": nearest.topology}
    plans = {paddle_reshard.plan(source, format=format, to=to).plan.plan_id for to in asked.values()}
    assert len(plans) == 1
    manifests = []
    for name, to in asked.items():
        paddle_reshard.convert(source, tmp_path / name, format=format, to=to)
        manifests.append((tmp_path / name / "paddle_reshard.json").read_text())
    assert manifests == [manifests[-1]] * 3
    assert json.loads(manifests[0])["request"]["targets"][0]["to"] == str(nearest.topology)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("launch", "SRC", "--to", 4), "4 is a number of cards"),
        (("submit", "SRC", "DST", "--to", 4), "4 is a number of cards"),
        (("ema", "SRC", "SRC", "DST", "--uniform", "--to", 4), "4 is a number of cards"),
        (("convert", "SRC", "--target", "DST:hybrid:4"), "4 is a number of cards"),
        (("convert", "SRC", "DST", "--to", 4, "--format", "huggingface"), "--to does not apply to"),
        (("convert", "SRC", "DST", "--to", 4, "--format", "fex"), "did you mean flex"),
        (("plan", "SRC", "--to", 0), "0 cards: a job has 1 to"),
        (("plan", "SRC", "--to", 4, "--cards", 4), "use only one of the two"),
    ],
)
def test_a_number_of_cards_where_none_can_stand_is_refused(arguments: tuple[object, ...], said: str) -> None:
    names = {"SRC": checkpoint_of(ALL_AXES)}
    ran = run_here(*(names.get(str(word), word) for word in arguments))
    assert ran.returncode == 2
    assert said in ran.stderr


def test_nodes_make_their_portions_of_the_nearest_topology(tmp_path: Path) -> None:
    """It is chosen of the whole, whatever ranks are asked for."""
    one, other = (paddle_reshard.plan(checkpoint_of(ALL_AXES), to=4, ranks=ranks) for ranks in ("0-1", "2-3"))
    assert one.portion is not None and other.portion is not None
    assert one.portion.digest == other.portion.digest


@pytest.mark.parametrize(
    ("case", "cards", "sentence"),
    [
        (ALL_AXES, "8", "the job with tp=2,pp=2,sharding=2 reads it as it is: paddle-reshard launch"),
        ("dense/uc_single", "2", "the trainer reads it in those without tp"),
        ("exports/llama", "2", "it is for no topology, so none is near"),
    ],
)
def test_convert_takes_no_topology_where_none_is_the_nearest(
    tmp_path: Path, case: str, cards: str, sentence: str
) -> None:
    (source,) = case_directory(case).glob("*-*")
    convention = ["--convention", "paddleformers"] if "export" in case else []
    ran = run_here("convert", source, tmp_path / "target", "--to", cards, *convention)
    assert ran.returncode == 1
    assert sentence in ran.stderr
    assert not (tmp_path / "target").exists()


def test_data_parallel_variants_of_sharded_topologies_are_for_those_who_ask() -> None:
    cards = paddle_reshard.plan(checkpoint_of(ALL_AXES), cards=4)
    every = {str(one.topology) for one in cards.alternatives}
    assert every - {str(one.topology) for one in cards.distinct()} == {
        *("tp=2,dp=2", "pp=2,dp=2", "sharding=2,dp=2", "dp=4")
    }


def test_a_refusal_names_its_topology_once(tmp_path: Path) -> None:
    source = tmp_path / "parameters"
    paddle_reshard.convert(checkpoint_of(ALL_AXES), source, format="huggingface")
    refused = paddle_reshard.plan(source, cards=2, format="hybrid").refused
    assert refused
    assert [one.reason for one in refused if one.reason.startswith(str(one.topology))] == []
