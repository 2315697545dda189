"""What an option of ``convert`` decides. Every option says so where it is declared, and the id of a conversion follows.

Two conversions with the same id come out the same, byte for byte, or are refused for the same reason; so one of them is
enough. What only decides how one is made, or what is told of it, is not part of the id.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import click


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
