"""Options of the command line: the declared options of a conversion, and those that only commands have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from paddle_reshard.pipeline.progress.events_as_json import EventLog
from paddle_reshard.pipeline.request.options import (
    CONVERSION_OPTIONS,
    Decides,
    Kind,
    RunOptions,
    declarations,
    flag_of,
    help_of,
    of_one_source,
)
from paddle_reshard.pipeline.request.read_options import DiffOptions, InspectOptions
from paddle_reshard.storage.documents.strict_json import parse_json

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
LOCATION = click.Path(readable=False)
"""A folder, file or URL, which need not exist; shells complete it as a path."""
VARIABLE = "PADDLE_RESHARD_{}"
"""Environment variable of an option that may be given so."""
WITHOUT_VARIABLES = object()
"""``obj`` of a context in which no option has the value of an environment variable."""


class FileOrObject(click.Path):
    """A small local JSON file, or the JSON object itself; its text then, as a job is given it again."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The path, or the text of an object."""
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                parse_json(value)
            except ValueError as error:
                self.fail(f"{value} is no JSON object: {error}", parameter, context)
            return value
        return super().convert(value, parameter, context)


class Words(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """Words that help lists and shells complete. The request, which also Python makes, knows whether a word is one."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The word as it is given."""
        return str(value)


class Option(click.Option):
    """An option that declares what it decides."""

    def __init__(self, *args: Any, decides: Decides, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.decides = decides

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """The value of its environment variable, if that counts."""
        return None if ctx.obj is WITHOUT_VARIABLES else super().resolve_envvar_value(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The option in a message about its value, with its environment variable if the value came from there."""
        if ctx is not None and ctx.get_parameter_source(self.name or "") is ParameterSource.COMMANDLINE:
            return click.Parameter.get_error_hint(self, ctx)
        return super().get_error_hint(ctx)


def decides(option: click.Option) -> Decides:
    """What an option decides; the outcome unless declared otherwise."""
    return option.decides if isinstance(option, Option) else Decides.OUTCOME


USUAL = (
    *("tensor", "element", "decay", "weights", "uniform"),
    *("to", "format", "sharding_strategy", "targets", "state", "dtype"),
    *("cards", "local", "nodes", "node", "save", "prove"),
    *("memory", "overwrite", "resume", "cluster", "workers", "report_path", "as_json", "quiet"),
)
"""Options that the help of a command with many lists first, in this order."""
SECTIONS: Mapping[Decides, str] = {
    Decides.OUTCOME: "What is read and made",
    Decides.LOCATION: "What is read and made",
    Decides.EXECUTION: "How it runs, and what it tells",
    Decides.ACCESS: "Access to stores",
}


class SectionedCommand(click.Command):
    """A command with so many options that ``-h`` shows only the usual ones.

    ``--help`` has them first, and the others by what they decide. Both begin with ``examples``.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...], **settings: Any) -> None:
        settings["context_settings"] = {"help_option_names": ["--help"]}
        super().__init__(*args, **settings)
        self.examples = examples

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with the two options for help at the end."""
        *own, all_options = super().get_params(ctx)
        settings: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
        usual = click.Option(["-h"], callback=_show_usual, help="Show the usual options.", **settings)
        return [*own, usual, all_options]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Of ``-to`` click would only say that there is no ``-t``."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {flag for option in self.get_params(ctx) for flag in option.opts}
            for one in given:
                if len(one) > 2 and f"-{one}" in known:
                    raise click.NoSuchOption(one, possibilities=[f"-{one}"], ctx=ctx) from error
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and examples."""
        if ctx.obj is USUAL:
            with formatter.indentation():
                formatter.write_paragraph()
                formatter.write_text(self.get_short_help_str(limit=formatter.width))
        else:
            super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}paddle-reshard {self.name} {example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the help."""
        *options, for_usual, for_all = [
            option for option in self.get_params(ctx) if isinstance(option, click.Option)
        ]
        usual = sorted(
            (o for o in options if o.name in USUAL), key=lambda option: USUAL.index(str(option.name))
        )
        sections = {"Usual options": [*usual, for_usual, for_all]}
        for option in options:
            if option.name not in USUAL and ctx.obj is not USUAL:
                sections.setdefault(SECTIONS[decides(option)], []).append(option)
        for title in dict.fromkeys(("Usual options", *SECTIONS.values())):
            records = [
                record for option in sections.get(title, ()) if (record := option.get_help_record(ctx))
            ]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if ctx.obj is USUAL:
            formatter.write_paragraph()
            formatter.write_text(f"All {len(options)} options: {ctx.command_path} --help")


def _show_usual(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        context.obj = USUAL
        click.echo(context.get_help(), color=context.color)
        context.exit()


Decorator = Callable[[Any], Any]
Declare = Callable[..., Decorator]
outcome_option: Declare = partial(click.option, cls=Option, decides=Decides.OUTCOME)
execution_option: Declare = partial(click.option, cls=Option, decides=Decides.EXECUTION)


def all_of(*decorators: Decorator) -> Decorator:
    """Several decorators as one; the help lists their options in this order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def declared(
    name: str, *further_flags: str, of: Any = None, help: str | None = None, choices: Sequence[str] = ()
) -> Decorator:
    """An option as it is declared in :mod:`~paddle_reshard.pipeline.request.options`, under its name there.

    ``of`` are the options of a function, a TypedDict, that may say something else of it; ``help`` is for a command
    without such a function, and ``choices`` for one that has not all of them.
    """
    option = declarations()[name]
    settings: dict[str, Any] = {"metavar": option.metavar, "help": help or help_of(name, of)}
    if option.default is not None:
        settings |= {"default": option.default, "show_default": True}
    if option.variable:
        settings |= {"envvar": VARIABLE.format(name.upper()), "show_envvar": True}
    if option.choices:
        settings["type"] = Words(tuple(choices or option.choices))
    elif option.kind is Kind.COUNT:
        settings["type"] = click.IntRange(1)
    elif option.kind is Kind.FLAG:
        settings["is_flag"] = True
    elif option.kind is Kind.LIST:
        settings["multiple"] = True
    elif option.kind is Kind.FILE:
        settings["type"] = FILE
    elif option.kind is Kind.ENTRIES:
        settings |= {
            "metavar": "FILE|JSON",
            "type": FileOrObject(exists=True, dir_okay=False, path_type=Path),
        }
    elif option.kind is Kind.OBJECT:
        settings |= {"metavar": "JSON|@FILE", "callback": lambda context, parameter, text: read_object(text)}
    elif option.decides is Decides.LOCATION:
        settings["type"] = LOCATION
    return click.option(flag_of(name), *further_flags, name, cls=Option, decides=option.decides, **settings)


def given(context: click.Context) -> dict[str, Any]:
    """The options given on the command line, as keyword arguments of the Python functions.

    Omitted options have the same defaults there, or the values of a session.
    """
    values = {
        name: value
        for name, value in context.params.items()
        if name in declarations() and context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if isinstance(values.get("layout"), str):
        values["layout"] = parse_json(values["layout"])
    return values


def read_object(text: str | None) -> dict[str, Any] | None:
    """Parse a JSON object, or ``@FILE`` with one. Messages never show the text, which may hold secrets."""
    if text is None:
        return None
    where = text[1:] if text.startswith("@") else "the text"
    try:
        value = parse_json(Path(where).read_text("utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise click.BadParameter(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        place = re.search(r"line \d+ column \d+", str(error))
        at = f" (it breaks at {place[0]})" if place else ""
        raise click.BadParameter(f"{where} is no JSON object{at}; give one, or @FILE with one") from error
    if not isinstance(value, dict):
        raise click.BadParameter(f"{where} is JSON, but no object: {{…}}")
    return value


def read_duration(text: str) -> float:
    """A duration like 90s, 30m, 2h or 1d in seconds; a bare number is in seconds.

    >>> read_duration("2h")
    7200.0

    Raises
    ------
    click.BadParameter
        If it is none.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration: give a number with s, m, h or d, as in 30m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


json_option = execution_option("--json", "as_json", is_flag=True, help="Print one JSON object.")
quiet_option = execution_option("--quiet", is_flag=True, help="Print only errors.")
inspect_options = all_of(
    *map(declared, ("rules", "config")),
    declared("convention", of=InspectOptions),
    declared("allow_links"),
    declared("storage_options"),
    json_option,
)
"""How commands that describe checkpoints access and interpret them, and answer."""
compare_options = all_of(
    *map(declared, ("rules", "config")),
    *(declared(name, of=DiffOptions) for name in ("convention", "allow_missing")),
    *map(declared, ("allow_links", "storage_options")),
)
"""How commands that compare two checkpoints access and interpret them."""


ON_STDERR = Path("-")
"""What ``--events`` names in place of a file."""


def _open_events(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Begin to append events to the file that the option names; those on stderr have begun already."""
    if path is not None and path != ON_STDERR and isinstance(context.obj, EventLog):
        try:
            context.obj.append_to(path)
        except OSError as error:
            raise click.BadParameter(f"{path}: {error.strerror or error}") from error
    return path


events_option = execution_option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE|-",
    is_eager=True,
    callback=_open_events,
    help="Append events to this file, one JSON object a line, whatever is printed. -: print them on stderr, in place "
    "of all else there.",
)
answer_options = all_of(
    json_option,
    quiet_option,
    events_option,
)
"""How a command prints its answer and its progress."""
report_option = execution_option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write the result as a page that a browser shows without a network.",
)

OF_ONE_SOURCE = of_one_source()
target_options = all_of(
    *map(declared, (name for name in CONVERSION_OPTIONS if name not in OF_ONE_SOURCE)),
    answer_options,
)
run_options = all_of(*map(declared, RunOptions.__annotations__))
