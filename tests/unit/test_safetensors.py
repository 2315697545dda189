"""The oracle is the safetensors library: what it writes is read, what is written it reads, byte for byte."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files.paddle_pickle_writer import EncodedFile
from paddle_reshard.storage.files.safetensors import (
    MAX_HEADER_BYTES,
    TAGS,
    Index,
    SafetensorsPayload,
    TensorSlot,
    encode_safetensors,
    format_index,
    parse_index,
    parse_safetensors,
)
from tests.conftest import case_files

LIBRARY_NAMES = {
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32", "U32": "uint32",
    "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16", "I8": "int8",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def parse(data: bytes) -> SafetensorsPayload:
    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 < nbytes <= MAX_HEADER_BYTES
        assert byte_offset + nbytes <= len(data)
        return data[byte_offset : byte_offset + nbytes]

    return parse_safetensors(read, len(data), "a.safetensors")


def written_by_the_library(tensors: list[tuple[str, str, tuple[int, ...], bytes]], metadata) -> bytes:
    kept = {key: np.frombuffer(data or b"\0", np.uint8) for key, _, _, data in tensors}
    return safetensors.serialize(
        {
            key: safetensors.TensorSpec(
                dtype=LIBRARY_NAMES[tag],
                shape=list(shape),
                data_ptr=kept[key].ctypes.data,
                data_len=len(data),
            )
            for key, tag, shape, data in tensors
        },
        metadata,
    )


def assembled(encoded: EncodedFile, payloads: dict[int, bytes]) -> bytes:
    parts = [*encoded.literals, *((offset, payloads[slot]) for slot, offset, _ in encoded.slots)]
    out = b""
    for offset, data in sorted(parts, key=lambda part: (part[0], len(part[1]))):
        assert offset == len(out)
        out += data
    assert len(out) == encoded.size_bytes
    return out


def payload(tag: str, shape: tuple[int, ...]) -> bytes:
    nbytes = int(TAGS[tag][1:]) * int(np.prod(shape, dtype=np.int64))
    return bytes(i % 2 if tag == "BOOL" else i % 251 for i in range(nbytes))


KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda key: key != "__metadata__"
)
TENSORS = st.dictionaries(
    KEYS,
    st.tuples(st.sampled_from(sorted(TAGS)), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    max_size=8,
)


@settings(deadline=None)
@given(TENSORS, st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), KEYS, max_size=1))
def test_files_equal_those_of_the_library(tensors, metadata):
    named = [(key, tag, shape, payload(tag, shape)) for key, (tag, shape) in tensors.items()]
    slots = [TensorSlot(i, key, tag, shape) for i, (key, tag, shape, _) in enumerate(named)]
    data = assembled(encode_safetensors(slots, metadata), {i: item[3] for i, item in enumerate(named)})
    assert data == written_by_the_library(named, metadata or None)
    found = parse(data)
    assert found.metadata == metadata
    assert found.tags == {key: tag for key, (tag, _) in tensors.items()}
    for key, tag, shape, wanted in named:
        ref = found.tensors[key]
        assert (ref.shape, ref.dtype, ref.nbytes) == (shape, TAGS[tag], len(wanted))
        assert data[ref.byte_offset : ref.byte_offset + ref.nbytes] == wanted
    offsets = [ref.byte_offset for ref in found.tensors.values()]
    assert offsets == sorted(offsets)


def test_real_files_are_laid_out_again_byte_for_byte():
    tags, files = set(), case_files(("dense", "moe"), "checkpoint-*/*.safetensors")
    for path in files:
        data = path.read_bytes()
        found = parse(data)
        tags |= set(found.tags.values())
        slots = [
            TensorSlot(i, key, found.tags[key], found.tensors[key].shape)
            for i, key in enumerate(reversed(found.tensors))
        ]
        places = {slot.slot: found.tensors[slot.key] for slot in slots}
        payloads = {i: data[ref.byte_offset : ref.byte_offset + ref.nbytes] for i, ref in places.items()}
        assert assembled(encode_safetensors(slots, found.metadata), payloads) == data
    assert {"F32", "BF16", "U16"} <= tags  # PaddleNLP tags bfloat16 as U16, PaddleFormers as BF16
    assert len(files) >= 20


def test_real_index_files_are_read_and_written_again_byte_for_byte():
    files = case_files(("dense", "moe"), "checkpoint-*/*.index.json")
    assert len(files) >= 10
    for path in files:
        data = path.read_bytes()
        index = parse_index(data, path.name)
        assert index.weight_map == json.loads(data)["weight_map"]
        assert all((path.parent / name).exists() for name in index.weight_map.values())
        assert format_index(index) == data


def test_an_index_keeps_what_its_writer_added():
    index = Index({"w": "a.safetensors"}, {"total_size": 4, "note": [1, None]}, {"master_weights": True})
    assert parse_index(format_index(index), "i") == index


@pytest.mark.parametrize("name", ["", ".", "..", "../a.safetensors", "/etc/passwd", "a\\b", "a\0", 3, None])
def test_an_index_names_only_files_next_to_it(name):
    with pytest.raises(FormatError, match="bad_index"):
        parse_index(json.dumps({"weight_map": {"w": name}}).encode(), "i")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([TensorSlot(0, "w", "F8_E5M2", (1,))], "F8_E5M2"),
        ([TensorSlot(0, "w", "F32", (-1,))], "not a shape"),
        ([TensorSlot(0, "__metadata__", "F32", (1,))], "__metadata__"),
        ([TensorSlot(0, "w", "F32", (1,)), TensorSlot(1, "w", "F32", (1,))], "same key"),
        ([TensorSlot(0, "k" * (1 << 16) + "k", "F32", (1,))], "key of a tensor"),
    ],
)
def test_what_cannot_be_written_is_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        encode_safetensors(slots, {})
