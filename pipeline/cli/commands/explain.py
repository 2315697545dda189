"""The command ``explain``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    OF_ONE_SOURCE,
    SectionedCommand,
    all_of,
    declared,
    given,
    target_options,
)
from paddle_reshard.pipeline.cli.terminal import print_facts, print_table, say
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.shown import ToCopy
from paddle_reshard.pipeline.request.options import flag_of

if TYPE_CHECKING:
    from paddle_reshard.pipeline.examine.explain import Explanation, Origin

HEADINGS = ("bytes", "what", "box", "from", "bytes", "of rank", "how")


@click.command(
    cls=SectionedCommand,
    examples=(
        "checkpoint-1000 model.norm.weight --to tp=2",
        "checkpoint-1000 model.norm.weight --to tp=2 --element 20",
    ),
)
@click.argument("source", type=LOCATION, metavar="SRC")
@click.argument("key", metavar="KEY")
@click.option(
    "--element",
    metavar="INDEX",
    help="Explain one element of the tensor, such as 20,18, and print commands that show its bytes on both sides.",
)
@all_of(*map(declared, OF_ONE_SOURCE), target_options)
@click.pass_context
def explain(
    context: click.Context,
    /,
    source: str,
    key: str,
    element: str | None,
    **_: Any,
) -> None:
    """Explain where the values of a tensor come from. Nothing is converted.

    For every box of the tensor KEY, in every state: its file and bytes in the target, the file, bytes and rank that it
    comes from, and what happens on the way. Give SRC and the options of the conversion, such as --to or --format.
    """
    chosen = None if element is None else _index(element)
    with running("reading headers and planning") as run:
        planned = paddle_reshard.plan(source, observe=run, **given(context))
        found = paddle_reshard.explain(planned, key, element=chosen)
    answer(found, lambda: _show(found, chosen is not None))


def _index(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"{flag_of('element')} {text!r}: not an index like 20,18") from error


def _show(found: Explanation, by_hand: bool) -> None:
    print_facts(found.facts())
    click.echo()
    print_table(HEADINGS, [*map(_row, found.origins)])
    if not by_hand:
        return
    click.echo()
    for line in dict.fromkeys(line for origin in found.origins for line in _commands(found, origin)):
        say(ToCopy(line))


def _row(origin: Origin) -> tuple[str, ...]:
    return (
        f"{origin.target_file} {_bytes(*origin.target_range)}",
        f"{origin.key} ({origin.state})",
        _box(origin),
        origin.source_file,
        _bytes(*origin.source_range),
        ", ".join(f"{axis} {rank}" for axis, rank in origin.rank.items()),
        origin.how or ("copied by the storage" if origin.copied else "as it is"),
    )


def _bytes(start: int, stop: int) -> str:
    return f"{start}…{stop - 1}"


def _box(origin: Origin) -> str:
    """A box as Python indexes it."""
    indices = (
        str(first) if extent == 1 else f"{first}:{first + extent}"
        for first, extent in zip(origin.offset, origin.extents, strict=True)
    )
    return f"[{', '.join(indices)}]"


def _commands(found: Explanation, origin: Origin) -> Iterator[str]:
    """Commands that show the bytes of an element in the source, and in a target called DST."""
    for folder, file, (start, stop) in (
        (found.source, origin.source_file, origin.source_range),
        ("DST", origin.target_file, origin.target_range),
    ):
        path = f"{folder.rstrip('/')}/{file}"
        yield shlex.join(["od", "-A", "d", "-t", "x1", "-j", str(start), "-N", str(stop - start), path])
