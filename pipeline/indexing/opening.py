"""Open a checkpoint to be read: a store, which dequantises weights if that is what the checkpoint holds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paddle_reshard.pipeline.checkpoint.reading import Readable, SourceFiles
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.storage.locate import Access, open_source
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddle_reshard.storage.files.safetensors import SafetensorsPayload


def open_checkpoint(location: str, access: Access) -> Source:
    """Open a checkpoint; a Hugging Face checkpoint with quantised weights appears with dequantised ones.

    Raises
    ------
    CheckpointError
        If it does not exist or cannot be read, or if quantised weights and their scales do not match.
    UnsupportedError
        If its weights are quantised in another way, or the scheme of a URL is not allowed.
    """
    return dequantising(open_source(location, *access))


def dequantising(store: Source) -> Source:
    """The store to read a checkpoint from: the given one, or one that reads its quantised weights as 16-bit floats."""
    files = SourceFiles(store, None, index_here, index_here)
    if files.pickles or not files.safetensors or CONFIG not in files.sizes:
        return store
    from paddle_reshard.pipeline.checkpoint.quantised import INTEGERS, dequantised, quantisation_of
    from paddle_reshard.pipeline.checkpoint.stored_tensors import StoredTensors
    from paddle_reshard.pipeline.core.file_names import WEIGHT_INDEX

    config = files.config()
    scheme = quantisation_of(config)
    if scheme is None:
        return store
    payloads = index_here(_index_fp8, store, files.safetensors)
    shapes = _shapes(store, payloads) if scheme.method == INTEGERS else {}
    index = files.weight_index(WEIGHT_INDEX)
    served = dequantised(StoredTensors(payloads, shapes), index, config, scheme)
    if served is None:
        return store
    from paddle_reshard.tasks.dequantise import DequantisedSource

    return DequantisedSource(store, served)


def _index_fp8(store: Readable, path: str, size_bytes: int) -> SafetensorsPayload:
    from paddle_reshard.storage.files.safetensors import parse_safetensors

    return parse_safetensors(partial(store.read, path), size_bytes, path, fp8=True)


def _shapes(store: Source, payloads: Mapping[str, SafetensorsPayload]) -> dict[str, tuple[int, int]]:
    """Key → values of every tensor that holds the shape of a packed weight; read all at once."""
    from paddle_reshard.pipeline.checkpoint.integers import shape_keys
    from paddle_reshard.storage.store import Read

    arrays = {key: (path, payloads[path].tensors[key]) for key, path in shape_keys(payloads).items()}
    buffers = {key: bytearray(array.nbytes) for key, (_, array) in arrays.items()}
    store.read_many(
        [Read(path, array.byte_offset, memoryview(buffers[key])) for key, (path, array) in arrays.items()]
    )
    shapes = {}
    for key, buffer in buffers.items():
        half = len(buffer) // 2
        rows, columns = (int.from_bytes(buffer[at : at + half], "little", signed=True) for at in (0, half))
        shapes[key] = (rows, columns)
    return shapes
