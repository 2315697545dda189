"""Every real checkpoint, converted to other topologies, still holds the truth bit for bit.

``make test`` converts one case to targets of every strategy. ``make full`` converts the cases that differ most to every
second target, and each of the others to every fourth, not the same ones; ``make exhaustive`` to those between. The
targets of a case are made in one run, which reads the source once; the conversions of ``test_as_the_job_reads.py`` have
a run each.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.request.options import TargetOptions
from tests import oracle
from tests.conftest import FEW_CASES, case_directory, hybrid_cases


@dataclass(frozen=True)
class Target:
    """What to convert to, and what the files must then show."""

    to: str
    strategy: str | None = None
    format: str = "hybrid"
    segment_size: int | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by which the files are named."""
        asked = {axis: int(size) for axis, size in (pair.split("=") for pair in self.to.split(","))}
        return {"tp": asked.get("tp", 1), "pp": asked.get("pp", 1), "shard": asked.get("sharding", 1)}

    @property
    def options(self) -> TargetOptions:
        options: TargetOptions = {"to": self.to, "format": self.format}
        if self.strategy is not None:
            options["sharding_strategy"] = self.strategy
        if self.segment_size is not None:
            options["layout"] = {"stage3_segment_size": self.segment_size}
        return options

    def __str__(self) -> str:
        size = "" if self.segment_size is None else f"segment{self.segment_size}"
        return "-".join(filter(None, (self.to.replace(",", "+"), self.strategy, self.format, size)))


SINGLE = Target("tp=1")
# Every strategy in three topologies.
EVERY_CASE = (
    SINGLE,
    Target("tp=2,pp=2"),
    Target("pp=4"),
    Target("sharding=3", "stage1v1"),
    Target("tp=2,sharding=2", "stage1v1"),
    Target("tp=2,pp=2,sharding=2", "stage1v1"),
    Target("sharding=5", "stage1v2"),
    Target("tp=2,sharding=2", "stage1v2"),
    Target("tp=2,pp=2,sharding=2", "stage1v2"),
    Target("sharding=2", "stage2"),
    Target("sharding=7", "stage2"),
    Target("tp=2,sharding=2", "stage2"),
    Target("sharding=2", "stage3"),
    Target("sharding=3", "stage3", segment_size=512),
    Target("sharding=8", "stage3", segment_size=2048),
)

MORE = (
    Target("tp=2,sharding=2", "stage1v1", "hybrid-plain"),
    Target("tp=2,pp=2,sharding=2", "stage1v2", "hybrid-plain"),
    Target("pp=2,sharding=3", "stage1v2", "hybrid-plain"),
    Target("dp=2,tp=2,sharding=2", "stage1v2"),
)
MORE_CASES = (
    "mp2_tied", "mp2pp2sh2_s1v2_meta_ema", "nlp_fused_mp2", "pp4vpp2", "sh2_s1v1_meta_fp32", "sh2_s3_seg512",
)  # fmt: skip
EVERY_STRATEGY = "mp2pp2sh2_s1v2_meta_ema"
"""The case that `make test` converts."""
TWO_LAYERS = ("mp2sh2_s1v2_meta_mid",)


def _targets(name: str) -> list[Target]:
    targets = [*EVERY_CASE, *(MORE if name in MORE_CASES else ())]
    # A model of two layers has no four stages.
    return [Target("pp=2") if name in TWO_LAYERS and target.to == "pp=4" else target for target in targets]


def _sampled(name: str) -> list[Target]:
    """The targets that are made of a case without ``make exhaustive``."""
    few = name in FEW_CASES
    number, step = (FEW_CASES.index(name), 2) if few else (hybrid_cases().index(name), 4)
    return _targets(name)[number % step :: step]


@cache
def _truth(name: str) -> dict[str, np.ndarray]:
    return oracle.read_truth(case_directory(name) / "truth.safetensors")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Target], Path]]:
    """Where a target of a case is; those of a case are made when the first of them is asked for."""
    folders: dict[tuple[str, bool], Path] = {}

    def made(name: str, target: Target) -> Path:
        sampled = target in _sampled(name)
        if (name, sampled) not in folders:
            folder = tmp_path_factory.mktemp("converted")
            targets = {
                folder / str(each): each.options
                for each in _targets(name)
                if (each in _sampled(name)) == sampled
            }
            paddle_reshard.convert(case_directory(name) / "checkpoint-3", targets)
            folders[name, sampled] = folder
        return folders[name, sampled] / str(target)

    yield made
    for folder in folders.values():
        shutil.rmtree(folder)


def _conversions(is_sample: Callable[[str, Target], bool]) -> list:
    def marks(name: str, target: Target) -> object:
        if not is_sample(name, target):
            return pytest.mark.exhaustive
        return () if name == EVERY_STRATEGY else pytest.mark.full

    return [
        pytest.param(name, target, id=f"{name}-to-{target}", marks=marks(name, target))
        for name in hybrid_cases()
        for target in _targets(name)
    ]


@pytest.mark.parametrize(("name", "target"), _conversions(lambda name, target: target in _sampled(name)))
def test_converted_checkpoint_equals_the_truth(
    name: str, target: Target, converted: Callable[[str, Target], Path]
) -> None:
    truth, made = _truth(name), converted(name, target)
    shapes = oracle.shapes_of(truth)
    oracle.assert_same_tensors(oracle.read_checkpoint(made, shapes), truth)
    assert oracle.degrees_of(oracle.find_files(made)["optimizer"]) == target.degrees
    # Without master weights nothing tells stage 2 from stage 1 v1, and nothing needs to.
    like_v1 = target.strategy == "stage2" and not any(key.endswith(".w_0") for key in truth)
    assert oracle.strategy_of(made) == ("stage1v1" if like_v1 else target.strategy or "none")
    # The trainer writes model_meta.json under sharding stage 1 only.
    has_meta = target.format == "hybrid" and str(target.strategy).startswith("stage1")
    assert (made / "model_meta.json").exists() == has_meta
    if has_meta:
        oracle.check_distribution(made, shapes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_paddlenlp_keeps_key_and_value_whole_where_tp_exceeds_their_heads(
    sequence_parallel: bool, tmp_path: Path
) -> None:
    """Its llama makes plain linear layers of them then, whatever the other layers are (3.0.0b4 ``modeling.py:729``)."""
    case = case_directory("nlp_single")
    assert json.loads((case / "checkpoint-3/config.json").read_text())["num_key_value_heads"] == 2
    target = tmp_path / "tp4"
    layout = {"sequence_parallel": sequence_parallel}
    paddle_reshard.convert(
        case / "checkpoint-3", target, to="tp=4,sharding=2", layout=layout, sharding_strategy="stage1v1"
    )
    truth = oracle.read_truth(case / "truth.safetensors")
    oracle.assert_same_tensors(oracle.read_checkpoint(target, oracle.shapes_of(truth)), truth)
    meta = json.loads((target / "model_meta.json").read_text())["sharding_metas"]["tp03_pp00"]
    names = meta["structure_name_mapping"]
    for name in ("q_proj", "k_proj", "v_proj"):
        in_sequence = sequence_parallel and name == "q_proj"
        expected = "column_sequence_parallel_linear_" if in_sequence else "linear_"
        assert names[f"llama.layers.1.self_attn.{name}.weight"].startswith(expected)
