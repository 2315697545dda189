"""The state that a trainer records: the fields of a ``trainer_state.bin`` or ``.json``; nothing is executed.

PaddleFormers 1.2 pickles its ``TrainerState`` (``trainer/trainer.py``, ``_save_checkpoint``), PaddleFleet its own with
the same fields (``trainer/trainer_callback.py``), and PaddleNLP 3 writes them as JSON. The pickle is read opcode by
opcode as every other; the one class that it may name becomes a dict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import FormatError, UnsafePickleError
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json_with_constants
from paddle_reshard.storage.files.paddle_pickle import (
    ARRAY_GLOBALS,
    Global,
    Instance,
    Machine,
    Window,
    plain_value,
)
from paddle_reshard.storage.files.paddle_pickle_writer import plain_opcodes

_STATE: Final = "TrainerState"
_ALLOWED: Final[Mapping[tuple[str, str], Global]] = {
    **ARRAY_GLOBALS,
    ("paddleformers.trainer.trainer_callback", _STATE): Global(None, _STATE),
    ("paddlenlp.trainer.trainer_callback", _STATE): Global(None, _STATE),
    ("paddlefleet.trainer.trainer_callback", _STATE): Global(None, _STATE),
}
_AS_JSON: Final = "paddlenlp"
"""The library that writes JSON."""


def parse_trainer_state(
    read: Callable[[int, int], bytes], size_bytes: int, path: str
) -> Mapping[str, Any] | None:
    """Field → value; ``None`` for a pickle that names other classes, of which nothing is known.

    ``read(byte_offset, nbytes)`` returns exactly ``nbytes`` bytes; ``path`` distinguishes JSON from a pickle.

    Raises
    ------
    FormatError
        If it is cut short, or holds no fields.
    """
    if path.endswith(".json"):
        try:
            fields = parse_json_with_constants(read(0, size_bytes))
        except JsonError as error:
            raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    else:
        try:
            machine = Machine(Window(read, size_bytes, path), _ALLOWED)
            root, opcodes = machine.run()
        except UnsafePickleError:
            return None
        fields = plain_value(machine, root.state, opcodes) if isinstance(root, Instance) else root
    if not isinstance(fields, dict):
        raise FormatError("not_an_object", path, None, "holds no fields of a trainer's state")
    return fields


def encode_trainer_state(fields: Mapping[str, Any], library: str) -> tuple[str, bytes]:
    """Name and content of the file from which a library's trainer reads these fields.

    Raises
    ------
    TypeError
        If a value is no plain one.
    """
    if library == _AS_JSON:
        return "trainer_state.json", (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
    module = f"{library}.trainer.trainer_callback"
    state = plain_opcodes(module) + plain_opcodes(_STATE) + b"\x93)\x81" + _opcodes(dict(fields))
    return "trainer_state.bin", b"\x80\x04" + state + b"b."


def _opcodes(value: Any) -> bytes:
    """Pickle opcodes of plain values, and of dicts, lists and tuples of these."""
    if isinstance(value, dict):
        items = b"".join(_opcodes(key) + _opcodes(item) for key, item in value.items())
        return b"}(" + items + b"u" if value else b"}"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e" if value else b"]"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_opcodes, value)) + b"t"
    return plain_opcodes(value)
