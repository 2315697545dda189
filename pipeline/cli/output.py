"""How commands end: guarded streams, exit statuses, errors in one line.

The purpose of a command determines whether its output matters. ``diff``, ``explain``, ``fingerprint``,
``inspect``, ``plan`` and ``verify`` answer a question: if the answer cannot be written, they fail, as
``ls`` and ``cmp`` do. All other commands perform an action: their exit status says whether it was performed, even if
their output was lost.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from signal import SIGPIPE
from typing import Any, TextIO

import click

from paddle_reshard.pipeline.cli.ends import End, end_of
from paddle_reshard.pipeline.cli.terminal import print_answer, say
from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.progress.events_as_json import EventLog

COMPLETION = "_PADDLE_RESHARD_COMPLETE"
"""Environment variable by which a shell requests completions."""
ANSWERS = ("diff", "explain", "fingerprint", "inspect", "plan", "verify")
"""Commands that are run for their output."""
_HELP_INSTEAD: tuple[type[Exception], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)
"""What click raises, since 8.2, where no command is given: its message is the help."""
TROUBLE = {"diff": 2, "verify": 2}
"""Exit status of failures, for commands where 1 is a valid answer."""


_PASS_ON = ("submit", "watch")
"""Commands that take the options of convert behind ``--``."""
_OF_RESULTS = {
    "--aoa",
    "--convention",
    "--drop",
    "--dtype",
    "--fill",
    "--format",
    "--vocab-size",
}
"""Options that make another checkpoint of the source, which a command without them reads."""
_FLAG = re.compile(
    r"(?<![\w-])(?<!SRC )--[a-z][a-z-]*(?![\w-])"
)  # after SRC the command is named: plan SRC --cards


# ---------------------------------------------------------------------------------------------------- streams


class GuardedStream(io.TextIOBase):
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

    def close(self) -> None:
        """Leave the inner stream to who opened it: Python closes this one when it is collected, which may be later."""

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
def guarded_streams() -> Iterator[tuple[GuardedStream, GuardedStream]]:
    """Replace stdout and stderr by a :class:`GuardedStream` each, also if they are closed."""
    before = sys.stdout, sys.stderr
    guarded = GuardedStream(sys.stdout), GuardedStream(sys.stderr)
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


# ------------------------------------------------------------------------------------------------------- ends


class EndingGroup(click.Group):
    """A group whose commands always end as described in this module."""

    def main(self, args: Sequence[str] | None = None, *further: Any, **extra: Any) -> Any:
        """Run a command and exit with its status."""
        if COMPLETION in os.environ:  # click writes completions as bytes
            return super().main(args, *further, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        command = next((word for word in arguments if not word.startswith("-")), None)
        own = arguments[: arguments.index("--")] if command == "resume" and "--" in arguments else arguments
        as_json = "--json" in own
        end: End | None = None
        trouble = TROUBLE.get(command or "", 1)
        with EventLog() as events, guarded_streams() as (stdout, _):
            if _asks_for_events(own):
                events.replace_stderr(lambda line: click.echo(line, err=True))
            settings = {**extra, "standalone_mode": False, "obj": events}
            try:
                status = _status(super().main(arguments, *further, **settings))
            except SystemExit as ended:
                status = _status(ended.code)
            except BaseException as error:  # noqa: BLE001 (every error is reported and becomes a status)
                end = end_of(error, trouble)
                if isinstance(error, ReshardError):
                    end = replace(end, message=self._naming_the_command(end.message, command))
                status = end.status
                if as_json:
                    print_answer(Answer(command, end.message, end.kind, end.retryable))
                if not events.replaces_stderr:
                    _report(error, end)
            stdout.flush()
            if stdout.failure is not None:
                status = _status_without_output(command, stdout.failure, status, trouble)
            events.write(
                "ended",
                status=status,
                error=end and end.message,
                kind=end and end.kind,
                retryable=end is not None and end.retryable,
            )
        sys.exit(status)

    def _naming_the_command(self, message: str, command: str | None) -> str:
        """A refusal that says of an option whose it is, where the command that was refused does not have it.

        Reading a checkpoint is refused alike in all commands, and the way out may be one that only convert can go.
        """
        if command is None or command not in self.commands or command in _PASS_ON:
            return message
        own, of_convert = (_flags(self.commands[name]) for name in (command, "convert"))
        others = dict.fromkeys(f for f in _FLAG.findall(message) if f in of_convert and f not in own)
        if not others:
            return message
        is_one, it = ("is an option", "it") if len(others) == 1 else ("are options", "them")
        first = f": convert with {it} first, and give the result" if others.keys() <= _OF_RESULTS else ""
        return f"{message} ({' and '.join(others)} {is_one} of convert{first})"


def _flags(command: click.Command) -> set[str]:
    return {flag for option in command.params for flag in option.opts}


def _asks_for_events(arguments: Sequence[str]) -> bool:
    """Whether events replace what is printed on stderr; also if the command line has mistakes.

    >>> _asks_for_events(["convert", "a", "b", "--events", "-"]), _asks_for_events(["convert", "--events=run.jsonl"])
    (True, False)
    """
    return "--events=-" in arguments or ("--events", "-") in pairwise(arguments)


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
