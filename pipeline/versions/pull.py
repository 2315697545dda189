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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from paddle_reshard.pipeline.convert.integrity import Damage, check_target_quickly, names_and_sizes
from paddle_reshard.pipeline.convert.manifest import (
    Manifest,
    parse_manifest,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.request.arguments import checked
from paddle_reshard.pipeline.versions.chain import (
    SAFETENSORS,
    Chain,
    StoredModel,
    Versions,
    manifest_of,
    newest_version,
    numbers_of,
    read_model,
)
from paddle_reshard.pipeline.versions.coding import WINDOW_BYTES, Window
from paddle_reshard.pipeline.versions.form import version_name
from paddle_reshard.pipeline.versions.reports import PullReport
from paddle_reshard.pipeline.versions.writing import (
    Unit,
    Written,
    describe_source,
    units_at_a_time,
    write_target,
)
from paddle_reshard.storage.apart import check_apart
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from paddle_reshard.storage.locate import (
    Access,
    StorageOptions,
    is_local,
    local_path,
    open_source,
    open_target,
)
from paddle_reshard.storage.store import Permission, Source, TargetStore

_PULLED = "pulled"
"""Entry of the manifest of a copy: the version that it holds, where that lies, and the digest of its manifest."""

Recorded = Mapping[tuple[str, int], str]
"""(file, first byte) → checksum of a part of the copy that the new one is made from, as its manifest records it."""


@checked
def pull(
    versions: PathLike,
    local: PathLike,
    *,
    version: int | None = None,
    memory: str | int = DEFAULT_MEMORY,
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
        Folder or URL of the versions.
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
    access = Access(storage_options or {}, texts_of(allow_scheme))
    known = Versions(open_root(os.fspath(versions), access.options, access.schemes), access)
    number = _wanted(known, version)
    target = open_target(where, Access({}), Permission(overwrite=True, resume=True, take_over=take_over))
    held = _held(target, where, known.root)
    if held == number:
        start = number
        written = Written(len(_unchanged(target.reopen(), check_target_quickly).files))
    else:
        copy = None if held is None or held > number else (held, read_model(open_source(where, {})))
        chain = known.chain(number, copy)
        start = number - len(chain.deltas)
        recorded = _checksums(chain.base.source) if start == held else {}
        written = _write(
            target, chain, known.root, recorded, parse_memory(memory), observe, not no_space_check
        )
    return PullReport(
        known.root.location,
        where,
        number,
        start,
        written.files,
        written.nbytes - written.resumed_bytes,
        written.resumed_bytes,
        time.monotonic() - began,
    )


def _wanted(known: Versions, version: int | None) -> int:
    """The version to pull."""
    number = newest_version(known.root) if version is None else int(version)
    if number is None:
        raise CheckpointError(f"{known.root.location}: has no version like {version_name(1)}")
    if number not in (numbers := numbers_of(known.root)):
        there = f"{version_name(numbers[0])} to {version_name(numbers[-1])}" if numbers else "no version"
        raise CheckpointError(f"{known.root.at(version_name(number))}: is not there; the folder has {there}")
    return number


def _held(target: TargetStore, where: str, versions: CheckpointRoot) -> int | None:
    """The version of ``versions`` that the target holds; ``None`` if it holds none of them.

    A folder that ``pull`` has not made is refused: a checkpoint of training must not be replaced.
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
    number = pulled.get("version")
    if pulled.get("versions") != versions.location or not isinstance(number, int):
        return None
    digest = manifest_of(versions, number).get("digest")
    is_another = None not in (digest, pulled.get("digest")) and digest != pulled["digest"]
    return None if is_another else number


def _unchanged(copy: Source, check: Callable[[Source, Manifest], Sequence[Damage]]) -> Manifest:
    """The manifest of a copy in which a check finds no damage."""
    data = copy.read(MANIFEST, 0, copy.sizes()[MANIFEST])
    manifest = parse_manifest(data, f"{copy.location}/{MANIFEST}")
    for damage in check(copy, manifest):
        raise _changed(f"{copy.location}/{damage.path}: {damage.detail}: the copy")
    return manifest


def _changed(what: str) -> CheckpointError:
    return CheckpointError(f"{what} has changed since it was pulled; remove the folder and pull again")


def _checksums(copy: Source) -> Recorded:
    parts = _unchanged(copy, names_and_sizes).parts
    return {(part.path, part.byte_offset): part.checksum or "" for part in parts}


def _units(chain: Chain, recorded: Recorded) -> Iterator[Unit]:
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
            yield Unit(path, 0, nbytes, WINDOW_BYTES, partial(_beginning, chain.base, path, nbytes, recorded))


def _tensor(chain: Chain, key: str, recorded: Recorded) -> Iterator[memoryview]:
    """The new bytes of a tensor."""
    place, copy = chain.base.places[key], chain.base.source.location
    what = f"{copy}/{place.path}: {key}"
    return _as_recorded(chain.windows(key), place.path, place.array.byte_offset, what, recorded)


def _beginning(base: StoredModel, path: str, nbytes: int, recorded: Recorded) -> Iterator[memoryview]:
    """The first bytes of a file of the base."""
    return _as_recorded(base.stretch(path, 0, nbytes), path, 0, f"{base.source.location}/{path}", recorded)


def _as_recorded(
    windows: Iterable[Window], path: str, start: int, what: str, recorded: Recorded
) -> Iterator[memoryview]:
    """Windows of a file from a byte on, held against the checksums that are recorded of them."""
    for window in windows:
        expected = recorded.get((path, start))
        if expected and checksum(window.data) != expected:
            raise _changed(what)
        start += len(window)
        yield window.data


def _write(
    target: TargetStore,
    chain: Chain,
    versions: CheckpointRoot,
    recorded: Recorded,
    budget_bytes: int,
    observe: Observer,
    space_check: bool,
) -> Written:
    """Write and publish the copy of a version, within the budget."""
    base, pulled = chain.base, {"version": chain.number, "versions": versions.location}
    if digest := manifest_of(versions, chain.number).get("digest"):
        pulled["digest"] = digest
    return write_target(
        target,
        list(_units(chain, recorded)),
        f"{version_name(chain.number)} of {versions.location}",
        [base.source, *(delta.model.source for delta in chain.deltas)],
        {_PULLED: pulled},
        describe_source(base.source),
        units_at_a_time(target.location, len(chain.deltas), len(base.places), budget_bytes),
        observe,
        space_check,
    )
