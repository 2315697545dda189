"""What ``plan --cards`` says on a page: the ranks of every topology side by side, and what each needs."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds
from paddle_reshard.pipeline.core.topology import sharding_in_words
from paddle_reshard.pipeline.examine.cards import Alternative, CardsPlan
from paddle_reshard.pipeline.report.data import PLAIN, Grid, ReportData, Table, Tile
from paddle_reshard.storage.remote.folder import without_secrets

HEADINGS = (
    *(
        "topology",
        "sharding",
        "bytes on a card",
        "parameters",
        "master weights",
        "moments",
        "average in host",
    ),
    *("bytes to read", "bytes to write", "seconds", "resumes at once"),
)
MOST_DRAWN = 64
"""Ranks that are drawn one by one; of larger jobs a cell shows its number of ranks."""


def describe_cards(found: CardsPlan) -> ReportData:
    """The page of a list of topologies."""
    nearest = found.nearest
    tiles = [
        Tile("Cards", f"{found.cards:,}"),
        Tile("Topologies", f"{len(found.alternatives)}", f"refused: {len(found.refused)}"),
    ]
    if nearest is not None:
        on_card = readable_bytes(nearest.fullest.on_card)
        moved = f"{readable_bytes(nearest.read_bytes)} to read"
        tiles += [
            Tile("Nearest", str(nearest.topology), sharding_in_words(nearest.strategy)),
            Tile("On a card", on_card, "parameters and optimizer states"),
            Tile("To write", readable_bytes(nearest.written_bytes), moved),
        ]
    starts = [(str(one.topology), line) for one in found.alternatives for line in _lines(one)]
    return ReportData(
        command="plan",
        version=version.__version__,
        status=f"topologies for {found.cards:,} cards",
        tone=PLAIN,
        sources=(without_secrets(found.path),),
        targets=(),
        tiles=tuple(tiles),
        facts=(("from", found.source), *starts, *found.notes()),
        grids=tuple(map(_grid, found.alternatives)),
        tables=(Table("Topologies", HEADINGS, _rows(found.alternatives)),),
    )


def _lines(one: Alternative) -> list[str]:
    return [line for line in (one.command, one.launch_line) if line]


def _rows(alternatives: Sequence[Alternative]) -> tuple[tuple[str | int | float, ...], ...]:
    return tuple(
        (
            f"{one.topology}{' (nearest)' if one.nearest else ''}",
            sharding_in_words(one.strategy),
            *(one.fullest.on_card, *one.fullest),
            *(one.read_bytes, one.written_bytes, one.seconds),
            "no" if one.not_resumed else "yes",
        )
        for one in alternatives
    )


def _grid(one: Alternative) -> Grid:
    topology = one.topology
    return Grid(
        title=str(topology),
        detail=f"{readable_bytes(one.fullest.on_card)} on a card, {readable_seconds(one.seconds)} to move",
        rows=topology.pp,
        columns=topology.tp,
        each=topology.sharding * topology.dp,
        drawn=topology.world_size <= MOST_DRAWN,
        marked=one.nearest,
    )
