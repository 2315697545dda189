"""Values of the Hugging Face layout: rows of rule tables, casts between dtypes, refusals of odd files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.commands.conversion import convert
from paddle_reshard.pipeline.cli.commands.elsewhere import ConvertArguments
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    RuleError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.formats.huggingface.parts import Part, model_parts
from paddle_reshard.pipeline.formats.huggingface.source import read_huggingface, stored_tensors
from paddle_reshard.pipeline.formats.huggingface.target import HuggingFaceTarget
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.storage.files.safetensors import (
    Index,
    SafetensorsPayload,
    TensorSlot,
    encode_safetensors,
    parse_safetensors,
)
from paddle_reshard.tasks.cast import cast, cast_in_range
from paddle_reshard.tasks.device import DeviceBox, PaddleMover
from tests.conftest import case_directory

F4, F2, BITS = np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2")
QKV = {
    "keys": ["q.weight", "k.weight", "v.weight"],
    "transposed": True,
    "widths": ["2*heads", "heads", "heads"],
    "groups": "heads",
}


def _table(*forms: tuple[str, Any]) -> RuleTable:
    """A table of one row per ``(key, huggingface)``."""
    rows = [
        {"key": k, "item": "layer", "name_class": "linear", "source": "here", "huggingface": f}
        for k, f in forms
    ]
    return parse_rule_table(
        json.dumps(
            {
                "family": "toy",
                "convention": "paddleformers",
                "model_types": [],
                "items": [{"name": "layer", "layer_class": "Layer", "repeated": True}],
                "rules": rows,
            }
        ),
        "toy.json",
    )


def _model(config: Mapping[str, Any], *tensors: tuple[str, tuple[int, ...], Any]) -> Model:
    table = _table(*((key, form) for key, _, form in tensors))
    return Model(
        tuple(
            ModelTensor(key, table.rules[i], None, shape, dtype_named("float32"), (), False)
            for i, (key, shape, _) in enumerate(tensors)
        ),
        table,
        config,
    )


# -------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("key", "form", "message"),
    [
        ("a", {}, "'keys' is missing"),
        ("a", {"keys": []}, "keys must have"),
        ("a", {"keys": ["b"], "rotated": True}, "unknown entry 'rotated'"),
        ("a", {"keys": ["b"], "transposed": 1}, "transposed cannot be 1"),
        ("a", {"keys": [1]}, r"keys\[0\] cannot be 1: a text is expected"),
        ("{layer}.a", {"keys": ["a"]}, "keys must have the same"),
        ("{layer}.a", {"keys": ["{layer}.{expert}.a"]}, "keys must have the same"),
        ("{head}.a", {"keys": ["{head}.a"]}, r"key can contain only \{layer\} and \{expert\} in braces"),
        ("{layer}.{layer}", {"keys": ["{layer}.{layer}"]}, "key contains {layer} twice"),
        ("a", {"keys": ["b", "c"]}, "several keys need a width each"),
        ("a", {"keys": ["b", "c"], "widths": ["1"]}, "several keys need a width each"),
        ("a", {"keys": ["b"], "widths": ["1"]}, "several keys need a width each"),
        ("a", {"keys": ["b"], "groups": "heads"}, "groups require several keys"),
        (
            "a",
            {"keys": ["b", "c"], "widths": ["1", "1"], "groups_there": "heads"},
            "groups_there require parts with the same key",
        ),
    ],
)
def test_rows_that_are_refused(key: str, form: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _table((key, form))


GATED = {
    "keys": ["q.weight", "q.weight", "k.weight", "v.weight"],
    "transposed": True,
    "widths": ["heads*width", "heads*width", "groups*width", "groups*width"],
    "groups": "groups",
    "groups_there": "heads",
}
TOWER = {
    "keys": ["qkv.weight"] * 3,
    "transposed": True,
    "widths": ["heads*width"] * 3,
    "groups": "heads",
}
ROWS, HEADS, GROUPS, WIDTH = 3, 6, 2, 5


def _filled(part: Part, logical: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.full(part.shape, -1)
    for box in part.boxes:
        for place in np.ndindex(*box.extents):
            there = box.first_element + sum(n * s for n, s in zip(place, box.strides, strict=True))
            array.reshape(-1)[there] = logical[tuple(n + o for n, o in zip(place, box.offset, strict=True))]
    return array


def test_parts_of_one_tensor() -> None:
    """Queries and gates alternate by head there; the projections of a vision tower come one after the other."""
    rng = np.random.default_rng(3)
    config = {"heads": HEADS, "groups": GROUPS, "width": WIDTH}
    gated = rng.permutation(2 * HEADS * WIDTH * ROWS).reshape(HEADS, 2, WIDTH, ROWS)
    keys, values = 1000 + rng.permutation(2 * GROUPS * WIDTH * ROWS).reshape(2, GROUPS, WIDTH, ROWS)
    of_group = [
        np.concatenate(
            [
                *gated[first : first + HEADS // GROUPS, 0],
                *gated[first : first + HEADS // GROUPS, 1],
                keys[group],
                values[group],
            ]
        )
        for group, first in enumerate(range(0, HEADS, HEADS // GROUPS))
    ]
    model = _model(config, ("a", (ROWS, 2 * (HEADS + GROUPS) * WIDTH), GATED))
    ((_, parts),) = model_parts(model)
    assert [part.key for part in parts] == ["q.weight", "k.weight", "v.weight"]
    for part, wanted in zip(parts, (gated, keys, values), strict=True):
        assert (_filled(part, np.concatenate(of_group).T) == wanted.reshape(-1, ROWS)).all()

    tower = rng.permutation(3 * HEADS * WIDTH * ROWS).reshape(3, HEADS, WIDTH, ROWS)
    model = _model(config, ("a", (ROWS, 3 * HEADS * WIDTH), TOWER))
    ((_, (whole,)),) = model_parts(model)
    assert (_filled(whole, tower.swapaxes(0, 1).reshape(-1, ROWS).T) == tower.reshape(-1, ROWS)).all()


def test_parts_that_do_not_divide_into_the_groups_there() -> None:
    config = {"heads": 4, "groups": 2, "width": 3, "odd": 5}
    model = _model(config, ("a", (ROWS, 36), GATED | {"groups_there": "odd"}))
    with pytest.raises(RuleError, match=r"a: parts of \[12, 12\] .* into 5 groups \(odd\)"):
        list(model_parts(model))


def test_boxes_of_a_grouped_projection() -> None:
    """``[q q k v | q q k v]`` of two heads: every box of every part, filled through its strides."""
    model = _model({"heads": 2}, ("qkv.weight", (3, 8), QKV))
    logical = np.arange(24).reshape(3, 8)
    ((_, parts),) = model_parts(model)
    for part, columns in zip(parts, ([0, 1, 4, 5], [2, 6], [3, 7]), strict=True):
        array = np.full(part.shape, -1)
        flat = array.reshape(-1)
        for box in part.boxes:
            for row in range(box.extents[0]):
                for column in range(box.extents[1]):
                    place = box.first_element + row * box.strides[0] + column * box.strides[1]
                    flat[place] = logical[box.offset[0] + row, box.offset[1] + column]
        np.testing.assert_array_equal(array, logical[:, columns].T)


@pytest.mark.parametrize(
    ("config", "shape", "form", "message"),
    [
        ({"heads": 2}, (3, 9), QKV, "its last dim has 9 elements; .* in 2 groups"),
        ({}, (3, 8), QKV, "needs heads from config.json"),
        ({}, (3,), {"keys": ["w"], "transposed": True}, r"a tensor of shape \(3,\) cannot become w"),
        ({}, (), {"keys": ["w"]}, r"a tensor of shape \(\) cannot become w"),
    ],
)
def test_tensors_that_the_row_does_not_fit(
    config: dict[str, int], shape: tuple[int, ...], form: Any, message: str
) -> None:
    with pytest.raises(RuleError, match=message):
        list(model_parts(_model(config, ("x", shape, form))))


def test_two_tensors_of_one_name() -> None:
    model = _model({}, ("a", (2,), {"keys": ["w"]}), ("b", (2,), {"keys": ["w"]}))
    with pytest.raises(RuleError, match="has the same Hugging Face key as a: w"):
        list(model_parts(model))


# ------------------------------------------------------------------------------------------------- files


def _payload(
    path: str, metadata: Mapping[str, str], *tensors: tuple[str, str, tuple[int, ...]]
) -> SafetensorsPayload:
    encoded = encode_safetensors(
        [TensorSlot(i, key, tag, shape) for i, (key, tag, shape) in enumerate(tensors)], metadata
    )
    content = bytearray(encoded.size_bytes)
    for offset, literal in encoded.literals:
        content[offset : offset + len(literal)] = literal
    return parse_safetensors(lambda at, nbytes: bytes(content[at : at + nbytes]), len(content), path)


@pytest.mark.parametrize(
    ("tensors", "metadata", "index", "message"),
    [
        ([("a", "F32", (2, 3))], {}, None, "b: no file holds it"),
        (
            [("a", "F32", (2, 3)), ("b", "F32", (2,)), ("c", "F32", (2,))],
            {},
            None,
            "c: in m.safetensors, but the model",
        ),
        (
            [("a", "F32", (3, 2)), ("b", "F32", (2,))],
            {},
            None,
            r"a: stored with shape \(3, 2\), but the model expects \(2, 3\)",
        ),
        ([("a", "U32", (2, 3)), ("b", "F32", (2,))], {}, None, "a: dtype U32 is not supported"),
        ([("a", "BF16", (2, 3)), ("b", "F32", (2,))], {}, None, "a: stored as bfloat16, planned as float32"),
        (
            [("a", "F32", (2, 3)), ("b", "F32", (2,))],
            {"format": "np"},
            None,
            "weights in Paddle's own layout",
        ),
        (
            [("a", "F32", (2, 3)), ("b", "F32", (2,))],
            {},
            {"a": "m.safetensors"},
            "b: the index says that no file holds it",
        ),
    ],
)
def test_files_that_are_refused(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str], index: Any, message: str
) -> None:
    model = _model({}, ("x", (3, 2), {"keys": ["a"], "transposed": True}), ("b", (2,), {"keys": ["b"]}))
    payload = _payload("m.safetensors", metadata, *tensors)
    listed = None if index is None else Index(index, {}, {})
    planned = HuggingFaceTarget().dtype_of
    with pytest.raises(CheckpointError, match=message):
        stored = stored_tensors({"m.safetensors": payload}, listed)
        read_huggingface(model, {"m.safetensors": 10**6}, stored, planned)


def test_parts_of_several_dtypes() -> None:
    model = _model({"heads": 2}, ("qkv.weight", (3, 8), QKV))
    payload = _payload(
        "m", {}, ("q.weight", "F32", (4, 3)), ("k.weight", "BF16", (2, 3)), ("v.weight", "F32", (2, 3))
    )
    with pytest.raises(CoverageError, match="are stored as bfloat16, float32"):
        read_huggingface(model, {"m": 10**6}, stored_tensors({"m": payload}, None))


def test_two_files_that_hold_the_same() -> None:
    payloads = {name: _payload(name, {}, ("b", "F32", (2,))) for name in ("m", "n")}
    with pytest.raises(CoverageError, match="two files hold it"):
        stored_tensors(payloads, None)


# ------------------------------------------------------------------------------------------------- casts


def test_every_bfloat16_and_float16_is_widened_exactly() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = cast(patterns, F4)
    assert wide.view(np.uint32).tobytes() == (patterns.astype(np.uint32) << 16).tobytes()
    halves = patterns.view(F2)
    np.testing.assert_array_equal(cast(halves, F4), [float(half) for half in halves])


def test_float16_is_the_nearest_one_with_ties_to_even() -> None:
    """Between neighbouring float16 values: at, below and above the middle."""
    low = np.arange(0x0000, 0x7BFF, dtype=np.uint16).view(F2).astype(np.float64)
    high = np.arange(0x0001, 0x7C00, dtype=np.uint16).view(F2).astype(np.float64)
    middle = (low + high) / 2
    for sign in (1, -1):
        values = (sign * middle).astype(np.float32)
        exact = values.astype(np.float64) == sign * middle
        assert exact.all()
        even = np.where(np.arange(len(low)) % 2 == 0, low, high)
        np.testing.assert_array_equal(cast_in_range(values, F2), sign * even)
        np.testing.assert_array_equal(cast_in_range(np.nextafter(values, np.float32(0)), F2), sign * low)
        beyond = np.nextafter(values, np.float32(sign * np.inf))
        np.testing.assert_array_equal(cast_in_range(beyond, F2), sign * high)


def test_bfloat16_to_float16_and_back() -> None:
    values = np.array([1.5, -2.0, 0.0, 65280.0], dtype=np.float32)
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(cast_in_range(patterns, F2), values.astype(np.float16))
    np.testing.assert_array_equal(cast_in_range(values.astype(np.float16), BITS), patterns)


def test_what_float16_cannot_hold() -> None:
    with pytest.raises(OverflowError, match=r"the value 65520\.0 is too large for float16"):
        cast_in_range(np.float32([1.0, 65520.0]), F2)
    kept = cast_in_range(np.float32([65519.0, np.inf, -np.inf, np.nan]), F2)
    np.testing.assert_array_equal(kept, np.float16([65504.0, np.inf, -np.inf, np.nan]))


@pytest.mark.parametrize(("one", "two"), [(F4, F2), (BITS, F4), (BITS, F2), (F2, F4), (F2, BITS), (F4, BITS)])
def test_paddle_gives_the_same_bits(one: np.dtype, two: np.dtype) -> None:
    mover = PaddleMover("cpu")
    values = np.linspace(-100, 100, 24, dtype=np.float32)
    source = np.ascontiguousarray(cast(values, one)).view(np.uint8)
    made = mover.zeros(24 * two.itemsize)
    extents = (6, 4)
    mover.move(
        DeviceBox(mover.load(source), 0, one, extents, (one.itemsize, 6 * one.itemsize)),
        DeviceBox(made, 0, two, extents, (4 * two.itemsize, two.itemsize)),
    )
    expected = cast(source.view(one), two).reshape(4, 6).T
    assert mover.fetch(made).tobytes() == np.ascontiguousarray(expected).tobytes()


# -------------------------------------------------------------------------------------------------- jobs


def test_a_conversion_without_a_topology_can_be_sent_as_a_job() -> None:
    one = ConvertArguments.read(convert, ["a", "b", "--format", "huggingface", "--dtype", "float16"])
    two = ConvertArguments.read(convert, ["a", "b", "--format", "huggingface"])
    assert one.identify("a", "b") != two.identify("a", "b")
    assert one.spell("/a", "/b")[2:] == ("--format", "huggingface", "--dtype", "float16", "--cluster", "ray")


@pytest.mark.parametrize("allowed", [(), ("hf",)])
def test_a_target_on_the_hub_is_refused_with_what_to_do(allowed: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"not supported.*hf upload org/model FOLDER"):
        paddle_reshard.plan(
            case_directory("dense/single"), "hf://org/model/", format="huggingface", allow_scheme=allowed
        )
