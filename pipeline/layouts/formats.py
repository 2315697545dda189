"""All formats. To add one: a folder beside this file, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from paddle_reshard.pipeline.layouts.flex.format import AUTO_PARALLEL, FLEX
from paddle_reshard.pipeline.layouts.huggingface.format import HUGGINGFACE
from paddle_reshard.pipeline.layouts.hybrid.format import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.layouts.unified.format import UNIFIED

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.format import Format
    from paddle_reshard.pipeline.layouts.reading import SourceFiles

_ALL: Final[tuple[Format, ...]] = (HYBRID, HYBRID_PLAIN, HUGGINGFACE, UNIFIED, FLEX, AUTO_PARALLEL)
"""From the general to the particular: files are of the last that recognises them."""
FORMATS: Final[Mapping[str, Format]] = {format.name: format for format in _ALL}
"""Name → format."""


def format_of(files: SourceFiles) -> Format:
    """The format of a folder's files; the first one's if they are of none."""
    return next(format for format in reversed(_ALL) if format.recognises(files))
