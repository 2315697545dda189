"""What commands share: they run under the observers that their options ask for, and answer."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from paddle_reshard.pipeline.cli.options import decides
from paddle_reshard.pipeline.cli.terminal import console, print_facts, print_object, printable, say
from paddle_reshard.pipeline.core.errors import FinishedError, ReshardError, UsageError
from paddle_reshard.pipeline.core.events import StepStarted
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.core.shown import ONLY_IN, SHOWN_DIFFERENCES, ToCopy
from paddle_reshard.pipeline.progress.stream import Checked, Happening, Stream
from paddle_reshard.pipeline.request.options import Decides

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod
    from rich.live import Live

    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.planning.compare import Difference
    from paddle_reshard.pipeline.progress.events_as_json import EventLog
    from paddle_reshard.pipeline.progress.metrics import CheckpointFigures
    from paddle_reshard.pipeline.report.command import Command
    from paddle_reshard.pipeline.report.html_report import HtmlReport


DRAWN_PER_SECOND = 2
"""Often enough to see that something moves; to draw takes a few milliseconds."""


@dataclass(frozen=True)
class RunningCommand:
    """A command while it runs: the observer of what it calls."""

    stream: Stream
    page: HtmlReport | None = None
    """The page of ``--report``, if one is wanted."""
    tells_outcomes: bool = False
    """Whether an observer tells how conversions end."""

    def __call__(self, event: Happening) -> None:
        """Tell an event to every observer."""
        self.stream(event)

    def show(self, result: Any, *compared: str) -> None:
        """Write the page of ``--report``, if one is wanted, with what the command found."""
        if self.page is not None:
            self.page.show(result, *compared)

    @contextmanager
    def converting(
        self, sources: Sequence[str], targets: Sequence[str]
    ) -> Iterator[Callable[[ConversionReport], None]]:
        """Tell how a conversion ended, once for each target; call what is yielded with its report."""
        started = time.monotonic()

        def tell(event: str, target: str, **more: Any) -> None:
            if not self.tells_outcomes:
                return
            from paddle_reshard.storage.remote.folder import without_secrets
            from paddle_reshard.storage.session.holder import user_at_host

            source, seconds = ", ".join(map(without_secrets, sources)), time.monotonic() - started
            where = source, without_secrets(target)
            self(Outcome(event, *where, time.time(), user_at_host(), seconds=seconds, **more))

        def converted(report: ConversionReport) -> None:
            if self.page is not None:
                self.page.show_done(report)
            for target in report.plan.target_locations:
                tell("converted", target, plan_id=report.plan.plan_id)

        try:
            yield converted
        except (UsageError, FinishedError):
            raise
        except (ReshardError, OSError, MemoryError) as error:
            refused = isinstance(error, ReshardError) and not error.retryable
            for target in targets:
                tell("refused" if refused else "failed", target, error=str(error))
            raise


@contextmanager
def running(
    step: str = "", figures: CheckpointFigures | None = None, silent: bool = False
) -> Iterator[RunningCommand]:
    """The current command while it runs, with the observers that its options ask for.

    It draws on a terminal and prints lines elsewhere, unless it is ``silent`` or ``--quiet`` or ``--json`` is given.
    ``--events`` writes events to a file, or prints them in place of all that. ``--report`` writes a page, also if the
    block fails after it has planned a conversion.

    ``step`` is what the command begins with; short ones are not shown. ``figures`` observe, and are what
    ``--metrics-port`` serves.
    """
    from paddle_reshard.storage.remote.retry_counts import count_retries

    context = click.get_current_context()
    options = context.params
    stream, page = Stream(RunState(count_retries)), None
    with ExitStack() as stack:
        if figures is not None:
            stream.observers.append(figures)
            if (address := options.get("metrics_port")) is not None:
                from paddle_reshard.pipeline.progress.metrics import serving

                stack.enter_context(serving(figures, address))
        _write_events(stream, context.obj, stack)
        only_events = getattr(context.obj, "replaces_stderr", False)
        if not (silent or only_events or options.get("quiet") or options.get("as_json")):
            stack.enter_context(_shown(stream))
        stack.enter_context(stream.ticking())
        if (path := options.get("report_path")) is not None:
            from paddle_reshard.pipeline.report.html_report import HtmlReport

            page = stack.enter_context(HtmlReport(path, command=command_of(context)))
            stream.observers.append(_recording(page))
        run = RunningCommand(stream, page, bool(context.obj))
        if step:
            run(StepStarted(step))
        yield run


def _recording(page: HtmlReport) -> Callable[[Happening], None]:
    """A page as an observer of a stream: it records events of functions alone."""

    def record(event: Happening) -> None:
        if not isinstance(event, (Outcome, Checked)):
            page(event)

    return record


def _write_events(stream: Stream, log: EventLog | None, stack: ExitStack) -> None:
    """Write events until the stack is closed, if they are wanted."""
    if log:
        from paddle_reshard.pipeline.progress.events_as_json import ProgressEvents

        events = ProgressEvents(stream.state, log.write)
        stream.observers.append(events)
        stream.clocks.append(events.tick)
        stack.callback(events.close)


@contextmanager
def _shown(stream: Stream) -> Iterator[None]:
    """Show progress: a live view on a terminal, lines elsewhere."""
    if sys.stderr and sys.stderr.isatty():
        screen = console()
        if screen.is_interactive:
            with _live(stream, screen):
                yield
            return
    from paddle_reshard.pipeline.request.progress_lines import ProgressLines

    lines = ProgressLines(stream.state, lambda line: say(line, err=True))
    stream.observers.append(lines)
    stream.clocks.append(lines.tick)
    yield


def _live(stream: Stream, screen: Console) -> Live:
    """A view that is drawn again and again, below what else is printed, and is gone at the end."""
    from rich.live import Live
    from rich.text import Text

    from paddle_reshard.pipeline.core.heap import private_bytes
    from paddle_reshard.pipeline.progress.live_view import ASCII, UNICODE, LiveView

    view = LiveView(stream.state, private_bytes, ASCII if screen.options.ascii_only else UNICODE)
    overflow: OverflowMethod = "crop" if screen.options.ascii_only else "ellipsis"

    def draw() -> Text:
        with stream.lock:
            lines = view.lines(*screen.size)
        drawn = Text("\n").join(
            Text.assemble(*((printable(text), style) for text, style in line)) for line in lines
        )
        drawn.no_wrap, drawn.overflow = True, overflow
        return drawn

    return Live(
        get_renderable=draw,
        console=screen,
        refresh_per_second=DRAWN_PER_SECOND,
        transient=True,
        redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),  # else it would end up on the terminal
    )


def answer(result: Any, show: Callable[[], None] | None = None) -> None:
    """Print the result of the current command, or the entries of its JSON object: as JSON, as text, or not at all.

    ``show`` prints it as text; by default its facts are printed.
    """
    context = click.get_current_context()
    if context.params.get("as_json"):
        from paddle_reshard.pipeline.cli.json_output import data_of

        print_object(context.info_name or "", result if isinstance(result, dict) else data_of(result))
    elif not context.params.get("quiet"):
        (show or (lambda: print_facts(result.facts())))()


def next_of(report: ConversionReport) -> list[tuple[str, str]]:
    """How to find out how a job starts from each target."""
    return [
        ("next", ToCopy(shlex.join(["paddle-reshard", "launch", location])))
        for location in report.plan.target_locations
    ]


def say_differences(differences: Sequence[Difference]) -> set[str]:
    """Say what differs: tensors that one side lacks in a line for each state, then the first of the others.

    Those sides are returned, as ``only in …``.
    """
    one_sided: dict[tuple[str, str], list[str]] = {}
    further = []
    for difference in differences:
        if difference.detail.startswith(ONLY_IN):
            key, _, state = difference.tensor.rpartition(" ")
            one_sided.setdefault((state.strip("()"), difference.detail), []).append(key)
        else:
            further.append(difference)
    for (state, side), keys in one_sided.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        say(f"{state} of {keys[0]}{more}: {side}")
    for difference in further[:SHOWN_DIFFERENCES]:
        say(f"{difference.tensor}: {difference.detail}")
    if len(further) > SHOWN_DIFFERENCES:
        say(f"… and {len(further) - SHOWN_DIFFERENCES} more, listed with --json")
    return {side for _, side in one_sided}


# ------------------------------------------------------------------------------------------------- the page


SECRET = "@FILE"
"""Stands for the value of an option that may hold secrets, all of which can be given in a file."""


def command_of(context: click.Context) -> Command:
    """The command line of a context, as a page may show it: without secrets, and options as they were given."""
    from paddle_reshard.pipeline.report.command import Command

    arguments: list[str] = []
    options: list[tuple[str, ...]] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Option):
            options += _given(parameter, value)
        else:
            arguments += map(_shown_value, value if isinstance(value, tuple) else (value,))
    return Command(context.info_name or "", tuple(arguments), tuple(options))


def _given(option: click.Option, value: Any) -> Iterator[tuple[str, ...]]:
    if option.is_flag:
        yield (option.opts[0] if value else option.secondary_opts[0],)
    elif decides(option) is Decides.ACCESS:
        yield option.opts[0], SECRET
    else:
        for one in value if isinstance(value, tuple) else (value,):
            yield option.opts[0], _shown_value(one)


def _shown_value(value: object) -> str:
    """A value as text; of a URL, also within DST:FORMAT:…, neither user and password nor query."""
    from paddle_reshard.storage.remote.folder import without_secrets

    return without_secrets(str(value))
