"""Upper limits of whatever comes from outside: file names, headers, pickles, JSON, options.

Each is checked before anything is allocated, or done, in its proportion. Each is the largest real use that is known,
several times over, so that it only ever meets a mistake or an attack.
"""

from __future__ import annotations

from typing import Final

from paddle_reshard.pipeline.core.file_names import MANIFEST, RULES, SEEN

MAX_RANKS: Final = 1 << 18
"""Ranks of a job, and so the size of an axis and the number in a file name: the largest known job has
100,000 cards."""
MAX_PARTS: Final = 1 << 12
"""``vpp``: pieces of a pipeline stage, at least a layer each; models have up to some 130 layers."""
MAX_TARGET_FILES: Final = 99_999
"""Tensor files of one kind in a target: their names have room for five digits. Public models have some 200."""
MAX_BYTES: Final = 1 << 60
"""A size given as an option: more than any file, store or memory has (an exbibyte)."""
MAX_BUFFER_MB: Final = 1 << 20
"""``comm_buffer_size_MB``, a terabyte; the trainers' default is 256."""
MAX_ELEMENTS: Final = 1 << 48
"""``stage3_segment_size``; a parameter of the largest models has 2**31 elements."""
MAX_VOCABULARY: Final = 1 << 28
"""Rows of a vocabulary; the largest public ones have 262,144."""

MAX_CONFIG_BYTES: Final = 4 << 20
"""``config.json``, ``ema.json`` and the like: the longest lists of labels or modules take some hundred kilobytes."""
MAX_META_BYTES: Final = 1 << 29
"""``model_meta.json``: 45,000 parameters in each of 8 cells take 120 MB."""
MAX_MANIFEST_BYTES: Final = 1 << 28
"""``paddle_reshard.json``: 100,000 files and as many fingerprints take some 50 MB."""
MAX_STATE_BYTES: Final = 1 << 27
"""``trainer_state.json``: 400,000 entries of its log take 120 MB."""
MAX_RECORD_BYTES: Final = 1 << 22
"""What watchers remember of a conversion takes a kilobyte; what is larger, but no more than this, is rewritten."""
MAX_LEDGER_BYTES: Final = 1 << 30
"""The ledger of a conversion on a disk: a million groups, each with a few parts."""
FREE_VALUES: Final = 1 << 16
"""Values, opcodes and containers that a file may have, however short they are."""
JSON_VALUE_BYTES: Final = 5
"""Beyond those, the fewest bytes of JSON for every comma and opening bracket: a header of safetensors, whose text is
the densest, has 9, a value of which takes some 60 bytes of memory."""
PICKLE_OPCODE_BYTES: Final = 1.25
"""The same for every opcode of a pickle, payloads not counted: headers of arrays have 2.4 and more, 1.7 if their names
have three letters."""
PICKLE_CONTAINER_BYTES: Final = 6
"""And for every tuple, of which each takes some 60 bytes of memory: headers of arrays have 15, or 10."""
LISTS_AS_CONTAINERS: Final = 4
"""A list or dict counts as so many tuples: arrays have none, schedules some, pieces of dist metadata one each."""
MAX_PICKLE_CONTAINERS: Final = 1 << 22
"""Lists, dicts and tuples of a pickle: 600,000 arrays, each with six tuples."""
MAX_STACK_VALUES: Final = 1 << 14
"""Values on the stack of a pickle. Those that write them append 1000 items at a time, and nest four deep."""
MAX_STACK_MARKS: Final = 1 << 8
"""Marks on the stack of a pickle, one or two for each open container."""


def most_bytes(path: str) -> int:
    """The largest number of bytes of a file, by its name, that may be read into memory at once.

    >>> most_bytes("checkpoint-3/paddle_reshard.json") == MAX_MANIFEST_BYTES
    True
    """
    folder, _, name = path.rpartition("/")
    return MAX_RECORD_BYTES if folder.endswith(SEEN) else _OF_NAME.get(name, MAX_META_BYTES)


def too_large(size_bytes: int, most: int) -> str:
    """Why a file is not read."""
    return f"{size_bytes} bytes; at most {most} are supported for this file"


_OF_NAME: Final = {
    MANIFEST: MAX_MANIFEST_BYTES,
    RULES: MAX_CONFIG_BYTES,
    "trainer_state.json": MAX_STATE_BYTES,
}
