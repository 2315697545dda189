"""``pull``: make or update a local copy of a published version, for engines that have no receiver of their own.

The copy is made beside the old one and takes its place when all of it is written and every checksum is right. Deltas
are applied on the way: whatever lies between the copy's version and the wanted one, each byte is written once::

    LOCAL (version 4) ─┐
    weight_v000005  ───┼─ window by window ─► staged copy ─► LOCAL (version 6)
    weight_v000006  ───┘
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from paddle_reshard.pipeline.convert.integrity import Damage, check_target_quickly, names_and_sizes
from paddle_reshard.pipeline.convert.manifest import (
    Manifest,
    describe_parts,
    format_manifest,
    manifest_head,
    parse_manifest,
)
from paddle_reshard.pipeline.core import version as package
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.versions.chain import (
    SAFETENSORS,
    Chain,
    StoredModel,
    Versions,
    newest_version,
    numbers_of,
    read_model,
)
from paddle_reshard.pipeline.versions.coding import WINDOW_BYTES
from paddle_reshard.pipeline.versions.form import version_name
from paddle_reshard.pipeline.versions.reports import PullReport
from paddle_reshard.pipeline.versions.writing import Unit, Written, units_at_a_time, write_target
from paddle_reshard.storage.apart import check_apart
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.locate import (
    Access,
    StorageOptions,
    absolute,
    is_local,
    local_path,
    open_source,
    open_target,
)
from paddle_reshard.storage.store import Permission, Receipt, Source, TargetStore

_PULLED = "pulled"
"""Entry of the manifest of a copy: the version that it holds, and where that lies."""


def pull(
    versions: PathLike,
    local: PathLike,
    *,
    version: int | None = None,
    memory: str = DEFAULT_MEMORY,
    take_over: bool = False,
    no_space_check: bool = False,
    storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
    observe: Observer = ignore_events,
) -> PullReport:
    """Make a local folder hold a published version, whole: an ordinary Hugging Face checkpoint.

    The folder is made from the version that it holds and the deltas since, or from a full version. It is replaced when
    the new one is complete; an interrupted call can be repeated and goes on where it was.

    Parameters
    ----------
    versions
        Folder or URL in which the versions lie.
    local
        A folder of this machine: one that ``pull`` has made, or one that does not exist yet.
    version
        Number of the version. Default: the one that the file ``latest`` names, or without that file the highest.
    memory
        Memory budget of this process.
    take_over
        Continue a call that has ended on another machine, without waiting for its lock to expire.
    no_space_check
        Do not check that the disk has enough free space.
    storage_options, allow_scheme
        How ``versions`` is reached, as for :func:`convert`.
    observe
        Called with progress events.

    Raises
    ------
    CheckpointError
        If a version is missing or damaged, or the copy is not what a delta was made from.
    TargetError
        If the folder holds something that ``pull`` has not made.
    """
    began = time.monotonic()
    where = os.fspath(local)
    if not is_local(where):
        raise UsageError(f"{where}: versions are pulled to a folder of this machine")
    check_apart(os.fspath(versions), where)
    access = Access(storage_options or {}, tuple(allow_scheme))
    known = Versions(open_root(os.fspath(versions), access.options, access.schemes), access)
    number = _wanted(known, version)
    target = open_target(where, Access({}), Permission(True, True, take_over))
    held = _held(target, where, known.root.location)
    if held == number:
        start, written = number, Written(0, 0)
        files = len(_unchanged(target.reopen(), check_target_quickly).files)
    else:
        chain, start = _chain(known, number, held, where)
        recorded = _checksums(chain.base.source) if start == held else {}
        written, files = _write(
            target, where, chain, number, known, recorded, parse_memory(memory), observe, not no_space_check
        )
    return PullReport(
        known.root.location,
        where,
        number,
        start,
        files,
        written.nbytes - written.resumed_bytes,
        written.resumed_bytes,
        time.monotonic() - began,
    )


def _wanted(known: Versions, version: int | None) -> int:
    """The version to pull."""
    number = newest_version(known.root) if version is None else version
    if number is None:
        raise CheckpointError(f"{known.root.location}: has no version like {version_name(1)}")
    if number not in (numbers := numbers_of(known.root)):
        there = f"{version_name(numbers[0])} to {version_name(numbers[-1])}" if numbers else "no version"
        raise CheckpointError(f"{known.root.at(version_name(number))}: is not there; the folder has {there}")
    return number


def _held(target: TargetStore, where: str, versions: str) -> int | None:
    """The version of ``versions`` that the target holds; ``None`` if it holds none of them.

    Raises
    ------
    TargetError
        If a folder is there that ``pull`` has not made: a checkpoint of training must not be replaced.
    """
    pulled = (own_manifest(target.published(MANIFEST)) or {}).get(_PULLED)
    if not isinstance(pulled, dict):
        folder = local_path(where)
        entry = min(os.listdir(folder), default="") if folder.is_dir() else ""
        if (
            entry and target.unfinished is None
        ):  # an interrupted call may have left the folder without its manifest
            raise TargetError(
                f"{where}: holds {entry}, and pull has not made this folder; choose another one"
            )
        return None
    if pulled.get("versions") != versions:
        return None
    number = pulled.get("version")
    return number if isinstance(number, int) else None


def _chain(known: Versions, number: int, held: int | None, where: str) -> tuple[Chain, int]:
    """The chain of a version and the version of its base: the copy if it is on the way, or a full version."""
    if held is not None and held < number:
        chain = known.chain(number, (held, read_model(open_source(where, {}))))
    else:
        chain = known.chain(number)
    return chain, number - len(chain.deltas)


def _unchanged(copy: Source, check: Callable[[Source, Manifest], Sequence[Damage]]) -> Manifest:
    """The manifest of a copy in which a check finds no damage."""
    data = copy.read(MANIFEST, 0, copy.sizes()[MANIFEST])
    manifest = parse_manifest(data, f"{copy.location}/{MANIFEST}")
    for damage in check(copy, manifest):
        raise _changed(f"{copy.location}/{damage.path}: {damage.detail}: the copy")
    return manifest


def _changed(what: str) -> CheckpointError:
    return CheckpointError(f"{what} has changed since it was pulled; remove the folder and pull again")


def _checksums(copy: Source) -> dict[tuple[str, int], str]:
    """(file, first byte) → checksum of a part of the copy, as its manifest records it."""
    parts = _unchanged(copy, names_and_sizes).parts
    return {(part.path, part.byte_offset): part.checksum or "" for part in parts}


def _units(chain: Chain, recorded: dict[tuple[str, int], str]) -> Iterator[Unit]:
    """The units of work of a copy: each header, tensor and small file."""
    first: dict[str, int] = {}
    for key, place in chain.base.places.items():
        start = place.array.byte_offset
        first[place.path] = min(start, first.get(place.path, start))
        if place.array.nbytes:
            parts = partial(_tensor, chain, key, {} if chain.changed(key) else recorded)
            yield Unit(place.path, start, place.array.nbytes, WINDOW_BYTES, parts)
    for path, size in chain.base.source.sizes().items():
        if path != MANIFEST:
            nbytes = first.get(path, size) if path.endswith(SAFETENSORS) else size
            yield Unit(path, 0, nbytes, WINDOW_BYTES, partial(_bytes, chain.base, path, nbytes, recorded))


def _tensor(chain: Chain, key: str, recorded: dict[tuple[str, int], str]) -> Iterator[memoryview]:
    """The new bytes of a tensor. Those that no delta changes are held against the record of the copy."""
    place = chain.base.places[key]
    start = place.array.byte_offset
    for window in chain.windows(key):
        expected = recorded.get((place.path, start))
        if expected and checksum(window.data) != expected:
            raise _changed(f"{chain.base.source.location}/{place.path}: {key}")
        start += len(window)
        yield window.data


def _bytes(
    base: StoredModel, path: str, nbytes: int, recorded: dict[tuple[str, int], str]
) -> Iterator[memoryview]:
    """The first bytes of a file of the base, held against the checksums that the copy has ``recorded``."""
    for start in range(0, nbytes, WINDOW_BYTES):
        window = np.empty(min(WINDOW_BYTES, nbytes - start), np.uint8).data
        base.source.read_into(path, start, window)
        expected = recorded.get((path, start))
        if expected and checksum(window) != expected:
            raise _changed(f"{base.source.location}/{path}")
        yield window


def _write(
    target: TargetStore,
    where: str,
    chain: Chain,
    number: int,
    known: Versions,
    recorded: dict[tuple[str, int], str],
    budget_bytes: int,
    observe: Observer,
    space_check: bool,
) -> tuple[Written, int]:
    """Write and publish the copy of a version, within the budget; the bytes written and the number of files."""
    versions, base = known.root.location, chain.base
    units = list(_units(chain, recorded))
    written = write_target(
        target,
        units,
        f"{version_name(number)} of {versions}",
        [base.source, *(delta.model.source for delta in chain.deltas)],
        partial(_describe, number, versions, base.source, units),
        units_at_a_time(where, len(chain.deltas), len(base.places), budget_bytes),
        observe,
        space_check,
    )
    return written, len({unit.path for unit in units})


def _describe(
    number: int, versions: str, base: Source, units: Sequence[Unit], receipts: Sequence[Receipt]
) -> bytes:
    """The manifest of a copy."""
    sizes: dict[str, int] = {}
    for unit in units:
        sizes[unit.path] = max(sizes.get(unit.path, 0), unit.start + unit.nbytes)
    return format_manifest(
        {
            **manifest_head(package.__version__),
            "plan_id": f"{version_name(number)} of {versions}",
            _PULLED: {"version": number, "versions": versions},
            "files": sizes,
            "source": {
                "location": absolute(base.location),
                "files": dict(base.sizes()),
                "versions": dict(base.versions()),
            },
            "etags": {},
            "parts": describe_parts(receipts, {}),
        }
    )
