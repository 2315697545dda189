"""Explain a target: what every byte of a file is, and from which bytes of which source file each value comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.convert.plan import ConversionPlan, source_in_words
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.examine.coverage import layout_of, reasons_left_out
from paddle_reshard.pipeline.examine.explanation import ExplainedTensor, Explanation, Origin, Stretch
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.planning.coverage import copied_values
from paddle_reshard.pipeline.planning.ops import MOVE, Ops
from paddle_reshard.pipeline.request.arguments import checked

SHOWN_NAMES = 20
"""Names that a message lists."""


@checked
def explain(
    plan: ConversionPlan,
    file: str | None = None,
    key: str | None = None,
    *,
    element: Sequence[int] | None = None,
) -> Explanation:
    """Explain a file of a target, a tensor, or one element.

    Parameters
    ----------
    plan
        From :func:`plan`.
    file
        Path of a file as the plan names it. Without it, ``key`` is explained wherever it lies.
    key
        Structured key of a tensor: only its values are explained, in all states.
    element
        Index of an element of it, one number for each dim; states of another shape are left out.

    Raises
    ------
    UsageError
        If there is no such file, key or element; with the closest names.
    PlanError
        If the plan was run before: its columns were released then.
    """
    if file is None and key is None:
        raise UsageError("name a file of the target or the key of a tensor")
    if element is not None and key is None:
        raise UsageError("an element belongs to a tensor; give its key too")
    origins = Origins(plan)
    if file is not None:
        _check_file(file, origins)
    if file is not None and key is None:
        stretches: tuple[Stretch, ...] = tuple(origins.stretches(file))
    else:
        chosen = _boxes(origins, file, str(key), element)
        stretches = tuple(of_values([origin]) for origin in chosen)
    moved = {(origin.key, origin.state) for stretch in stretches for origin in stretch.origins}
    return Explanation(
        plan.store.location,
        source_in_words(plan.source),
        "; ".join(target.spec.in_words() for target in plan.targets),
        file,
        None if file is None else origins.sizes()[file],
        stretches,
        tuple(_tensors(plan, key, moved, file is None)),
    )


def _check_file(file: str, origins: Origins) -> None:
    """Refuse a file that the target has not."""
    names = [*origins.sizes()]
    if file not in names:
        more = f", … ({len(names)})" if len(names) > SHOWN_NAMES else ""
        listed = ", ".join(names[:SHOWN_NAMES]) + more
        near = did_you_mean(file, names)
        raise UsageError(f"the target has no file {file}; its files are {listed}{near}")


def _boxes(origins: Origins, file: str | None, key: str, element: Sequence[int] | None) -> Sequence[Origin]:
    """The boxes of a tensor, or those of one element of it."""
    numbers = _numbers_of(origins.conversion, key)
    boxes = list(origins.boxes(file, numbers))
    if file is not None and not boxes:
        held = sorted({origin.target_file for origin in origins.boxes(None, numbers)})
        listed = ", ".join(held[:SHOWN_NAMES]) or "no file of the target"
        raise UsageError(f"{file} holds no values of {key}; they go to {listed}")
    return boxes if element is None else _at(boxes, element, key)


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


# ------------------------------------------------------------------------------------------------- tensors


def _tensors(
    conversion: ConversionPlan, key: str | None, moved: set[tuple[str, str]], everywhere: bool
) -> Iterator[ExplainedTensor]:
    """The tensors whose values were found; of a key also those that no target has."""
    source = conversion.source
    catalog, models = source.catalog, {tensor.key: tensor for tensor in source.model.tensors}
    for number, tensor in enumerate(catalog.tensors):
        named = everywhere and key is not None and (key == tensor.key or key in tensor.aliases)
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
    yield f"{table.family} of {table.convention}: {rule.key}: {_cut_in_words(tensor)}"
    if rule.of_expert and source.job.expert_axis is not None:
        yield f"whole experts are distributed over {source.job.expert_axis}"
    if rule.huggingface is not None:
        turned = ", transposed" if rule.huggingface.transposed else ""
        yield f"{rule.key} is {', '.join(rule.huggingface.keys)} in transformers{turned}"


def _cut_in_words(tensor: ModelTensor) -> str:
    rule = tensor.rule
    if rule.split is None:
        return "every tp rank holds the whole"
    fused = f", in each of {rule.fused_parts} fused parts" if rule.fused_parts > 1 else ""
    return f"tp cuts dim {rule.split}{fused}"


def _rules_of_values(catalog: Catalog, number: int) -> Iterator[str]:
    """What defines values that no file stores as they are."""
    if number in catalog.implied:
        other = catalog.tensors[catalog.implied[number]].state
        yield f"no file stores this {catalog.tensors[number].state}: the format defines it by the {other}"
    if number in catalog.mixtures:
        mixture = catalog.mixtures[number]
        divided = f", divided by {mixture.divide_by}" if mixture.divide_by != 1 else ""
        yield f"mixed in {len(mixture.terms)} steps in float32{divided}"


class Origins:
    """The boxes of values of a plan, which was not run before: its columns were released then."""

    def __init__(self, conversion: ConversionPlan) -> None:
        conversion.plan.check_not_run()
        self.conversion, self.plan = conversion, conversion.plan
        self._numbers = {file.path: number for number, file in enumerate(self.plan.target_files)}
        self._copied = Ops.empty()
        if self.plan.copied_bytes:  # no op says which values these are, so the layout of the target has to
            layout = layout_of(conversion)
            self._copied = copied_values(self.plan, layout.catalog, layout.files)
        self._rank = cache(lambda file: rank_of(conversion, conversion.plan.source_files[file].path))

    def sizes(self) -> dict[str, int]:
        """File → size in bytes, of all files of the target."""
        stored = ((file.path, file.size_bytes) for file in self.plan.target_files)
        carried = ((file.target_path, file.size_bytes) for file in self.plan.carried)
        return dict([*stored, *carried])

    def boxes(self, file: str | None, tensors: Sequence[int] | None) -> Iterator[Origin]:
        """The boxes of values of a file, or of some tensors; by file and first byte."""
        files = [*self._numbers.values()] if file is None else [self._numbers.get(file, -1)]
        for ops, copied in ((self.plan.ops, False), (self._copied, True)):
            chosen = (ops["kind"] == MOVE) & np.isin(ops["target_file"], files)
            if tensors is not None:
                chosen &= np.isin(ops["tensor"], tensors)
            yield from self._described(ops[chosen], copied)

    def _described(self, ops: Ops, copied: bool) -> Iterator[Origin]:
        plan = self.plan
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
                rank=self._rank(int(row["source_file"])),
                copied=copied,
            )

    def stretches(self, file: str) -> Iterator[Stretch]:
        """All stretches of a file, in order. What is neither a literal nor a value is padding."""
        for carried in self.plan.carried:
            if carried.target_path == file:
                yield Stretch(0, carried.size_bytes, "file", source_file=carried.source_path)
                return
        size = self.sizes()[file]
        written = sorted([*self._literals(file, size), *self._values(file)], key=lambda one: one.start)
        reach = 0
        for stretch in [*written, Stretch(size, size, "")]:
            if reach < stretch.start:
                yield Stretch(reach, stretch.start, "padding")
            if stretch.kind:
                yield stretch
            reach = max(reach, stretch.stop)

    def _literals(self, file: str, size: int) -> Iterator[Stretch]:
        for _, offset, content in self.plan.literals.by_file().of_ranges([(self._numbers[file], 0, size)]):
            yield Stretch(offset, offset + len(content), "literal", content)

    def _values(self, file: str) -> Iterator[Stretch]:
        """Boxes that interleave are one stretch."""
        values: list[Origin] = []
        reach = 0
        for origin in sorted(self.boxes(file, None), key=lambda origin: origin.target_range):
            start, stop = origin.target_range
            if values and start >= reach:
                yield of_values(values)
                values = []
            values.append(origin)
            reach = max(reach, stop)
        if values:
            yield of_values(values)


def of_values(origins: Sequence[Origin]) -> Stretch:
    """The stretch of boxes of one file."""
    ranges = [origin.target_range for origin in origins]
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    return Stretch(start, stop, "value", origins=tuple(origins))


def rank_of(conversion: ConversionPlan, path: str) -> Mapping[str, int]:
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
