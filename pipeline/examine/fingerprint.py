"""Fingerprints of a checkpoint of any topology and format: its tensors are read once, wherever groups run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.pipeline.convert.sums import fingerprints_of, run_sums
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import Facts, Result, readable_bytes
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.reading import Reader, spare_of
from paddle_reshard.pipeline.planning.sums import plan_sums
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import FingerprintOptions
from paddle_reshard.storage.documents.fingerprints import format_fingerprints, parse_fingerprints
from paddle_reshard.storage.local.folders import check_writable, written_whole
from paddle_reshard.storage.locate import absolute


@dataclass(frozen=True, slots=True, repr=False)
class FingerprintReport(Result):
    """The fingerprints of a checkpoint, and what it took."""

    path: str
    fingerprints: Fingerprints
    read_bytes: int

    @property
    def root(self) -> str:
        """The fingerprint of the whole checkpoint."""
        return self.fingerprints.root

    def _in_short(self) -> str:
        return self.root

    def facts(self) -> Facts:
        """The roots and what was read."""
        states = [(f"root of {state}", root) for state, root in self.fingerprints.states.items()]
        extent = f"{len(self.fingerprints)} tensors, {readable_bytes(self.read_bytes)} read"
        return [("root", self.root), *states, ("extent", extent)]


@with_options(FingerprintOptions)
def fingerprint(
    source: PathLike,
    *,
    output: PathLike | None = None,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[FingerprintOptions],
) -> FingerprintReport:
    """Compute the fingerprint of every tensor of a checkpoint, and the root over all of them.

    They do not depend on topology and format. Each tensor is read once, within the memory budget; of copies, the first
    is read.

    Parameters
    ----------
    output
        A local file to write the fingerprints to.

    Raises
    ------
    ReshardError
        If it is not a complete, consistent checkpoint, or ``memory`` is too small.
    TargetError
        If ``output`` cannot be written.
    """
    path = None if output is None else Path(output)
    if path is not None:
        check_writable(path, TargetError)
    report = fingerprint_with(os.fspath(source), Reader.of(options, observe))
    if path is not None:
        write_fingerprints(report, path)
    return report


def fingerprint_with(source: str, reader: Reader) -> FingerprintReport:
    """:func:`fingerprint`, with its options as a value."""
    store = reader.open(source)
    checkpoint = reader.index(store)
    plan = plan_sums(checkpoint.catalog, reader.planning)
    tensors = checkpoint.catalog.tensors
    del checkpoint
    trim_heap()
    sums = run_sums(plan, store, reader.engine, spare_of([store]), reader.observe)
    store.check_unchanged()
    return FingerprintReport(store.location, fingerprints_of(tensors, sums), plan.read_bytes)


def write_fingerprints(report: FingerprintReport, path: Path) -> None:
    """Write the fingerprints of a checkpoint to a local file."""
    facts = {"version": version.__version__, "checkpoint": absolute(report.path)}
    with written_whole(path, TargetError) as file:
        file.write(format_fingerprints(report.fingerprints, facts))


def read_fingerprints(path: PathLike) -> Fingerprints:
    """The fingerprints in a local file that :func:`fingerprint` has written."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    return parse_fingerprints(data, os.fspath(path))
