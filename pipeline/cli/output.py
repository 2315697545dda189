"""What commands print, and how they end: streams that decide about nothing, plain tables, one JSON object.

What a command is *for* decides whether its output matters. ``inspect``, ``plan``, ``simulate`` and ``verify`` answer a
question: an answer that cannot be written is trouble, as it is for ``ls`` and ``cmp``. All others do something: their
exit status tells whether it was done, whatever became of their output.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGPIPE
from typing import Any, TextIO

import click

from paddle_reshard.pipeline.cli.signals import exit_status, sentence
from paddle_reshard.pipeline.cli.terminal import printable, say
from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.core.suggest import did_you_mean

COMPLETION = "_PADDLE_RESHARD_COMPLETE"
"""The variable by which a shell asks for completions."""
ANSWERS = ("inspect", "plan", "simulate", "verify")
"""Commands that are run for what they print."""
TROUBLE = {"verify": 2}
"""Exit status of what is no answer, where 1 is one."""


# ---------------------------------------------------------------------------------------------------- streams


class Stream(io.TextIOBase):
    """A standard stream whose failure is kept instead of raised; what follows one is thrown away."""

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner
        self.failure: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self.inner.encoding

    def isatty(self) -> bool:
        """Whether somebody looks at it."""
        return self.inner.isatty()

    def fileno(self) -> int:
        """The number of its file."""
        return self.inner.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write if that is still possible."""
        self._try(lambda: self.inner.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what waits, if that is still possible."""
        self._try(self.inner.flush)

    def _try(self, act: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            act()
        except OSError as error:
            self.failure = error
            # What waits in its buffer goes nowhere: the interpreter would try once more when it ends.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.inner.fileno())
                os.close(nowhere)


@contextmanager
def guarded_streams() -> Iterator[tuple[Stream | None, Stream | None]]:
    """stdout and stderr as :class:`Stream`; what they cannot encode is replaced. ``None``: they are closed."""
    before = sys.stdout, sys.stderr
    guarded = [None if stream is None else Stream(_replacing(stream)) for stream in before]
    try:
        sys.stdout, sys.stderr = guarded
        yield guarded[0], guarded[1]
    finally:
        for stream in guarded:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _replacing(stream: TextIO) -> TextIO:
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")
    return stream


def occupy_standard_files() -> None:
    """Give standard files that are closed to nobody: else the next file that is opened becomes one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Choice(click.Choice[str]):
    """A choice that asks whether another word was meant."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The chosen word."""
        try:
            return super().convert(value, parameter, context)
        except click.BadParameter as error:
            meant = did_you_mean(str(value), self.choices)
            raise click.BadParameter(error.message.rstrip(".") + meant, context, parameter) from None


# ----------------------------------------------------------------------------------------------------- tables


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and what they are: in two columns on a terminal, with a tab between them elsewhere."""
    print_table((), facts)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows, each on one line of its own, nothing cut: columns on a terminal, tabs elsewhere.

    Numbers (their columns hold nothing else) stand to the right of their column.
    """
    lines = [tuple(map(printable, row)) for row in ((headings, *rows) if headings else rows)]
    if not lines:
        return
    if not sys.stdout or not sys.stdout.isatty():
        for line in lines:
            click.echo("\t".join(line))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [
        all(_is_number(cell) for cell in column) for column in zip(*lines[bool(headings) :], strict=True)
    ]
    for place, line in enumerate(lines):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ]
        if headings and place == 0:
            click.secho("  ".join(cells).rstrip(), bold=True)
        elif headings:
            click.echo("  ".join(cells).rstrip())
        else:
            click.echo("  ".join((click.style(cells[0], bold=True), *cells[1:])).rstrip())


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


# ------------------------------------------------------------------------------------------------------- JSON


def print_object(command: str, facts: Mapping[str, Any]) -> None:
    """The one JSON object of a command that came to its end."""
    print_answer(Answer(command, facts=facts))


def answer(data: Mapping[str, Any], as_json: bool, quiet: bool, show: Callable[[], None]) -> None:
    """Print a result as one JSON object, for people, or not at all."""
    if as_json:
        print_object(click.get_current_context().info_name or "", data)
    elif not quiet:
        show()


def print_error(command: str | None, end: End) -> None:
    """The one JSON object of a command that did not."""
    print_answer(Answer(command, end.message, end.kind, end.retryable))


def print_answer(answer: Answer) -> None:
    """The one JSON object of a command, however it ended."""
    click.echo(json.dumps(answer.data()))


# ------------------------------------------------------------------------------------------------------- ends


@dataclass(frozen=True, slots=True)
class End:
    """How a command ended that did not do what it should."""

    status: int
    message: str
    kind: str
    retryable: bool = False


def end_of(error: BaseException, trouble: int) -> End:
    """What an error means to a user; ``trouble`` is the exit status of what is no answer."""
    kind = type(error).__name__
    if isinstance(error, click.ClickException):
        return End(error.exit_code, error.format_message(), "UsageError")
    if isinstance(error, ReshardError):
        return End(max(trouble, error.exit_status), str(error), kind, error.retryable)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return End(exit_status(error), sentence(error), "Interrupted", True)
    if isinstance(error, MemoryError):
        return End(trouble, f"out of memory: {error}" if str(error) else "out of memory", kind, True)
    if isinstance(error, OSError):
        return End(trouble, f"{kind}: {error}", kind, isinstance(error, (ConnectionError, TimeoutError)))
    return End(trouble, f"{kind}: {error} ({_places(error)}); this is a defect of paddle-reshard", "Defect")


def _places(error: BaseException) -> str:
    """Where an error comes from, in short: the innermost lines."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


class Commands(click.Group):
    """Commands that end as this module says, whatever happens."""

    def main(self, args: Sequence[str] | None = None, *further: Any, **extra: Any) -> Any:
        """Run a command, and end the process with its status."""
        if COMPLETION in os.environ:  # a shell asks, and click answers it in bytes
            return super().main(args, *further, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        command = next((word for word in arguments if not word.startswith("-")), None)
        as_json = "--json" in arguments
        trouble = TROUBLE.get(command or "", 1)
        with guarded_streams() as (stdout, _):
            try:
                status = _status(super().main(arguments, *further, **{**extra, "standalone_mode": False}))
            except SystemExit as ended:
                status = _status(ended.code)
            except BaseException as error:  # noqa: BLE001 (the end of everything: told, and turned into a status)
                end = end_of(error, trouble)
                status = end.status
                if as_json:
                    print_error(command, end)
                _tell(error, end)
            if stdout is not None:
                stdout.flush()
            failure = OSError(errno.EBADF, "is closed") if stdout is None else stdout.failure
            if failure is not None:
                status = _unheard(command, failure, status, trouble)
        sys.exit(status)


def _status(code: object) -> int:
    return code if isinstance(code, int) else 0


def _tell(error: BaseException, end: End) -> None:
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        if context is not None:
            click.echo(f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n", err=True)
        say(f"Error: {end.message}", err=True)
    else:
        say(f"paddle-reshard: {end.message}", err=True)


def _unheard(command: str | None, failure: OSError, status: int, trouble: int) -> int:
    """The exit status of a command whose output nobody got: its own, unless it was run for its output."""
    if command not in ANSWERS:
        return status
    if failure.errno == errno.EPIPE:  # whoever read it had enough: as for any other tool
        return 128 + SIGPIPE
    say(f"paddle-reshard: stdout: {failure.strerror or failure}", err=True)
    return trouble
