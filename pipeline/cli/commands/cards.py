"""What ``plan --cards`` prints: a line for each topology, how a job starts from it, and what to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle_reshard.pipeline.cli.terminal import print_facts, print_table
from paddle_reshard.pipeline.core.topology import sharding_in_words

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.cards import Alternative, CardsPlan

HEADINGS = (
    *("topology", "sharding", "GiB on a card", "parameters", "master weights", "moments", "EMA in host"),
    *("GiB to read", "GiB to write", "seconds", "resumes", "nearest"),
)
SHOWN_REFUSED = 12
"""Refused topologies that are listed; JSON has all."""
GIB = 1 << 30


def print_cards(found: CardsPlan) -> None:
    """Print the topologies, those that change least first."""
    print_table(HEADINGS, [_row(one) for one in found.alternatives])
    facts = []
    for one in found.alternatives:
        facts += [(str(one.topology), line) for line in (one.command, one.launch_line) if line]
    notes = found.notes()
    refused = [fact for fact in notes if fact[0] == "refused"]
    facts += [fact for fact in notes if fact[0] != "refused"] + refused[:SHOWN_REFUSED]
    if len(refused) > SHOWN_REFUSED:
        facts.append(("refused", f"… and {len(refused) - SHOWN_REFUSED} more, listed with --json"))
    print_facts(facts)


def _row(one: Alternative) -> tuple[str, ...]:
    held = one.fullest
    sizes = (held.on_card, *held, one.read_bytes, one.written_bytes)
    return (
        str(one.topology),
        sharding_in_words(one.strategy),
        *map(_gib, sizes),
        f"{one.seconds:.1f}",
        "no" if one.not_resumed else "yes",
        "nearest" if one.nearest else "",
    )


def _gib(size_bytes: int) -> str:
    """GiB with three significant digits at least, so that columns add up.

    >>> _gib(3 << 30), _gib(1 << 20)
    ('3.000', '0.001')
    """
    return f"{size_bytes / GIB:.3f}"
