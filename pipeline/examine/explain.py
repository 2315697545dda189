"""Explain a tensor of a target: from which bytes of which source file each of its values comes, and by which rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.convert.plan import ConversionPlan, source_in_words
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.shown import Facts, Result
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.examine.coverage import layout_of, reasons_left_out
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.planning.coverage import copied_values
from paddle_reshard.pipeline.planning.ops import MOVE
from paddle_reshard.pipeline.request.arguments import checked


@dataclass(frozen=True, slots=True)
class Origin:
    """A box of values: where it lies in a target file, and where in a source file it comes from.

    An element at index ``i`` of the tensor lies at byte ``target_byte + Σ (i - offset) · target_strides``, and the same
    on the other side.
    """

    key: str
    state: str
    offset: Shape
    """First element of the box in the tensor."""
    extents: Shape
    target_file: str
    target_byte: int
    """Byte of the first element in the target file."""
    target_strides: Shape
    """Bytes from one element to the next along each dim."""
    target_dtype: str
    source_file: str
    source_byte: int
    source_strides: Shape
    source_dtype: str
    source_state: str
    """State of the tensor that is read: differs for parameters that are made from master weights, and reverse."""
    rank: Mapping[str, int]
    """Axis → coordinate of the rank that wrote the source file; empty if ranks have no files of their own."""
    copied: bool
    """Whether the storage copies it by itself."""

    @property
    def target_range(self) -> tuple[int, int]:
        """First byte, and one past the last, in the target file."""
        return _hull(self.target_byte, self.extents, self.target_strides, self.target_dtype)

    @property
    def source_range(self) -> tuple[int, int]:
        """First byte, and one past the last, in the source file."""
        return _hull(self.source_byte, self.extents, self.source_strides, self.source_dtype)

    @property
    def how(self) -> str:
        """What happens to the values on the way; empty if their bytes stay as they are, in the same order."""
        words = []
        if self.source_state != self.state:
            words.append(f"from {self.source_state}")
        if self.source_dtype != self.target_dtype:
            words.append(f"{self.source_dtype} → {self.target_dtype}")
        source_order, target_order = (
            [dim for dim in np.argsort([-step for step in strides], kind="stable") if self.extents[dim] > 1]
            for strides in (self.source_strides, self.target_strides)
        )
        if source_order != target_order:
            words.append("transposed")
        return ", ".join(words)

    def at(self, element: Sequence[int]) -> Origin | None:
        """The same of a single element; ``None`` if it is not in the box."""
        inside = [index - first for index, first in zip(element, self.offset, strict=True)]
        if any(not 0 <= index < extent for index, extent in zip(inside, self.extents, strict=True)):
            return None
        steps = [
            sum(index * step for index, step in zip(inside, strides, strict=True))
            for strides in (self.target_strides, self.source_strides)
        ]
        return replace(
            self,
            offset=tuple(element),
            extents=(1,) * len(self.extents),
            target_byte=self.target_byte + steps[0],
            source_byte=self.source_byte + steps[1],
        )


def _hull(byte: int, extents: Shape, strides: Shape, dtype: str) -> tuple[int, int]:
    size = next(known.itemsize for known in DTYPES if known.name == dtype)
    return byte, byte + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + size


@dataclass(frozen=True, slots=True)
class ExplainedTensor:
    """A tensor of the source or target, and what is known of it."""

    key: str
    state: str
    dtype: str
    shape: Shape
    rules: tuple[str, ...]
    """What said how it is cut, named and made: the row of the rule table, statements, definitions of the format."""
    left_out: str = ""
    """Why no target has it; empty if one does."""


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """A tensor on both sides."""

    source: str
    """Location of the source."""
    source_in_words: str
    target_in_words: str
    tensors: tuple[ExplainedTensor, ...]
    """The tensor in each of its states, also those that no target has."""
    origins: tuple[Origin, ...]
    """The boxes of its values, by file and first byte of the target."""

    def _in_short(self) -> str:
        what = ", ".join(dict.fromkeys(tensor.key for tensor in self.tensors))
        return f"{what}: {len(self.origins)} boxes of values"

    def facts(self) -> Facts:
        """Source and target; tensors and their rules."""
        facts = [("from", f"{self.source}: {self.source_in_words}"), ("to", self.target_in_words)]
        for tensor in self.tensors:
            shown = f"{tensor.key} ({tensor.state}), {tensor.dtype} {list(tensor.shape)}"
            facts.append(("tensor", shown))
            if tensor.left_out:
                facts.append(("left out", f"{tensor.state}: {tensor.left_out}"))
        rules = dict.fromkeys(rule for tensor in self.tensors for rule in tensor.rules)
        return [*facts, *(("rule", rule) for rule in rules)]


@checked
def explain(plan: ConversionPlan, key: str, *, element: Sequence[int] | None = None) -> Explanation:
    """Explain a tensor, or one element of it.

    Parameters
    ----------
    plan
        From :func:`plan`.
    key
        Structured key of a tensor, which is explained in all states.
    element
        Index of an element of it, one number for each dim; states of another shape are left out.

    Raises
    ------
    UsageError
        If there is no such key or element; with the closest names.
    PlanError
        If the plan was run before: its columns were released then.
    """
    plan.plan.check_not_run()
    origins = list(_boxes(plan, _numbers_of(plan, key)))
    if element is not None:
        origins = _at(origins, element, key)
    return Explanation(
        plan.store.location,
        source_in_words(plan.source),
        "; ".join(target.spec.in_words() for target in plan.targets),
        tuple(_tensors(plan, key, {(origin.key, origin.state) for origin in origins})),
        tuple(origins),
    )


def _numbers_of(conversion: ConversionPlan, key: str) -> list[int]:
    """The tensors of the plan with this key, or tied to it."""
    plan, source = conversion.plan, conversion.source.catalog
    moved = len(plan.tensors) - plan.compared_only
    numbers = [n for n, t in enumerate(plan.tensors[:moved]) if key == t.key or key in t.aliases]
    if not numbers and not any(key == t.key for t in source.tensors):
        known = sorted({t.key for t in source.tensors})
        near = did_you_mean(key, known) or f"; keys are such as {', '.join(known[:3])}"
        raise UsageError(f"the source has no tensor {key}{near}")
    return numbers


def _at(origins: Sequence[Origin], element: Sequence[int], key: str) -> list[Origin]:
    fitting = [origin for origin in origins if len(origin.offset) == len(element)]
    single = [box for origin in fitting if (box := origin.at(element)) is not None]
    if not single:
        ends = [[o + e for o, e in zip(origin.offset, origin.extents, strict=True)] for origin in origins]
        largest = max(ends, key=prod, default=[])
        raise UsageError(
            f"element {list(element)} of {key} lies in none of its boxes, which end at {largest}"
        )
    return single


def _tensors(conversion: ConversionPlan, key: str, moved: set[tuple[str, str]]) -> Iterator[ExplainedTensor]:
    """The tensors whose values were found, and those of the key that no target has."""
    source = conversion.source
    catalog, models = source.catalog, {tensor.key: tensor for tensor in source.model.tensors}
    for number, tensor in enumerate(catalog.tensors):
        named = key == tensor.key or key in tensor.aliases
        is_moved = (tensor.key, tensor.state) in moved
        is_stored = named and np.any(catalog.fragments["tensor"] == number)
        if not is_moved and not is_stored:
            continue
        why = "" if is_moved else next(reasons_left_out(conversion, tensor.key, tensor.state), "")
        rules = (
            *_rules_of_model(source, models.get(tensor.key)),
            *source.history.statements.get(tensor.key, ()),
            *_rules_of_values(catalog, number),
        )
        yield ExplainedTensor(tensor.key, tensor.state, tensor.dtype.name, tensor.global_shape, rules, why)


def _rules_of_model(source: Checkpoint, tensor: ModelTensor | None) -> Iterator[str]:
    """How a parameter is cut, distributed and named."""
    if tensor is None:
        return
    table, rule = source.model.table, tensor.rule
    fused = f", in each of {rule.fused_parts} fused parts" if rule.fused_parts > 1 else ""
    cut = "every tp rank holds the whole" if rule.split is None else f"tp cuts dim {rule.split}{fused}"
    yield f"{table.family} of {table.convention}: {rule.key}: {cut}"
    if rule.of_expert and source.job.expert_axis is not None:
        yield f"whole experts are distributed over {source.job.expert_axis}"
    if rule.huggingface is not None:
        turned = ", transposed" if rule.huggingface.transposed else ""
        yield f"{rule.key} is {', '.join(rule.huggingface.keys)} in transformers{turned}"


def _rules_of_values(catalog: Catalog, number: int) -> Iterator[str]:
    """What defines values that no file stores as they are."""
    if number in catalog.implied:
        other = catalog.tensors[catalog.implied[number]].state
        yield f"no file stores this {catalog.tensors[number].state}: the format defines it by the {other}"
    if number in catalog.mixtures:
        mixture = catalog.mixtures[number]
        divided = f", divided by {mixture.divide_by}" if mixture.divide_by != 1 else ""
        yield f"mixed in {len(mixture.terms)} steps in float32{divided}"


def _boxes(conversion: ConversionPlan, tensors: Sequence[int]) -> Iterator[Origin]:
    """The boxes of values of some tensors."""
    plan = conversion.plan
    kinds = [(plan.ops, False)]
    if plan.copied_bytes:  # no op says which values these are, so the layout of the target has to
        layout = layout_of(conversion)
        kinds.append((copied_values(plan, layout.catalog, layout.files), True))
    rank = cache(lambda file: _rank_of(conversion, plan.source_files[file].path))
    for every, copied in kinds:
        ops = every[(every["kind"] == MOVE) & np.isin(every["tensor"], tensors)]
        for row in ops.rows()[np.lexsort((ops["target_byte"], ops["target_file"]))]:
            tensor, read = (plan.tensors[int(row[name])] for name in ("tensor", "source_tensor"))
            dims = len(tensor.global_shape)
            yield Origin(
                key=tensor.key,
                state=tensor.state,
                offset=_numbers(row["offset"], dims),
                extents=_numbers(row["extents"], dims),
                target_file=plan.target_files[int(row["target_file"])].path,
                target_byte=int(row["target_byte"]),
                target_strides=_numbers(row["target_strides"], dims),
                target_dtype=DTYPES[int(row["target_dtype"])].name,
                source_file=plan.source_files[int(row["source_file"])].path,
                source_byte=int(row["source_byte"]),
                source_strides=_numbers(row["source_strides"], dims),
                source_dtype=DTYPES[int(row["source_dtype"])].name,
                source_state=read.state,
                rank=rank(int(row["source_file"])),
                copied=copied,
            )


def _rank_of(conversion: ConversionPlan, path: str) -> Mapping[str, int]:
    """Axis → coordinate of the rank that wrote a source file; where its name tells only a number, that as ``rank``."""
    source = conversion.source
    format = FORMATS[source.format]
    coordinates = dict(format.rank_of(path) or {})
    job = source.job.topology or Topology()
    if job.ep > 1 and coordinates and "ep" not in coordinates:
        coordinates["ep"] = job.expert_rank(coordinates.get("tp", 0), coordinates.get("sharding", 0))
    number = format.process_of(path)
    if number is not None and MANIFEST not in conversion.store.sizes():
        coordinates["rank"] = number  # a conversion numbers files, not ranks
    return coordinates


def _numbers(values: Iterable[int], dims: int) -> Shape:
    return tuple(int(value) for value in list(values)[:dims])
