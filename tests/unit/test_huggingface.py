"""The Hugging Face layout: rows of rule tables, refusals of odd files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.commands.conversion import convert
from paddle_reshard.pipeline.cli.commands.forwarded import ConvertArguments
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    RuleError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.formats.huggingface.parts import model_parts
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
from tests.conftest import case_directory

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
    items = [{"name": "layer", "layer_class": "Layer", "repeated": True}]
    toy = {"family": "toy", "convention": "paddleformers", "model_types": [], "items": items, "rules": rows}
    return parse_rule_table(json.dumps(toy), "toy.json")


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

TWO_KEYS = {"keys": ["b", "c"], "widths": ["1", "1"]}


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
        ("a", {**TWO_KEYS, "groups_there": "heads"}, "groups_there require parts with the same key"),
    ],
)
def test_rows_that_are_refused(key: str, form: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _table((key, form))


ODD = {
    "keys": ["q.weight", "q.weight", "k.weight", "v.weight"],
    "transposed": True,
    "widths": ["heads*width", "heads*width", "groups*width", "groups*width"],
    "groups": "groups",
    "groups_there": "odd",
}


@pytest.mark.parametrize(
    ("config", "shape", "form", "message"),
    [
        (
            {"heads": 4, "groups": 2, "width": 3, "odd": 5},
            (3, 36),
            ODD,
            r"x: parts of \[12, 12\] .* into 5 groups",
        ),
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


A, B = ("a", "F32", (2, 3)), ("b", "F32", (2,))


@pytest.mark.parametrize(
    ("tensors", "metadata", "index", "message"),
    [
        ([A], {}, None, "b: no file holds it"),
        ([A, B, ("c", "F32", (2,))], {}, None, "c: in m.safetensors, but the model"),
        (
            [("a", "F32", (3, 2)), B],
            {},
            None,
            r"a: stored with shape \(3, 2\), but the model expects \(2, 3\)",
        ),
        ([("a", "U32", (2, 3)), B], {}, None, "a: dtype U32 is not supported"),
        ([("a", "BF16", (2, 3)), B], {}, None, "a: stored as bfloat16, planned as float32"),
        ([A, B], {"format": "np"}, None, "weights in Paddle's own layout"),
        ([A, B], {}, {"a": "m.safetensors"}, "b: the index says that no file holds it"),
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


# -------------------------------------------------------------------------------------------------- jobs


def test_a_conversion_without_a_topology_can_be_sent_as_a_job() -> None:
    one = ConvertArguments.read(convert, ["a", "b", "--format", "huggingface", "--dtype", "float16"])
    two = ConvertArguments.read(convert, ["a", "b", "--format", "huggingface"])
    assert one.identify("a", "b") != two.identify("a", "b")
    assert one.spell("/a", "/b")[2:] == ("--format", "huggingface", "--dtype", "float16", "--cluster", "ray")


@pytest.mark.parametrize("named", [{}, {"hf": {}}])
def test_a_target_on_the_hub_is_refused_with_what_to_do(named: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"not supported.*hf upload org/model FOLDER"):
        paddle_reshard.plan(
            case_directory("dense/single"), "hf://org/model/", format="huggingface", storage_options=named
        )
