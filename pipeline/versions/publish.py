"""``publish``: export a checkpoint, and store it as the next version of its model.

The export goes to a scratch folder first: beside the versions if they are on a disk, otherwise in the folder for
temporary files (``TMPDIR``). A full version is the export itself; of a delta, the scratch folder is the new side::

    CHECKPOINT ──convert──► export ─┐
    weight_v000001  (full)  ────────┼─ compare, tensor by tensor ─► frames ─► weight_v000004
    weight_v000002, …3 (deltas) ────┘
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from paddle_reshard.pipeline.api import clean
from paddle_reshard.pipeline.convert.conversion import convert_with, read_source
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import StaleSessionError, UsageError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST, WEIGHT_INDEX
from paddle_reshard.pipeline.core.shown import counted, readable_bytes
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.request.options import ConversionOptions, takes
from paddle_reshard.pipeline.request.parse import (
    Asked,
    ConversionSettings,
    RunSettings,
    read_options,
    read_request,
)
from paddle_reshard.pipeline.request.record import record_of
from paddle_reshard.pipeline.versions.chain import (
    Chain,
    Place,
    StoredModel,
    Versions,
    manifest_of,
    numbers_of,
    read_model,
)
from paddle_reshard.pipeline.versions.coding import (
    MAX_OVERWRITE_BYTES,
    WINDOW_BYTES,
    Window,
    pieces_of,
    spool_file,
    write_frame,
)
from paddle_reshard.pipeline.versions.form import (
    CHECKSUMS,
    DELTA_FILE,
    LATEST,
    MAX_VERSION,
    DeltaForm,
    Encoding,
    format_delta_index,
    version_name,
)
from paddle_reshard.pipeline.versions.reports import PublishReport
from paddle_reshard.pipeline.versions.writing import (
    Unit,
    describe_source,
    in_order,
    units_at_a_time,
    write_target,
)
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.files.safetensors import TensorSlot, encode_safetensors
from paddle_reshard.storage.listing import CheckpointRoot, open_root
from paddle_reshard.storage.local.folders import make_private, temporary_folder
from paddle_reshard.storage.locate import (
    is_local,
    local_path,
    open_source,
    open_target,
    target_access,
)
from paddle_reshard.storage.store import OWN_PREFIX, Permission, Source, TargetStore
from paddle_reshard.tasks.index import index_here

_EXPORT: Final = "huggingface"
_NOT_COMPARED = ("memory",)
"""Options in the statement of a request that change no byte of an export."""


@takes(ConversionOptions)
def publish(
    checkpoint: PathLike,
    versions: PathLike,
    *,
    encoding: str = Encoding.XOR.value,
    checksum: str = "adler32",
    full_every: int | None = None,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> PublishReport:
    """Publish the parameters of a checkpoint as the next version in a folder, for inference engines to fetch.

    The first version is full, later ones hold what changed. A version is full again when names, shapes, dtypes, files
    or the small files of the export change. If the newest version is of this checkpoint and these options, nothing is
    published. An interrupted call can be repeated: no version appears before it is complete.

    Parameters
    ----------
    checkpoint
        Folder or URL of a checkpoint, in any format and topology.
    versions
        Folder or URL in which the versions ``weight_v000001``, … and the file ``latest`` lie.
    encoding
        ``"xor"`` or ``"overwrite"``: how a delta states new bytes.
    checksum
        ``"adler32"``, ``"xxh3-128"`` or ``"blake3"``: what a delta states of the new bytes of each tensor.
    full_every
        Publish a full version after so many deltas at most.
    observe
        Called with progress events.
    options
        :class:`ConversionOptions` of an export as a Hugging Face checkpoint.

    Raises
    ------
    ReshardError
        If the checkpoint cannot be exported, or a version in the folder is damaged.
    """
    if options.get("format") not in (None, _EXPORT):
        raise UsageError(f"versions are exports of the format {_EXPORT}, not {options['format']}")
    form = DeltaForm.named(encoding, checksum)
    if full_every is not None and full_every < 1:
        raise UsageError(f"a full version after every {full_every} deltas: at least 1")
    asked = read_options({**options, "format": _EXPORT})
    publisher = _Publisher(os.fspath(checkpoint), os.fspath(versions), form, asked, observe)
    return publisher.publish(full_every)


def complete_versions(root: CheckpointRoot) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and manifest of each complete version in a folder, the newest first.

    One without a manifest is unfinished, or refused when it is to be written.
    """
    for number in reversed(numbers_of(root)):
        if manifest := manifest_of(root, number):
            yield number, manifest


class _Publisher:
    """One call of ``publish``."""

    def __init__(
        self, checkpoint: str, versions: str, form: DeltaForm, asked: Asked, observe: Observer
    ) -> None:
        self.checkpoint, self.form, self.asked, self.observe = checkpoint, form, asked, observe
        self.began = time.monotonic()
        access = target_access(asked.shared)
        self.versions = Versions(open_root(versions, access.options, access.schemes), access)
        root = self.versions.root.location
        self.private = None if is_local(root) else temporary_folder(f"export {root}")
        """The folder that scratch is in, unless that is the one of the versions: nobody else may put anything there."""
        self.scratch = (
            local_path(root) / f"{OWN_PREFIX}export" if self.private is None else self.private / "export"
        )
        """Where the export of a delta lies until the delta is published. After an error it stays, to be continued."""

    def publish(self, full_every: int | None) -> PublishReport:
        """Publish the next version, or complete the publication of the newest one."""
        last, manifest = next(complete_versions(self.versions.root), (0, {}))
        if last and self._is_of_this_checkpoint(manifest):
            self._point_to(last)
            self._tidy(manifest)
            return self._report(last, already=True)
        number = last + 1
        if number > MAX_VERSION:
            raise UsageError(f"{self._at(MAX_VERSION)} is the last version that a folder can have")
        if not last:
            return self._publish_full(number, "the first version")
        chain = self.versions.chain(last)
        if full_every is not None and len(chain.deltas) >= full_every:
            return self._publish_full(number, f"after {counted(len(chain.deltas), 'delta')}")
        if self.private is not None:
            make_private(self.private)
        scratch = str(self.scratch)
        self._export(scratch, overwrite=True)
        new = read_model(open_source(scratch, {}))
        reason = why_full(chain, new, self.form.encoding)
        report = (
            self._publish_full(number, reason) if reason else self._publish_delta(number, chain, new, scratch)
        )
        self._remove_scratch()
        return report

    def _at(self, number: int) -> str:
        return self.versions.root.at(version_name(number))

    def _is_of_this_checkpoint(self, manifest: Mapping[str, Any]) -> bool:
        if _outcome(manifest.get("request", {})) != _outcome(record_of(self.asked)):
            return False
        source = describe_source(self._source())
        return source == {name: manifest.get("source", {}).get(name) for name in source}

    def _source(self) -> Source:
        """The files that an export is made from: those of the checkpoint, and of what changes bring."""
        request = read_request((self.checkpoint,), (), self.asked)
        if request.locations.brought:
            return read_source(request, index_here).store
        return open_source(self.checkpoint, *request.locations.reading)

    def _point_to(self, number: int) -> None:
        """Name the newest version, after it is complete."""
        if self.versions.root.read(LATEST) != version_name(number).encode():
            self.versions.root.replace(LATEST, version_name(number).encode())

    # ------------------------------------------------------------------------------------------------ export

    def _remove_scratch(self) -> None:
        shutil.rmtree(self.scratch)
        if self.private is not None:
            with suppress(OSError):  # another call has begun to export
                self.private.rmdir()

    def _tidy(self, manifest: Mapping[str, Any]) -> None:
        """Remove the export of a version that was published by a call that was killed then."""
        export = self.scratch / MANIFEST
        if export.is_file() and (own_manifest(export.read_bytes()) or {}).get("source") == manifest.get(
            "source"
        ):
            self._remove_scratch()

    def _export(self, target: str, overwrite: bool = False) -> None:
        """Export the checkpoint, or continue to; ``overwrite`` what another call has left at the target."""
        settings = ConversionSettings(self.asked.with_shared(overwrite=overwrite), RunSettings(resume=True))
        self._make(target, partial(convert_with, self.checkpoint, (target,), settings, self.observe))

    def _make(self, target: str, make: Callable[[], object]) -> None:
        """Make a target; afresh, if what is unfinished there was to be another one."""
        try:
            make()
        except StaleSessionError:
            access = self.versions.access
            clean(target, storage_options=access.options, allow_scheme=access.schemes)
            make()

    def _publish_full(self, number: int, reason: str) -> PublishReport:
        self._export(self._at(number))
        self._point_to(number)
        return self._report(number, reason=reason)

    # ------------------------------------------------------------------------------------------------- delta

    def _publish_delta(self, number: int, chain: Chain, new: StoredModel, scratch: str) -> PublishReport:
        where = self._at(number)
        at_a_time = units_at_a_time(where, len(chain.deltas) + 1, len(new.places), self.asked.budget_bytes)
        folder = str(Path(scratch).parent)
        with tempfile.TemporaryFile(dir=folder) as spool:
            texts = self._texts(number, *self._compare(chain, new, folder, spool, at_a_time))
            self._make(where, partial(self._write, where, new, texts, spool, at_a_time))
        self._point_to(number)
        return self._report(number)

    def _compare(
        self, chain: Chain, new: StoredModel, folder: str, spool: IO[bytes], at_a_time: int
    ) -> tuple[list[TensorSlot], dict[str, str]]:
        """Append the frames of the tensors that changed to ``spool``. Returns them, and their checksums."""
        self.observe(StepStarted("compare", sum(place.array.nbytes for place in new.places.values())))
        slots: list[TensorSlot] = []
        checksums: dict[str, str] = {}
        with ExitStack() as opened:
            make = partial(self._encode, chain, new, folder, opened)
            for key, checksum, frame in in_order(make, sorted(new.places), at_a_time):
                if frame is not None:
                    size = sum(map(spool.write, pieces_of(frame)))
                    slots.append(TensorSlot(len(slots), key, "U8", (size,)))
                    checksums[key] = checksum
                    frame.close()
                self.observe(Progress(new.places[key].array.nbytes))
        spool.flush()
        stored = readable_bytes(spool.tell())
        self.observe(StepEnded("compare", f"{counted(len(slots), 'tensor')}, {stored}"))
        return slots, checksums

    def _encode(
        self, chain: Chain, new: StoredModel, folder: str, opened: ExitStack, key: str
    ) -> tuple[str, str, IO[bytes] | None]:
        """A tensor's key, the checksum of its new bytes, and its frame; ``None`` if it has not changed."""
        hasher = CHECKSUMS[self.form.checksum]()

        def windows() -> Iterator[tuple[Window, Window]]:
            for old, window in zip(chain.windows(key), new.windows(key), strict=True):
                hasher.update(window.data)
                yield window, old

        frame = opened.enter_context(spool_file(folder))
        nbytes = new.places[key].array.nbytes
        changed = write_frame(self.form.encoding, windows(), nbytes, frame, folder)
        if not changed:
            frame.close()
        return key, hasher.hexdigest(), frame if changed else None

    def _texts(self, number: int, slots: list[TensorSlot], checksums: Mapping[str, str]) -> dict[str, bytes]:
        """The beginning of each file of a delta: all of the index, and of the frames' file the header."""
        texts = {WEIGHT_INDEX: format_delta_index(self.form, number, list(checksums))}
        if slots:
            ((_, texts[DELTA_FILE]),) = encode_safetensors(slots, checksums).literals
        return texts

    def _write(
        self, where: str, new: StoredModel, texts: Mapping[str, bytes], spool: IO[bytes], at_a_time: int
    ) -> None:
        access = self.versions.access
        target = open_target(where, access, Permission(resume=True))
        units = [_unit(target, path, text, spool) for path, text in texts.items()]
        content = hashlib.sha256(b"".join(texts.values())).hexdigest()[:16]
        export = own_manifest(new.source.read(MANIFEST, 0, new.source.sizes()[MANIFEST])) or {}
        write_target(
            target,
            units,
            content,
            [new.source],
            {"request": export["request"]},
            export["source"],
            at_a_time,
            self.observe,
            not self.asked.shared.get("no_space_check"),
        )

    def _report(self, number: int, reason: str = "", already: bool = False) -> PublishReport:
        chain = self.versions.chain(number)
        base = chain.base.places
        model = chain.deltas[-1].model if chain.deltas else chain.base
        return PublishReport(
            self.checkpoint,
            self.versions.root.location,
            number,
            reason,
            model_bytes=sum(place.array.nbytes for place in base.values()),
            version_bytes=sum(size for path, size in model.source.sizes().items() if path != MANIFEST),
            tensors=len(base),
            changed_tensors=len(model.places),
            already=already,
            seconds=time.monotonic() - self.began,
        )


def why_full(chain: Chain, new: StoredModel, encoding: Encoding) -> str:
    """Why a delta cannot lead to an export; empty if one can. A tensor too large for the encoding is refused."""
    for key in sorted(chain.base.places.keys() | new.places.keys()):
        before, after = chain.base.places.get(key), new.places.get(key)
        if before is None or after is None:
            return f"{key} is {'new' if before is None else 'gone'}"
        if before.kind != after.kind:
            return f"{key} was {_kind(before)} and is {_kind(after)}"
    small = {path for model in (chain.base, new) for path in model.others}
    for path in sorted(small):
        if _content(chain.base, path) != _content(new, path):
            return f"{path} has changed"
    if encoding is Encoding.OVERWRITE:
        for key, place in new.places.items():
            if place.array.nbytes >= MAX_OVERWRITE_BYTES:
                raise UsageError(
                    f"{key}: has {place.array.nbytes} bytes, and positions of --encoding overwrite end at "
                    f"{MAX_OVERWRITE_BYTES}; use --encoding xor"
                )
    return ""


def _kind(place: Place) -> str:
    return f"{place.tag} {list(place.array.shape)} in {place.path}"


def _content(model: StoredModel, path: str) -> bytes | None:
    """The content of a small file."""
    size = model.others.get(path)
    return None if size is None else model.source.read(path, 0, size)


def _outcome(request: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request that decide what an export holds."""
    return {name: value for name, value in request.items() if name not in _NOT_COMPARED}


def _unit(target: TargetStore, path: str, text: bytes, spool: IO[bytes]) -> Unit:
    """A file that begins with a text; that of the frames goes on with the spool."""
    behind = os.fstat(spool.fileno()).st_size if path == DELTA_FILE else 0
    size = len(text) + behind
    part_bytes = max(WINDOW_BYTES, target.smallest_part_bytes)
    if target.most_parts is not None:
        part_bytes = max(part_bytes, -(-size // target.most_parts))

    def parts() -> Iterator[memoryview]:
        for start in range(0, size, part_bytes):
            stop = min(start + part_bytes, size)
            first = max(start, len(text)) - len(text)
            yield memoryview(
                text[start:stop] + os.pread(spool.fileno(), max(0, stop - len(text)) - first, first)
            )

    return Unit(path, 0, size, part_bytes, parts)
