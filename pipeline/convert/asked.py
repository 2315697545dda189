"""What was asked of a conversion, as its manifest states it.

A statement names options as Python does, so that the call or the command can be made of it. It holds no options of
stores and no credentials, and does not say where the target is, so that a conversion has the same manifest wherever it
writes. Locations in it are shown and compared, but never opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from paddle_reshard.pipeline.convert.options import (
    ConversionOptions,
    Decides,
    Targets,
)
from paddle_reshard.pipeline.convert.resuming import (
    KEPT,
    OPTIONS,
    request_record,
)
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.locate import absolute, is_local

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.plan import ConversionPlan

LOCATIONS = tuple(name for name in KEPT if OPTIONS[name].decides is Decides.LOCATION)
SOURCES = "sources"
"""Entry of the request of an average; ``decay``, ``weights`` or ``uniform`` is beside it."""
NOT_STATED = ("overwrite",)
"""It says what may be at the target's location, not what is made; a session keeps it all the same."""


def stated_request(target: Targets, options: ConversionOptions) -> dict[str, Any]:
    """The options of a conversion, as its manifest states them; defaults are omitted, except ``memory``.

    Raises
    ------
    UsageError
        If a given file cannot be read.
    """
    record = request_record(target, options)
    given = {name: shown_location(cast(PathLike, options.get(name))) for name in LOCATIONS if name in record}
    return {**record, **given}


def stated_average(
    sources: Sequence[PathLike], target: Targets, options: ConversionOptions, how: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for an average; ``how`` has ``decay``, ``weights`` or ``uniform``."""
    weighed = {name: list(value) if isinstance(value, Sequence) else value for name, value in how.items()}
    given = {name: value for name, value in weighed.items() if value}
    return {
        SOURCES: [shown_location(source) for source in sources],
        **given,
        **stated_request(target, options),
    }


def session_record(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The record of a session: of locations it only notes that they were given. ``None`` for averages."""
    if asked is None or SOURCES in asked:
        return None
    return {name: True if name in LOCATIONS else value for name, value in asked.items()}


def shown_location(location: PathLike) -> str:
    """A location as a manifest may show it: absolute, and without user, password and query."""
    text = os.fspath(location)
    if is_local(text):
        return absolute(text)
    from paddle_reshard.storage.remote.folder import without_secrets

    return without_secrets(text)


def statement_of(conversion: ConversionPlan) -> dict[str, Any]:
    """What is made of what, by which version."""
    source, store, asked = conversion.source, conversion.store, conversion.asked
    stated = {} if asked is None else {name: value for name, value in asked.items() if name not in NOT_STATED}
    return {
        "version": version.__version__,
        "plan_id": conversion.plan.plan_id,
        **({"request": stated} if stated else {}),
        "limits": asdict(conversion.limits),
        "source": {
            "location": absolute(store.location),
            "format": source.format,
            "topology": None if source.topology is None else str(source.topology),
            "sharding_strategy": source.strategy,
            "files": store.sizes(),
            "versions": store.versions(),
        },
    }
