"""The numbers of ``docs/tour.md``: one tensor through one conversion.

::

    python -m tests.tour          print every block
    python -m tests.tour --write  put them into the document

Each function below makes one block of the document from a real conversion; ``tests/unit/test_tour.py`` compares them.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.checkpoint.reading import index_tensor_file
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.locate import open_source
from tests.conftest import COMMITTED, REPO

DOCUMENT = REPO / "docs" / "tour.md"
SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
KEY = "model.layers.3.self_attn.k_proj.weight"
ROW, COLUMN = 20, 18
"""The element that is followed."""


@dataclass(frozen=True)
class Tour:
    """A conversion that was made, and the tensor to look at."""

    planned: paddle_reshard.ConversionPlan
    report: paddle_reshard.ConversionReport
    target: Path

    @property
    def plan(self) -> paddle_reshard.Plan:
        return self.planned.plan

    @property
    def catalog(self) -> Any:
        return self.planned.source.catalog

    def number(self, state: str) -> int:
        found: int = self.catalog.index()[KEY, state]
        return found

    def fragments(self) -> npt.NDArray[np.void]:
        """The boxes of the master weight, row by row of the drawing."""
        found = self.catalog.stored(self.number("master_weight")).rows()
        return found[np.lexsort((found["offset"][:, 1], found["offset"][:, 0]))]

    def ops(self, state: str) -> npt.NDArray[np.void]:
        """What is done to make the tensor of this state, in the same order."""
        rows = self.plan.ops.rows()
        rows = rows[rows["tensor"] == self.number(state)]
        return rows[np.lexsort((rows["offset"][:, 1], rows["offset"][:, 0]))]

    def origins(self) -> tuple[paddle_reshard.Origin, ...]:
        """Where the element comes from, in each state."""
        return paddle_reshard.explain(self.planned, key=KEY, element=(ROW, COLUMN)).origins

    def group(self) -> int:
        return int(
            self.plan.op_groups[np.flatnonzero(self.plan.ops["tensor"] == self.number("master_weight"))[0]]
        )


def stored(tour: Tour) -> Iterator[str]:
    """What the source's files say."""
    store = open_source(str(SOURCE), {})
    meta = json.loads((SOURCE / "model_meta.json").read_text("utf-8"))["sharding_metas"]
    for cell in ("tp00_pp01", "tp01_pp01"):
        name = meta[cell]["structure_name_mapping"][KEY]
        shape = meta[cell]["param_meta"][KEY][0]
        yield f"{cell}: {KEY}"
        yield f"           is {name}, of shape {shape} on this tp rank"
        for shard in ("shard00", "shard01"):
            path = f"optimizer.{cell}_{shard}.pdopt"
            array = index_tensor_file(store, path, store.sizes()[path])["master_weights"][name]
            assert isinstance(array, ArrayRef)
            yield f"  {path}  {array.shape[0]:4} × float32 at byte {array.byte_offset}"


def boxes(tour: Tour) -> Iterator[str]:
    """The logical tensor, drawn from its boxes."""
    found = tour.fragments()
    path = {int(row["file"]): tour.catalog.files[row["file"]].path.removesuffix(".pdopt") for row in found}
    rows = sorted({(int(row["offset"][0]), int(row["extents"][0])) for row in found})
    columns = sorted({(int(row["offset"][1]), int(row["extents"][1])) for row in found})
    at = {(int(row["offset"][0]), int(row["offset"][1])): path[int(row["file"])] for row in found}
    wide = max(map(len, path.values())) + 2

    def line(ends: str) -> str:
        return " " * 12 + ends[0] + ends[1].join("─" * wide for _ in columns) + ends[2]

    yield " " * 13 + " ".join(f"columns {c}…{c + width - 1}".center(wide) for c, width in columns)
    for number, (row, height) in enumerate(rows):
        yield line("├┼┤" if number else "┌┬┐")
        names = "│".join(at[row, column].center(wide) for column, _ in columns)
        yield f"rows {row}…{row + height - 1}".ljust(12) + f"│{names}│"
    yield line("└┴┘")


def dims(values: Any) -> str:
    return f"({', '.join(str(int(value)) for value in values[:2])})"


def fragments(tour: Tour) -> Iterator[str]:
    """The same boxes as rows of the catalog."""
    yield f"{'file':<33}  {'first byte':>10}  {'offset':<8}  {'extents':<8}  byte strides"
    for row in tour.fragments():
        path = tour.catalog.files[row["file"]].path
        yield (
            f"{path:<33}  {row['byte_base']:>10}  {dims(row['offset']):<8}  {dims(row['extents']):<8}  "
            f"{dims(row['strides'])}"
        )


def target(tour: Tour) -> Iterator[str]:
    """Where the tensor will be, and the literal bytes before it."""
    op = tour.ops("master_weight")[0]
    file = int(op["target_file"])
    first = int(op["target_byte"])
    offset, content = next(
        (offset, content)
        for number, offset, content in tour.plan.literals
        if number == file and offset + len(content) == first
    )
    described = tour.plan.target_files[file]
    size = 64 * 32 * 4
    yield f"{described.path}, {described.size_bytes} bytes"
    yield f"  bytes {offset}…{first - 1}  literal: {content!r}"[:100] + "…"
    yield f"  bytes {first}…{first + size - 1}  64 × 32 float32, row by row: byte strides {dims(op['target_strides'])}"


def ops(tour: Tour) -> Iterator[str]:
    """What is moved."""
    yield f"{'box':<15}{'from':<33}  {'byte':>6}     {'to':<15}  {'byte':>7}"
    for op in tour.ops("master_weight"):
        (row, column), (height, width) = op["offset"][:2].tolist(), op["extents"][:2].tolist()
        yield (
            f"[{row}:{row + height}, {column}:{column + width}]".ljust(15)
            + f"{tour.plan.source_files[op['source_file']].path:<33}  {op['source_byte']:>6}"
            + f"  → {tour.plan.target_files[op['target_file']].path:<15}  {op['target_byte']:>7}"
        )


def cast(tour: Tour) -> Iterator[str]:
    """The parameter, which no file of the source holds."""
    made = tour.ops("param")
    op = made[-1]
    yield f"{KEY} (param): {len(made)} ops, float32 → bfloat16"
    yield (
        f"the last one from byte {op['source_byte']} of {tour.plan.source_files[op['source_file']].path} "
        f"to byte {op['target_byte']} of {tour.plan.target_files[op['target_file']].path}"
    )


def group(tour: Tour) -> Iterator[str]:
    """The portion of work to which all of it belongs."""
    number, plan = tour.group(), tour.plan
    bands, parts = (rows[rows["group"] == number] for rows in (plan.bands, plan.parts))
    used = {int(row["file"]) for row in tour.fragments()}
    count = int((plan.op_groups == number).sum())
    yield f"group {number} of {plan.groups}: {count} ops, peak {plan.group_peaks[number]:,} bytes"
    yield f"  {len(bands)} bands, among them"
    for band in bands:
        if int(band["file"]) in used:
            path = plan.source_files[band["file"]].path
            yield f"    {path}  bytes {band['start']}…{band['stop'] - 1}, pass {band['pass']}"
    yield f"  {len(parts)} parts"
    for part in parts:
        path = plan.target_files[part["file"]].path
        yield f"    {path:<33}  bytes {part['start']}…{part['stop'] - 1}"


def element(tour: Tour) -> Iterator[str]:
    """One value, before and after."""
    for row in tour.fragments():
        low = row["offset"][:2]
        inside = np.array([ROW, COLUMN]) - low
        if (inside < 0).any() or (inside >= row["extents"][:2]).any():
            continue
        path = tour.catalog.files[row["file"]].path
        byte = int(row["byte_base"] + (inside * row["strides"][:2]).sum())
        steps = " + ".join(f"{int(i)} × {int(s)}" for i, s in zip(inside, row["strides"][:2], strict=True))
        yield from shown(path, f"{row['byte_base']} + {steps}", byte, SOURCE / path)
    op = tour.ops("master_weight")[0]
    path = tour.plan.target_files[op["target_file"]].path
    strides = op["target_strides"][:2]
    byte = int(op["target_byte"] + ROW * strides[0] + COLUMN * strides[1])
    steps = f"{ROW} × {strides[0]} + {COLUMN} × {strides[1]}"
    yield from shown(path, f"{op['target_byte']} + {steps}", byte, tour.target / path)


def shown(path: str, sum_of_bytes: str, byte: int, file: Path) -> Iterator[str]:
    found = file.read_bytes()[byte : byte + 4]
    value = float(np.frombuffer(found, dtype="<f4")[0])
    yield f"{path}"
    yield f"  byte {sum_of_bytes} = {byte}: {found.hex(' ')} = {value:.8g}"


def explained(tour: Tour) -> Iterator[str]:
    """The same from the command line, and what its commands show."""
    arguments = ["explain", str(SOURCE), KEY, "--element", f"{ROW},{COLUMN}", "--to", "tp=1"]
    shown = CliRunner().invoke(cli, arguments).stdout
    yield f"$ {shlex.join(['paddle-reshard', *arguments]).replace(f'{REPO}/', '')}"
    yield "…"
    shown = shown.replace("\t", "  ")
    yield from (line for line in shown.splitlines() if line.startswith("rule"))
    yield "…"
    yield from (
        line for line in shown.splitlines() if "(master_weight)" in line and not line.startswith("tensor")
    )
    yield "…"
    origin = next(o for o in tour.origins() if o.state == "master_weight")
    for path, start in ((origin.source_file, origin.source_byte), (origin.target_file, origin.target_byte)):
        line = next(
            line
            for line in shown.splitlines()
            if line.startswith("od") and f"-j {start} " in line and path in line
        )
        yield f"$ {line.replace(f'{REPO}/', '').replace('DST/', 'one-card/')}"
        command = shlex.split(line.replace("DST/", f"{tour.target}/"))
        yield subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def python(tour: Tour) -> Iterator[str]:
    """The same without any command of ours."""
    origin = next(o for o in tour.origins() if o.state == "master_weight")
    for folder, shown, path, start in (
        (SOURCE, SOURCE.relative_to(REPO), origin.source_file, origin.source_byte),
        (tour.target, "one-card", origin.target_file, origin.target_byte),
    ):
        code = "import struct; print(struct.unpack_from('<f', open({!r}, 'rb').read(), {})[0])"
        yield f'$ python3 -c "{code.format(f"{shown}/{path}", start)}"'
        done = [sys.executable, "-c", code.format(str(folder / path), start)]
        yield subprocess.run(done, capture_output=True, text=True, check=True).stdout.strip()


def proof(tour: Tour) -> Iterator[str]:
    """Every byte of the target, and every element of the source."""
    for name, value in paddle_reshard.prove(tour.planned).facts():
        yield f"{name:<15}{value}"


def result(tour: Tour) -> Iterator[str]:
    """What came of it all."""
    moved = tour.report.moved
    yield f"{moved.groups} groups, {moved.read_bytes:,} bytes read, {moved.written_bytes:,} bytes written"
    manifest = json.loads((tour.target / "paddle_reshard.json").read_text("utf-8"))
    yield f"paddle_reshard.json lists {len(manifest['files'])} files"


BLOCKS: tuple[Callable[[Tour], Iterator[str]], ...] = (
    stored,
    boxes,
    fragments,
    target,
    ops,
    cast,
    group,
    element,
    explained,
    python,
    proof,
    result,
)


def make_blocks(folder: Path) -> dict[str, str]:
    """Name → text of every block, from a conversion into ``folder``."""
    planned = paddle_reshard.plan(SOURCE, folder, to="tp=1")
    made = Tour(planned, paddle_reshard.convert(SOURCE, folder, to="tp=1"), folder)
    return {block.__name__: "\n".join(line.rstrip() for line in block(made)) for block in BLOCKS}


MARKED = re.compile(r"<!-- tour: (\w+) -->\n```text\n(.*?)\n```", re.DOTALL)


def main() -> None:
    """Print the blocks, or put them into the document."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_blocks(Path(folder) / "one-card")
    if "--write" in sys.argv:
        text = DOCUMENT.read_text("utf-8")
        text = MARKED.sub(lambda found: f"<!-- tour: {found[1]} -->\n```text\n{made[found[1]]}\n```", text)
        DOCUMENT.write_text(text, "utf-8")
        return
    for name, block in made.items():
        sys.stdout.write(f"--- {name}\n{block}\n")


if __name__ == "__main__":
    main()
