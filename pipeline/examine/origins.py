"""From a plan: what the bytes of a target file are, and from where each box of values comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np

from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.examine.coverage import layout_of
from paddle_reshard.pipeline.examine.explanation import Origin, Stretch
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.planning.coverage import copied_values
from paddle_reshard.pipeline.planning.ops import MOVE, Ops


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
