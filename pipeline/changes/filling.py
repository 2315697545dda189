"""Take the tensors that a checkpoint lacks from another checkpoint, or from a file (``--fill``).

PaddleFormers' sharded saving loses buffers and parameters that are not trained
(``trainer/utils/sharding_io.py:70-107``). Only what no file of the checkpoint holds is taken, and only in
the shape and the dtype that its metadata give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Filled, MissingPolicy
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments, check_catalog
from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor
from paddle_reshard.pipeline.model.completeness import lost
from paddle_reshard.pipeline.model.model import ModelTensor

PREFIX: Final = "FILL/"
"""Prefix of the paths of the other checkpoint's files among those of the source."""


@dataclass(frozen=True)
class Filler:
    """Tensors that a checkpoint may take, by their metadata."""

    location: str
    catalog: Catalog
    numbers: Mapping[str, int]
    """Structured key → tensor of ``catalog``."""
    paths: frozenset[str]
    """All files of the location."""
    exact: bool
    """Whether every tensor must be taken: so it is with a file that was made for one checkpoint."""


def fill(checkpoint: Checkpoint, filler: Filler, policy: MissingPolicy) -> Checkpoint:
    """The checkpoint with the tensors that it lacked.

    Raises
    ------
    CoverageError
        Naming a tensor that is in neither, or that has another shape or dtype in ``filler``; or, if ``filler`` is
        exact, one that the checkpoint holds or does not know.
    """
    lacking = [tensor for tensor in checkpoint.model.tensors if tensor.missing]
    taken: dict[str, int] = {}  # identity → tensor of the filler
    absent: set[str] = set()
    for tensor in lacking:
        identity = tensor.tied_to or tensor.key
        number = filler.numbers.get(tensor.key, filler.numbers.get(identity))
        if number is not None:
            _check(tensor, filler, number)
            taken.setdefault(identity, number)
        elif identity not in taken:
            absent.add(tensor.key)
    _check_base(lacking, absent, filler)
    for tensor in lacking:
        if tensor.key in absent and not (tensor.of_base or policy.allows(tensor.key)):
            raise lost(tensor, filler.location)
    if filler.exact:
        _check_exact(filler, taken)
    tensors = tuple(replace(t, missing=t.key in absent) for t in checkpoint.model.tensors)
    catalog = _joined(checkpoint, taken, filler)
    check_catalog(catalog)
    return replace(
        checkpoint,
        catalog=catalog,
        model=replace(checkpoint.model, tensors=tensors),
        own_files=checkpoint.own_files | {PREFIX + path for path in filler.paths},
        history=replace(checkpoint.history, filled=Filled(filler.location, tuple(taken))),
    )


def _check(tensor: ModelTensor, filler: Filler, number: int) -> None:
    """Refuse a tensor of another shape or dtype, or one of which only the master weight is stored."""
    given = filler.catalog.tensors[number]
    if number in filler.catalog.implied:
        raise CoverageError(
            f"{tensor.key} (param)",
            f"{filler.location}, given with --fill, does not store it, only its master weight; give a checkpoint that "
            "stores its parameters",
        )
    if (given.dtype, given.global_shape) != (tensor.dtype, tensor.global_shape):
        raise CoverageError(
            f"{tensor.key} (param)",
            f"{tensor.dtype.name} {tensor.global_shape} in the checkpoint, but {given.dtype.name} "
            f"{given.global_shape} in {filler.location}, given with --fill",
        )


def _check_base(lacking: Sequence[ModelTensor], absent: set[str], filler: Filler) -> None:
    """Refuse a part of the base model of an adapter: a target holds all of it, or nothing."""
    base = [tensor.key for tensor in lacking if tensor.of_base]
    without = [key for key in base if key in absent]
    if without and len(without) < len(base):
        given = next(key for key in base if key not in absent)
        raise CoverageError(
            without[0],
            f"belongs to the base model, of which --fill gives {given}, but not this; give the whole base or none",
            (filler.location,),
        )


def _check_exact(filler: Filler, taken: Mapping[str, int]) -> None:
    """Refuse tensors of a file that would be ignored."""
    used = set(taken.values())
    for key in sorted(key for key, number in filler.numbers.items() if number not in used):
        raise CoverageError(
            key,
            "given with --fill, but the checkpoint already holds it or has no such tensor; remove it from the file",
        )


def _joined(checkpoint: Checkpoint, taken: Mapping[str, int], filler: Filler) -> Catalog:
    """The catalog with the tensors taken from the filler, and the files that hold them."""
    catalog = checkpoint.catalog
    if not taken:
        return catalog
    given = filler.catalog.only(list(taken.values()))
    rows = given.fragments.copy()
    used = np.unique(rows["file"])
    numbers = np.zeros(len(given.files), dtype=np.int32)
    numbers[used] = np.arange(len(catalog.files), len(catalog.files) + len(used))
    rows["file"] = numbers[rows["file"]]
    rows["tensor"] = rows["tensor"] + len(catalog.tensors)
    aliases = checkpoint.model.aliases
    added = (
        Tensor(identity, PARAM, tensor.dtype, tensor.global_shape, aliases.get(identity, ()))
        for identity, tensor in zip(taken, given.tensors, strict=True)
    )
    files = (given.files[number] for number in used.tolist())
    return replace(
        catalog,
        tensors=Tensors([*catalog.tensors, *added]),
        files=(*catalog.files, *(File(PREFIX + file.path, file.size_bytes) for file in files)),
        fragments=Fragments.joined([catalog.fragments, rows]),
    )
