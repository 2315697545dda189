"""A delta that somebody else wrote may say anything: it makes the new checkpoint, or is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paddle_reshard
from paddle_reshard.pipeline.convert.manifest import format_manifest
from paddle_reshard.pipeline.core.errors import FormatError, ReshardError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.delta.document import Document, parse_document
from paddle_reshard.storage.checksum import checksum
from tests.conftest import case_directory
from tests.delta.test_deltas import contents, step
from tests.hostile.test_fuzz_checkpoints import json_values

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "20"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
Edit = Callable[[dict[str, Any]], object]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Old, delta, new."""
    folder = tmp_path_factory.mktemp("pair")
    paddle_reshard.convert(
        next(case_directory("dense/mp2").glob("checkpoint-*")), folder / "old", format="huggingface"
    )
    new = step(folder / "old", folder / "new")
    paddle_reshard.delta(folder / "old", new, folder / "delta")
    return folder / "old", folder / "delta", new


def sign(delta: Path) -> None:
    """Let the manifest say what is there."""
    manifest = json.loads((delta / MANIFEST).read_text())
    for name in ("delta.json", "delta.bin"):
        data = (delta / name).read_bytes()
        manifest["files"][name] = len(data)
        manifest["parts"][name] = {"bytes": [len(data)], "crc64nvme": [checksum(data)]}
    del manifest["digest"]
    (delta / MANIFEST).write_bytes(format_manifest(manifest))


def assert_makes_nothing_else(pair: tuple[Path, Path, Path], edit: Callable[[Path], None]) -> str:
    """Apply a delta that was edited. Returns why it was refused, if it was."""
    old, delta, new = pair
    with tempfile.TemporaryDirectory() as folder:
        edited, target = Path(folder) / "delta", Path(folder) / "target"
        shutil.copytree(delta, edited, copy_function=shutil.copyfile)
        edit(edited)
        before = contents(Path(folder)).keys()
        try:
            paddle_reshard.apply_delta(old, edited, target)
        except ReshardError as refusal:
            assert contents(Path(folder)).keys() == before
            return str(refusal)
        made = contents(target)
        assert {**made, **contents(new)} == made
        return ""


def editing(edit: Edit) -> Callable[[Path], None]:
    def act(delta: Path) -> None:
        document = json.loads((delta / "delta.json").read_text())
        edit(document)
        (delta / "delta.json").write_text(json.dumps(document))
        sign(delta)

    return act


def renamed(name: str) -> Edit:
    return lambda document: document["files"].update({name: document["files"].pop("config.json")})


def with_value(place: int, value: Any) -> Edit:
    return lambda document: document["files"][WEIGHTS][-1].__setitem__(place, value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (renamed("../config.json"), "is not the path of a file of a checkpoint"),
        (renamed("/tmp/config.json"), "is not the path of a file of a checkpoint"),
        (renamed("model_state/../../a"), "is not the path of a file of a checkpoint"),
        (renamed("a/b"), "is not the path of a file of a checkpoint"),
        (renamed("model_state/.."), "is not the path of a file of a checkpoint"),
        (renamed("a\0b"), "is not the path of a file of a checkpoint"),
        (with_value(0, 1 << 62), "at most 8388608 are read"),
        (with_value(0, 0), "at most 8388608 are read"),
        (with_value(0, (8 << 20) + 2), "at most 8388608 are read"),
        (with_value(1, 3), "integers of 3"),
        (with_value(2, 99), "there is no old file 99"),
        (with_value(2, -2), "there is no old file -2"),
        (with_value(2, -1), "is sparse, compared with null"),
        (with_value(3, 1 << 61), "lies beyond the end of"),
        (with_value(3, -4), "a number is negative"),
        (with_value(4, "whole"), "is whole, compared with"),
        (with_value(5, 1 << 40), "bytes that become"),
        (with_value(5, 0), "bytes that become"),
        (with_value(6, 1 << 40), "bytes that become"),
        (with_value(6, 1 << 18), "bytes that become"),
        (lambda document: document.update(generation=2), "use a newer version"),
        (lambda document: document.update(format="zip"), "is no paddle-reshard delta"),
        (lambda document: document["files"].update({"config.json": {}}), "not a list"),
        (lambda document: document["files"][WEIGHTS].pop(), "the blocks take"),
    ],
)
def test_what_cannot_be_meant_is_refused_as_it_is_read(
    pair: tuple[Path, Path, Path], edit: Edit, words: str
) -> None:
    with pytest.raises(FormatError, match=re.escape(words)):
        parse(pair[1], edit)


def parse(delta: Path, edit: Edit) -> Document:
    document = json.loads((delta / "delta.json").read_text())
    edit(document)
    return parse_document(json.dumps(document).encode(), "delta.json", (delta / "delta.bin").stat().st_size)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (renamed(".paddle_reshard_session.json"), "this tool's own records"),
        (renamed("n" * 300), "the file system is 255"),
        (with_value(7, "0" * 16), "are not those that the delta was made from"),
        (with_value(8, "0" * 16), "of the new bytes is wrong"),
        (lambda document: document["old"]["files"].update({WEIGHTS: 1 << 62}), "the delta was made from"),
        (lambda document: document["old"]["files"].update({"../../etc/passwd": 4}), "etc/passwd: is missing"),
    ],
)
def test_what_does_not_fit_the_world_is_refused_before_it_is_published(
    pair: tuple[Path, Path, Path], edit: Edit, words: str
) -> None:
    assert words in assert_makes_nothing_else(pair, editing(edit))


@pytest.mark.parametrize("claimed", [280_000, 4])
def test_a_bomb_takes_no_more_memory_than_it_says(pair: tuple[Path, Path, Path], claimed: int) -> None:
    """A gigabyte of zeros takes some kilobytes, and whatever it is claimed to become is checked."""
    codec = pyarrow.Codec("zstd")
    elsewhere = pyarrow.system_memory_pool()
    bomb = codec.compress(bytes(1 << 28), asbytes=True, memory_pool=elsewhere)[:claimed]

    def edit(delta: Path) -> None:
        document = json.loads((delta / "delta.json").read_text())
        for blocks in document["files"].values():
            for block in blocks:
                block[5:7] = [0, 0] if block[4] == "same" else [len(bomb), max(len(bomb), block[6])]
        stored = sum(block[5] for blocks in document["files"].values() for block in blocks)
        (delta / "delta.bin").write_bytes(bomb * (stored // len(bomb)))
        (delta / "delta.json").write_text(json.dumps(document))
        sign(delta)

    tracemalloc.start()
    before = pyarrow.default_memory_pool().max_memory()
    try:
        assert "is damaged in bytes" in assert_makes_nothing_else(pair, edit)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        assert pyarrow.default_memory_pool().max_memory() - before < 64 << 20
    finally:
        tracemalloc.stop()


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """Replace one value anywhere in ``delta.json``."""
    value = draw(json_values)
    steps = draw(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=5))

    def edit(document: dict[str, Any]) -> None:
        node: Any = document
        for place, last in zip(steps, [False] * (len(steps) - 1) + [True], strict=True):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                return
            key = keys[place % len(keys)]
            if last or not isinstance(node[key], dict | list):
                node[key] = value
                return
            node = node[key]

    return edit


@settings(SETTINGS, max_examples=5 * EXAMPLES)
@given(edits())
def test_any_document_is_understood_or_refused(pair: tuple[Path, Path, Path], edit: Edit) -> None:
    try:
        document = parse(pair[1], edit)
    except FormatError as refusal:
        assert str(refusal)
        return
    for path, blocks in document.files.items():
        assert path.count("/") <= 1
        assert not {"", ".", ".."} & set(path.split("/"))
        assert all(0 < block.nbytes <= 8 << 20 for block in blocks)
        assert all(block.stored_bytes <= block.written_bytes <= block.nbytes for block in blocks)


@SETTINGS
@given(st.integers(0, 1 << 20), st.integers(1, 255), st.binary(max_size=16))
def test_any_data_makes_the_new_checkpoint_or_is_refused(
    pair: tuple[Path, Path, Path], place: int, flip: int, inserted: bytes
) -> None:
    def edit(delta: Path) -> None:
        data = bytearray((delta / "delta.bin").read_bytes())
        data[place % len(data)] ^= flip
        data[place % len(data) : place % len(data) + len(inserted)] = inserted
        (delta / "delta.bin").write_bytes(data)
        sign(delta)

    assert_makes_nothing_else(pair, edit)
