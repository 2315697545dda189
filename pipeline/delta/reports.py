"""What ``delta`` and ``apply_delta`` have made."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.shown import Facts, Shown, readable_bytes, readable_seconds


@dataclass(frozen=True, slots=True, repr=False)
class DeltaReport(Shown):
    """What differs between two checkpoints, and what it takes to say so."""

    old: str
    new: str
    target: str
    files: int
    """Of the new checkpoint."""
    new_bytes: int
    """Their size."""
    delta_bytes: int
    """Size of the delta, without its manifest."""
    same_bytes: int
    """Of the new ones, those in blocks that are equal in the old checkpoint."""
    compared_bytes: int
    """Those in blocks of which the delta holds the differences."""
    whole_bytes: int
    """Those in blocks that it holds whole, compressed."""
    folders_left: tuple[str, ...]
    """Folders of the new checkpoint that are none of a checkpoint's own: the delta does not hold them."""
    resumed_bytes: int
    """Of the delta, what an earlier run had written."""
    seconds: float

    def _in_short(self) -> str:
        return f"{self.target}, {self.size}"

    @property
    def size(self) -> str:
        """Size of the delta, and as a share of the new checkpoint."""
        share = f", {self.delta_bytes / self.new_bytes:.2%} of the new checkpoint" if self.new_bytes else ""
        return f"{readable_bytes(self.delta_bytes)}{share}"

    def facts(self) -> Facts:
        """What was compared, and what came of it."""
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
            facts.append(("left out", ", ".join(f"{folder}/" for folder in self.folders_left)))
        return [*facts, ("time", readable_seconds(self.seconds)), ("done", self.target)]


@dataclass(frozen=True, slots=True, repr=False)
class ApplyReport(Shown):
    """The new checkpoint, made again."""

    old: str
    delta: str
    target: str
    files: int
    written_bytes: int
    resumed_bytes: int
    """What an earlier run had written."""
    seconds: float

    def _in_short(self) -> str:
        return f"{self.target}, {readable_bytes(self.written_bytes)} written"

    def facts(self) -> Facts:
        """What was made of what."""
        facts = [
            ("old", self.old),
            ("delta", self.delta),
            ("written", f"{self.files} files, {readable_bytes(self.written_bytes)}"),
        ]
        if self.resumed_bytes:
            facts.append(("reused", f"{readable_bytes(self.resumed_bytes)} were done before"))
        return [*facts, ("time", readable_seconds(self.seconds)), ("done", self.target)]
