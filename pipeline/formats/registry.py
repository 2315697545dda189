"""The table of formats. To add a format, add a folder and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from paddle_reshard.pipeline.checkpoint.format import FormatOption
from paddle_reshard.pipeline.formats.flex import format as flex
from paddle_reshard.pipeline.formats.huggingface import format as huggingface
from paddle_reshard.pipeline.formats.hybrid import format as hybrid
from paddle_reshard.pipeline.formats.unified import format as unified

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Donor
    from paddle_reshard.pipeline.checkpoint.format import Format
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles

_ALL: Final[tuple[Format, ...]] = (*hybrid.FORMATS, huggingface.FORMAT, unified.FORMAT, *flex.FORMATS)
"""From general to specific: the last format that recognises the files is used."""
FORMATS: Final[Mapping[str, Format]] = {format.name: format for format in _ALL}
"""Name → format."""
FormatName = Literal["hybrid", "hybrid-plain", "huggingface", "unified", "flex", "auto-parallel"]
"""The names in the table, for type checkers."""
DEFAULT: Final = _ALL[0].name


def names_of(formats: Iterable[Format], last: str = "and") -> str:
    """Names of formats as a list in a sentence.

    >>> names_of([FORMATS["flex"], FORMATS["unified"], FORMATS["hybrid"]], "or")
    'flex, unified or hybrid'
    """
    names = [format.name for format in formats]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def help_of_formats() -> str:
    """Descriptions of all formats, for the command line's help."""
    return "; ".join(f"{format.name}: {format.help}" for format in _ALL) + "."


def option_of_formats(name: str) -> FormatOption:
    """An option, with the help of all formats that have it.

    >>> option_of_formats("dtype").help
    'huggingface: output dtype of floating-point tensors (except those that the model keeps in float32), rounded once, \
from the master weight if there is one. Default: as trained, bit for bit.'
    >>> option_of_formats("max_shard_size").help.partition(" Default: ")[2]
    '5GB (huggingface), no limit (unified), 4GiB (flex, auto-parallel).'
    """
    understood: dict[FormatOption, list[Format]] = {}
    for format in _ALL:
        if name in format.options:
            understood.setdefault(format.options[name]._replace(default=""), []).append(format)
    help = " ".join(_help_of(name, option, formats) for option, formats in understood.items())
    return FormatOption(help, tuple(dict.fromkeys(c for option in understood for c in option.choices)))


def _help_of(name: str, option: FormatOption, formats: Iterable[Format]) -> str:
    """What an option means for these formats, and the default of each."""
    defaults: dict[str, list[str]] = {}
    for format in formats:
        defaults.setdefault(format.options[name].default, []).append(format.name)
    said = ", ".join(f"{default} ({', '.join(names)})" for default, names in defaults.items() if default)
    return f"{', '.join(format.name for format in formats)}: {option.help}{said and f' Default: {said}.'}"


def average_target(format: Format) -> str:
    """Format and options of a target that exports the moving average.

    >>> average_target(formats_for_average()[1])
    'huggingface:state=ema'
    """
    options = ",".join(f"{name}={value}" for name, value in format.average_options.items())
    return f"{format.name}:{options}"


def formats_for_average() -> tuple[str, Format]:
    """Names of formats that store the average along with the weights, and a format that exports it as a model."""
    beside = [format for format in _ALL if not format.model_only and "ema" not in format.cannot_hold]
    return names_of(beside, "or"), next(format for format in _ALL if format.average_options)


def formats_to_complete() -> tuple[Format, ...]:
    """Formats whose targets ``--like`` completes."""
    return tuple(format for format in _ALL if format.read_donor)


def read_donor(files: SourceFiles) -> Donor:
    """The model that completes targets, which has their format."""
    return next(format.read_donor(files) for format in _ALL if format.read_donor)


def rank_of_file(path: str) -> Mapping[str, int] | None:
    """Axis → coordinate of the rank that writes a file; ``None`` if no format writes a file of this name per rank.

    >>> rank_of_file("model_state.tp01_pp00.pdparams"), rank_of_file("model_state/0_0.distcp")
    ({'tp': 1, 'pp': 0}, None)
    """
    ranks = (format.rank_of(path) for format in _ALL)
    return next((rank for rank in ranks if rank is not None), None)


def format_of(files: SourceFiles) -> Format:
    """The format of a folder's files; the first format if none recognises them."""
    return next(format for format in reversed(_ALL) if format.recognises(files))
