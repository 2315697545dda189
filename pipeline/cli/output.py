"""What commands print and how they end: guarded streams, plain tables, a JSON object.

The purpose of a command determines whether its output matters. ``diff``, ``explain``, ``families``, ``fingerprint``,
``inspect``, ``plan`` and ``verify`` answer a question: if the answer cannot be written, they fail, as
``ls`` and ``cmp`` do. All other commands perform an action: their exit status says whether it was performed, even if
their output was lost.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from signal import SIGPIPE
from typing import Any, TextIO

import click

from paddle_reshard.pipeline.cli.ends import End, end_of
from paddle_reshard.pipeline.cli.log_file import log_file_closed, note_failure
from paddle_reshard.pipeline.cli.progress_events import are_wanted, print_ended
from paddle_reshard.pipeline.cli.terminal import printable, say
from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean

COMPLETION = "_PADDLE_RESHARD_COMPLETE"
"""Environment variable by which a shell requests completions."""
ANSWERS = ("diff", "explain", "families", "fingerprint", "inspect", "plan", "verify")
"""Commands that are run for their output."""
_HELP_INSTEAD: tuple[type[Exception], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)
"""What click raises, since 8.2, where no command is given: its message is the help."""
TROUBLE = {"diff": 2, "verify": 2}
"""Exit status of failures, for commands where 1 is a valid answer."""


# ---------------------------------------------------------------------------------------------------- streams


class Stream(io.TextIOBase):
    """A standard stream that records its first failure instead of raising it, and discards later output.

    Characters that it cannot encode are replaced, whatever Python has made of the locale.
    """

    def __init__(self, inner: TextIO | None) -> None:
        self.inner = inner or io.StringIO()
        self.failure = None if inner else OSError(errno.EBADF, "is closed")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream."""
        return self.inner.encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self.inner.isatty()

    def fileno(self) -> int:
        """File descriptor of the stream."""
        return self.inner.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write, unless the stream has failed."""
        self._try(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream has failed."""
        self._try(self.inner.flush)

    def _write(self, text: str) -> None:
        try:
            self.inner.write(text)
        except UnicodeEncodeError:
            self.inner.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _try(self, act: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            act()
        except OSError as error:
            self.failure = error
            # Discard its buffer, which the interpreter would otherwise flush again at exit.
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.inner.fileno())
                os.close(null)


@contextmanager
def guarded_streams() -> Iterator[tuple[Stream, Stream]]:
    """Replace stdout and stderr by a :class:`Stream` each, also if they are closed."""
    before = sys.stdout, sys.stderr
    guarded = Stream(sys.stdout), Stream(sys.stderr)
    try:
        sys.stdout, sys.stderr = guarded
        yield guarded
    finally:
        for stream in guarded:
            stream.flush()
        sys.stdout, sys.stderr = before


def occupy_standard_files() -> None:
    """Open the null device for closed standard files; otherwise the next opened file would take their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Choice(click.Choice):  # type: ignore[type-arg]  # generic only since click 8.2
    """A choice that suggests the closest value for a misspelled one."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The chosen value."""
        try:
            return super().convert(value, parameter, context)
        except click.BadParameter as error:
            meant = did_you_mean(str(value), self.choices)
            raise click.BadParameter(error.message.rstrip(".") + meant, context, parameter) from None


# ----------------------------------------------------------------------------------------------------- tables


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values: in two columns on a terminal, tab-separated elsewhere."""
    print_table((), facts)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> None:
    """Print each row on its own line, without truncation: in columns on a terminal, tab-separated elsewhere.

    Columns that contain only numbers are right-aligned. Sizes and counts are plain numbers where they are
    tab-separated, so that ``cut`` and ``awk`` can add them up.
    """
    on_terminal = sys.stdout.isatty()
    cells_of = str if on_terminal else _plain
    lines = [
        tuple(printable(cells_of(cell)) for cell in row) for row in ((headings, *rows) if headings else rows)
    ]
    if not lines:
        return
    if not on_terminal:
        for line in lines:
            click.echo("\t".join(line))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [
        all(_is_number(cell) for cell in column) for column in zip(*lines[bool(headings) :], strict=True)
    ]
    for row, line in enumerate(lines):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ]
        if headings and row == 0:
            click.secho("  ".join(cells).rstrip(), bold=True)
        elif headings:
            click.echo("  ".join(cells).rstrip())
        else:
            click.echo("  ".join((click.style(cells[0], bold=True), *cells[1:])).rstrip())


def _plain(cell: str | int) -> str:
    return f"{int(cell)}" if isinstance(cell, int) else cell


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


# ------------------------------------------------------------------------------------------------------- JSON


def print_object(command: str, facts: Mapping[str, Any]) -> None:
    """Print the JSON object of a command that succeeded."""
    print_answer(Answer(command, facts=facts))


def answer(data: Mapping[str, Any], as_json: bool, quiet: bool, show: Callable[[], None]) -> None:
    """Print a result as a JSON object, as text, or not at all."""
    if as_json:
        print_object(click.get_current_context().info_name or "", data)
    elif not quiet:
        show()


def print_error(command: str | None, end: End) -> None:
    """Print the JSON object of a command that failed."""
    print_answer(Answer(command, end.message, end.kind, end.retryable))


def print_answer(answer: Answer) -> None:
    """Print the JSON object of a command, whether it succeeded or not."""
    click.echo(json.dumps(answer.data()))


# ------------------------------------------------------------------------------------------------------- ends


REPLACED = {
    "delta": ("publish", "docs/deltas.md"),
    "apply": ("pull", "docs/deltas.md"),
    "simulate": ("plan SRC … --workers 1,8,64", "docs/guides/clusters.md"),
    "explain --source": ("explain SRC … --to …", "docs/proof.md"),
}
"""Command, or command and option, that there is not → what replaces it, and the page that describes that."""


class Commands(click.Group):
    """A group whose commands always end as described in this module."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; what was replaced is an error that names what replaces it."""
        for name in (args[0], *(f"{args[0]} {word.partition('=')[0]}" for word in args[1:])):
            if name in REPLACED:
                other, page = REPLACED[name]
                raise UsageError(f"there is no {name}; {other} replaces it: {page}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *further: Any, **extra: Any) -> Any:
        """Run a command and exit with its status."""
        if COMPLETION in os.environ:  # click writes completions as bytes
            return super().main(args, *further, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        command = next((word for word in arguments if not word.startswith("-")), None)
        as_json = "--json" in arguments
        events = are_wanted(arguments)
        end: End | None = None
        trouble = TROUBLE.get(command or "", 1)
        with log_file_closed(), guarded_streams() as (stdout, _):
            try:
                status = _status(super().main(arguments, *further, **{**extra, "standalone_mode": False}))
            except SystemExit as ended:
                status = _status(ended.code)
            except BaseException as error:  # noqa: BLE001 (every error is reported and becomes a status)
                end = end_of(error, trouble)
                status = end.status
                if as_json:
                    print_error(command, end)
                note_failure(end.shown)
                if not events:
                    _report(error, end)
            stdout.flush()
            if stdout.failure is not None:
                status = _status_without_output(command, stdout.failure, status, trouble)
            if events:
                print_ended(status, end)
        sys.exit(status)


def _status(code: object) -> int:
    return code if isinstance(code, int) else 0


def _report(error: BaseException, end: End) -> None:
    if isinstance(error, _HELP_INSTEAD):
        click.echo(end.message, err=True)
    elif isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        if context is not None:
            click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
        say(f"Error: {end.message}", err=True)
    else:
        say(f"paddle-reshard: {end.shown}", err=True)


def _status_without_output(command: str | None, failure: OSError, status: int, trouble: int) -> int:
    """The exit status of a command whose output was lost: its own, unless it was run for its output."""
    if command not in ANSWERS:
        return status
    if failure.errno == errno.EPIPE:  # the reader has closed the pipe, as head does
        return 128 + SIGPIPE
    say(f"paddle-reshard: stdout: {failure.strerror or failure}", err=True)
    return trouble
