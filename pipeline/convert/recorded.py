"""The fingerprints of a target, as its manifest records them, and where each of them came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.convert.integrity import check_target_quickly, manifest_of
from paddle_reshard.pipeline.convert.manifest import NOT_A_MANIFEST
from paddle_reshard.pipeline.convert.sums import fingerprints_of, run_sums
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.choices import FULL
from paddle_reshard.pipeline.core.crc import checksum_of
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError
from paddle_reshard.pipeline.core.events import Observer
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import (
    EMA,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    Tensor,
)
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.sums import plan_sums
from paddle_reshard.storage.documents.fingerprints import fingerprints_data
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.sums import Sum

EXPORTED = {PARAM: (PARAM, MASTER_WEIGHT), EMA: (EMA_PARAM, EMA_MASTER_WEIGHT)}
"""State that an export holds → states of the source that its parameters may be made of, the first that is."""


@dataclass(frozen=True, slots=True)
class Known:
    """The fingerprints that a source records of itself."""

    fingerprints: Fingerprints
    location: str
    unchanged: bool
    """Whether nothing else has changed either. Other small files may make other tensors of the same bytes."""

    def checksum(self, tensor: Tensor, passed: int | None) -> int | None:
        """The checksum of a tensor, if it is on record and cannot have changed.

        Refused if it is on record, and that of the values that ``passed`` is another.
        """
        number = self.fingerprints.tensors.find(tensor.key, tensor.state)
        if number is None:
            return None
        other = self.fingerprints.tensors[number]
        if (other.dtype, other.global_shape) != (tensor.dtype, tensor.global_shape):
            return None
        recorded = int(self.fingerprints.checksums[number])
        if passed not in (None, recorded):
            raise CheckpointError(
                f"{tensor.label}: its values have crc64nvme {passed:016x}, but {MANIFEST} of {self.location} records "
                f"{recorded:016x}: {_CHANGED}. {_advice(self.location)}"
            )
        return recorded if self.unchanged else None


def known_of(store: Source) -> Known | None:
    """What the manifest of a source records.

    A file of tensors that is visibly not the one that it lists is refused. So is a damaged manifest, which may have
    recorded other values. Files without tensors may be others, and files may be missing: the values that are left must
    be those on record all the same.
    """
    if MANIFEST not in store.sizes():
        return None
    try:
        manifest = manifest_of(store)
    except FormatError as error:
        if error.reason == NOT_A_MANIFEST:  # another program's file of that name
            return None
        raise CheckpointError(f"{error}. {_advice(store.location)}") from error
    except CheckpointError:  # of a version that recorded no checksums
        return None
    if manifest.changed:
        raise CheckpointError(f"{store.location}/{MANIFEST}: {manifest.changed}. {_advice(store.location)}")
    if manifest.fingerprints is None:
        return None
    damages = check_target_quickly(store, manifest)
    for damage in damages:
        if damage.path in store.sizes() and damage.path.endswith(_TENSOR_FILES):
            raise CheckpointError(
                f"{store.location}: {damage.path}{damage.stretch}: {damage.detail}: {_CHANGED}. "
                f"{_advice(store.location)}"
            )
    return Known(manifest.fingerprints, store.location, unchanged=not damages)


_TENSOR_FILES = (".pdparams", ".pdopt", ".distcp", ".metadata", ".safetensors")
_CHANGED = "the checkpoint was changed after it was written"


def _advice(location: str) -> str:
    return f"See verify {location}; convert it as it is with --fingerprint off"


@dataclass(frozen=True, slots=True)
class Moved:
    """What the groups of a conversion added up."""

    tensors: Tensors
    """The tensors of the plan."""
    sums: Mapping[tuple[int, int], Sum]
    """By number and dtype of the tensor."""

    @classmethod
    def of(cls, tensors: Tensors, sums: Iterable[Sum]) -> Moved:
        """From the sums of all groups, added up already."""
        return cls(tensors, {(one.tensor, one.dtype): one for one in sums})

    def checksum(self, tensor: Tensor, dtype: int, exported: str | None) -> int | None:
        """The checksum of a tensor of the target, if all of it passed; ``exported`` is the state of an export."""
        for state in (tensor.state,) if exported is None else EXPORTED[exported]:
            number = self.tensors.find(tensor.key, state)
            found = None if number is None else self.sums.get((number, dtype))
            if number is not None and found is not None:
                whole = found.elements == tensor.elements
                same = self.tensors.shape(number) == tensor.global_shape
                return checksum_of(found.remainder, tensor.nbytes) if whole and same else None
        return None


@dataclass(frozen=True, slots=True)
class Recorder:
    """Finds the fingerprints of the staged targets of a conversion."""

    mode: str
    moved: Moved
    known: Known | None
    """What the source records; ``None`` if the target holds other values."""
    settings: PlanSettings
    engine: Engine
    spare_bytes: int
    observe: Observer

    def entry(self, staged: Source, catalog: Catalog, exported: str | None) -> dict[str, Any]:
        """The entry of the manifest of a target with this ``catalog``.

        A tensor of the source that is not what its manifest records is refused.
        """
        known = None if exported == EMA else self.known
        tensors, dtypes = catalog.tensors, catalog.tensors.dtypes.tolist()
        found: dict[int, int] = {}
        origins = {"moved": 0, "source": 0, "read": 0}
        for number, tensor in enumerate(tensors):
            passed = self.moved.checksum(tensor, dtypes[number], exported)
            recorded = None if known is None else known.checksum(tensor, passed)
            if passed is not None:
                found[number], origins["moved"] = passed, origins["moved"] + 1
            elif recorded is not None:
                found[number], origins["source"] = recorded, origins["source"] + 1
        lacking = [number for number in range(len(tensors)) if number not in found]
        if lacking and self.mode == FULL:
            plan = plan_sums(catalog, self.settings, lacking)
            sums = run_sums(plan, staged, self.engine, self.spare_bytes, self.observe)
            read = fingerprints_of(tensors, sums, lacking)
            for number in lacking:
                checksum = read.find(*tensors.identity(number))
                assert checksum is not None  # noqa: S101
                found[number] = checksum
            origins["read"], lacking = len(lacking), []
        chosen = sorted(found)
        complete = Fingerprints.of(
            Tensors(tensors[number] for number in chosen),
            np.array([found[number] for number in chosen], dtype=np.uint64),
        )
        data = fingerprints_data(complete)
        if lacking:
            data |= {"root": None, "states": {}}
        return {"from": {**origins, "unknown": len(lacking)}, **data}
