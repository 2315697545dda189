"""The average in the files of a FlexCheckpoint: ``ema_state/<rank>_0.distcp`` and one ``0.metadata`` for all.

What several ranks hold is written by the first of them; slices are written without their padding. Which rank writes
what, and what the metadata say, follows from the boxes of all ranks, which every rank has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paddle_reshard.pipeline.layouts.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.layouts.flex.names import EMA_STATE, METADATA
from paddle_reshard.storage.formats.dist_metadata import encode_dist_metadata

METADATA_PATH = f"{EMA_STATE}/0{METADATA}"


@dataclass(frozen=True)
class RankBoxes:
    """What a rank holds."""

    master_weights: Mapping[str, Box] = field(default_factory=dict)
    """By the name of the parameter."""
    params: Mapping[str, Box] = field(default_factory=dict)
    """By structured key."""

    def entries(self) -> Iterator[tuple[bool, str, Box]]:
        """``(master weight?, name, box)`` of all that has values, in order."""
        for master, boxes in ((True, self.master_weights), (False, self.params)):
            yield from ((master, name, box) for name, box in boxes.items() if box.elements)


@dataclass(frozen=True)
class FlexRank:
    """A rank among all that save together."""

    number: int
    boxes: tuple[RankBoxes, ...]
    """Of every rank."""

    @property
    def path(self) -> str:
        """Of this rank's file in the checkpoint."""
        return f"{EMA_STATE}/{_file_name(self.number)}"

    def written(self) -> list[tuple[bool, str, Box]]:
        """What this rank writes: what no rank before it holds."""
        others = {box for rank in self.boxes[: self.number] for _, _, box in rank.entries()}
        return [entry for entry in self.boxes[self.number].entries() if entry[2] not in others]

    def metadata(self) -> bytes:
        """The file that says where everything lies; the same on every rank."""
        first: dict[Box, int] = {}
        for number, rank in enumerate(self.boxes):
            for _, _, box in rank.entries():
                first.setdefault(box, number)
        return encode_dist_metadata(describe_boxes({box: (_file_name(rank),) for box, rank in first.items()}))


def _file_name(rank: int) -> str:
    return f"{rank}_0.distcp"
