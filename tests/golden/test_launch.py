"""``launch`` names the arguments with which real trainers wrote such checkpoints, and resumed from them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.trainer_arguments import TrainingJob, trainer_arguments
from tests.conftest import case_directory, case_names
from tests.jobs.command import run_here
from tests.lab.job import FILES_OF_RANKS, described
from tests.parity.run import CHECKPOINT, ROWS, config_like
from tests.parity.table_rows import STRATEGIES
from tests.published import checked
from tests.sampling import exhaustive

PLACES = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("tensor_parallel_degree", "pipeline_parallel_degree", "sequence_parallel", "use_expert_parallel"),
    *("expert_model_parallel_size", "sharding", "sharding_parallel_size", "sharding_parallel_degree", "split_param"),
    *("sharding_parallel_config", "unified_checkpoint", "save_sharded_model"),
}  # fmt: skip
"""Arguments that say how a job is spread, and how it saves; the laboratory's others say how it computes."""
AXES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "sharding_parallel_size": "sharding",
}
SAVES = "save_checkpoint_format"
ALL_AXES = "mp2pp2sh2_s1v2_meta_ema"
CASES = (
    *(f"dense/{ALL_AXES}", "dense/pp4vpp2", "dense/sh2_s1v1", "dense/sh2_s3_seg512", "dense/mp2pp2_sp"),
    *("dense/nlp_mp2", "dense/uc_sh2_s1v2", "moe/ep2_mp2sh2_s1v2_meta", "moe/nlp_dsv2_ep_dp2sh2_s1v2_meta"),
)
NOT_OF_RANKS = ("fc_", "auto_", "defaults_", "hfsteps_", "quant", "/dp2")
"""In names of cases: formats that fit every topology, data-parallel ranks, which write no
files, and what is refused."""
OTHERS = tuple(
    sorted(
        name
        for name in {*case_names("dense"), *case_names("moe"), *case_names("states")} - {*CASES}
        if not any(part in name for part in NOT_OF_RANKS)
    )
)
WITHOUT_SEQUENCE_PARALLEL = "dense/nlp_sp_mp2pp2"
"""Its trainer was given the argument, its model was not."""


def arguments_of_the_trainer(case: str) -> dict[str, Any]:
    """What decides how the job of a real case was spread, and in which format it saved."""
    given = json.loads((case_directory(case) / "case.json").read_bytes())["args"] or {}
    if vpp := given.get("_vpp"):
        given["virtual_pipeline_model_parallel_size"] = vpp
    if case == WITHOUT_SEQUENCE_PARALLEL:
        del given["sequence_parallel"]
    return {name: value for name, value in given.items() if name in (*PLACES, SAVES)}


@pytest.mark.parametrize("case", [*CASES, *map(exhaustive, OTHERS)])
def test_arguments_are_those_that_the_real_trainer_was_given(case: str) -> None:
    expected = arguments_of_the_trainer(case)
    checkpoint = case_directory(case) / CHECKPOINT
    unified = "uc_" in case
    axes = {axis: expected[name] for name, axis in AXES.items() if name in expected}
    arguments = dict(paddle_reshard.launch(checkpoint, to=Topology(**axes) if unified else None).arguments)
    stored = expected.pop(SAVES, None)
    if unified:  # reads every strategy
        expected.pop("split_param", None), arguments.pop("split_param", None)
    assert {name: value for name, value in arguments.items() if name in PLACES} == expected
    assert arguments.get(SAVES) == stored
    assert arguments["resume_from_checkpoint"] == str(checkpoint)


RESUMED = [
    name
    for name, row in ROWS.items()
    if not row.whole and not row.cold and not row.source.startswith("states/lora")
]


@pytest.mark.parametrize("name", RESUMED)
def test_arguments_are_those_with_which_the_trainer_resumes_from_a_conversion(name: str) -> None:
    row = ROWS[name]
    job = TrainingJob(
        "paddleformers",
        row.format,
        Topology.parse(row.to),
        row.strategy or "none",
        comm_overlap=bool(row.layout.get("comm_overlap")),
        sequence_parallel=bool(row.arguments.get("sequence_parallel")),
    )
    assert spread(trainer_arguments(job)) == spread(row.trainer_arguments())


@pytest.mark.parametrize("name", [name for name, s in STRATEGIES.items() if "auto-parallel" not in name])
def test_arguments_are_those_of_the_table_of_losses(name: str) -> None:
    strategy = STRATEGIES[name]
    kind = strategy.strategy if strategy.strategy.startswith("stage") else "none"
    job = TrainingJob("paddleformers", "hybrid", Topology.parse(str(strategy.topology)), kind)
    assert spread(trainer_arguments(job)) == spread(strategy.trainer_arguments())
    assert job.topology.world_size == strategy.topology.ranks


def spread(arguments: Any) -> dict[str, Any]:
    """What of the arguments is about ranks and files; the laboratory's default reads files of ranks."""
    named = dict(arguments)
    if (vpp := named.pop("_vpp", 1)) > 1:
        named["virtual_pipeline_model_parallel_size"] = vpp
    if "load_sharded_model" not in named and named.get("load_checkpoint_format") == "sharding_io":
        del named["load_checkpoint_format"]
    return {
        name: value
        for name, value in named.items()
        if name in {*PLACES, *FILES_OF_RANKS, "pp_sharding_comm_overlap"}
    }


@pytest.mark.parametrize(
    ("case", "to", "right"),
    [
        ("small-flex/fc_pp2sh2_s1v2_tied", "tp=2", True),
        ("moe/moe_fc_single", "tp=2", False),
        ("moe/moe_fc_single", "sharding=4", True),
        ("moe/ep2_fc_sh2_s1v2", "tp=2", False),
        ("moe/ep2_fc_sh2_s1v2", "ep=2,sharding=2", True),
        ("small-flex/fc_moe_mp2sh2_s1v2_ema", "tp=2,pp=2", True),
        ("small-flex/fc_moe_mp2sh2_s1v2_ema", "sharding=2", False),
    ],
)
def test_a_job_that_would_read_fused_parts_wrongly_is_refused(
    case: str, to: str, right: bool, tmp_path: Path
) -> None:
    """What the real trainer made of each: tests/corpus/moe/README.md (*Peer baselines*) and docs/peers.md."""
    job, source = described()[case if "/" in case else f"dense/{case}"], case_directory(case) / CHECKPOINT
    config = config_like(job, tmp_path)
    if right:
        assert paddle_reshard.launch(source, to=to, config=config).ranks == Topology.parse(to).world_size
        return
    with pytest.raises(paddle_reshard.UsageError, match=f"as if they were not fused.*flex --to {to}$"):
        paddle_reshard.launch(source, to=to, config=config)
    assert not paddle_reshard.plan(source, cards=2, config=config).any_topology
    by_rank = tmp_path / "by-rank"
    paddle_reshard.convert(source, by_rank, format="flex", to=to, config=config)
    assert (
        paddle_reshard.launch(by_rank, config=config).arguments["load_checkpoint_format"] == "flex_checkpoint"
    )


def test_no_flexcheckpoint_is_for_a_job_that_takes_what_its_class_cuts_for_copies(tmp_path: Path) -> None:
    """Run with the real trainer: with tp=2, both ranks of gpt_oss hold the first half of the attention sinks, of their
    master weights and moments too, from whole tensors, from files by rank and from those of the job itself."""
    source = case_directory("moe/gptoss_single") / CHECKPOINT
    paddle_reshard.convert(source, tmp_path / "flex", format="flex")
    assert paddle_reshard.launch(tmp_path / "flex", to="sharding=2").ranks == 2
    with pytest.raises(paddle_reshard.UsageError, match=r"sinks, which its class.*hybrid --to tp=2$"):
        paddle_reshard.launch(tmp_path / "flex", to="tp=2")
    with pytest.raises(paddle_reshard.PlanError, match=r"sinks, which its class.*choose --format hybrid$"):
        paddle_reshard.plan(source, format="flex", to="tp=2")
    paddle_reshard.convert(tmp_path / "flex", tmp_path / "hybrid", to="tp=2")
    assert paddle_reshard.launch(tmp_path / "hybrid").arguments["load_checkpoint_format"] == "sharding_io"


def test_without_config_json_a_name_that_may_be_of_fused_parts_is_enough_to_refuse() -> None:
    source = case_directory("families/qwen3_next_fc_sh2_s1v2") / CHECKPOINT
    assert not (source / "config.json").exists()
    assert paddle_reshard.launch(source, to="sharding=4").ranks == 4
    with pytest.raises(paddle_reshard.UsageError, match=r"not known without its config\.json \(--config"):
        paddle_reshard.launch(source, to="tp=2")


def test_an_average_is_read_by_jobs_with_groups_of_ranks_alone(tmp_path: Path) -> None:
    paddle_reshard.convert(case_directory(ALL_AXES) / CHECKPOINT, tmp_path / "flex", format="flex")
    for to, read in (("tp=1", False), ("dp=2", False), ("sharding=2", True), ("tp=2", True)):
        [said] = [one for one in paddle_reshard.launch(tmp_path / "flex", to=to).remarks if "average" in one]
        assert ("the average is ignored" in said) is not read, to


def test_no_average_is_read_under_stage_3(tmp_path: Path) -> None:
    source = case_directory(ALL_AXES) / CHECKPOINT
    paddle_reshard.convert(
        source, tmp_path / "flex", format="flex", to="sharding=2", sharding_strategy="stage3"
    )
    assert any("the average is ignored" in said for said in paddle_reshard.launch(tmp_path / "flex").remarks)


def test_a_converted_checkpoint_tells_what_changes_for_its_job(tmp_path: Path) -> None:
    source = case_directory(ALL_AXES) / CHECKPOINT
    paddle_reshard.convert(source, tmp_path / "target", to="tp=2,sharding=4")
    found = paddle_reshard.launch(tmp_path / "target")
    assert found.ranks == 8
    batch, decay, context, random, ema = found.remarks
    assert "(sharding × dp): 4, before: 2" in batch
    assert "without random states" in random
    assert "--zcc_save_ema_coef" in ema
    assert "pp > 1" in decay
    assert "any --context_parallel_size that divides 4" in context

    answer = checked(run_here("launch", tmp_path / "target", "--json"))
    assert answer["arguments"] == {
        "resume_from_checkpoint": str(tmp_path / "target"),
        "tensor_model_parallel_size": 2,
        "sharding": "stage1",
        "sharding_parallel_size": 4,
        "split_param": True,
        **FILES_OF_RANKS,
        "bf16": True,
        "fp16_opt_level": "O2",
        "amp_master_grad": True,
        "fine_tuning": "Full",
    }
    assert shlex.split(found.command_line())[-2:] == ["--fine_tuning", "Full"]


BY_DEFAULT = {"bf16": True, "fp16": False, "fp16_opt_level": "O2", "amp_master_grad": True}
"""What the laboratory gives a trainer where a case says nothing else."""


@pytest.mark.parametrize(
    "case", [f"dense/{ALL_AXES}", "dense/single_fp32", "states/fp16_single", "states/lora_rslora_single"]
)
def test_the_precision_and_what_is_tuned_are_those_of_the_real_job(case: str) -> None:
    given = BY_DEFAULT | json.loads((case_directory(case) / "case.json").read_bytes())["args"]
    found = paddle_reshard.launch(case_directory(case) / CHECKPOINT)
    half = given["bf16"] or given["fp16"]
    for name in BY_DEFAULT:
        assert found.arguments.get(name, False) == (given[name] if half else False), name
    assert any("float32" in remark for remark in found.remarks) is not half
    adapter = case_directory(case) / CHECKPOINT / "lora_config.json"
    if not adapter.exists():
        assert found.arguments["fine_tuning"] == "Full"
        return
    lora = json.loads(adapter.read_bytes())
    assert found.arguments["fine_tuning"] == "LoRA"
    assert found.arguments["lora_rank"] == lora["r"] and found.arguments["rslora"] is lora["rslora"]
    assert float(found.arguments["lora_plus_scale"]) == lora["lora_plus_scale"]


def test_a_unified_checkpoint_is_not_read_as_that_of_another_library() -> None:
    """Its linear layers are those of Paddle; by default the trainer transposes them, and they do not fit."""
    found = paddle_reshard.launch(case_directory("dense/uc_sh2_s1v2") / CHECKPOINT, to="sharding=2")
    assert found.arguments["convert_from_hf"] is False
    assert "--convert_from_hf false" in found.command_line()


@pytest.mark.parametrize(
    ("case", "to", "starts"),
    [
        ("dense/uc_single", "tp=2", False),
        ("dense/uc_single", "pp=2", True),
        ("dense/nlp_uc_mp2pp2", "tp=2,pp=2", True),
        ("recipes/dsv3_ep2_uni_pp2sh2_s1v2", "tp=2", True),
    ],
)
def test_a_unified_checkpoint_starts_no_job_with_tensor_parallelism(case: str, to: str, starts: bool) -> None:
    """``ConversionMixin._get_tensor_parallel_mappings`` of PaddleFormers 1.2.0 raises NotImplementedError, and of its
    models only those of recipes have one of their own; every model of PaddleNLP 3 has."""
    said = [remark for remark in paddle_reshard.launch(case_directory(case) / CHECKPOINT, to=to).remarks]
    assert (
        any("reads no unified checkpoint under tensor parallelism" in remark for remark in said) is not starts
    )


def test_a_conversion_to_a_unified_checkpoint_says_what_does_not_read_it(tmp_path: Path) -> None:
    for case, said in (("mp2", True), ("pp2", False)):
        planned = paddle_reshard.plan(case_directory(case) / CHECKPOINT, tmp_path / case, format="unified")
        assert any("under tensor parallelism" in remark for remark in planned.targets[0].remarks) is said


def test_parameters_that_the_trainer_saves_and_does_not_load_are_named() -> None:
    """``save_to_hf``, its default, beside files of ranks: it looks for ``model_state`` alone."""
    source = case_directory("small-unified/mp2pp2_tohf") / CHECKPOINT
    assert any(
        "loads no model.tp00_pp00.safetensors" in said for said in paddle_reshard.launch(source).remarks
    )
    nearest = paddle_reshard.plan(source, cards=4).nearest
    assert nearest is not None and nearest.command.endswith("TARGET --to tp=2,pp=2")


@pytest.mark.parametrize(
    ("case", "in_one_file"), [("uc_sh2_s1v1_tied", False), ("nlp_uc_mp2pp2", False), ("uc_single_tied", True)]
)
def test_one_card_reads_only_the_first_of_several_files(case: str, in_one_file: bool) -> None:
    """Of each kind of a unified checkpoint, and without a word, as its index lists the keys of all."""
    source = case_directory(f"small-unified/{case}") / CHECKPOINT
    for to, told in (("tp=1", not in_one_file), ("sharding=2", False)):
        remarks = paddle_reshard.launch(source, to=to).remarks
        wrongly = [said for said in remarks if said.startswith("starts wrongly: ")]
        assert ["silently reads only the first" in said for said in wrongly] == [True] * told
    for cards, told in ((1, not in_one_file), (2, False)):
        listed = paddle_reshard.plan(source, cards=cards)
        assert ("silently reads only the first" in str(listed.advice())) is told


@pytest.mark.parametrize(
    ("size", "to", "starts"),
    [(None, "pp=2", False), (None, "sharding=2", True), ("20KB", "pp=2", True)],
)
def test_a_stage_finds_no_states_of_tied_words_that_are_stored_once(
    size: str | None, to: str, starts: bool, tmp_path: Path
) -> None:
    """The trainer's own files of one card, and conversions to as many, stop it at a ``KeyError``."""
    source = case_directory("small-unified/uc_single_tied") / CHECKPOINT
    if size is not None:
        paddle_reshard.convert(source, tmp_path / "t", format="unified", max_shard_size=size)
        source = tmp_path / "t"
    remarks = paddle_reshard.launch(source, to=to).remarks
    assert any("states of tied words under one key" in said for said in remarks) is not starts
    paddle_reshard.convert(source, tmp_path / "job", to=to)
    made = paddle_reshard.plan(tmp_path / "job", format="unified", max_shard_size=size).targets[0]
    assert (
        any("or unified in several files, with --max-shard-size" in said for said in made.remarks)
        is not starts
    )


@pytest.mark.parametrize("segment", [512, 1 << 20])
def test_segments_of_stage_3_that_are_not_the_trainers_are_said(segment: int, tmp_path: Path) -> None:
    source = case_directory("dense/single") / CHECKPOINT
    stage3 = {"to": "sharding=2", "sharding_strategy": "stage3", "layout": {"stage3_segment_size": segment}}
    paddle_reshard.convert(source, tmp_path / "t", **stage3)
    said = [
        remark for remark in paddle_reshard.launch(tmp_path / "t").remarks if "stage3_segment_size" in remark
    ]
    assert bool(said) is (segment == 512)


def test_without_a_model_configuration_it_says_what_to_give() -> None:
    flex = case_directory("states/lora_fc_mp2") / CHECKPOINT
    with pytest.raises(paddle_reshard.UnsupportedError, match="--config FILE"):
        paddle_reshard.launch(flex, to="tp=2")


def test_parameters_alone_start_without_optimizer(tmp_path: Path) -> None:
    source = case_directory(ALL_AXES) / CHECKPOINT
    paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    exported = paddle_reshard.launch(tmp_path / "model")
    assert exported.library == "transformers" and exported.arguments == {}
    assert f"vllm serve {tmp_path / 'model'}" in exported.commands

    paddle_reshard.convert(tmp_path / "model", tmp_path / "cold", to="tp=2", format="hybrid-plain")
    assert paddle_reshard.launch(tmp_path / "cold").arguments["ignore_load_lr_and_optim"] is True


def test_more_data_parallel_ranks_do_not_share_experts_out() -> None:
    found = paddle_reshard.launch(case_directory("dense/nlp_mp2") / CHECKPOINT, to="tp=2,dp=2")
    assert found.ranks == 4
    assert "use_expert_parallel" not in found.arguments
    with pytest.raises(paddle_reshard.UnsupportedError, match="tp=2,ep=2 is not known"):
        trainer_arguments(TrainingJob("paddlenlp", "hybrid-plain", Topology(tp=2, ep=2), "none"))


def test_a_topology_that_is_not_that_of_the_files_is_wrong_usage() -> None:
    source = case_directory(ALL_AXES) / CHECKPOINT
    with pytest.raises(paddle_reshard.UsageError, match="is for tp=2,pp=2,sharding=2, not tp=4"):
        paddle_reshard.launch(source, to="tp=4")
    assert paddle_reshard.launch(source, to="tp=2,pp=2,sharding=2,dp=2").ranks == 16
    with pytest.raises(paddle_reshard.UsageError, match="any topology; give that of the job"):
        paddle_reshard.launch(case_directory("dense/fc_single") / CHECKPOINT)
