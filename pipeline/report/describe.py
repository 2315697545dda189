"""Describe plans and results as the content of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite

import numpy as np

from paddle_reshard.pipeline.convert.conversion import ConversionReport
from paddle_reshard.pipeline.convert.integrity import IntegrityReport
from paddle_reshard.pipeline.convert.plan import ConversionPlan, laid_out_again, source_in_words
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.core.shown import readable_bytes, readable_seconds
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.coverage import Coverage
from paddle_reshard.pipeline.examine.diff import DifferenceSummary, DiffReport
from paddle_reshard.pipeline.examine.verify import VerifyReport
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES, Plan
from paddle_reshard.pipeline.report.data import BAD, GOOD, PLAIN, Bar, Chart, Left, ReportData, Table, Tile
from paddle_reshard.pipeline.report.picture import Picture, locate, make_picture
from paddle_reshard.pipeline.report.places import Described, arrange
from paddle_reshard.pipeline.report.run_record import RunData
from paddle_reshard.pipeline.request.record import averaging
from paddle_reshard.storage.locate import absolute, shown_location
from paddle_reshard.storage.outputs import prefixes
from paddle_reshard.storage.remote.folder import without_secrets

MOST_ROWS = 3000
"""Rows of a table."""
MOST_NAMES = 100
_MOUNTED = re.compile(r"[A-Z]+\d*/")


# -------------------------------------------------------------------------------------------------- pictures


def picture_of(conversion: ConversionPlan) -> Picture:
    """The picture of a conversion whose plan still has its ops. The targets are laid out once more for it."""
    plan, source = conversion.plan, conversion.source
    laid_out = laid_out_again(conversion)
    first_files = np.cumsum([0, *(len(layout.files.files) for layout in laid_out)]).tolist()
    holding = {
        first + file
        for first, layout in zip(first_files, laid_out, strict=False)
        for file in np.unique(layout.files.fragments["file"]).tolist()
    }
    targets = [
        Described(prefix, target.spec.format, target.spec.in_words(), _topology(target.spec.data()))
        for prefix, target in zip(prefixes(len(laid_out)), conversion.targets, strict=True)
    ]
    of_targets = arrange([file.path for file in plan.target_files], holding, targets)
    paths = [file.path for file in plan.source_files]
    of_source = arrange(
        paths,
        np.unique(source.catalog.fragments["file"]).tolist(),
        [
            Described("", source.format, source_in_words(source), source.job.topology),
            *_mounted(paths, _sources(conversion)[0]),
        ],
    )
    return make_picture(
        locate(source.catalog.tensors, source.catalog.fragments, of_source),
        [
            locate(layout.catalog.tensors, layout.files.fragments, of_targets, first)
            for first, layout in zip(first_files, laid_out, strict=False)
        ],
        plan,
        (of_source, of_targets),
    )


def _mounted(paths: Sequence[str], averaged: Sequence[str]) -> list[Described]:
    """Further checkpoints that a source is joined from, by the folders below which it has their files."""
    folders = dict.fromkeys(match[0] for path in paths if (match := _MOUNTED.match(path)))
    where = {f"SRC{number}/": location for number, location in enumerate(averaged)}
    return [Described(prefix, prefix.rstrip("/"), where.get(prefix, ""), None) for prefix in folders]


def _topology(data: Mapping[str, object]) -> Topology | None:
    axes = data.get("topology")
    return Topology(**axes) if isinstance(axes, dict) else None


# -------------------------------------------------------------------------------------------------- results


def describe_plan(
    conversion: ConversionPlan,
    picture: Picture | None,
    command: str = "plan",
    proof: Coverage | None = None,
) -> ReportData:
    """The report of a plan: what moves, and whether the plan is complete."""
    plan = conversion.plan
    targets = tuple(conversion.target_locations) or tuple(
        target.spec.in_words() for target in conversion.targets
    )
    share = (plan.peak_bytes + FOOTPRINT_BYTES) / plan.budget_bytes
    copied = f"{readable_bytes(plan.copied_bytes)} by the store itself" if plan.copied_bytes else ""
    read = f"{plan.read_amplification:.2f} × what is needed"
    budget = f"of a group at most; budget of a process {readable_bytes(plan.budget_bytes)}"
    sources, averaged = _sources(conversion)
    return ReportData(
        command=command,
        version=version.__version__,
        status="planned" if proof is None or proof else "not complete",
        tone=PLAIN if proof is None or proof else BAD,
        sources=sources,
        targets=tuple(map(absolute, targets)) if conversion.target_locations else targets,
        averaged=averaged,
        tiles=(
            Tile("Tensors", f"{len(plan.tensors) - plan.compared_only:,}", f"{plan.groups:,} groups"),
            Tile("Writes", readable_bytes(plan.written_bytes), copied),
            Tile("Reads", readable_bytes(plan.read_bytes), read),
            Tile("Memory", readable_bytes(plan.peak_bytes), budget, min(1.0, share)),
        ),
        facts=(
            *(fact for fact in conversion.facts() if not fact[0].startswith(_SHOWN_ELSEWHERE)),
            *([("not proven", conversion.source.alike)] if conversion.source.alike else ()),
            *(() if proof is None else proof.facts()[:1]),
        ),
        remarks=tuple(dict.fromkeys(remark for target in conversion.targets for remark in target.remarks)),
        left=tuple(_left(conversion, targets)),
        picture=picture,
        budget_bytes=plan.budget_bytes,
        footprint_bytes=FOOTPRINT_BYTES,
        tables=(*_proof(proof), _files(conversion)),
    )


_SHOWN_ELSEWHERE = ("average", "remark", "omitted", "not carried", "dropped", "memory", "time")


def _sources(conversion: ConversionPlan) -> tuple[tuple[str, ...], str]:
    """Where the sources are, and how they are averaged if they are several."""
    sources, how = averaging(conversion.asked or {})
    return (sources, how) if sources else ((absolute(conversion.store.location),), "")


def describe_conversion(
    report: ConversionReport,
    picture: Picture | None,
    run: RunData | None,
    proof: Coverage | None = None,
) -> ReportData:
    """The report of a finished conversion; ``proof`` was made before it moved anything."""
    moved = report.moved
    planned = describe_plan(report.plan, picture, _command(report.plan), proof)
    rate = f"{readable_bytes(int(moved.written_bytes / report.seconds))}/s written" if report.seconds else ""
    first = Tile("Time", readable_seconds(report.seconds), rate)
    *tiles, planned_memory = planned.tiles
    memory = _memory(report.plan.plan, run) or planned_memory
    known = {name for name, _ in planned.facts}
    further = [fact for fact in report.facts() if fact[0] not in known and fact[0] != "done"]
    facts = [fact for fact in further if not fact[0].startswith((*_SHOWN_ELSEWHERE, "worker"))]
    return replace(
        planned,
        status="converted",
        tone=GOOD,
        tiles=(first, *tiles, memory),
        facts=(*planned.facts, *facts),
        run=run,
        retries=moved.retries,
        tables=(*_workers(report), *planned.tables),
    )


def _command(conversion: ConversionPlan) -> str:
    """The command that runs such a conversion."""
    return "ema" if conversion.plan.mixtures else "convert"


def describe_failure(
    error: BaseException,
    conversion: ConversionPlan,
    picture: Picture | None,
    run: RunData | None,
    proof: Coverage | None = None,
) -> ReportData:
    """The report of a conversion that failed after it was planned."""
    planned = describe_plan(conversion, picture, _command(conversion), proof)
    kind = type(error).__name__
    message = f"{error} [{kind}]" if isinstance(error, ReshardError) else str(error) or kind
    *tiles, planned_memory = planned.tiles
    tiles = [_reached(run), *tiles, _memory(conversion.plan, run) or planned_memory]
    return replace(planned, status="not converted", tone=BAD, error=message, run=run, tiles=tuple(tiles))


def _reached(run: RunData | None) -> Tile:
    """The progress of a conversion that failed."""
    if run is None or not run.steps:
        return Tile("Came as far as", "the plan")
    last = run.steps[-1]
    note = f"in the step {last.name}" if last.stop is None else f"after the step {last.name}"
    moved = next((step for step in reversed(run.steps) if step.total_groups is not None), None)
    if moved is None or not moved.total_bytes:
        return Tile("Came as far as", last.name, note)
    done = f"{readable_bytes(moved.done_bytes)} of {readable_bytes(moved.total_bytes)} written"
    groups = f"{moved.done_groups:,} of {moved.total_groups:,} groups"
    share = min(1.0, moved.done_bytes / moved.total_bytes)
    return Tile("Came as far as", f"{int(100 * share)} %", f"{done}, {groups}; ended {note}", share)


def _memory(plan: Plan, run: RunData | None) -> Tile | None:
    """Peak memory of the process, if it ran all groups and the system tells its memory."""
    if run is None or not run.peak_bytes or not run.in_this_process:
        return None
    budget = readable_bytes(plan.budget_bytes)
    note = (
        f"of this process at its peak; its budget {budget}, a group at most {readable_bytes(plan.peak_bytes)}"
    )
    return Tile("Memory", readable_bytes(run.peak_bytes), note, min(1.0, run.peak_bytes / plan.budget_bytes))


def describe_comparison(
    report: VerifyReport | IntegrityReport | DiffReport, compared: Sequence[PathLike], run: RunData | None
) -> ReportData:
    """The report of a comparison of the locations ``compared``."""
    if isinstance(report, DiffReport):
        return _describe_diff(report, compared, run)
    if isinstance(report, IntegrityReport):
        return _describe_integrity(report, compared, run)
    return _describe_verification(report, compared, run)


def _comparison(
    command: str, status: str, agree: bool, verdict: str, compared: Sequence[PathLike], run: RunData | None
) -> ReportData:
    """The report of a comparison without its figures and findings."""
    return ReportData(
        command=command,
        version=version.__version__,
        status=status,
        tone=GOOD if agree else BAD,
        sources=tuple(map(shown_location, compared[:1])),
        targets=tuple(map(shown_location, compared[1:])),
        result=verdict,
        run=run,
        budget_bytes=None if run is None else run.budget_bytes,
        footprint_bytes=FOOTPRINT_BYTES,
    )


def _describe_verification(
    report: VerifyReport, compared: Sequence[PathLike], run: RunData | None
) -> ReportData:
    """The report of ``verify`` about two checkpoints, or about one and its fingerprints."""
    status = "equal" if report.equal else "different"
    rows = [(difference.tensor, difference.detail) for difference in report.differences]
    return replace(
        _comparison("verify", status, report.equal, report.verdict, compared, run),
        tiles=(
            Tile("Tensors", f"{report.tensors:,}"),
            Tile("Compared", f"{report.compared_elements:,}", "elements, bit for bit"),
            Tile("Differences", f"{len(rows):,}"),
            Tile("Read", readable_bytes(report.read_bytes)),
        ),
        findings=(_table("Differences", ("tensor", "difference"), rows),) if rows else (),
        remarks=report.remarks,
    )


def _describe_integrity(
    report: IntegrityReport, compared: Sequence[PathLike], run: RunData | None
) -> ReportData:
    """The report of ``verify`` about a target and its manifest."""
    status = "intact" if report.intact else "damaged"
    rows = [(damage.path, damage.byte_offset, damage.nbytes, damage.detail) for damage in report.damages]
    headings = ("file", "first byte", "bytes", "damage")
    return replace(
        _comparison("verify", status, report.intact, report.verdict, compared[:1], run),
        tiles=(
            Tile("Files", f"{report.files:,}", f"{report.parts:,} parts"),
            Tile("Read", readable_bytes(report.read_bytes), "compared with the manifest"),
            Tile("Not checked", readable_bytes(report.unchecked_bytes)),
            Tile("Damages", f"{len(rows):,}"),
        ),
        facts=(("source on record", without_secrets(report.recorded_source)),),
        findings=(_table("Damages", headings, rows),) if rows else (),
    )


_DIFFERING = (
    *("tensor", "state", "relative", "largest", "mean", "ulps", "in A", "in B", "first at"),
    *("changed", "elements", "beyond tolerance", "NaN on one side", "dtypes"),
)
"""First what one looks for: how far a tensor is apart, and an example."""


def _describe_diff(report: DiffReport, compared: Sequence[PathLike], run: RunData | None) -> ReportData:
    """The report of ``diff``, the largest relative difference first."""
    rows = [
        (
            *(tensor.key, tensor.state, _finite(tensor.relative), _finite(tensor.largest)),
            *(_finite(tensor.mean), tensor.ulps, *map(_finite, tensor.values)),
            ", ".join(map(str, tensor.first)),
            *(tensor.changed, tensor.elements, tensor.outside, tensor.nans),
            " / ".join(dict.fromkeys(tensor.dtypes)),
        )
        for tensor in report.differing
    ]
    tables = [_table("Tensors that differ", _DIFFERING, rows)] if rows else []
    if report.unmatched:
        one_sided = [(difference.tensor, difference.detail) for difference in report.unmatched]
        tables.append(_table("Tensors without a counterpart", ("tensor", "what is wrong"), one_sided))
    changed = sum(tensor.changed for tensor in report.differing)
    summaries = (("state", report.by_state()), ("layer", report.by_layer()))
    agreeing = "agree within the tolerance" if report.differing else "agree"
    status = agreeing if report.agree else "different"
    return replace(
        _comparison("diff", status, report.agree, report.verdict, compared, run),
        tiles=(
            Tile("Tensors", f"{report.tensors:,}", f"{len(rows):,} differ"),
            Tile("Elements", f"{report.elements:,}", f"{changed:,} differ"),
            Tile("Unmatched", f"{len(report.unmatched):,}"),
            Tile("Read", readable_bytes(report.read_bytes)),
        ),
        charts=tuple(_chart(name, of_name) for name, of_name in summaries if of_name),
        findings=tuple(tables),
    )


# ---------------------------------------------------------------------------------------------------- parts


def _left(conversion: ConversionPlan, targets: Sequence[str]) -> list[Left]:
    """The tensors, states and files that targets leave out, by reason."""
    several = len(targets) > 1
    left = []
    if conversion.dropped:
        left.append(Left("dropped as requested", conversion.dropped, len(conversion.dropped), ""))
    for number, target in enumerate(conversion.targets):
        of = targets[number] if several else ""
        states = target.states_not_carried
        if states:
            model_only = FORMATS[target.spec.format].model_only
            reason = "state was not requested" if model_only else "state is not supported by this format"
            left.append(Left(reason, states, len(states), of))
        ordered = sorted(target.not_carried, key=lambda entry: entry[1])
        for reason, group in groupby(ordered, key=lambda entry: entry[1]):
            names = [name for name, _ in group]
            left.append(Left(reason, tuple(names[:MOST_NAMES]), len(names), of))
    return left


def _files(conversion: ConversionPlan) -> Table:
    plan = conversion.plan
    rows = [(file.path, file.size_bytes, "written") for file in plan.target_files]
    rows += [
        (file.target_path, file.size_bytes, f"taken over from {file.source_path}") for file in plan.carried
    ]
    return _table("Files of the target" + "s" * (len(conversion.targets) > 1), ("file", "bytes", "how"), rows)


def _proof(proof: Coverage | None) -> list[Table]:
    """A table of what every byte of the targets is, and of what becomes of every element of the source."""
    if proof is None:
        return []
    return [_table("Proof that the plan is complete", ("what", "how much"), proof.facts())]


def _workers(report: ConversionReport) -> list[Table]:
    if not report.moved.workers:
        return []
    rows = [
        (
            *(f"worker {worker.number}", worker.host, worker.groups, worker.read_bytes, worker.written_bytes),
            *(round(worker.busy_seconds, 3), ", ".join(f"{n} × {why}" for why, n in worker.retries.items())),
        )
        for worker in report.moved.workers
    ]
    headings = ("worker", "host", "groups", "bytes read", "bytes written", "busy seconds", "retries")
    return [_table("Workers", headings, rows)]


def _table(
    title: str, headings: tuple[str, ...], rows: Sequence[tuple[str | int | float | None, ...]]
) -> Table:
    return Table(title, headings, tuple(rows[:MOST_ROWS]), max(0, len(rows) - MOST_ROWS))


def _chart(name: str, summaries: Sequence[DifferenceSummary]) -> Chart:
    bars = tuple(
        Bar(summary.name, _finite(summary.mean), f"{summary.mean:.3g}, largest {summary.largest:.3g}")
        for summary in summaries[: MOST_ROWS // 10]
    )
    return Chart(f"Mean difference by {name}", bars)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
