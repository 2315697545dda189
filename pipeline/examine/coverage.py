"""Show that a plan is complete: every byte of its targets, and every element of its source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from paddle_reshard.pipeline.changes.change import LeftOut
from paddle_reshard.pipeline.checkpoint.files import LaidOut
from paddle_reshard.pipeline.convert.plan import ConversionPlan, laid_out_again
from paddle_reshard.pipeline.core.catalog import Catalog, volumes
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.shown import Facts, Result
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.formats.targets import join
from paddle_reshard.pipeline.planning.coverage import COPIED, LITERAL, PADDING, VALUE, Swept, sweep
from paddle_reshard.storage.outputs import prefixes


@dataclass(frozen=True, repr=False)
class Coverage(Result):
    """What every byte of the targets is, and what becomes of every element of the source; true if it is complete.

    The bytes of literals, padding, values and carried files add up to ``total_bytes``. The manifest, which is
    written last, is not among them.
    """

    files: int
    total_bytes: int
    literal_bytes: int
    padding_bytes: int
    value_bytes: int
    copied_bytes: int
    """The part of ``value_bytes`` that the storage copies by itself."""
    carried_bytes: int
    """Files that are copied whole."""
    tensors: int
    """Number of tensors that the source stores."""
    stored_elements: int
    """Their elements, each counted once."""
    used_elements: int
    """The part of ``stored_elements`` that some target holds."""
    left_out: tuple[LeftOut, ...]
    """The rest."""
    problem_count: int
    problems: tuple[str, ...]
    """Descriptions of the first problems; empty if the plan is complete."""

    def __bool__(self) -> bool:
        return not self.problem_count

    def _in_short(self) -> str:
        if self.problem_count:
            return f"{self.problem_count} problems: {self.problems[0]}"
        return f"{self.total_bytes} bytes in {self.files} files, each written once"

    def facts(self) -> Facts:
        """The bytes of each kind, the elements used and left out, and the problems."""
        proof = f"each of {self.total_bytes:,} bytes in {self.files} files is written once"
        if self.problem_count:
            proof = f"NOT COMPLETE: {self.problem_count} problems"
        facts = [("proof", proof)]
        kinds = (
            ("values", self.value_bytes),
            ("of these, copied by the storage", self.copied_bytes),
            ("literals", self.literal_bytes),
            ("padding", self.padding_bytes),
            ("carried files", self.carried_bytes),
        )
        facts += [(name, f"{count:,} bytes") for name, count in kinds if count]
        share = f"{self.used_elements:,} of {self.stored_elements:,} elements of {self.tensors} tensors"
        facts.append(("used", share))
        for left in self.left_out:
            extent = f"{left.elements:,} elements of {left.tensors} tensors ({left.state})"
            facts.append(("left out", f"{extent}: {left.reason}"))
        facts += [("problem", problem) for problem in self.problems]
        if self.problem_count > len(self.problems):
            facts.append(("problem", f"… and {self.problem_count - len(self.problems)} more"))
        return facts


def prove(plan: ConversionPlan) -> Coverage:
    """Prove that a plan writes every byte of its targets exactly once, and uses or leaves out each element knowingly.

    The targets are laid out again, and the plan's columns are compared with that layout and with the source's
    fragments. Nothing is read but the plan. Memory depends on the number of boxes, not on their bytes.

    Raises
    ------
    PlanError
        If the plan was run before: its columns were released then. If it is that of a portion.
    """
    if plan.portion is not None:
        raise PlanError(
            f"{plan.portion.in_words()}: prove the plan of the whole, without --ranks; it is {plan.plan_id}"
        )
    described = layout_of(plan)
    swept = sweep(plan.plan, described.catalog, described.files)
    bytes_of = swept.bytes_of.tolist()
    carried = sum(file.size_bytes for file in plan.plan.carried)
    values = bytes_of[VALUE] + bytes_of[COPIED]
    total = sum(file.size_bytes for file in plan.plan.target_files) + carried
    counted = values + bytes_of[LITERAL] + bytes_of[PADDING] + carried
    if counted != total and not swept.problems.count:
        swept.problems.add(f"{counted} bytes are described, the files have {total}")
    stored = _stored_elements(plan.source.catalog)
    used, left_out = _left_out(plan, described.catalog, stored, swept)
    return Coverage(
        files=len(plan.plan.target_files) + len(plan.plan.carried),
        total_bytes=total,
        literal_bytes=bytes_of[LITERAL],
        padding_bytes=bytes_of[PADDING],
        value_bytes=values,
        copied_bytes=bytes_of[COPIED],
        carried_bytes=carried,
        tensors=int((stored > 0).sum()) + sum(left.tensors for left in plan.excluded),
        stored_elements=int(stored.sum()) + sum(left.elements for left in plan.excluded),
        used_elements=used,
        left_out=left_out,
        problem_count=swept.problems.count,
        problems=tuple(swept.problems.described),
    )


def layout_of(plan: ConversionPlan) -> LaidOut:
    """The targets of a plan, laid out again, with the tensors and files of its columns."""
    plan.plan.check_not_run()
    laid_out = laid_out_again(plan)
    return join(plan.source.catalog, laid_out, prefixes(len(laid_out)))


def _stored_elements(catalog: Catalog) -> Ints:
    """Elements that files hold of each tensor; further copies are not counted."""
    first = catalog.fragments["replica"] == 0
    counted = np.bincount(
        catalog.fragments["tensor"][first],
        weights=volumes(catalog.fragments)[first],
        minlength=len(catalog.tensors),
    )
    return counted.astype(np.int64)


def _left_out(
    plan: ConversionPlan, moved: Catalog, stored: Ints, swept: Swept
) -> tuple[int, tuple[LeftOut, ...]]:
    """How many elements of the source are used, and those that are left out, by state and reason."""
    index = moved.index()
    total = 0
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for number in np.flatnonzero(stored).tolist():
        tensor, elements = plan.source.catalog.tensors[number], int(stored[number])
        at = index.get((tensor.key, tensor.state))
        used = 0 if at is None else int(swept.used[at])
        total += used
        if used == elements:
            continue
        compared = at is not None and int(swept.checked[at]) == elements
        reason = next(_reasons(plan, tensor.key, tensor.state, used, compared), None)
        if reason is None:
            swept.problems.add(
                f"{tensor.label}: {used} of {elements} elements are used, and no reason is known"
            )
            continue
        left_over = counts[tensor.state, reason]
        left_over[0] += 1
        left_over[1] += elements - used
    left = (LeftOut(state, reason, *left_over) for (state, reason), left_over in sorted(counts.items()))
    return total, (*left, *plan.excluded)


def _reasons(plan: ConversionPlan, key: str, state: str, used: int, compared: bool) -> Iterator[str]:
    """Why elements of a tensor are left out."""
    if used:
        held = (target.wanted.catalog.tensors for target in plan.targets)
        found = ((tensors, tensors.of_state(state).get(key)) for tensors in held)
        if any(number is not None and prod(tensors.shape(number)) == used for tensors, number in found):
            yield "beyond the vocabulary that was requested"
        return
    if compared:
        yield "it is its master weight, rounded, and compared with it"
    yield from reasons_left_out(plan, key, state)


def reasons_left_out(plan: ConversionPlan, key: str, state: str) -> Iterator[str]:
    """Why no target has a tensor."""
    if all(state in target.states_not_carried for target in plan.targets):
        formats = {target.spec.format for target in plan.targets}
        models = all(FORMATS[name].model_only for name in formats)
        yield "not requested" if models else f"not supported by the format {', '.join(sorted(formats))}"
    for target in plan.targets:
        for name, reason in target.not_carried:
            if name == key:
                yield reason
