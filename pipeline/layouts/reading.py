"""The metadata of a checkpoint's files, through whatever serves them: ranged reads, no payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError
from paddle_reshard.pipeline.core.file_names import MODEL_META, SCHEDULER
from paddle_reshard.pipeline.core.limits import MAX_CONFIG_BYTES, MAX_META_BYTES
from paddle_reshard.pipeline.layouts.checkpoint import checked_schedule
from paddle_reshard.storage.formats.paddle_pickle import parse_pickle
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json

if TYPE_CHECKING:
    from paddle_reshard.storage.formats.safetensors import SafetensorsPayload

T = TypeVar("T")


class Readable(Protocol):
    """Ranged reads that return bytes."""

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""


class IndexFiles(Protocol):
    """Where, and how many at a time, files are indexed."""

    def __call__(
        self, index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
    ) -> dict[str, T]:
        """``index(store, path, size_bytes)`` of every file; a function of a module, so that it can be sent away."""


def index_tensor_file(store: Readable, path: str, size_bytes: int) -> dict[str, Any]:
    """The contents of a tensor file, its arrays as references."""
    root = parse_pickle(lambda offset, nbytes: store.read(path, offset, nbytes), size_bytes, path).root
    if not isinstance(root, dict):
        raise FormatError(
            "not_a_dict", path, None, f"holds a {type(root).__name__}, a state dict is expected"
        )
    return root


def index_safetensors(store: Readable, path: str, size_bytes: int) -> SafetensorsPayload:
    """The header of a safetensors file."""
    from paddle_reshard.storage.formats.safetensors import parse_safetensors

    return parse_safetensors(partial(store.read, path), size_bytes, path)


def read_lr_scheduler(store: Readable, sizes: Mapping[str, int]) -> Any:
    """What ``scheduler.pdparams`` holds: the same as ``LR_Scheduler`` in the optimizer files of hybrid checkpoints.

    ``None`` where there is none.
    """
    if SCHEDULER not in sizes:
        return None
    return checked_schedule(index_tensor_file(store, SCHEDULER, sizes[SCHEDULER]), SCHEDULER)


def read_json(store: Readable, path: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A JSON file whose top is an object."""
    if path not in sizes:
        raise CheckpointError(f"{path} is missing")
    most = MAX_META_BYTES if path == MODEL_META or path.endswith(".index.json") else MAX_CONFIG_BYTES
    if sizes[path] > most:
        raise FormatError(
            "too_large", path, None, f"{sizes[path]} bytes, at most {most} are read of such a file"
        )
    try:
        value = parse_json(store.read(path, 0, sizes[path]))
    except JsonError as error:
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(
            "not_an_object", path, None, f"holds a {type(value).__name__}, an object is expected"
        )
    return value
