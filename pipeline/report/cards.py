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
    *("topology", "sharding", "bytes on a card", "parameters", "master weights", "moments"),
    *("average in host", "bytes to read", "bytes to write", "seconds", "resumes at once"),
)
MOST_DRAWN = 64
"""Ranks that are drawn one by one; of larger jobs a cell shows its number of ranks."""


def describe_cards(plan: CardsPlan) -> ReportData:
    """The page of a list of topologies."""
    nearest = plan.nearest
    tiles = [
        Tile("Cards", f"{plan.cards:,}"),
        Tile("Topologies", f"{len(plan.alternatives)}", f"refused: {len(plan.refused)}"),
    ]
    if nearest is not None:
        on_card = readable_bytes(nearest.fullest.on_card)
        moved = f"{readable_bytes(nearest.read_bytes)} to read"
        tiles += [
            Tile("Nearest", str(nearest.topology), sharding_in_words(nearest.strategy)),
            Tile("On a card", on_card, "parameters and optimizer states"),
            Tile("To write", readable_bytes(nearest.written_bytes), moved),
        ]
    starts = [
        (str(alternative.topology), line) for alternative in plan.alternatives for line in _lines(alternative)
    ]
    return ReportData(
        command="plan",
        version=version.__version__,
        status=f"topologies for {plan.cards:,} cards",
        tone=PLAIN,
        sources=(without_secrets(plan.path),),
        targets=(),
        tiles=tuple(tiles),
        facts=(("from", plan.source), *starts, *plan.notes()),
        grids=tuple(map(_grid, plan.alternatives)),
        tables=(Table("Topologies", HEADINGS, _rows(plan.alternatives)),),
    )


def _lines(alternative: Alternative) -> list[str]:
    return [line for line in (alternative.command, alternative.launch_line) if line]


def _rows(alternatives: Sequence[Alternative]) -> tuple[tuple[str | int | float, ...], ...]:
    return tuple(
        (
            f"{alternative.topology}{' (nearest)' if alternative.nearest else ''}",
            sharding_in_words(alternative.strategy),
            *(alternative.fullest.on_card, *alternative.fullest),
            *(alternative.read_bytes, alternative.written_bytes, alternative.seconds),
            "no" if alternative.not_resumed else "yes",
        )
        for alternative in alternatives
    )


def _grid(alternative: Alternative) -> Grid:
    topology, seconds = alternative.topology, readable_seconds(alternative.seconds)
    return Grid(
        title=str(topology),
        detail=f"{readable_bytes(alternative.fullest.on_card)} on a card, {seconds} to move",
        rows=topology.pp,
        columns=topology.tp,
        each=topology.sharding * topology.dp,
        drawn=topology.world_size <= MOST_DRAWN,
        marked=alternative.nearest,
    )
