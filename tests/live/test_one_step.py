"""Parameters beside optimizer states that are not theirs do not get into a running job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_reshard import load_into
from paddle_reshard.pipeline.core.errors import MasterDriftError
from tests import oracle
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.live.fleet_job import bits, model_of
from tests.live.pieces import Elsewhere, piece
from tests.spoiled import EMBEDDING, SPOILED, flip_one_bit, of_another_step, one_card

AT = 1500
"""Of the embedding, which is (vocabulary, 24)."""


class Job:
    """A model in bfloat16 and its AdamW, as they are before the first step."""

    def __init__(self, case: str) -> None:
        self.truth = oracle.read_truth(case_directory(case) / "truth.safetensors")
        self.keys = list(oracle.shapes_of(self.truth))
        layer = model_of(self.truth, self.keys)
        self.model = dict(layer.state_dict())
        self.optimizer = paddle.optimizer.AdamW(parameters=layer.parameters(), multi_precision=True)
        block = paddle.base.framework.default_main_program().global_block()
        self.optimizer._create_accumulators(block, layer.parameters())
        self.states = dict(self.optimizer.state_dict())
        self.states.pop("LR_Scheduler", None)
        self.names = {parameter.name: key for key, parameter in self.model.items()}

    def held(self) -> dict[str, np.ndarray]:
        """The bits in memory, keyed as in the truth."""
        found = {key: bits(parameter) for key, parameter in self.model.items()}
        for name, key in self.names.items():
            found[f"{key}.w_0"] = bits(self.optimizer._master_weights[name])
            for state in (*oracle.MOMENTS, *oracle.POWERS):
                of_master = self.optimizer._accumulators[state.removesuffix("_0")]
                found[f"{key}.{state}"] = bits(of_master[self.optimizer._master_weights[name].name])
        return found


CASES = dict(zip(SPOILED, ("mp2_tied", *2 * ["small-families/qwen2_single"]), strict=True))
REPORT = (
    r"(\S+) \(param\): element \(\d+,[ \d]*\) is \S+ \(0x[0-9a-f]{4}\), its master weight \S+ \(0x[0-9a-f]{8}\) is "
    r"rounded to \S+ \(0x[0-9a-f]{4}\) \(model_state\S*\.pdparams and optimizer\S*\.pdopt\)"
)


@pytest.mark.parametrize("sections", [("model", "optimizer"), ("model",), ("optimizer",)], ids="+".join)
@pytest.mark.parametrize("spoil", SPOILED)
def test_states_of_other_parameters_are_refused(
    spoil: Callable[[Path], Path], sections: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever a job takes of them."""
    source = spoil(tmp_path)
    job = Job(CASES[spoil])
    state_dict = {name: {"model": job.model, "optimizer": job.states}[name] for name in sections}
    with pytest.raises(MasterDriftError) as refused:
        load_into(state_dict, source, parameter_to_structured_name=job.names)
    told = re.match(REPORT, str(refused.value))
    assert told, str(refused.value)
    assert told[1] in job.keys


@pytest.mark.parametrize("name", ["mp2_tied", "small-families/qwen2_single", "mp2pp2sh2_s1v1_meta_ema"])
def test_what_belongs_together_is_loaded_and_read_once(name: str) -> None:
    job = Job(name)
    source = case_directory(name) / "checkpoint-3"
    report = load_into(
        {"model": job.model, "optimizer": job.states}, source, parameter_to_structured_name=job.names
    )
    held = job.held()
    oracle.assert_same_tensors(held, {key: bits(job.truth[key]) for key in held})
    assert report.master_drift == ()
    files = [path for pattern in ("model_state*", "optimizer*") for path in source.glob(pattern)]
    assert report.read_bytes <= sum(path.stat().st_size for path in files)


def test_one_bit_is_found_by_the_process_that_loads_it(tmp_path: Path) -> None:
    """Of which it loads both; those that hold other rows read nothing of it."""
    source = one_card(tmp_path)
    flip_one_bit(source, AT)
    job = Job("small-families/qwen2_single")
    state_dict = {"model": job.model, "optimizer": job.states}
    with pytest.raises(MasterDriftError, match=rf"{re.escape(EMBEDDING)} \(param\): element \(62, 12\) is "):
        load_into(state_dict, source, parameter_to_structured_name=job.names)

    whole = job.truth[EMBEDDING].shape
    element = AT // whole[1]

    def rows_of(dtype: type, first: int, last: int) -> SimpleNamespace:
        rows = (last - first, whole[1])
        return piece(np.zeros(rows, dtype), whole, (first, 0), rows)

    def load(first: int, last: int, first_master: int, last_master: int) -> Any:
        pieces = {
            EMBEDDING: rows_of(np.uint16, first, last),
            f"{EMBEDDING}.w_0": rows_of(np.float32, first_master, last_master),
        }
        report = load_into(pieces, source, strict=False)
        assert report.read_bytes == report.filled_bytes
        for key, rows in ((EMBEDDING, (first, last)), (f"{EMBEDDING}.w_0", (first_master, last_master))):
            expected = bits(job.truth[key])[slice(*rows)].copy()
            if rows[0] <= element < rows[1] and key == EMBEDDING:
                expected[element - rows[0], AT % whole[1]] ^= 1
            assert np.array_equal(bits(pieces[key].local_tensor), expected)

    load(0, element, 0, whole[0])
    load(
        0, whole[0], element + 1, whole[0]
    )  # as a rank of sharding: another one has that row of the master weight
    with pytest.raises(MasterDriftError):
        load(element, element + 1, 0, whole[0])


def test_what_differs_is_loaded_where_that_is_allowed(tmp_path: Path) -> None:
    source = of_another_step(tmp_path)
    job = Job("small-families/qwen2_single")
    report = load_into(
        {"model": job.model, "optimizer": job.states},
        source,
        parameter_to_structured_name=job.names,
        master_weights="report",
    )
    held = job.held()
    for key in job.keys:
        assert np.array_equal(held[key], bits(job.truth[key]))
        assert np.array_equal(held[f"{key}.w_0"], bits(job.truth[f"{key}.w_0"] * np.float32(1.01)))
    named = [re.match(REPORT, line) for line in report.master_drift]
    assert all(named)
    assert {found[1] for found in named if found} == set(job.keys)


def test_tensors_on_a_device_are_held_too(tmp_path: Path) -> None:
    """Here they only say that they lie on one: then groups run in the thread of the caller."""
    source = of_another_step(tmp_path)
    job = Job("small-families/qwen2_single")

    live = {
        EMBEDDING: Elsewhere(job.model[EMBEDDING]),
        f"{EMBEDDING}.w_0": paddle.zeros(job.truth[EMBEDDING].shape, "float32"),
    }
    with pytest.raises(MasterDriftError, match=re.escape(EMBEDDING)):
        load_into(live, source, strict=False)
