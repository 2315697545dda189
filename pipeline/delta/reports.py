"""Results of ``delta`` and ``apply_delta``."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes, readable_seconds


@dataclass(frozen=True, slots=True, repr=False)
class DeltaReport(Shown):
    """The difference between two checkpoints, in numbers."""

    old: str
    new: str
    target: str
    files: int
    """Number of files of the new checkpoint."""
    new_bytes: int
    """Size of these files."""
    delta_bytes: int
    """Size of the delta, without its manifest."""
    same_bytes: int
    """Bytes of the new checkpoint in blocks that the old one has, too."""
    compared_bytes: int
    """Bytes of the new checkpoint in blocks that are stored as differences."""
    whole_bytes: int
    """Bytes of the new checkpoint in blocks that are stored whole, compressed."""
    folders_left: tuple[str, ...]
    """Folders of the new checkpoint that are not part of it: the delta does not hold them."""
    resumed_bytes: int
    """Bytes of the delta that an earlier run had written."""
    seconds: float

    def _in_short(self) -> str:
        return f"{self.target}, {self.size}"

    @property
    def size(self) -> str:
        """Size of the delta, and as a share of the new checkpoint."""
        share = f", {self.delta_bytes / self.new_bytes:.2%} of the new checkpoint" if self.new_bytes else ""
        return f"{readable_bytes(self.delta_bytes)}{share}"

    def facts(self) -> Facts:
        """Rows to display."""
        parts = (
            ("unchanged", self.same_bytes),
            ("in blocks with changes", self.compared_bytes),
            ("new", self.whole_bytes),
        )
        facts = [
            ("old", self.old),
            ("new", f"{self.new}, {self.files} files, {readable_bytes(self.new_bytes)}"),
            (
                "compared",
                ", ".join(f"{readable_bytes(size)} {what}" for what, size in parts if size) or "nothing",
            ),
            ("delta", self.size),
        ]
        if self.folders_left:
            facts.append(("not included", ", ".join(f"{folder}/" for folder in self.folders_left)))
        return [*facts, ("time", readable_seconds(self.seconds)), ("done", self.target)]


@dataclass(frozen=True, slots=True, repr=False)
class ApplyReport(Shown):
    """The recreated checkpoint, in numbers."""

    old: str
    delta: str
    target: str
    files: int
    written_bytes: int
    resumed_bytes: int
    """Bytes that an earlier run had written."""
    seconds: float

    def _in_short(self) -> str:
        return f"{self.target}, {readable_bytes(self.written_bytes)} written"

    def facts(self) -> Facts:
        """Rows to display."""
        facts = [
            ("old", self.old),
            ("delta", self.delta),
            ("written", f"{self.files} files, {readable_bytes(self.written_bytes)}"),
        ]
        if self.resumed_bytes:
            facts.append(("reused", f"{readable_bytes(self.resumed_bytes)} from an earlier run"))
        return [*facts, ("time", readable_seconds(self.seconds)), ("done", self.target)]
