"""Names under which a trainer finds optimizer states: exchanged, counted from elsewhere, of another class."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.tensors import WRITTEN_NAMES
from paddle_reshard.pipeline.model.optimizer_keys import split_accumulator_key
from tests import oracle
from tests.conftest import case_directory, checkpoint_of
from tests.oracle import unpickle

LAYER = re.compile(r"(?<![a-z_])([a-z_]+)_(\d+)(?=\.[wb]_\d)")
"""The part of a name that stands for a layer: ``linear_3`` of ``linear_3.w_0_moment1_0``."""
PLAIN, WITH_META = "dense/single", "dense/sh2_s1v2_meta"
Q, K = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")


def _renamed(case: str, folder: Path, layer: Callable[[str, int], str]) -> Path:
    """A copy in which every file calls the parameters of a layer otherwise: the names, and the states under them."""
    copied = folder / "renamed"
    shutil.copytree(checkpoint_of(case), copied, copy_function=shutil.copyfile)

    def in_text(text: str) -> str:
        return LAYER.sub(lambda found: layer(found[1], int(found[2])), text)

    def anywhere(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {in_text(key) if isinstance(key, str) else key: anywhere(of) for key, of in value.items()}
        if isinstance(value, tuple):
            return tuple(map(anywhere, value))
        return in_text(value) if isinstance(value, str) else value

    for path in copied.iterdir():
        if path.name == "model_meta.json":
            path.write_text(in_text(path.read_text()))
        elif path.name.startswith(("model_state.", "optimizer.", "ema.")):
            path.write_bytes(pickle.dumps(anywhere(unpickle(path)), protocol=4))
    return copied


def _exchanged(*numbers: tuple[int, int]) -> Callable[[str, int], str]:
    """Linear layers that have each other's number."""
    to = {one: other for pair in numbers for one, other in (pair, pair[::-1])}
    return lambda word, number: f"{word}_{to.get(number, number) if word == 'linear' else number}"


@pytest.mark.parametrize(("case", "file"), [(WITH_META, "model_meta.json"), (PLAIN, "model_state.pdparams")])
def test_two_parameters_with_each_others_name_are_refused(case: str, file: str, tmp_path: Path) -> None:
    sound, exchanged = checkpoint_of(case), _renamed(case, tmp_path, _exchanged((0, 1)))
    told = (
        rf"{re.escape(Q)} has the parameter name linear_1\.w_0 in {re.escape(file)}.* that of {re.escape(K)}; its own "
        r"is linear_0\.w_0.*\(1 more parameter so\)"
    )
    with pytest.raises(CheckpointError, match=told):
        paddle_reshard.verify(sound, exchanged)
    with pytest.raises(CheckpointError, match=told):
        paddle_reshard.verify(exchanged)
    with pytest.raises(CheckpointError, match=told):
        paddle_reshard.convert(exchanged, tmp_path / "target", format="flex")
    assert re.match(told, paddle_reshard.inspect(exchanged).misnamed)


def test_so_they_are_in_a_program_of_auto_parallel_training(tmp_path: Path) -> None:
    """Metadata and data files have the names of states; those of parameters are in data files besides."""
    target, name, other = tmp_path / "auto", rb"linear_0.w_0", rb"linear_1.w_0"
    paddle_reshard.convert(checkpoint_of(PLAIN), target, format="auto-parallel")
    assert paddle_reshard.verify(target)
    to = {name: other, other: name}
    for path in (target / "dist_ckpt").iterdir():
        path.write_bytes(re.sub(rb"linear_[01]\.w_0", lambda found: to[found[0]], path.read_bytes()))
    told = rf"{re.escape(Q)} has the parameter name linear_1\.w_0 in dist_ckpt/0_0\.distcp.* that of {re.escape(K)}"
    with pytest.raises(CheckpointError, match=told):
        paddle_reshard.verify(checkpoint_of(PLAIN), target)
    assert re.match(told, paddle_reshard.inspect(target).misnamed)


def test_an_exchange_in_every_layer_is_a_class_of_its_own_but_no_equal(tmp_path: Path) -> None:
    """Seven linear layers in each decoder layer, of which there are four: such a class may exist."""
    sound = checkpoint_of(WITH_META)
    other = _renamed(WITH_META, tmp_path, _exchanged(*((7 * layer, 7 * layer + 1) for layer in range(4))))
    assert paddle_reshard.verify(other)
    assert f"{Q} has the parameter name linear_1.w_0" in paddle_reshard.inspect(other).misnamed
    report = paddle_reshard.verify(sound, other)
    assert {difference.tensor for difference in report.differences} == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(4) for part in "qk"
    }
    first = next(difference for difference in report.differences if difference.tensor == Q)
    assert re.search(
        r"linear_0\.w_0 in A, model_meta.json .*, and linear_1\.w_0 in B, model_meta.json", first.detail
    )


def test_a_parameter_called_as_none_is_differs(tmp_path: Path) -> None:
    other = _renamed(
        PLAIN, tmp_path, lambda word, number: f"{word}_{99 if (word, number) == ('linear', 0) else number}"
    )
    report = paddle_reshard.verify(checkpoint_of(PLAIN), other)
    assert [difference.tensor for difference in report.differences] == [Q]
    assert paddle_reshard.verify(other)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(
            lambda word, number: f"{word}_{number + (28 if word == 'linear' else 0)}", id="second model"
        ),
        pytest.param(lambda word, number: f"other_{word}_{number}", id="another class"),
    ],
)
@pytest.mark.parametrize("case", [WITH_META, PLAIN])
def test_names_of_another_process_are_said_and_no_difference(
    case: str, layer: Callable[[str, int], str], tmp_path: Path
) -> None:
    other = _renamed(case, tmp_path, layer)
    report = paddle_reshard.verify(checkpoint_of(case), other)
    assert report.equal
    (remark,) = report.remarks
    assert "has the parameter name" in paddle_reshard.inspect(other).misnamed
    assert re.search(r"parameter name \w+\.w_0 in A, .*, and \w+\.w_0 in B", remark)
    assert paddle_reshard.verify(other)


def test_an_exchange_beside_a_second_model_is_refused(tmp_path: Path) -> None:
    """Numbers that are all 28 higher, but for two."""
    exchange = _exchanged((28, 29))

    def layer(word: str, number: int) -> str:
        return exchange(word, number + (28 if word == "linear" else 0))

    with pytest.raises(CheckpointError, match=rf"{re.escape(Q)} has the parameter name linear_29\.w_0"):
        paddle_reshard.verify(_renamed(PLAIN, tmp_path, layer))


def test_a_job_with_sequence_parallelism_has_other_names_and_the_same_values(tmp_path: Path) -> None:
    source = checkpoint_of("dense/mp2pp2")
    paddle_reshard.convert(source, tmp_path / "there", to="tp=2,pp=2", layout={"sequence_parallel": True})
    report = paddle_reshard.verify(source, tmp_path / "there")
    assert report.equal
    assert "parameter name" in report.remarks[0]


def _rearranged(entries: list[tuple[str, Any]], how: str) -> list[tuple[str, Any]]:
    """The entries of an optimizer in another order."""
    if how == "shuffled":
        return Random(0).sample(entries, len(entries))
    moment2 = [number for number, (entry, _) in enumerate(entries) if "_moment2_" in entry]
    middle = moment2[len(moment2) // 2]
    return [*entries[:middle], *entries[middle + 1 :], entries[middle]]


@pytest.mark.parametrize("how", ["one comes last", "shuffled"])
def test_a_state_is_that_of_the_parameter_that_it_names_wherever_it_stands(how: str, tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    shutil.copytree(checkpoint_of(PLAIN), source, copy_function=shutil.copyfile)
    path = source / "optimizer.pdopt"
    path.write_bytes(pickle.dumps(dict(_rearranged([*unpickle(path).items()], how)), protocol=4))
    paddle_reshard.convert(source, made, to="tp=1")
    truth = oracle.read_truth(case_directory(PLAIN) / "truth.safetensors")
    oracle.assert_same_tensors(oracle.read_checkpoint(made, oracle.shapes_of(truth)), truth)


@pytest.mark.parametrize("master", ["", "_fp32_master_0"])
def test_what_comes_before_an_ending_means_the_same_before_any_other(master: str) -> None:
    """Also where a name ends as an accumulator begins: that of the parameter and the ending do not run together."""
    for other, ending in product(WRITTEN_NAMES, repeat=2):
        for name in (f"linear_0.w_0_{other}"[:stop] for stop in range(12, 14 + len(other))):
            key = f"{name}{master}_{ending}_0"
            assert split_accumulator_key(key, {name}) == (name, ending, bool(master))
