"""The forms in which versions of Paddle write their files. ``docs/versions.md`` says by what each version is proven.

No file names the version of the library that wrote it. What there is: the protocol of a pickle (5 by default from
Paddle 3.4 on), the names of functions and classes in it, which attributes objects have, and in ``.metadata`` files of
Paddle's develop branch ``checkpoint_version`` and commit ids, which nothing interprets. So a version is never refused,
only what a file holds; what it says beyond the proven versions is named where it cannot change a value.

``tests/lab/upstream.py`` compares the code that the formats depend on between two versions of the libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class PaddleRelease:
    """How a version of Paddle writes files."""

    pickle_protocol: int
    """What ``paddle.save`` uses by default."""
    metadata: str
    """The version that introduced its classes of ``.metadata`` files, a key of
    :data:`~paddle_reshard.storage.files.dist_metadata.GENERATIONS`."""


PADDLE_RELEASES: Final[Mapping[str, PaddleRelease]] = {
    "3.0": PaddleRelease(4, "3.0"),
    "3.2": PaddleRelease(4, "3.2"),
    "3.3": PaddleRelease(4, "3.3"),
    "3.4": PaddleRelease(5, "3.3"),
}
"""Versions of Paddle for which targets are written; each stands for those after it up to the next."""
NEWEST_PADDLE: Final = max(PADDLE_RELEASES)
DEFAULT_PADDLE: Final = "3.3"
"""Also 3.4 loads its files, with a copy of each array."""


def paddle_release(version: str) -> PaddleRelease:
    """The form of a version that a target is asked for; it must be one of :data:`PADDLE_RELEASES`."""
    if version not in PADDLE_RELEASES:
        raise UsageError(
            f"--paddle-version {version}: files are written as by {', '.join(PADDLE_RELEASES)}; give the last of them "
            f"that is not newer than the Paddle that will read them{did_you_mean(version, PADDLE_RELEASES)}"
        )
    return PADDLE_RELEASES[version]
