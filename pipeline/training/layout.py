"""Map each entry of a live ``state_dict`` to a box of a logical tensor. Pure.

Every live tensor is laid out as if it were a target file: its values at their positions in memory, its padding as
zeros. So loading is a conversion with memory as the target: every byte of every live tensor is written exactly once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import PlanError, RuleError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape, padded
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    WRITTEN_NAMES,
    Tensor,
    dtype_named,
    is_per_parameter,
)
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX, split_accumulator_key
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements, TensorCut, in_words
from paddle_reshard.pipeline.planning.match import source_tensors

Path = tuple[str, ...]
"""Keys of the nested dicts that lead to an entry."""

EMA_SECTIONS = ("ema", "ema_state")
DIST_SUFFIX = ".dist"
"""Suffix that auto-parallel training appends to the names of sharded parameters."""

_OPTIMIZER_STATES = frozenset({MASTER_WEIGHT, *ACCUMULATORS})
_EMA = {PARAM: EMA_PARAM, MASTER_WEIGHT: EMA_MASTER_WEIGHT}
_STATES = "|".join(sorted(WRITTEN_NAMES, key=len, reverse=True))
_OF_KEY = re.compile(rf"(?P<key>.+)[./](?:(?P<state>{_STATES})(?:_\d+)?|w_0|master_weight)")
"""States under structured names: FlexCheckpoint's ``.moment1_0`` and ``.w_0``, the converter's ``.master_weight``."""
_MASTER_OF_NAME = re.compile(r"(?P<name>.+)_fp32_master_\d+")


@dataclass(frozen=True, slots=True)
class LivePiece:
    """The piece of a tensor that a process holds, as described by the entry itself."""

    path: Path
    dtype: str
    shape: Shape
    """Of the values in memory."""
    local_shape: Shape
    """Shape of the box of the logical tensor that the values are, or are a range of."""
    global_shape: Shape | None = None
    """Shape of the logical tensor. ``None`` for a plain tensor, which does not describe its piece."""
    global_offset: Shape = ()
    flat: tuple[int, int] | None = None
    """Range of the flattened box; elements beyond the box are padding."""
    joined_by_rank: bool = False
    """Whether ``global_shape`` describes the concatenated pieces of all tp ranks (FlexCheckpoint's view), which for
    fused tensors is not the logical shape."""

    @property
    def name(self) -> str:
        """Name of the entry in messages."""
        return ".".join(self.path)

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return prod(self.shape) * dtype_named(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's position among the tensor-parallel ranks."""

    tp: int = 1
    rank: int = 0


class Names:
    """Finds the tensor of a checkpoint for an entry of a ``state_dict``."""

    def __init__(self, catalog: Catalog, parameter_names: Mapping[str, str]) -> None:
        self.index = catalog.index()
        self.keys = {name: t.key for t in catalog.tensors for name in (t.key, *t.aliases)}
        self.parameter_names = dict(parameter_names)
        for name, key in parameter_names.items():
            variant = name.removesuffix(DIST_SUFFIX) if name.endswith(DIST_SUFFIX) else name + DIST_SUFFIX
            self.parameter_names.setdefault(variant, key)

    def find(self, path: Path) -> int | None:
        """Index of the tensor in the catalog; ``None`` if the checkpoint has no tensor of this name."""
        identity = self.meaning(path)
        return None if identity is None else self.index.get((self.keys.get(identity[0], ""), identity[1]))

    def meaning(self, path: Path) -> tuple[str, str] | None:
        """Structured name and state of an entry, whether or not the checkpoint contains them."""
        *sections, name = path
        meaning = self._in_optimizer(name.removeprefix(SLICE_PREFIX), MASTER_WEIGHTS in sections)
        if meaning is not None and any(section in sections for section in EMA_SECTIONS):
            return (meaning[0], _EMA[meaning[1]]) if meaning[1] in _EMA else None
        return meaning

    def _in_optimizer(self, name: str, master: bool) -> tuple[str, str] | None:
        state = MASTER_WEIGHT if master else PARAM
        if name in self.keys:
            return name, state
        if name in self.parameter_names:
            return self.parameter_names[name], state
        match = _OF_KEY.fullmatch(name)
        if match and match["key"] in self.keys:
            return match["key"], match["state"] or MASTER_WEIGHT
        accumulator = split_accumulator_key(name, self.parameter_names)
        if accumulator is not None:
            return self.parameter_names[accumulator[0]], accumulator[1]
        match = _MASTER_OF_NAME.fullmatch(name)
        if match and match["name"] in self.parameter_names:
            return self.parameter_names[match["name"]], MASTER_WEIGHT
        return None


def find_tensors(names: Names, paths: Iterable[Path], missing_policy: MissingPolicy) -> dict[Path, int]:
    """Entry → index of the tensor that it is filled from.

    An entry without one is refused, or left out if it may be missing.
    """
    tensors = {path: names.find(path) for path in paths}
    missing = [
        path
        for path, tensor in tensors.items()
        if tensor is None and not (missing_policy.allows(path[-1]) or missing_policy.allows(".".join(path)))
    ]
    if missing:
        meaning = names.meaning(missing[0])
        what = (
            f"the checkpoint has no {meaning[1]} of {meaning[0]}"
            if meaning
            else "is neither a key of the checkpoint nor a state of a name in parameter_to_structured_name"
        )
        raise PlanError(
            f"{'.'.join(missing[0])}: {what}{_and_more(len(missing) - 1)}; list entries to leave "
            f"unchanged in allow_missing"
        )
    return {path: tensor for path, tensor in tensors.items() if tensor is not None}


def check_complete(tensors: Sequence[Tensor], chosen: Mapping[Path, int]) -> None:
    """Refuse entries with some optimizer states of a parameter but not all that the checkpoint has."""
    held = {(tensors[i].key, tensors[i].state) for i in chosen.values()}
    trained = {
        tensors[i].key: ".".join(path) for path, i in chosen.items() if tensors[i].state in _OPTIMIZER_STATES
    }
    lost = [
        tensor
        for tensor in tensors
        if tensor.key in trained
        and tensor.state in _OPTIMIZER_STATES
        and (tensor.key, tensor.state) not in held
    ]
    if lost:
        raise PlanError(
            f"{lost[0].label}: in the checkpoint, but not in the state_dict, which has "
            f"{trained[lost[0].key]}{_and_more(len(lost) - 1)}; let the optimizer create all its "
            f"states first, or pass strict=False"
        )


def lay_out_live(
    checkpoint: Checkpoint, pieces: Mapping[LivePiece, int], ranks: TensorParallel
) -> TargetFiles:
    """Lay out every live tensor as a file with its name; an entry that is no piece of its tensor is refused.

    ``pieces`` maps what the process holds to the index of its tensor in the checkpoint's catalog; ``ranks`` determine
    which piece a plain tensor is.
    """
    files = tuple(File(piece.name, piece.nbytes) for piece in pieces)
    names = Counter(file.path for file in files)
    if len(names) < len(files):
        raise UsageError(f"{names.most_common(1)[0][0]}: two entries of the state_dict have this name")
    boxes = _BoxCollector(checkpoint, ranks)
    for file, (piece, tensor) in enumerate(pieces.items()):
        boxes.add(file, piece, tensor)
    return boxes.target(files)


def needed_of(catalog: Catalog, wanted: Fragments) -> Catalog:
    """A catalog with only the first copies of the tensors that are needed at least in part; they keep their numbers."""
    needed = source_tensors(wanted["tensor"], catalog.implied)
    kept = (catalog.fragments["replica"] == 0) & np.isin(catalog.fragments["tensor"], needed)
    return replace(catalog, fragments=catalog.fragments[kept])


class _BoxCollector:
    """Collects the boxes of all live tensors."""

    def __init__(self, checkpoint: Checkpoint, ranks: TensorParallel) -> None:
        self.tensors = checkpoint.catalog.tensors
        self.model = checkpoint.model
        self.cut_by_key = {tensor.key: tensor for tensor in checkpoint.model.tensors}
        self.config = checkpoint.model.config
        self.ranks = ranks
        self.placements = Placements()
        self.origins: list[Shape] = []
        self.fills: list[tuple[int, int, int]] = []

    def add(self, file: int, piece: LivePiece, number: int) -> None:
        tensor = self.tensors[number]
        if piece.dtype != tensor.dtype.name:
            raise UnsupportedError(
                f"{piece.name}: has dtype {piece.dtype}, the checkpoint's {tensor.label} has "
                f"{tensor.dtype.name}; loading does not cast"
            )
        cut, rank, origin = self._locate(piece, tensor)
        local_shape = piece.local_shape
        if prod(local_shape) == tensor.elements == 1:  # a single number, with one dim or none
            local_shape = tensor.global_shape
        itemsize = tensor.dtype.itemsize
        kind = self.placements.kind(ArrayKind(local_shape, cut, itemsize, piece.flat))
        self.placements.add(kind, rank, number, file, 0, tensor.dtype, 0)
        self.origins.append(padded(origin, 0))
        if piece.flat is not None:
            start, stop = piece.flat
            values = max(0, min(stop, prod(local_shape)) - start)
            if stop - start > values:
                self.fills.append((file, values * itemsize, (stop - start - values) * itemsize))

    def target(self, files: tuple[File, ...]) -> TargetFiles:
        fragments = self.placements.fragments()
        origins = np.array(self.origins, dtype=np.int64).reshape(len(self.origins), -1)
        if len(origins):
            origin = np.repeat(origins, self.placements.box_counts(), axis=0)
            fragments["offset"] = fragments["offset"] + origin
        return TargetFiles(files, Literals(), tuple(self.fills), fragments)

    def _locate(self, piece: LivePiece, tensor: Tensor) -> tuple[TensorCut, int, Shape]:
        """The cut of the logical tensor, and the rank and offset of this piece."""
        _check_held(piece)
        whole = TensorCut(1, None)
        if prod(piece.local_shape) == tensor.elements == 1:
            return whole, 0, ()
        if piece.global_shape is None:
            return (*self._cut_of_plain(piece, tensor), ())
        if piece.global_shape != tensor.global_shape:
            raise PlanError(
                f"{piece.name}: a piece of a tensor of shape {piece.global_shape}, but the checkpoint's "
                f"{tensor.label} has shape {tensor.global_shape}"
            )
        box = zip(piece.global_offset, piece.local_shape, piece.global_shape, strict=True)
        if any(not 0 <= offset <= offset + local <= extent for offset, local, extent in box):
            raise PlanError(
                f"{piece.name}: a piece of shape {piece.local_shape} at {piece.global_offset} exceeds a "
                f"tensor of shape {piece.global_shape}"
            )
        fused = self._cut_of_fused(piece, tensor)
        return (*fused, ()) if fused else (whole, 0, piece.global_offset)

    def _cut_of_plain(self, piece: LivePiece, tensor: Tensor) -> tuple[TensorCut, int]:
        """A plain tensor is the whole tensor, or under tensor parallelism the rank's piece, by the rules."""
        if piece.local_shape == tensor.global_shape:
            return TensorCut(1, None), 0
        described = self.cut_by_key.get(tensor.key)
        if described is not None and self.ranks.tp > 1 and not is_per_parameter(tensor.state):
            try:
                cut = self.model.cut(described, self.ranks.tp)
                if cut.local_shape(tensor.key, tensor.global_shape) == piece.local_shape:
                    return cut, self.ranks.rank
            except RuleError:
                pass  # the rules do not describe such a piece
        raise PlanError(
            f"{piece.name}: has shape {piece.local_shape}, the checkpoint's {tensor.label} has "
            f"{tensor.global_shape}; a plain tensor must be the whole tensor"
            + (f" or the piece of one of {self.ranks.tp} tp ranks" if self.ranks.tp > 1 else "")
            + "; pass a value that describes its piece: a DistTensor, or a ShardedWeight of sharded_state_dict()"
        )

    def _cut_of_fused(self, piece: LivePiece, tensor: Tensor) -> tuple[TensorCut, int] | None:
        """The cut of a fused tensor whose pieces are concatenated rank by rank, ``[gate_0 | up_0 | gate_1 | up_1]``."""
        described = self.cut_by_key.get(tensor.key)
        if described is None or described.rule.split is None:
            return None
        dim, shares = described.rule.split, described.rule.shares(self.config)
        if len(shares) == 1:
            return None
        local, extent, offset = piece.local_shape[dim], tensor.global_shape[dim], piece.global_offset[dim]
        if not piece.joined_by_rank or local == extent:
            return None
        uncut_dims = [d for d in range(len(piece.local_shape)) if d != dim]
        if (
            extent % local
            or offset % local
            or local % sum(shares)
            or any(piece.global_offset[d] for d in uncut_dims)
        ):
            raise PlanError(
                f"{piece.name}: {tensor.label} consists of {in_words(shares)}, and a piece of shape "
                f"{piece.local_shape} at {piece.global_offset} is not that of one tp rank; cut it along "
                f"dim {dim} only"
            )
        return TensorCut(extent // local, dim, shares), offset // local


def _check_held(piece: LivePiece) -> None:
    """Check that the number of values in memory matches the box or the range."""
    if piece.flat is not None:
        start, stop = piece.flat
        if not 0 <= start <= stop or prod(piece.shape) != stop - start:
            raise PlanError(
                f"{piece.name}: has {prod(piece.shape)} elements, but its flattened range is [{start}, {stop})"
            )
    elif piece.shape != piece.local_shape and not prod(piece.shape) == prod(piece.local_shape) == 1:
        raise PlanError(f"{piece.name}: has shape {piece.shape}, but its local shape is {piece.local_shape}")


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count else ""
