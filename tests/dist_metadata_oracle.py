"""What Python's own ``pickle`` finds in the metadata of a dist checkpoint: shares no code with the parser.

The classes are those of each Paddle version, declared again, so that ``pickle`` writes and reads what Paddle would.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from paddle_reshard.storage.files.dist_metadata import DistMetadata

MODULES = {
    "2.6": "paddle.distributed.checkpoint.metadata",
    "3.0": "paddle.distributed.checkpoint.metadata",
    "3.2": "paddle.distributed.flex_checkpoint.dcp.metadata",
    "3.3": "paddle.distributed.flex_checkpoint.dcp.metadata",
}
CLASSES = {
    "2.6": """
@dataclass
class LocalTensorMetadata:
    global_offset: tuple
    local_shape: tuple
@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple
@dataclass
class Metadata:
    state_dict_metadata: dict = None
    storage_metadata: dict = None
""",
    "3.0": """
@dataclass
class LocalTensorMetadata:
    global_offset: tuple
    local_shape: tuple
    dtype: str
@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple
@dataclass
class Metadata:
    state_dict_metadata: dict = None
    storage_metadata: dict = None
    flat_mapping: dict = None
""",
    "3.2": """
@dataclass
class LocalTensorMetadata:
    global_offset: tuple
    local_shape: tuple
    dtype: str
    global_shape: tuple = None
@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple
@dataclass
class Metadata:
    state_dict_metadata: dict = None
    storage_metadata: dict = None
    flat_mapping: dict = None
""",
    "3.3": """
@dataclass(frozen=True)
class LocalTensorMetadata:
    global_offset: tuple
    local_shape: tuple
    dtype: str
    global_shape: tuple = None
    is_flattened: bool = False
    flattened_range: tuple = None
@dataclass(frozen=True)
class LocalTensorIndex:
    tensor_key: str
    global_offset: tuple
    is_flattened: bool = False
    flattened_range: tuple = None
    replica_id: int = None
    local_shape: tuple = None
@dataclass
class Metadata:
    state_dict_metadata: dict = None
    storage_metadata: dict = None
    flat_mapping: dict = None
""",
}
"""The classes of each Paddle version, as its wheel has them."""


def classes_of(generation: str) -> types.ModuleType:
    """A module that calls itself like Paddle's, so that ``pickle`` writes what Paddle would."""
    module = types.ModuleType(MODULES[generation])
    module.dataclass = dataclass
    exec(compile(CLASSES[generation], generation, "exec", dont_inherit=True), module.__dict__)
    for name in ("LocalTensorMetadata", "LocalTensorIndex", "Metadata"):
        getattr(module, name).__module__ = MODULES[generation]
    return module


class as_imported:
    """``pickle`` looks classes up by name: let it find these, and put back what was there."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module, self.before = module, {}

    def __enter__(self):
        parts = self.module.__name__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            self.before[name] = sys.modules.get(name)
            sys.modules[name] = self.module if end == len(parts) else types.ModuleType(name)
        return self.module

    def __exit__(self, *_):
        for name, module in self.before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def dumped(metadata, module, protocol: int = 4, python: bool = False) -> bytes:
    with as_imported(module):
        return (pickle._dumps if python else pickle.dumps)(metadata, protocol)


def loaded(data: bytes, module):
    with as_imported(module):
        return pickle.loads(data)


def shape(found: DistMetadata, index: int):
    return found.shapes[index] if index >= 0 else None


def entries(found: DistMetadata) -> tuple[Counter, Counter]:
    """What was parsed, as plain values: pieces, and indexes with their file."""
    pieces, named = Counter(), []
    for key, dtype, offset, local, whole, flat in found.pieces.tolist():
        values = (found.keys[key], *(shape(found, i) for i in (offset, local, whole, flat)))
        named.append(values)
        pieces[(*values, found.dtypes[dtype] if dtype >= 0 else None)] += 1
    places = Counter()
    for piece, file, replica in found.locations.tolist():
        key, offset, local, _, flat = named[piece]
        places[key, offset, local, flat, replica if replica >= 0 else None, found.files[file]] += 1
    return pieces, places


def plain(value):
    return tuple(int(v) for v in value) if value is not None else None


def expected(metadata) -> tuple[Counter, Counter]:
    """The same of Paddle's own objects; where an index does not tell the shape, from the piece."""
    pieces, places, by_offset, ends = Counter(), Counter(), {}, {}
    for key, found in metadata.state_dict_metadata.items():
        for piece in found:
            whole = plain(getattr(piece, "global_shape", None))
            flat = plain(getattr(piece, "flattened_range", None))
            offset, local = plain(piece.global_offset), plain(piece.local_shape)
            if whole is not None and flat is None:  # Paddle's loader ends such a piece with its tensor
                ends[key, offset, local] = tuple(
                    min(n, w - o) for n, w, o in zip(local, whole, offset, strict=True)
                )
                local = ends[key, offset, local]
            pieces[key, offset, local, whole, flat, getattr(piece, "dtype", None)] += 1
            by_offset[key, offset] = (local, flat)
    for index, file in metadata.storage_metadata.items():
        key, offset = index.tensor_key, plain(index.global_offset)
        local, flat = by_offset[key, offset]
        if getattr(index, "local_shape", None) is not None:
            local, flat = plain(index.local_shape), plain(index.flattened_range)
            local = ends.get((key, offset, local), local) if flat is None else local
        places[key, offset, local, flat, getattr(index, "replica_id", None), file] += 1
    return pieces, places


def replicated(module, keys: int, world: int):
    """What a fully replicated checkpoint gathers: an index per key and rank, whose fields are shared."""
    pieces, places = {}, {}
    for i in range(keys):
        local = (7168, 2048) if i % 3 else (2048,)
        offset = (0,) * len(local)
        pieces[f"layer.{i}.w"] = [module.LocalTensorMetadata(offset, local, "float32", tuple(list(local)))]
        index = module.LocalTensorIndex("".join(["layer.", f"{i}.w"]), offset, False, None, None, local)
        for replica in range(world):
            places[replace(index, replica_id=replica)] = f"{(replica + i) % world}_0.distcp"
    return module.Metadata(pieces, places, {key: (key,) for key in pieces})


def flattened(module, keys: int, world: int):
    """What sharding gathers: a range of each tensor on each rank, half of the bounds numpy numbers."""
    pieces, places = {}, {}
    for i in range(keys):
        local = (1024, 256)
        cuts = [1024 * 256 * rank // world for rank in range(world + 1)]
        pieces[f"layer.{i}.w"] = []
        for rank in range(world):
            number = np.int64 if rank % 2 else int
            for make in (tuple, list):
                cut = tuple(map(number, (cuts[rank], cuts[rank + 1])))
                if make is tuple:
                    piece = module.LocalTensorMetadata(
                        (0, 0), tuple(make(local)), "float32", local, True, cut
                    )
                    pieces[f"layer.{i}.w"].append(piece)
                else:
                    index = module.LocalTensorIndex(
                        f"layer.{i}.w", (0, 0), True, cut, None, tuple(make(local))
                    )
                    places[index] = f"{rank}_0.distcp"
    return module.Metadata(pieces, places, {key: (key,) for key in pieces})
