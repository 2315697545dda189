"""The command ``clean``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, declared, given, json_option, quiet_option
from paddle_reshard.pipeline.cli.terminal import say
from paddle_reshard.pipeline.core.errors import TargetError


@click.command()
@click.argument("target", type=LOCATION, metavar="DST")
@declared("storage_options")
@json_option
@quiet_option
@click.pass_context
def clean(context: click.Context, /, target: str, **_: Any) -> None:
    """Remove an unfinished conversion. Fails if it is running."""
    with running("looking for an unfinished conversion"):
        removed = paddle_reshard.clean(target, **given(context))
        if not removed:
            _check_is_there(target, given(context))

    def show() -> None:
        for line in removed or (f"{target}: no unfinished conversion",):
            say(f"removed {line}" if removed else line)

    answer({"removed": list(removed)}, show)


def _check_is_there(target: str, options: Mapping[str, Any]) -> None:
    """Refuse a location without a conversion and without anything else, which is most likely misspelt."""
    from paddle_reshard.storage.listing import open_root
    from paddle_reshard.storage.locate import target_access

    access = target_access(options)
    if not open_root(target, access.options).is_there():
        raise TargetError(f"{target}: there is neither an unfinished conversion nor anything else")
