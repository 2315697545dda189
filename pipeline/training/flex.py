"""The average in the files of a FlexCheckpoint: ``ema_state/<rank>_0.distcp`` and a common ``0.metadata``.

A box that several ranks hold is written by the first of them; slices are written without their padding. The
assignment to ranks and the metadata follow from the boxes of all ranks, so every rank needs to know them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.names import EMA_STATE, METADATA
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata

METADATA_PATH = f"{EMA_STATE}/0{METADATA}"


@dataclass(frozen=True)
class RankBoxes:
    """The boxes of a rank."""

    master_weights: Mapping[str, Box] = field(default_factory=dict)
    """Boxes of master weights, by parameter name."""
    params: Mapping[str, Box] = field(default_factory=dict)
    """Boxes of float32 parameters, by structured key."""

    def entries(self) -> Iterator[tuple[bool, str, Box]]:
        """``(master weight?, name, box)`` of every box that is not empty, in order."""
        for master, boxes in ((True, self.master_weights), (False, self.params)):
            yield from ((master, name, box) for name, box in boxes.items() if box.elements)


@dataclass(frozen=True)
class FlexRank:
    """A rank among those that save together."""

    number: int
    boxes: tuple[RankBoxes, ...]
    """The boxes of every rank."""

    @property
    def path(self) -> str:
        """Name of this rank's file in the checkpoint."""
        return f"{EMA_STATE}/{_file_name(self.number)}"

    def written(self) -> list[tuple[bool, str, Box]]:
        """The boxes that this rank writes: those that no earlier rank holds."""
        earlier = {box for rank in self.boxes[: self.number] for _, _, box in rank.entries()}
        return [entry for entry in self.boxes[self.number].entries() if entry[2] not in earlier]

    def metadata(self) -> bytes:
        """The metadata of all ranks' boxes; the same on every rank."""
        first: dict[Box, int] = {}
        for number, rank in enumerate(self.boxes):
            for _, _, box in rank.entries():
                first.setdefault(box, number)
        return encode_dist_metadata(describe_boxes({box: (_file_name(rank),) for box, rank in first.items()}))


def _file_name(rank: int) -> str:
    return f"{rank}_0.distcp"
