"""What ``plan --cards`` prints: a line for each topology, and how a job starts from the nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle_reshard.pipeline.cli.terminal import on_terminal, print_facts, print_table, say
from paddle_reshard.pipeline.core.shown import Bytes, ToCopy
from paddle_reshard.pipeline.core.topology import sharding_in_words

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.cards import Alternative, CardsPlan

HEADINGS = (
    *("topology", "sharding", "GiB on a card", "parameters", "master weights", "moments", "EMA in host"),
    *("GiB to read", "GiB to write", "seconds", "resumes", "nearest"),
)
HEADINGS_IN_SHORT = ("topology", "sharding", "on a card", "to write", "lost")
SHOWN = 10
"""Topologies that a screen has room for, with what the nearest needs; ``--all`` shows the others."""
SHOWN_REFUSED = 12
"""Refused topologies that are listed; JSON has all."""
GIB = 1 << 30


def print_cards(found: CardsPlan, all: bool) -> None:
    """Print the topologies, those that change least first: all there is for programs, a screen for people."""
    if on_terminal():
        _print_screen(found, all)
    else:
        print_table(HEADINGS, [_row(alternative) for alternative in found.alternatives])
        print_facts(_every_line(found))


def _print_screen(found: CardsPlan, all: bool) -> None:
    shown = found.alternatives if all else found.distinct()[:SHOWN]
    nearest = found.nearest
    bold = [number for number, alternative in enumerate(shown) if alternative is nearest]
    print_table(HEADINGS_IN_SHORT, [_row_in_short(alternative) for alternative in shown], bold)
    hidden = len(found.alternatives) - len(shown)
    if hidden or (found.refused and not all):
        counts = {"more": hidden, "refused": len(found.refused)}
        say(f"and {', '.join(f'{count} {what}' for what, count in counts.items() if count)}: --all")
    print_facts([*found.advice(), *(_notes(found) if all else ())])


def _every_line(found: CardsPlan) -> list[tuple[str, str]]:
    facts = []
    for alternative in found.alternatives:
        lines = (alternative.command, alternative.launch_line)
        facts += [(str(alternative.topology), ToCopy(line)) for line in lines if line]
    return facts + _notes(found)


def _notes(found: CardsPlan) -> list[tuple[str, str]]:
    notes = found.notes()
    refused = [fact for fact in notes if fact[0] == "refused"]
    facts = [fact for fact in notes if fact[0] != "refused"] + refused[:SHOWN_REFUSED]
    if len(refused) > SHOWN_REFUSED:
        facts.append(("refused", f"… and {len(refused) - SHOWN_REFUSED} more, listed with --json"))
    return facts


def _row_in_short(alternative: Alternative) -> tuple[str, ...]:
    from paddle_reshard.pipeline.core.tensors import in_words

    lost = in_words(alternative.states_lost) or "the average" * alternative.ignores_average
    return (
        str(alternative.topology),
        sharding_in_words(alternative.strategy),
        str(Bytes(alternative.fullest.on_card)),
        str(Bytes(alternative.written_bytes)) if alternative.written_bytes else "nothing",
        "does not resume" if alternative.not_resumed else lost or "nothing",
    )


def _row(alternative: Alternative) -> tuple[str, ...]:
    held = alternative.fullest
    sizes = (held.on_card, *held, alternative.read_bytes, alternative.written_bytes)
    return (
        str(alternative.topology),
        sharding_in_words(alternative.strategy),
        *map(_gib, sizes),
        f"{alternative.seconds:.1f}",
        "no" if alternative.not_resumed else "yes",
        "nearest" if alternative.nearest else "",
    )


def _gib(size_bytes: int) -> str:
    """GiB with three significant digits at least, so that columns add up.

    >>> _gib(3 << 30), _gib(1 << 20)
    ('3.000', '0.001')
    """
    return f"{size_bytes / GIB:.3f}"
