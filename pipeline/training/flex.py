"""The average in the files of a FlexCheckpoint: ``ema_state/<rank>_0.distcp`` and a common ``0.metadata``.

A box that several ranks hold is written by the first of them; slices are written without their padding. The
assignment to ranks and the metadata follow from the boxes of all ranks, so every rank needs to know them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.names import EMA_STATE, METADATA
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata

METADATA_PATH = f"{EMA_STATE}/0{METADATA}"

Entry = tuple[str, str]
"""``MASTER_WEIGHTS`` with a parameter name, or ``""`` with a structured key."""
_T = TypeVar("_T")


def entries_of(master_weights: Mapping[str, _T], params: Mapping[str, _T]) -> dict[Entry, _T]:
    """What is known of each tensor of a rank: first its master weights, then its float32 parameters."""
    masters = {(MASTER_WEIGHTS, name): value for name, value in master_weights.items()}
    return masters | {("", key): value for key, value in params.items()}


@dataclass(frozen=True)
class RankBoxes:
    """The boxes of a rank."""

    master_weights: Mapping[str, Box] = field(default_factory=dict)
    """Boxes of master weights, by parameter name."""
    params: Mapping[str, Box] = field(default_factory=dict)
    """Boxes of float32 parameters, by structured key."""

    def entries(self) -> dict[Entry, Box]:
        """Every box that is not empty, in order."""
        boxes = entries_of(self.master_weights, self.params)
        return {entry: box for entry, box in boxes.items() if box.elements}


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

    def written(self) -> dict[Entry, Box]:
        """The boxes that this rank writes: those that no earlier rank holds."""
        earlier = {box for rank in self.boxes[: self.number] for box in rank.entries().values()}
        return {entry: box for entry, box in self.boxes[self.number].entries().items() if box not in earlier}

    def metadata(self) -> bytes:
        """The metadata of all ranks' boxes; the same on every rank."""
        first: dict[Box, int] = {}
        for number, rank in enumerate(self.boxes):
            for box in rank.entries().values():
                first.setdefault(box, number)
        return encode_dist_metadata(describe_boxes({box: (_file_name(rank),) for box, rank in first.items()}))


def _file_name(rank: int) -> str:
    return f"{rank}_0.distcp"
