"""What the model classes of PaddleFormers hold when they are built: the reader of ``facts.json.xz``."""

import functools
import json
import lzma
import re
from pathlib import Path
from typing import Any, NamedTuple

BIASES = ({"use_bias": True}, {"attention_bias": True}, {"text_config": {"attention_bias": True}})
"""What a user sets for biases of linear layers."""


class Entry(NamedTuple):
    """One entry of a rank's state dict; ``shape`` is the rank's own, in elements."""

    key: str
    name: str | None
    """The parameter name; ``None`` for a buffer."""
    shape: list[int]
    dtype: str
    is_distributed: bool
    split_axis: int | None
    no_sync: bool
    expert: bool
    same_as: str | None
    """The first key of the same tensor, if this is a further one."""
    trainable: bool
    is_parameter: bool


class Sharded(NamedTuple):
    """One entry of ``sharded_state_dict()``."""

    structured: str
    key: str
    local_shape: list[int]
    global_shape: list[int]
    global_offset: list[int]
    is_flattened: bool


class Build(NamedTuple):
    """One rank of one class under one config and topology."""

    family: str
    topology: str
    rank: int
    config: dict[str, Any]
    """The entries that differ from the laboratory's base config."""
    saved: dict[str, Any] | None
    """The config.json that a checkpoint of it has."""
    kind: str | None
    entries: list[Entry] | None
    sharded: list[Sharded] | str | None
    """A string says why ``sharded_state_dict()`` does not run."""
    refused: str | None
    lost: str | None
    """The laboratory got no answer; this says nothing about the class."""
    maps: list[list[str]] | None
    """The AOA statements with which the class reads a Hugging Face checkpoint, and those with which it writes one."""
    transposed: list[str] | None
    """``transpose_weight_keys``: regular expressions of the ends of keys, whose weights ``save_to_hf`` transposes."""

    def saves_transposed(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether ``save_to_hf`` swaps the dims of a tensor, as the library's ``conversion_utils.py:1272`` has it."""
        matrix = "lora" not in key and len(shape) == 2
        return matrix and any(
            re.search(rf"\.{of}\.weight$", key) or re.fullmatch(rf"^{of}\.weight$", key)
            for of in self.transposed or ()
        )


@functools.cache
def builds() -> tuple[Build, ...]:
    """Read all builds, in the order in which they were made."""
    whole = json.loads(lzma.decompress(Path(__file__).with_name("facts.json.xz").read_bytes()))

    def table(number: int) -> list[list[Any]]:
        return [whole["rows"][row] for row in whole["tables"][number]]

    def read(one: dict[str, Any]) -> Build:
        part = one.get("sharded")
        return Build(
            *(one[field] for field in ("family", "topology", "rank", "config")),
            whole["configs"][one["saved"]] if "saved" in one else None,
            one.get("class"),
            [Entry(*row) for row in table(one["rows"])] if "rows" in one else None,
            [Sharded(*row) for row in table(part)] if isinstance(part, int) else part,
            one.get("refused"),
            one.get("lost"),
            whole["maps"][one["maps"]] if "maps" in one else None,
            whole["transposed"][one["transposed"]] if "transposed" in one else None,
        )

    return tuple(read(one) for one in whole["builds"])


def declared(family: str, *, biases: bool = False, inverse: bool = False) -> list[str]:
    """The AOA statements with which a class reads a Hugging Face checkpoint, or writes one (``inverse``).

    ``biases``: those of classes with biases of linear layers, too.
    """
    switched = ({}, *BIASES) if biases else ({},)
    statements = (
        build.maps[inverse]
        for build in builds()
        if build.maps and (build.family, build.topology) == (family, "tp1") and build.config in switched
    )
    return list(dict.fromkeys(one for of_build in statements for one in of_build))
