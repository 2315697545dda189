"""What state does a trainer record? The fields of a ``trainer_state.bin`` or ``.json``; nothing is executed.

PaddleFormers 1.2 pickles its ``TrainerState`` (``trainer/trainer.py``, ``_save_checkpoint``), PaddleNLP 3 writes the
same fields as JSON. The pickle is read opcode by opcode as every other; the one class that it may name becomes a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import FormatError, UnsafePickleError
from paddle_reshard.storage.formats.paddle_pickle import (
    ARRAY_GLOBALS,
    Global,
    Instance,
    Machine,
    Window,
    plain_value,
)
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json_with_constants

_STATE: Final = "TrainerState"
_ALLOWED: Final[Mapping[tuple[str, str], Global]] = {
    **ARRAY_GLOBALS,
    ("paddleformers.trainer.trainer_callback", _STATE): Global(None, _STATE),
    ("paddlenlp.trainer.trainer_callback", _STATE): Global(None, _STATE),
}


def parse_trainer_state(
    read: Callable[[int, int], bytes], size_bytes: int, path: str
) -> Mapping[str, Any] | None:
    """Field → value; ``None`` for a pickle that names other classes, of which nothing is known.

    Parameters
    ----------
    read
        ``read(byte_offset, nbytes)`` returns exactly ``nbytes`` bytes.
    size_bytes, path
        Size and name of the file; the name distinguishes JSON from a pickle.

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
