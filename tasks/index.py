"""Read the metadata of a checkpoint's files: ranged reads, no payload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from paddle_reshard.pipeline.catalog import Catalog
from paddle_reshard.pipeline.errors import CheckpointError, FormatError
from paddle_reshard.pipeline.layouts.huggingface.source import read_huggingface
from paddle_reshard.pipeline.layouts.huggingface.target import INDEX, HuggingFaceTarget
from paddle_reshard.pipeline.layouts.model import Model
from paddle_reshard.storage.formats.paddle_pickle import parse_pickle
from paddle_reshard.storage.formats.safetensors import SafetensorsPayload, parse_index, parse_safetensors

LARGEST_JSON_BYTES = 1 << 30
FILES_IN_FLIGHT = 16
"""Files whose metadata are read at a time."""


class Readable(Protocol):
    """Ranged reads that return bytes."""

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""


def index_tensor_file(store: Readable, path: str, size_bytes: int) -> dict[str, Any]:
    """What a tensor file holds, its arrays as references."""
    root = parse_pickle(lambda offset, nbytes: store.read(path, offset, nbytes), size_bytes, path).root
    if not isinstance(root, dict):
        raise FormatError(
            "not_a_dict", path, None, f"holds a {type(root).__name__}, a state dict is expected"
        )
    return root


def index_tensor_files(store: Readable, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """What several tensor files hold; their metadata are read side by side, for a store that answers late."""
    with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
        return dict(
            zip(sizes, pool.map(partial(index_tensor_file, store), sizes, sizes.values()), strict=True)
        )


def index_huggingface(
    store: Readable, sizes: Mapping[str, int], model: Model, target: HuggingFaceTarget | None = None
) -> Catalog:
    """The parameters of ``model``, as a Hugging Face checkpoint holds them.

    Parameters
    ----------
    sizes
        Path of every file → size in bytes.
    target
        What it must have been made as, where that is known.

    Raises
    ------
    CheckpointError
        If it holds another model, or is not whole; naming the tensor and the file.
    """
    weights = {path: size for path, size in sizes.items() if path.endswith(".safetensors")}

    def index(path: str) -> SafetensorsPayload:
        return parse_safetensors(partial(store.read, path), weights[path], path)

    with ThreadPoolExecutor(FILES_IN_FLIGHT) as pool:
        payloads = dict(zip(weights, pool.map(index, weights), strict=True))
    listed = parse_index(store.read(INDEX, 0, sizes[INDEX]), INDEX) if INDEX in sizes else None
    return read_huggingface(model, weights, payloads, listed, target)


def read_json(store: Readable, path: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A JSON file whose top is an object."""
    if path not in sizes:
        raise CheckpointError(f"{path} is missing")
    if sizes[path] > LARGEST_JSON_BYTES:
        raise FormatError(
            "too_large", path, None, f"{sizes[path]} bytes are more than any JSON of a checkpoint"
        )
    try:
        value = json.loads(store.read(path, 0, sizes[path]))
    except (ValueError, RecursionError) as error:
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(
            "not_an_object", path, None, f"holds a {type(value).__name__}, an object is expected"
        )
    return value
