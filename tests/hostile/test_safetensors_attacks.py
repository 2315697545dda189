"""No header makes the parser hang, recurse, believe a lie or answer anything but a named refusal."""

from __future__ import annotations

import json
import random
import struct

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files.safetensors import (
    MAX_HEADER_BYTES,
    TensorSlot,
    encode_safetensors,
    parse_index,
    parse_safetensors,
)
from tests.sampling import examples

FUZZ = examples(400)
W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def file_of(header: bytes | dict, data: bytes = b"\0" * 4) -> bytes:
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(text)) + text + data


def refusal(data: bytes) -> FormatError | None:
    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 <= byte_offset <= byte_offset + nbytes <= len(data)
        assert nbytes <= MAX_HEADER_BYTES
        return data[byte_offset : byte_offset + nbytes]

    try:
        parse_safetensors(read, len(data), "a.safetensors")
    except FormatError as error:
        assert error.path == "a.safetensors"
        assert len(str(error)) < 1000
        return error
    return None


def changed(**values: object) -> bytes:
    return file_of({"w": {**W, **values}})


def two(first: list[int], second: list[int], size: int) -> bytes:
    def entry(offsets: list[int]) -> dict:
        return {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}

    return file_of({"a": entry(first), "b": entry(second)}, b"\0" * size)


ATTACKS = {
    "an empty file": (b"", "another_file"),
    "half a length": (b"\0" * 7, "truncated"),
    "no header": (b"\0" * 8, "bad_json"),
    "a header longer than the file": (struct.pack("<Q", 100) + b"{}", "length_beyond_end"),
    "a header of 2**64 - 1 bytes": (b"\xff" * 8 + b"{}", "header_too_long"),
    "a header over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header_too_long"),
    "a list": (file_of(b"[]", b""), "bad_json"),
    "a space first": (file_of(b" {}", b""), "bad_json"),
    "half a JSON": (file_of(b'{"w":', b""), "bad_json"),
    "two JSONs": (file_of(b"{}{}", b""), "bad_json"),
    "JSON nested 100,000 deep": (file_of(b'{"w":' * 100_000, b""), "nesting_too_deep"),
    "lists nested 50,000 deep": (file_of(b'{"w":' + b"[" * 50_000, b""), "nesting_too_deep"),
    "text that is not UTF-8": (file_of(b'{"\xff":1}', b""), "bad_text"),
    "half a character as key": (file_of(b'{"\\ud800":1}', b""), "bad_text"),
    "half a character as metadata": (file_of(b'{"__metadata__":{"a":"\\ud800"}}', b""), "bad_text"),
    "a key twice": (
        file_of(b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],'
                b'"data_offsets":[0,4]}}'),
        "duplicate_key",
    ),
    "a key twice, once escaped": (file_of(b'{"w":1,"\\u0077":2}'), "duplicate_key"),
    "a field twice": (
        file_of(b'{"w":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}'), "duplicate_key"
    ),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}', b""), "duplicate_key"),
    "metadata that is text": (file_of({"__metadata__": "x"}, b""), "bad_metadata"),
    "metadata with a number": (file_of({"__metadata__": {"x": 1}}, b""), "bad_metadata"),
    "metadata that is null": (file_of({"__metadata__": None}, b""), "bad_metadata"),
    "an entry that is a number": (file_of({"w": 1}), "bad_entry"),
    "an entry without shape": (file_of({"w": {"dtype": "F32", "data_offsets": [0, 4]}}), "bad_entry"),
    "an entry with one field more": (changed(strides=[4]), "bad_entry"),
    "an unknown dtype": (changed(dtype="F33"), "unsupported_dtype"),
    "an 8-bit float": (changed(dtype="F8_E4M3", shape=[4]), "unsupported_dtype"),
    "a dtype that is a list": (changed(dtype=["F32"]), "unsupported_dtype"),
    "a shape that is a number": (changed(shape=1), "bad_shape"),
    "a negative extent": (changed(shape=[-1]), "bad_shape"),
    "two negative extents": (changed(shape=[-1, -1]), "bad_shape"),
    "an extent that is a float": (changed(shape=[1.0]), "bad_shape"),
    "an extent that is true": (changed(shape=[True]), "bad_shape"),
    "an extent of 2**63": (changed(shape=[1 << 63, 0]), "bad_shape"),
    "a shape of 65 dims": (changed(shape=[1] * 65), "bad_shape"),
    "a shape whose product is 2**64 + 1 elements": (changed(shape=[274177, 67280421310721]), "size_mismatch"),
    "a number of 5,000 digits": (file_of(b'{"w":' + b"9" * 5000 + b"}"), "bad_json"),
    "NaN": (file_of(b'{"w":NaN}'), "bad_json"),
    "offsets that are one number": (changed(data_offsets=[0]), "bad_offsets"),
    "offsets backwards": (changed(data_offsets=[4, 0]), "bad_offsets"),
    "negative offsets": (changed(data_offsets=[-4, 0]), "bad_offsets"),
    "more bytes than the shape": (changed(data_offsets=[0, 8]), "size_mismatch"),
    "fewer bytes than the shape": (changed(shape=[2]), "size_mismatch"),
    "a hole before the first": (two([1, 2], [2, 4], 4), "hole"),
    "a hole between": (two([0, 1], [2, 4], 4), "hole"),
    "an overlap": (two([0, 3], [2, 4], 4), "overlap"),
    "two tensors in one place": (two([0, 4], [0, 4], 4), "overlap"),
    "an empty tensor inside another": (two([0, 4], [2, 2], 4), "overlap"),
    "tensors beyond the end": (two([0, 2], [2, 4], 3), "truncated"),
    "bytes after the last": (two([0, 2], [2, 4], 5), "trailing_bytes"),
    "bytes after an empty header": (file_of(b"{}"), "trailing_bytes"),
    "a very long key": (file_of({"w" * 70_000: W}), "value_too_long"),
    "very long metadata": (file_of({"__metadata__": {"a": "w" * 70_000}}, b""), "value_too_long"),
}  # fmt: skip


@pytest.mark.parametrize("idea", ATTACKS)
def test_every_attack_is_stopped_for_its_reason(idea):
    data, reason = ATTACKS[idea]
    error = refusal(data)
    assert error is not None
    assert error.reason == reason


def test_a_refusal_names_the_tensor_the_file_and_both_numbers():
    assert str(refusal(changed(shape=[3]))) == (
        "a.safetensors at byte 8: 'w' of shape (3,) F32 holds 4 bytes, expected 12 [size_mismatch]"
    )


def test_the_attacks_start_from_a_file_that_is_read():
    assert refusal(changed()) is None
    assert refusal(two([0, 2], [2, 4], 4)) is None


def test_a_store_that_returns_too_little_is_noticed():
    data = changed()
    with pytest.raises(FormatError, match="short_read"):
        parse_safetensors(lambda at, nbytes: data[at : at + nbytes - 1], len(data), "x")


BASE = b"".join(
    [
        encode_safetensors(
            [
                TensorSlot(0, "é", "F32", (2, 3)),
                TensorSlot(1, "b", "BF16", (5,)),
                TensorSlot(2, "c", "BOOL", ()),
            ],
            {"format": "pt"},
        ).literals[0][1],
        b"\0" * 35,
    ]
)


def test_a_file_cut_anywhere_is_refused():
    assert refusal(BASE) is None
    assert all(refusal(BASE[:stop]) is not None for stop in range(len(BASE)))


@FUZZ
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_files_are_refused_or_the_library_reads_the_same(seed, count):
    rng = random.Random(seed)
    data = bytearray(BASE)
    for _ in range(count):
        at = rng.randrange(len(BASE) - 35)
        if rng.random() < 0.5:
            data[at] = rng.choice(b'{}[]":,0123456789 -eE\\"' + bytes(range(256)))
        else:
            data[at : at + 1] = data[at : at + rng.randrange(3)]
    data = bytes(data)
    if refusal(data) is None:
        found = parse_safetensors(lambda at, nbytes: data[at : at + nbytes], len(data), "x")
        wanted = dict(safetensors.deserialize(data))
        assert {key: (list(ref.shape), found.tags[key]) for key, ref in found.tensors.items()} == {
            key: (entry["shape"], entry["dtype"]) for key, entry in wanted.items()
        }
        assert all(
            data[ref.byte_offset : ref.byte_offset + ref.nbytes] == wanted[key]["data"]
            for key, ref in found.tensors.items()
        )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "another_file"),
        (b"{}", "bad_index"),
        (b'{"weight_map":[]}', "bad_index"),
        (b'{"weight_map":{},"metadata":[]}', "bad_index"),
        (b'{"weight_map":{"a":"x","a":"y"}}', "duplicate_key"),
        (b'{"weight_map":{"a":"x","\\u0061":"x"}}', "duplicate_key"),
        (b'{"weight_map":{"\\ud800":"x"}}', "bad_text"),
        (b'{"a":' * 100_000, "nesting_too_deep"),
        (b'{"weight_map":{"a":"' + b"x" * 70_000 + b'"}}', "value_too_long"),
    ],
)
def test_damaged_index_files_are_refused(data, reason):
    with pytest.raises(FormatError) as caught:
        parse_index(data, "model.safetensors.index.json")
    assert caught.value.reason == reason
