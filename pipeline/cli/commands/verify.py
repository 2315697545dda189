"""The command ``verify``, with the exit status of ``cmp`` and ``diff``: 0 equal, 1 different, 2 trouble."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running, say_differences
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    answer_options,
    compare_options,
    declared,
    given,
    report_option,
)
from paddle_reshard.pipeline.cli.terminal import say
from paddle_reshard.pipeline.core.choices import READ_REPLICAS
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.shown import SHOWN_DIFFERENCES, counted
from paddle_reshard.pipeline.request.read_options import VerifyOptions

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.examine.verify import VerifyReport

DIFFERENT = 1
"""Exit status of ``verify`` after a comparison that found differences."""
OPTIONS_FOR_ONE = (
    *("a", "source"),
    *("report_path", "as_json", "quiet", "events"),
    *("storage_options", "allow_links"),
)
"""Options of ``verify`` that also apply to a single target."""


@click.command()
@click.argument("a", type=LOCATION, metavar="A")
@click.argument("b", type=LOCATION, metavar="[B]", required=False)
@click.option("--states", metavar="LIST", help="Compare only these states, comma-separated: param,moment1,…")
@click.option(
    "--subset",
    is_flag=True,
    help="Allow B to lack tensors of A; with --against, allow A to lack tensors that have a fingerprint.",
)
@click.option(
    "--against",
    metavar="FILE",
    help="With one argument: fingerprints of the tensors that it should hold, a file "
    "written by paddle-reshard fingerprint --output.",
)
@click.option(
    "--source",
    metavar="SRC",
    help="With one argument: the source of the conversion, with which the parts that the storage copied are "
    "compared. The source recorded in the manifest is never opened.",
)
@click.option(
    "--resume",
    metavar="FILE",
    help="Keep the progress of the comparison in this file, continue from it if it exists, and remove it at the end.",
)
@declared("replicas", of=VerifyOptions, choices=READ_REPLICAS)
@declared("memory")
@declared("cluster", of=VerifyOptions)
@declared("workers")
@compare_options
@report_option
@answer_options
@click.pass_context
def verify(
    context: click.Context,
    /,
    a: str,
    b: str | None,
    states: str | None,
    subset: bool,
    against: str | None,
    source: str | None,
    resume: str | None,
    **_: Any,
) -> None:
    """Compare two checkpoints, bit for bit. Their topologies and formats may differ.

    With one argument, compare every byte of a target with the checksums in its manifest. In a checkpoint without a
    manifest, compare all copies of each tensor, and every parameter with its master weight. With --against, compare
    every tensor with its fingerprint.

    Exit status: 0 equal (or intact), 1 different (or damaged), 2 the comparison could not be made.
    """
    options = given(context)
    options.pop("resume", None)  # of a conversion it is a flag; here it names a file
    if b is None and against is None and _holds_manifest(a, options):
        _refuse_options_for_two(context)
        own = {name: value for name, value in options.items() if name in OPTIONS_FOR_ONE}
        _compare_with_manifest(a, {"source": source, **own})
    if source is not None:
        raise UsageError(
            f"--source requires a target with a manifest; {a} has none"
            if b is None and against is None
            else "--source requires a single target with a manifest; a second checkpoint or --against does not need it"
        )
    chosen = None if states is None else [state.strip() for state in states.split(",")]
    with running("reading headers") as run:
        report = paddle_reshard.verify(
            a,
            b,
            states=chosen,
            subset=subset,
            against=against,
            resume=resume,
            observe=run,
            **options,
        )
        run.show(report, *(side for side in (a, b or against) if side is not None))
    alone = b is None and against is None
    answer(report, lambda: _show_verification(report, alone))
    sys.exit(0 if report else DIFFERENT)


def _compare_with_manifest(target: str, options: Mapping[str, Any]) -> NoReturn:
    """Compare a target with its manifest, show what that found, and exit."""
    with running("comparing with the manifest") as run:
        found = paddle_reshard.check(target, observe=run, **options)
        run.show(found, target)
    answer(found, lambda: _show_integrity(found))
    sys.exit(0 if found else DIFFERENT)


def _holds_manifest(location: str, access: Mapping[str, Any]) -> bool:
    from paddle_reshard.pipeline.examine.verify import holds_manifest

    return holds_manifest(location, **access)


def _refuse_options_for_two(context: click.Context) -> None:
    """Refuse options that ``verify`` of a single target would ignore."""
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if is_given and option.name not in OPTIONS_FOR_ONE:
            raise UsageError(
                f"{option.opts[0]} is for two checkpoints; a single target is compared with its manifest, "
                f"byte for byte"
            )


def _show_verification(report: VerifyReport, alone: bool) -> None:
    if sides := say_differences(report.differences):
        say(_advice(sides))
    for remark in report.remarks:
        say(remark)
    if not alone:
        say(report.verdict)
        return
    from paddle_reshard.pipeline.core.file_names import MANIFEST

    count = len(report.differences)
    say(f"no {MANIFEST}: only values that are stored twice were compared")
    found = f"contradicts itself: {counted(count, 'difference')}" if count else "consistent"
    say(f"{found}; {report.extent}")


def _advice(sides: Collection[str]) -> str:
    """How to compare what both have: --subset allows B, or a checkpoint beside fingerprints, to lack tensors, and A by
    exchanging the two, but not both.
    """
    from paddle_reshard.pipeline.core.shown import only_in
    from paddle_reshard.pipeline.examine.verify import OF_FINGERPRINTS

    advice = "use --states LIST to compare chosen states"
    ways = {
        only_in("A"): "--subset if B may hold fewer tensors",
        only_in("B"): "exchange A and B and give --subset if A may hold fewer tensors",
        only_in(OF_FINGERPRINTS): "--subset if the checkpoint may hold fewer tensors",
    }
    way = ways.get(next(iter(sides))) if len(sides) == 1 else None
    return f"{advice}, or {way}" if way else advice


def _show_integrity(report: IntegrityReport) -> None:
    for damage in report.damages[:SHOWN_DIFFERENCES]:
        say(f"{damage.path}{damage.stretch}: {damage.detail}")
    if len(report.damages) > SHOWN_DIFFERENCES:
        say(f"… and {len(report.damages) - SHOWN_DIFFERENCES} more")
    say(report.verdict)
    if report.unchecked_bytes:
        say(
            f"unchecked bytes were copied by the storage; to compare them, give the unchanged source "
            f"with --source SRC (recorded in the manifest: {report.recorded_source})"
        )
