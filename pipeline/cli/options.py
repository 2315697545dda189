"""Options that several commands have, and what an option of ``convert`` decides.

Every option says that where it is declared, and the id of a conversion follows. Two conversions with the same id come
out the same, byte for byte, or are refused for the same reason; so one of them is enough. What only decides how one is
made, or what is told of it, is not part of the id.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import click

from paddle_reshard.pipeline.convert.choices import REPLICAS
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.schemes import PLAIN_SCHEMES


class Decides(Enum):
    """What an option decides."""

    OUTCOME = "what comes out, or whether that is refused"
    PLACE = "the same, by naming a file or URL that stays where it is"
    CONDUCT = "where, how fast and with what means a conversion runs, and what it tells"
    ACCESS = "how stores are reached; holds secrets, which belong in no id and no command line"


class Option(click.Option):
    """An option that says what it decides."""

    def __init__(self, *args: Any, decides: Decides, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.decides = decides


def decides(option: click.Option) -> Decides:
    """What an option decides: the outcome, where it does not say."""
    return option.decides if isinstance(option, Option) else Decides.OUTCOME


Declare = Callable[..., Callable[[Any], Any]]
outcome_option: Declare = partial(click.option, cls=Option, decides=Decides.OUTCOME)
place_option: Declare = partial(click.option, cls=Option, decides=Decides.PLACE)
conduct_option: Declare = partial(click.option, cls=Option, decides=Decides.CONDUCT)
access_option: Declare = partial(click.option, cls=Option, decides=Decides.ACCESS)

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def all_of(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one; the help lists their options in this order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


json_option = conduct_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
rules_option = outcome_option(
    "--rules", type=FILE, help="Rule table of the model family, instead of those that come with the tool."
)
config_option = outcome_option(
    "--config", type=FILE, help="The model's config.json, for a checkpoint that has none."
)
missing_option = outcome_option(
    "--allow-missing",
    multiple=True,
    metavar="PATTERN",
    help="Keys that no file of a checkpoint holds and that may be missing in a target too; * stands for anything.",
)
replicas_option = outcome_option(
    "--replicas",
    type=click.Choice(REPLICAS),
    default="compare",
    show_default=True,
    help="Tensors that several ranks hold: compare all copies, or look at the first.",
)
memory_option = conduct_option(
    "--memory", default=DEFAULT_MEMORY, show_default=True, help="Memory budget of each worker."
)


def _storage_option(text: str, *names: str) -> Callable[[Any], Any]:
    return access_option(
        *names,
        metavar="JSON|@FILE",
        callback=lambda context, parameter, value: _storage_options(value),
        help=text,
    )


_REACH = (
    "What fsspec needs to reach the store: key, secret, endpoint_url, profile, … Never printed or stored; "
    "@FILE keeps it out of the list of processes."
)
allow_scheme_option = conduct_option(
    "--allow-scheme",
    multiple=True,
    metavar="NAME",
    help=f"Open URLs of this scheme too, beside the plain ones: {', '.join(sorted(PLAIN_SCHEMES))}.",
)
storage_option = all_of(_storage_option(_REACH, "--storage-options"), allow_scheme_option)
allow_links_option = outcome_option(
    "--allow-links", is_flag=True, help="Follow links in the source that lead out of its folder."
)
source_storage_option = all_of(
    allow_links_option,
    _storage_option(_REACH, "--storage-options", "--source-storage-options", "storage_options"),
    allow_scheme_option,
)
target_storage_option = all_of(
    _storage_option(_REACH, "--storage-options", "--target-storage-options", "storage_options"),
    allow_scheme_option,
)
both_storage_options = all_of(
    allow_links_option,
    storage_option,
    _storage_option("The same for what is read, in place of --storage-options.", "--source-storage-options"),
    _storage_option(
        "The same for what is written, in place of --storage-options.", "--target-storage-options"
    ),
)
quiet_option = conduct_option("--quiet", is_flag=True, help="Print nothing but errors.")


def _storage_options(text: str | None) -> dict[str, Any] | None:
    """A JSON object, or the one in a file; the text itself never appears in a message, it holds secrets."""
    if text is None:
        return None
    try:
        value = parse_json(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise click.BadParameter("neither a JSON object nor @FILE with one") from error
    if not isinstance(value, dict):
        raise click.BadParameter("a JSON object is expected")
    return value
