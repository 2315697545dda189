"""The command ``families``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from paddle_reshard.pipeline.cli.command import answer
from paddle_reshard.pipeline.cli.options import json_option
from paddle_reshard.pipeline.cli.terminal import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddle_reshard.pipeline.model.rules.families import Family

HEADINGS: Final = (
    "family",
    "library",
    "axes",
    "Hugging Face",
    "MTP",
    "LoRA",
    "files proven by",
    "Hugging Face proven by",
)


@click.command()
@json_option
def families(**_: Any) -> None:
    """List the supported model families.

    With what can be converted of each, and how it was tested.
    """
    from paddle_reshard.pipeline.model.rules.families import families as known
    from paddle_reshard.pipeline.model.rules.tables import shipped_tables

    found = known(shipped_tables())
    data = {"families": [asdict(family) for family in found]}
    answer(data, lambda: print_table(HEADINGS, rows(found)))


def rows(found: Sequence[Family]) -> list[tuple[str, ...]]:
    """The cells under ``HEADINGS``, one line for each family."""
    return [
        (
            family.name,
            family.library,
            " ".join(family.axes),
            family.huggingface,
            "yes" if family.multi_token_prediction else "no",
            "yes" if family.lora else "no",
            family.proven.files,
            family.proven.huggingface or "no",
        )
        for family in found
    ]
