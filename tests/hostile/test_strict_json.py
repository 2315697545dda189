"""A JSON text with two readings, or with numbers that are none, is refused wherever one comes from outside.

Files of checkpoints that are such texts: ``refusals.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from paddle_reshard.pipeline.cli.options import read_object
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UsageError
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.parse import read_layout
from paddle_reshard.pipeline.watch.records import CheckpointRecord
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json, parse_json_with_constants
from paddle_reshard.storage.files.safetensors import parse_index, parse_safetensors
from paddle_reshard.storage.session.ledger import SessionRecord, parse_ledger

TEXTS = {
    "a key twice": b'{"a": 1, "a": 1}',
    "a key twice, deep inside": b'{"a": [{"b": {"c": 1, "d": 2, "c": 3}}]}',
    "a key twice, spelled differently": b'{"ab": 1, "\\u0061b": 2}',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [Infinity]}',
    "minus Infinity": b'{"a": -Infinity}',
    "a number that no float holds": b'{"a": 1e999}',
    "nested without end": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a number of 10,000 digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
}


def test_a_number_of_many_digits_where_python_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10.6 and before, or whoever lifted it."""
    monkeypatch.delattr(sys, "get_int_max_str_digits", raising=False)
    limit = getattr(sys, "set_int_max_str_digits", lambda digits: None)
    limit(0)
    try:
        with pytest.raises(JsonError, match="10000 characters"):
            parse_json(TEXTS["a number of 10,000 digits"])
        assert parse_json('{"a": [-12, 12345678901234567890]}') == {"a": [-12, 12345678901234567890]}
    finally:
        limit(4300)


def test_the_reader_reads_what_python_reads_from_json() -> None:
    value = {"a": [1, -2.5, 1e300, True, None, "é\U0001f600\n"], "": {"b": {}}, "0": 12345678901234567890}
    for text in (
        json.dumps(value),
        json.dumps(value, ensure_ascii=False).encode(),
        json.dumps(value, indent=2),
    ):
        assert parse_json(text) == value
    assert parse_json_with_constants('[Infinity, {"loss": NaN}]')[0] == float("inf")
    with pytest.raises(JsonError):
        parse_json_with_constants('{"a": 1, "a": 1}')


def _file(read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, folder: Path) -> object:
        path = folder / "given.json"
        path.write_bytes(data)
        return read(path)

    return parse


def _safetensors(data: bytes, folder: Path) -> object:
    file = len(data).to_bytes(8, "little") + data
    return parse_safetensors(lambda start, nbytes: file[start : start + nbytes], len(file), "x")


def _ledger(data: bytes, folder: Path) -> object:
    records, good_bytes = parse_ledger(b"[0," + data + b",[]]\n")
    if not records and good_bytes == 0:
        raise TargetError("counts for nothing")
    return records


READERS: dict[str, tuple[Callable[[bytes, Path], object], type[Exception]]] = {
    "config": (_file(load_config), UsageError),
    "layout": (_file(read_layout), UsageError),
    "rules": (_file(load_tables), UsageError),
    "aoa": (lambda data, _: parse_aoa(data.decode("latin-1"), "x"), UsageError),
    "storage options": (lambda data, _: read_object(data.decode("latin-1")), click.BadParameter),
    "storage options in a file": (_file(lambda path: read_object(f"@{path}")), click.BadParameter),
    "manifest": (lambda data, _: parse_manifest(data, "x"), CheckpointError),
    "session": (lambda data, _: SessionRecord.parse(data, "x"), TargetError),
    "ledger": (_ledger, TargetError),
    "record of a watcher": (lambda data, _: CheckpointRecord.parse(data), ValueError),
    "safetensors header": (_safetensors, CheckpointError),
    "safetensors index": (lambda data, _: parse_index(data, "x"), CheckpointError),
}


GIVEN_AS_TEXT = ("aoa", "storage options")
"""Readers of what is text already: bytes that are none do not get there."""


@pytest.mark.parametrize(
    ("reader", "idea"),
    [(r, i) for r in READERS for i in TEXTS if i != "not UTF-8" or r not in GIVEN_AS_TEXT],
)
def test_every_reader_refuses(reader: str, idea: str, tmp_path: Path) -> None:
    read, error = READERS[reader]
    with pytest.raises(error):
        read(TEXTS[idea], tmp_path)
