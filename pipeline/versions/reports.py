"""Results of ``publish`` and ``pull``."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.shown import Facts, Shown, counted, readable_bytes, readable_seconds
from paddle_reshard.pipeline.versions.form import version_name


@dataclass(frozen=True, slots=True, repr=False)
class PublishReport(Shown):
    """A published version, in numbers."""

    checkpoint: str
    versions: str
    version: int
    reason: str
    """Why the version is full; empty for a delta."""
    model_bytes: int
    """Size of the export."""
    version_bytes: int
    """Size of the version, without its manifest."""
    tensors: int
    changed_tensors: int
    already: bool
    """Whether the newest version is of this checkpoint and these options, so nothing was published."""
    seconds: float

    def _in_short(self) -> str:
        return f"{version_name(self.version)}, {readable_bytes(self.version_bytes)}"

    def facts(self) -> Facts:
        """Rows to display."""
        if self.already:
            kind = "published before, from the same checkpoint"
        elif self.reason:
            kind = f"full: {self.reason}"
        else:
            share = f" ({self.version_bytes / self.model_bytes:.2%})" if self.model_bytes else ""
            kind = f"delta: {readable_bytes(self.version_bytes)} of {readable_bytes(self.model_bytes)}{share}"
        changed = [("changed", f"{self.changed_tensors} of {counted(self.tensors, 'tensor')}")]
        return [
            ("checkpoint", self.checkpoint),
            ("version", f"{version_name(self.version)}, {kind}"),
            *([] if self.already else changed),
            ("time", readable_seconds(self.seconds)),
            ("done", self.versions),
        ]


@dataclass(frozen=True, slots=True, repr=False)
class PullReport(Shown):
    """The local copy of a version, in numbers."""

    versions: str
    local: str
    version: int
    base: int
    """The version it was made from: that of the local copy, or a full one. ``version`` if it was there already."""
    files: int
    written_bytes: int
    resumed_bytes: int
    """Bytes that an earlier run had written."""
    seconds: float

    def _in_short(self) -> str:
        return f"{self.local}, {version_name(self.version)}"

    def facts(self) -> Facts:
        """Rows to display."""
        deltas = counted(self.version - self.base, "delta")
        facts = [
            ("version", f"{version_name(self.version)}, from {version_name(self.base)} and {deltas}"),
            ("written", f"{counted(self.files, 'file')}, {readable_bytes(self.written_bytes)}"),
        ]
        if self.resumed_bytes:
            facts.append(("reused", f"{readable_bytes(self.resumed_bytes)} from an earlier run"))
        return [*facts, ("time", readable_seconds(self.seconds)), ("done", self.local)]
