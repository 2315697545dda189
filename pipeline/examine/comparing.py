"""Run the comparisons of a plan, wherever groups run, and continue where an earlier run was interrupted.

An interrupted comparison leaves a *progress file*: a line that says what is compared, and a line for every batch of
finished groups. All lines are JSON; a torn last line does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted
from paddle_reshard.pipeline.planning.compare import Difference
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import typed
from paddle_reshard.storage.local.folders import written_whole
from paddle_reshard.storage.os_errors import writing
from paddle_reshard.storage.session.staging import append_to_file
from paddle_reshard.storage.store import ReadRange, Source
from paddle_reshard.tasks.group import GroupReport, groups_ended

FORMAT = "paddle_reshard verify"


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of comparing one group: a line's entry."""

    group: int
    elements: int
    read_bytes: int
    differences: tuple[Difference, ...]


def run_comparisons(
    plan: Plan,
    source: ReadRange,
    stores: Sequence[Source],
    engine: Engine,
    observe: Observer,
    resume: Path | None,
) -> list[Compared]:
    """Compare all groups of a plan; the results in the order of the groups.

    ``resume`` is a progress file. It is created if it does not exist, refused if it belongs to another comparison, and
    removed when everything is compared.
    """
    done = dict[int, Compared]()
    if resume is not None:
        head = FORMAT, version.__version__, plan.plan_id, _hash_of(stores)
        done = _finished_earlier(resume, _line(head))
    observe(StepStarted("comparing", plan.read_bytes, plan.groups, plan.budget_bytes))
    read_bytes = sum(group.read_bytes for group in done.values())
    observe(Progress(read_bytes, before=True, groups=len(done)))
    with closing(engine.compare(RemainingGroups(plan, done), source)) as batches:
        for reports in batches:
            groups = [compared(report) for report in reports]
            done |= {group.group: group for group in groups}
            if resume is not None:
                with writing(resume, UsageError):
                    append_to_file(resume.resolve(), _line(list(map(astuple, groups))))
            for ended in groups_ended(plan, reports):
                observe(ended)
            observe(Progress(sum(group.read_bytes for group in groups)))
    if resume is not None:
        resume.unlink()
    return [done[group] for group in sorted(done)]


def compared(report: GroupReport) -> Compared:
    """The result of comparing a group."""
    differences = (Difference(d.tensor, f"{d.detail}: {d.path_a} and {d.path_b}") for d in report.differences)
    return Compared(report.group, report.compared_elements, report.read_bytes, tuple(differences))


def _hash_of(stores: Sequence[Source]) -> str:
    """A hash that changes with any file."""
    files: list[Mapping[str, object]] = []
    for store in stores:
        files += [dict(store.sizes()), dict(store.versions())]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _finished_earlier(path: Path, first: bytes) -> dict[int, Compared]:
    """The finished groups in a progress file, which then has only complete lines, the ``first`` at least."""
    with writing(path, UsageError):
        data = path.read_bytes() if path.exists() else b""
        done, lines = _finished(data, first, path)
        if lines == data:
            append_to_file(path.resolve(), b"")  # refused at once if later lines could not be added
            return done
    with written_whole(path, UsageError) as file:
        file.write(lines)
    return done


def _finished(data: bytes, first: bytes, path: Path) -> tuple[dict[int, Compared], bytes]:
    """The finished groups, and all complete lines."""
    lines = data.splitlines(keepends=True)
    if not first.startswith(data) and lines[0] != first:
        raise UsageError(
            f"--resume {path}: it does not belong to this comparison; the checkpoints, the options or the version of "
            "this package differ from when it was started. Remove it to compare everything"
        )
    done: dict[int, Compared] = {}
    good = [first]
    for line in lines[1:]:
        try:
            if not line.endswith(b"\n"):
                break
            groups = typed(parse_json(line), tuple[tuple[int, int, int, tuple[tuple[str, str], ...]], ...])
        except JsonError:
            break
        for group, elements, read_bytes, differences in groups:
            done[group] = Compared(
                group, elements, read_bytes, tuple(Difference(*found) for found in differences)
            )
        good.append(line)
    return done, b"".join(good)


def _line(values: object) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"
