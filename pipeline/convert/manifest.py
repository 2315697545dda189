"""The manifest of a target: what was made, from what, and checksums to verify it with.

The same conversion gives the same manifest, on any engine and however often it was resumed. For every file, columns
list the sizes and checksums of its parts in order, so 100,000 parts take a few megabytes. A part copied by the storage
has no checksum (``null``), because no worker read its bytes; under its number, ``copied`` has the source file and byte
it was copied from, and its MD5 if the store reported one.

A manifest also lists what else may be in the folder (``additional_files``), and has a digest of all its entries, which
shows accidental changes. The digest is not a signature: anyone who rewrites a manifest can compute a new one.

``request`` is what was asked (:mod:`~paddle_reshard.pipeline.request.record`), ``target_number`` which of its targets
this one is, and ``limits`` what the target's store sets for parts: the plan follows from these and the source.
``portion`` says whose files it has, if not all, and the digest of the whole; ``plan_id`` is that of the whole.

``generation`` is the version of this schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Completion, Filled
from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob
from paddle_reshard.pipeline.convert.plan import ConversionPlan, PlannedTarget
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.crc import ALGORITHM
from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.file_names import MANIFEST, MANIFEST_FORMAT
from paddle_reshard.pipeline.planning.parts import MADE
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.request.record import NOT_STATED
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import Bounds, EntryError, typed
from paddle_reshard.storage.locate import absolute
from paddle_reshard.storage.outputs import prefixes
from paddle_reshard.storage.store import Receipt

FORMAT = MANIFEST_FORMAT
NOT_A_MANIFEST = "not_a_manifest"
"""Reason of the error about a file of that name that is not ours."""
GENERATION = 2
Copies = Mapping[tuple[str, int], tuple[str, int]]
"""File and byte offset of a copied part → file and byte offset in the source."""


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """A part of a target file, as described by its manifest."""

    path: str
    byte_offset: int
    nbytes: int
    checksum: str | None
    copied: tuple[str, int, str] | None
    """For a part without a checksum: source file, byte offset in it, and MD5 or ``""``."""


_Bytes = Annotated[int, Bounds(0)]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The parts of a file, in order."""

    bytes: tuple[_Bytes, ...] = ()
    crc64nvme: tuple[str | None, ...] = ()
    copied: Mapping[str, tuple[str, _Bytes, str]] = field(default_factory=dict)
    """Number of a part → source file, byte offset in it, and MD5."""


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """Entries about the source; further entries are for people."""

    OPEN: ClassVar[bool] = True
    location: str
    """For display only: nothing that a manifest names is opened."""
    files: Mapping[str, _Bytes]
    versions: Mapping[str, str]
    topology: str | None = None
    """As :meth:`~paddle_reshard.pipeline.core.topology.Topology.parse` reads it; ``None`` if it was not known."""


@dataclass(frozen=True, slots=True)
class _Portion:
    """Which portion of which whole the files are."""

    OPEN: ClassVar[bool] = True
    ranks: str
    world_size: _Bytes
    whole: str
    job: TrainingJob | None = None

    def __str__(self) -> str:
        return f"ranks {self.ranks} of {self.world_size}, of {self.whole}"


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries about the files; further entries are for people."""

    OPEN: ClassVar[bool] = True
    files: Mapping[str, _Bytes]
    source: ManifestSource
    parts: Mapping[str, _Columns]
    additional_files: tuple[str, ...]
    etags: Mapping[str, str] = field(default_factory=dict)
    topology: str | None = None
    sharding_strategy: str | None = None
    stage3_segment_size: str | None = None
    portion: _Portion | None = None


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest."""

    files: Mapping[str, int]
    """File → size in bytes."""
    parts: tuple[ManifestPart, ...]
    source: ManifestSource
    etags: Mapping[str, str]
    """File → ETag, if the store reports one."""
    additional_files: frozenset[str]
    """Further paths that may be in the folder."""
    changed: str
    """How the manifest differs from what was written; empty if it does not."""
    topology: str | None = None
    """Topology of the job that the files are for, written as that of the source; ``None`` if they are for any job."""
    sharding_strategy: str | None = None
    """Strategy of that job."""
    stage3_segment_size: str | None = None
    """Number of elements above which that job cuts a parameter; ``None``: as by default, or it does not use stage 3."""
    portion: str = ""
    """Which ranks' portion of which whole the files are, in words; empty: all of it."""
    portion_job: TrainingJob | None = None
    """The job of a portion, of whose other ranks nothing lies here."""


def manifest_head(version: str) -> dict[str, Any]:
    """The first entries of a manifest; ``version`` is that of this package."""
    return {"format": FORMAT, "generation": GENERATION, "version": version, "additional_files": [MANIFEST]}


def describe_parts(receipts: Iterable[Receipt], copies: Copies) -> dict[str, Any]:
    """File → columns of its parts."""
    unique = {(receipt.path, receipt.byte_offset): receipt for receipt in receipts}
    files: dict[str, Any] = {}
    for (path, byte_offset), receipt in sorted(unique.items()):
        columns = files.setdefault(path, {"bytes": [], ALGORITHM: []})
        if (path, byte_offset) in copies:
            copied = [*copies[path, byte_offset], receipt.md5]
            columns.setdefault("copied", {})[str(len(columns["bytes"]))] = copied
        columns["bytes"].append(receipt.nbytes)
        columns[ALGORITHM].append(receipt.checksum or None)
    return files


def format_manifest(values: Mapping[str, Any]) -> bytes:
    """Format a manifest as JSON, with one line for each file's columns, and add its digest.

    >>> print(format_manifest({"version": "1", "parts": {"a": {"bytes": [1, 2]}}}).decode())
    {
     "version": "1",
     "parts": {
      "a": {"bytes":[1,2]}
     },
     "digest": "sha256:44b1d199ed51fcad5e6f1eaaeb2cca549168b09aa26b9fb624b46bbc8755cdbc"
    }
    """
    text = json.dumps({**values, "parts": None, "digest": _digest(values)}, indent=1)
    lines = [
        f"  {json.dumps(path)}: {json.dumps(columns, separators=(',', ':'))}"
        for path, columns in values.get("parts", {}).items()
    ]
    parts = "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"
    return text.replace('\n "parts": null', f'\n "parts": {parts}', 1).encode()


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Parse a manifest.

    Raises
    ------
    FormatError
        If it is not a manifest of this package and generation, or contradicts itself.
    """
    try:
        values = parse_json(data)
    except JsonError as error:
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FormatError(NOT_A_MANIFEST, path, None, f"not a {FORMAT}")
    generation = values.get("generation")
    if type(generation) is not int or generation != GENERATION:
        raise FormatError(
            "unknown_generation",
            path,
            None,
            f"has generation {generation!r}; this version reads {GENERATION}: use that which wrote it",
        )
    try:
        entries = typed(values, _Entries)
    except EntryError as error:
        raise FormatError("damaged", path, None, f"not a valid manifest: {error}") from error
    return Manifest(
        entries.files,
        tuple(_parts(path, entries)),
        entries.source,
        entries.etags,
        frozenset(entries.additional_files),
        _changed(values),
        topology=entries.topology,
        sharding_strategy=entries.sharding_strategy,
        stage3_segment_size=entries.stage3_segment_size,
        portion="" if entries.portion is None else str(entries.portion),
        portion_job=None if entries.portion is None else entries.portion.job,
    )


def _digest(values: Mapping[str, Any]) -> str:
    """The digest of all entries except the digest itself; independent of their order."""
    entries = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _changed(values: Mapping[str, Any]) -> str:
    """How a manifest differs from what was written, by its digest."""
    found, recorded = _digest(values), values.get("digest")
    if found == recorded:
        return ""
    return f"was changed after it was written: its digest is {found}, the manifest says {recorded}"


def _parts(manifest: str, entries: _Entries) -> Iterator[ManifestPart]:
    """The parts of all files; those of a file must add up to its size."""
    for path, size_bytes in entries.files.items():
        byte_offset = 0
        columns = entries.parts.get(path, _Columns())
        if len(columns.bytes) != len(columns.crc64nvme):
            lengths = f"{len(columns.bytes)} sizes and {len(columns.crc64nvme)} checksums"
            raise FormatError("damaged", manifest, None, f"{path}: {lengths} of parts")
        for number, (nbytes, checksum) in enumerate(zip(columns.bytes, columns.crc64nvme, strict=True)):
            copied = columns.copied.get(str(number))
            if checksum is None and copied is None:
                detail = f"{path}: part {number} has neither a checksum nor a source"
                raise FormatError("damaged", manifest, None, detail)
            yield ManifestPart(path, byte_offset, nbytes, checksum, copied)
            byte_offset += nbytes
        if byte_offset != size_bytes:
            detail = f"{path}: its parts add up to {byte_offset} of {size_bytes} bytes"
            raise FormatError("parts_do_not_tile", manifest, None, detail)


def describe_targets(
    conversion: ConversionPlan, replica_drift: Sequence[str] = (), receipts: Iterable[Receipt] = ()
) -> dict[str, dict[str, Any]]:
    """Prefix of each target → the entries of its manifest."""
    plan, stated = conversion.plan, statement_of(conversion)
    files = {f.path: f.size_bytes for f in plan.target_files}
    files |= {c.target_path: c.size_bytes for c in plan.carried}
    parts = describe_parts(receipts, _copies(plan))
    described = {}
    named = zip(prefixes(len(conversion.targets)), conversion.targets, strict=True)
    for number, (prefix, target) in enumerate(named):
        described[prefix] = {
            **manifest_head(version.__version__),
            **stated,
            **({"target_number": number} if "request" in stated else {}),
            **target.spec.facts(),
            "files": _below(prefix, files),
            "source": {
                **stated["source"],
                "not_carried": dict(target.not_carried),
                "states_not_carried": list(target.states_not_carried),
                "states_dropped": list(conversion.dropped),
                "replica_drift": list(replica_drift),
            },
            **_filled(conversion.source.history.filled),
            **_like(conversion.source.history.completion, target),
            **({"remarks": list(target.remarks)} if target.remarks else {}),
            "etags": {},
            "parts": _below(prefix, parts),
        }
    return described


def _filled(filled: Filled | None) -> dict[str, Any]:
    """What the source lacked and was taken from elsewhere."""
    if filled is None:
        return {}
    return {"filled": {"location": absolute(filled.location), "tensors": list(filled.tensors)}}


def _like(completion: Completion | None, target: PlannedTarget) -> dict[str, Any]:
    """What another model gave."""
    if completion is None:
        return {}
    given = {
        "location": absolute(completion.location),
        "tensors": list(completion.tensors),
        "files": list(target.donated),
        "config": sorted(completion.config),
    }
    return {"like": given}


def _below(prefix: str, of_paths: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the target with this prefix, by path within the target."""
    return {path.removeprefix(prefix): value for path, value in of_paths.items() if path.startswith(prefix)}


def _copies(plan: Plan) -> dict[tuple[str, int], tuple[str, int]]:
    """File and byte offset of every copied part → file and byte offset in the source."""
    return {
        (plan.target_files[part["file"]].path, int(part["start"])): (
            plan.source_files[part["source_file"]].path,
            int(part["source_start"]),
        )
        for part in plan.parts[plan.parts["source_file"] != MADE]
    }


def statement_of(conversion: ConversionPlan) -> dict[str, Any]:
    """What is made of what, by which version."""
    source, store, asked = conversion.source, conversion.store, conversion.asked
    stated = {} if asked is None else {name: value for name, value in asked.items() if name not in NOT_STATED}
    return {
        "version": version.__version__,
        "plan_id": conversion.plan_id,
        **({} if conversion.portion is None else {"portion": conversion.portion.recorded()}),
        **({"request": stated} if stated else {}),
        "limits": asdict(conversion.limits),
        "source": {
            "location": absolute(store.location),
            "format": source.format,
            "topology": None if source.job.topology is None else str(source.job.topology),
            "sharding_strategy": source.job.strategy,
            "files": store.sizes(),
            "versions": store.versions(),
        },
    }
