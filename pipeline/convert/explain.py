"""Explain a target: what every byte of a file is, and from which bytes of which source file each value comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from paddle_reshard.pipeline.convert.coverage import check_not_run, layout_of, reasons_left_out
from paddle_reshard.pipeline.convert.plan import ConversionPlan, source_in_words
from paddle_reshard.pipeline.core.catalog import Catalog, File
from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.shown import Facts, Shown
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.layouts.formats import FORMATS
from paddle_reshard.pipeline.layouts.model import ModelTensor
from paddle_reshard.pipeline.planning.coverage import copied_values
from paddle_reshard.pipeline.planning.ops import MOVE, Ops

SHOWN_NAMES = 20
"""So many names are listed in a message."""


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
    """Of the first element."""
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
        one, two = (
            [dim for dim in np.argsort([-step for step in strides], kind="stable") if self.extents[dim] > 1]
            for strides in (self.source_strides, self.target_strides)
        )
        if one != two:
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
class Stretch:
    """A range of a target file."""

    start: int
    stop: int
    """One past the last byte."""
    kind: str
    """``literal``, ``padding``, ``value``, or ``file`` for a file that is copied whole."""
    content: bytes = b""
    """Of a literal."""
    origins: tuple[Origin, ...] = ()
    """Of values, by first byte in the target. Boxes may interleave, as those of matrices that are cut by columns do."""
    source_file: str = ""
    """Of a file that is copied whole."""


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
class Explanation(Shown):
    """A file of a target, or a tensor on both sides."""

    source: str
    """Location of the source."""
    source_in_words: str
    target_in_words: str
    file: str | None
    """The explained file; ``None`` for a tensor in all files."""
    size_bytes: int | None
    """Of the file; ``None`` for a tensor."""
    stretches: tuple[Stretch, ...]
    """Of the file, in order; of a tensor, only the boxes of its values, by file."""
    tensors: tuple[ExplainedTensor, ...]

    @property
    def origins(self) -> tuple[Origin, ...]:
        """All boxes of values."""
        return tuple(origin for stretch in self.stretches for origin in stretch.origins)

    def _in_short(self) -> str:
        what = self.file or ", ".join(dict.fromkeys(tensor.key for tensor in self.tensors))
        return f"{what}: {len(self.stretches)} stretches, {len(self.origins)} boxes of values"

    def facts(self) -> Facts:
        """Source and target; of a single key also its tensors and their rules."""
        facts = [("from", f"{self.source}: {self.source_in_words}"), ("to", self.target_in_words)]
        if self.file is not None:
            facts.append(("file", f"{self.file}, {self.size_bytes:,} bytes"))
        if len({tensor.key for tensor in self.tensors}) > 1:
            return [*facts, ("tensors", str(len(self.tensors)))]
        for tensor in self.tensors:
            shown = f"{tensor.key} ({tensor.state}), {tensor.dtype} {list(tensor.shape)}"
            facts.append(("tensor", shown))
            if tensor.left_out:
                facts.append(("left out", f"{tensor.state}: {tensor.left_out}"))
        rules = dict.fromkeys(rule for tensor in self.tensors for rule in tensor.rules)
        return [*facts, *(("rule", rule) for rule in rules)]


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
    UnsupportedError
        If the file has quantised weights.
    PlanError
        If the plan was run before: its columns were released then.
    """
    if file is None and key is None:
        raise UsageError("name a file of the target or the key of a tensor")
    if element is not None and key is None:
        raise UsageError("an element belongs to a tensor; give its key too")
    explained = _Explained(plan)
    if file is not None:
        explained.check_file(file)
    numbers = None if key is None else explained.numbers(key)
    stretches: Iterable[Stretch]
    if numbers is None and file is not None:
        stretches = explained.stretches(file)
    else:
        origins = list(explained.origins(file, numbers))
        if file is not None and not origins:
            held = sorted({origin.target_file for origin in explained.origins(None, numbers)})
            listed = ", ".join(held[:SHOWN_NAMES]) or "no file of the target"
            raise UsageError(f"{file} holds no values of {key}; they go to {listed}")
        if element is not None:
            origins = _at(origins, element, str(key))
        stretches = [_of_values([origin]) for origin in origins]
    made = tuple(stretches)
    found = {(origin.key, origin.state) for stretch in made for origin in stretch.origins}
    sizes = {f.path: f.size_bytes for f in (*plan.plan.target_files, *explained.whole)}
    return Explanation(
        plan.store.location,
        source_in_words(plan.source),
        "; ".join(target.spec.in_words() for target in plan.targets),
        file,
        None if file is None else sizes[file],
        made,
        tuple(explained.tensors(key, found, file is None)),
    )


def _at(origins: Sequence[Origin], element: Sequence[int], key: str) -> list[Origin]:
    fitting = [origin for origin in origins if len(origin.offset) == len(element)]
    found = [one for origin in fitting if (one := origin.at(element)) is not None]
    if not found:
        ends = [[o + e for o, e in zip(origin.offset, origin.extents, strict=True)] for origin in origins]
        largest = max(ends, key=prod, default=[])
        raise UsageError(
            f"element {list(element)} of {key} lies in none of its boxes, which end at {largest}"
        )
    return found


class _Explained:
    """A plan with its layout."""

    def __init__(self, plan: ConversionPlan) -> None:
        check_not_run(plan)
        self.conversion, self.plan = plan, plan.plan
        self.files = {f.path: number for number, f in enumerate(self.plan.target_files)}
        self.whole = [File(carried.target_path, carried.size_bytes) for carried in self.plan.carried]
        self._copied = Ops.empty()
        if self.plan.copied_bytes:  # no op says which values these are, so the layout of the target has to
            layout = layout_of(plan)
            self._copied = copied_values(self.plan, layout.catalog, layout.files)
        self._ranks: dict[int, Mapping[str, int]] = {}

    def check_file(self, file: str) -> None:
        """Refuse a file that the target has not, or whose values are quantised."""
        plan = self.plan
        names = [*(f.path for f in plan.stored_files), *(carried.target_path for carried in plan.carried)]
        if file not in names:
            near = did_you_mean(file, names)
            listed = ", ".join(names[:SHOWN_NAMES]) + (
                f", … ({len(names)})" if len(names) > SHOWN_NAMES else ""
            )
            raise UsageError(f"the target has no file {file}; its files are {listed}{near}")
        if plan.quantised is not None and (
            file in plan.quantised.files or file in plan.quantised.scale_files
        ):
            raise UnsupportedError(
                f"{file}: its weights are quantised while they are written, so no source byte is found in it; explain "
                "the same conversion without --quantize"
            )

    def numbers(self, key: str) -> list[int]:
        """The tensors of the plan with this key, or tied to it."""
        moved = len(self.plan.tensors) - self.plan.beside
        found = [n for n, t in enumerate(self.plan.tensors[:moved]) if key == t.key or key in t.aliases]
        if not found and not any(key == t.key for t in self.conversion.source.catalog.tensors):
            known = sorted({t.key for t in self.conversion.source.catalog.tensors})
            near = did_you_mean(key, known) or f"; keys are such as {', '.join(known[:3])}"
            raise UsageError(f"the source has no tensor {key}{near}")
        return found

    def origins(self, file: str | None, numbers: Sequence[int] | None) -> Iterator[Origin]:
        """The boxes of values of a file, or of some tensors; by file and first byte."""
        for ops, copied in ((self.plan.ops, False), (self._copied, True)):
            chosen = ops["kind"] == MOVE
            if file is not None:
                chosen &= ops["target_file"] == self.files.get(file, -1)
            if numbers is not None:
                chosen &= np.isin(ops["tensor"], numbers)
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

    def _rank(self, file: int) -> Mapping[str, int]:
        if file not in self._ranks:
            source = self.conversion.source
            found = dict(FORMATS[source.format].rank_of(self.plan.source_files[file].path) or {})
            job = source.topology or Topology()
            if job.ep > 1 and found and "ep" not in found:
                found["ep"] = job.expert_rank(found.get("tp", 0), found.get("sharding", 0))
            self._ranks[file] = found
        return self._ranks[file]

    def stretches(self, file: str) -> Iterator[Stretch]:
        """All stretches of a file, in order. What is neither a literal nor a value is padding."""
        for carried in self.plan.carried:
            if carried.target_path == file:
                yield Stretch(0, carried.size_bytes, "file", source_file=carried.source_path)
                return
        number = self.files[file]
        size = self.plan.target_files[number].size_bytes
        found = [
            Stretch(offset, offset + len(content), "literal", content)
            for _, offset, content in self.plan.literals.by_file().of_ranges([(number, 0, size)])
        ]
        values: list[Origin] = []
        reach = 0
        for origin in sorted(self.origins(file, None), key=lambda one: one.target_range):
            start, stop = origin.target_range
            if values and start >= reach:
                found.append(_of_values(values))
                values = []
            values.append(origin)
            reach = max(reach, stop)
        if values:
            found.append(_of_values(values))
        found.sort(key=lambda stretch: stretch.start)
        reach = 0
        for stretch in [*found, Stretch(size, size, "")]:
            if reach < stretch.start:
                yield Stretch(reach, stretch.start, "padding")
            if stretch.kind:
                yield stretch
            reach = max(reach, stretch.stop)

    def tensors(
        self, key: str | None, found: set[tuple[str, str]], everywhere: bool
    ) -> Iterator[ExplainedTensor]:
        """The tensors that were found; of a key also those that no target has."""
        models = {tensor.key: tensor for tensor in self.conversion.source.model.tensors}
        source = self.conversion.source.catalog
        for number, tensor in enumerate(source.tensors):
            named = key is not None and (key == tensor.key or key in tensor.aliases)
            moved = (tensor.key, tensor.state) in found
            if not moved and not (named and everywhere):
                continue
            if not moved and not np.any(source.fragments["tensor"] == number):
                continue  # no file stores it
            why = "" if moved else next(reasons_left_out(self.conversion, tensor.key, tensor.state), "")
            rules = tuple(self._rules(models.get(tensor.key), tensor.key, source, number))
            yield ExplainedTensor(
                tensor.key, tensor.state, tensor.dtype.name, tensor.global_shape, rules, why
            )

    def _rules(self, model: ModelTensor | None, key: str, catalog: Catalog, number: int) -> Iterator[str]:
        source = self.conversion.source
        if model is not None:
            table = source.model.table
            yield f"{table.family} of {table.convention}: {model.rule.key}: {_cut_in_words(model)}"
            if model.rule.of_expert and source.expert_axis is not None:
                yield f"whole experts are distributed over {source.expert_axis}"
            if model.rule.huggingface is not None:
                form = model.rule.huggingface
                turned = ", transposed" if form.transposed else ""
                yield f"{model.rule.key} is {', '.join(form.keys)} in transformers{turned}"
        yield from source.statements.get(key, ())
        if number in catalog.implied:
            other = catalog.tensors[catalog.implied[number]].state
            yield f"no file stores this {catalog.tensors[number].state}: the format defines it by the {other}"
        if number in catalog.mixtures:
            mixture = catalog.mixtures[number]
            divided = f", divided by {mixture.divide_by}" if mixture.divide_by != 1 else ""
            yield f"mixed in {len(mixture.terms)} steps in float32{divided}"


def _cut_in_words(tensor: ModelTensor) -> str:
    rule = tensor.rule
    if rule.split is None:
        return "every tp rank holds the whole"
    fused = f", in each of {rule.fused_parts} fused parts" if rule.fused_parts > 1 else ""
    return f"tp cuts dim {rule.split}{fused}"


def _of_values(origins: Sequence[Origin]) -> Stretch:
    ranges = [origin.target_range for origin in origins]
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    return Stretch(start, stop, "value", origins=tuple(origins))


def _numbers(values: Iterable[int], dims: int) -> Shape:
    return tuple(int(value) for value in list(values)[:dims])
