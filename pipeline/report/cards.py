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
    *("topology", "sharding", "bytes on a card", "parameter bytes", "master bytes", "moment bytes"),
    *("EMA bytes", "bytes to write"),
)
MOST_TILES = 8
"""Topologies that are drawn; the table has all."""
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
    return ReportData(
        command="plan",
        version=version.__version__,
        status=f"topologies for {plan.cards:,} cards",
        tone=PLAIN,
        sources=(without_secrets(plan.path),),
        targets=(),
        tiles=tuple(tiles),
        facts=(("from", plan.source), *(fact for fact in plan.notes() if fact[0] != "refused")),
        grids=tuple(map(_grid, plan.distinct()[:MOST_TILES])),
        tables=(
            Table("All topologies", HEADINGS, _rows(plan.alternatives), first=MOST_TILES),
            *_refused(plan),
        ),
    )


def _refused(plan: CardsPlan) -> tuple[Table, ...]:
    rows = tuple((str(refusal.topology), refusal.reason) for refusal in plan.refused)
    return (Table("Refused", ("topology", "why"), rows, first=MOST_TILES),) if rows else ()


def _rows(alternatives: Sequence[Alternative]) -> tuple[tuple[str | int | float, ...], ...]:
    return tuple(
        (
            _title(alternative),
            sharding_in_words(alternative.strategy),
            *(alternative.fullest.on_card, *alternative.fullest),
            alternative.written_bytes,
        )
        for alternative in alternatives
    )


def _title(alternative: Alternative) -> str:
    if alternative.not_resumed:
        return f"{alternative.topology} (does not resume at once)"
    return f"{alternative.topology}{' (nearest)' if alternative.nearest else ''}"


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
        commands=tuple(filter(None, (alternative.command, alternative.launch_line))),
    )
