"""The steps that follow after a report: a sentence each, and the command where there is one."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_reshard.pipeline.convert.conversion import ConversionReport
from paddle_reshard.pipeline.convert.integrity import IntegrityReport
from paddle_reshard.pipeline.core.tensors import PARAM
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.cards import CardsPlan
from paddle_reshard.pipeline.examine.diff import DiffReport
from paddle_reshard.pipeline.examine.verify import VerifyReport
from paddle_reshard.pipeline.report.command import Command
from paddle_reshard.pipeline.report.data import NextStep
from paddle_reshard.storage.locate import shown_location
from paddle_reshard.storage.remote.folder import without_secrets
from paddle_reshard.storage.session.ledger import keeps

OF_A_PLAN = ("--save", "--prove", "--report", "--json", "--quiet")
"""Options of ``plan`` that ``convert`` does not need."""

NextSteps = tuple[NextStep, ...]


def after_plan(command: Command | None) -> NextSteps:
    """After ``plan``: convert; ``command`` is that of the plan."""
    if command is None:
        return (NextStep("Convert: the same arguments, with convert in place of plan."),)
    arguments = command.arguments if len(command.arguments) > 1 else (*command.arguments, "DST")
    if command.has("--target"):
        arguments = command.arguments
    planned = Command("convert", arguments, command.without(*OF_A_PLAN).options)
    return (NextStep("Convert as planned.", str(planned)),)


def after_cards(plan: CardsPlan) -> NextSteps:
    """After ``plan --cards``: convert to the topology that is nearest, or to the first."""
    chosen = plan.nearest or next(iter(plan.alternatives), None)
    if chosen is None:
        return ()
    if not chosen.command:
        return (NextStep("The trainer reads it as it is.", chosen.launch_line or ""),)
    return (NextStep(f"Convert to {chosen.topology}.", chosen.command),)


def after_conversion(report: ConversionReport) -> NextSteps:
    """After ``convert``: compare exports with the source, start a job from every target, and compare whole targets."""
    conversion = report.plan
    launches = [_launch(location) for location in conversion.target_locations]
    whole = [
        location
        for location, target in zip(conversion.target_locations, conversion.targets, strict=True)
        if conversion.same_values and not conversion.dropped and not target.states_not_carried
    ]
    checks = [
        NextStep("Compare every value with the source.", str(Command("verify", (report.source, location))))
        for location in whole
    ]
    exports = [
        NextStep(
            "Compare the parameters with those of the source.",
            str(Command("verify", (report.source, location), (("--states", PARAM),))),
        )
        for location, target in zip(conversion.target_locations, conversion.targets, strict=True)
        if conversion.same_values and not conversion.dropped and target.spec.facts().get("state") == PARAM
    ]
    return (*exports, *launches, *checks)


def after_failure(error: BaseException, command: Command | None) -> NextSteps:
    """After a failure: continue, or begin again if the checkpoint was refused, which leaves nothing to continue."""
    if keeps(error):
        words = "What is written is kept. Continue from it, when the cause is gone."
        resumed = None if command is None else command.with_options("--resume")
        return (NextStep(words, "the same call, with resume=True" if resumed is None else str(resumed)),)
    words = "Nothing is kept of a conversion that was refused. Do what the message says, and convert again."
    return (NextStep(words, "" if command is None else str(command)),)


def after_comparison(
    report: VerifyReport | IntegrityReport | DiffReport, compared: Sequence[PathLike], command: Command | None
) -> NextSteps:
    """After a comparison of the locations ``compared``."""
    shown = tuple(map(shown_location, compared))
    if isinstance(report, IntegrityReport):
        return _after_integrity(report, shown)
    if isinstance(report, DiffReport):
        return _after_diff(report, shown)
    two = len(shown) == 2 and not (command and command.has("--against"))
    if report.equal:
        return (_launch(*shown[1:] if two else shown[:1]),)
    if two:
        return (NextStep("How far apart the values are.", str(Command("diff", shown))),)
    return (
        NextStep("Take another copy of the checkpoint: this one is not what it was, or not of one step."),
    )


def _launch(*locations: str) -> NextStep:
    return NextStep("How a job starts from it.", str(Command("launch", locations)))


def _after_integrity(report: IntegrityReport, shown: tuple[str, ...]) -> NextSteps:
    if report.intact:
        return (_launch(*shown),)
    made_from = f"{without_secrets(report.recorded_source)} again, with what `request` in its manifest states"
    words = f"Move it away and convert {made_from}; if it happens again, look at the disk."
    return (NextStep(words),)


def _after_diff(report: DiffReport, shown: tuple[str, ...]) -> NextSteps:
    if report.agree:
        return (NextStep("Whether they are equal bit for bit.", str(Command("verify", shown))),)
    steps = []
    if report.differing:
        words = "The first element of each tensor that differs, with both files."
        steps.append(NextStep(words, str(Command("verify", shown))))
    if report.unmatched:
        for side in shown:
            holding = Command("inspect", (side,), (("--tensors",),))
            steps.append(NextStep("Which tensors this one holds.", str(holding)))
    return tuple(steps)
