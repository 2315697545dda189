"""Every change of what a conversion made is found, or no reader of its files can see it (``README.md``)."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard import ReshardError
from tests.conftest import COMMITTED, case_directory
from tests.oracle import ALLOWED, NAME_TABLE, unpickle

TENSORS = (".pdparams", ".pdopt", ".distcp", ".safetensors")
NO_TENSORS = ("scheduler.pdparams", "scaler.pdparams")
FUSED = (("(q|k|v)_proj", "qkv_proj"), ("(gate|up)_proj", "up_gate_proj"))
"""Transformers has several tensors where Paddle has one."""
ITEMS = {"BF16": "u2", "F16": "u2", "F32": "u4"}
FRAMING = 60
"""Bits of a target that are no values, evenly spread; every eighth of them is shown to another reader too."""

QWEN, EXPERTS = "small-families/qwen2_single", "small-unified/ep2_uc_sh2_s1v2"
AVERAGES = "small-flex/fc_moe_mp2sh2_s1v2_ema"
SHARDED = {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v1"}
SLICES = {"to": "sharding=2", "sharding_strategy": "stage3", "layout": {"stage3_segment_size": 512}}
TARGETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one card": (QWEN, {"to": "tp=1"}),
    "flex, several files": (QWEN, {"format": "flex", "max_shard_size": "100KB"}),
    "sharding=2, stage3": (QWEN, {"format": "hybrid-plain", **SLICES}),
    "huggingface": (QWEN, {"format": "huggingface"}),
    "tp=2, sharding=2, stage1v2, averages": (AVERAGES, {"to": "tp=2,sharding=2"}),
    "unified, experts": (EXPERTS, {"format": "unified"}),
    "tp=2, pp=2, sharding=2, stage1v1": (QWEN, SHARDED),
    "ep=2, pp=2, sharding=2, stage1v2": (EXPERTS, {"to": "ep=2,pp=2,sharding=2"}),
    "tp=2, float16": ("states/fp16_single", {"to": "tp=2"}),
    "flex, averages": (AVERAGES, {"format": "flex"}),
    "unified, float32": ("small-unified/uc_single_fp32", {"format": "unified"}),
}
IN_FULL = 4


@dataclass(frozen=True)
class Array:
    """A stored array: its name, where its bytes lie in the file, and which of its elements are not zero."""

    name: str
    start: int
    values: np.ndarray
    elements: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        bits = np.frombuffer(self.values.tobytes("A"), f"u{self.values.itemsize}")
        object.__setattr__(self, "elements", np.flatnonzero(bits))

    @property
    def stop(self) -> int:
        return self.start + self.values.nbytes


def arrays_of(path: Path) -> list[Array]:
    """All arrays of a file, found without the package."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        first = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:first])
        return [
            Array(name, first + at, np.frombuffer(content[first + at : first + end], ITEMS[entry["dtype"]]))
            for name, entry in header.items()
            if name != "__metadata__"
            for at, end in [entry["data_offsets"]]
        ]
    sizes = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}
    stored = [
        (position + sizes[opcode.name], len(operand))
        for opcode, operand, position in pickletools.genops(content)
        if opcode.name in sizes and len(operand) > 1
    ]
    held = list(_arrays(unpickle(path), ""))
    assert [values.nbytes for _, values in held] == [nbytes for _, nbytes in stored]
    return [Array(name, start, values) for (name, values), (start, _) in zip(held, stored, strict=True)]


def _arrays(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, tuple):
        yield from _arrays(value[1], name)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _arrays(entry, f"{name}/{key}")


class Made:
    """A target and its sound files, with all that it can be compared with."""

    def __init__(self, folder: Path, case: str, options: Mapping[str, Any]) -> None:
        self.source, self.path, self.fingerprints = (
            folder / name for name in ("source", "made", "known.json")
        )
        self.is_export = options.get("format") == "huggingface"
        real = case_directory(case)
        shutil.copytree(real / "checkpoint-3", self.source, copy_function=shutil.copyfile)
        if not (self.source / "config.json").exists():
            shutil.copy(real / "config.json", self.source)
        paddle_reshard.convert(self.source, self.path, **options)
        paddle_reshard.fingerprint(self.source, output=self.fingerprints)
        files = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
        self.sound = {path: path.read_bytes() for path in files}
        held = [path for path in files if path.suffix in TENSORS and path.name not in NO_TENSORS]
        self.arrays = {path: arrays_of(path) for path in held}
        assert self.two() == self.against() == self.alone() == set()

    def two(self) -> set[str] | None:
        """Tensors or files that ``verify SRC DST`` names; ``None``: it refuses."""
        try:
            report = paddle_reshard.verify(self.source, self.path, subset=self.is_export)
        except ReshardError:
            return None
        return {difference.tensor for difference in report.differences}

    def against(self) -> set[str] | None:
        """Tensors that ``verify DST --against`` names."""
        try:
            report = paddle_reshard.verify(self.path, against=self.fingerprints, subset=self.is_export)
        except ReshardError:
            return None
        return {difference.tensor for difference in report.differences}

    def alone(self) -> set[str]:
        """Files that ``verify DST`` names."""
        return {damage.path for damage in paddle_reshard.check(self.path).damages}

    def check_alone(self, path: Path) -> None:
        assert self.alone() == {path.relative_to(self.path).as_posix()}

    def check_values(self, path: Path, content: bytearray, arrays: list[Array]) -> None:
        """All commands name the tensors of these arrays of a file, which were changed, and no others."""
        names = set()
        for array in arrays:
            name = array.name
            for parts, whole in FUSED if self.is_export else ():
                name = re.sub(parts, whole, name)
            names.add(name)
        path.write_bytes(content)
        for named in (self.two(), self.against()):
            # With a master weight the parameter that is its rounding may be another one, too.
            implied = {
                t for t in named or () if t.replace("(param)", "(master_weight)") in (named or set()) - {t}
            }
            assert named and len(named - implied) <= len(names) <= len(named), (path.name, names, named)
        self.check_alone(path)
        path.write_bytes(self.sound[path])


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if i >= IN_FULL else ()) for i, n in enumerate(TARGETS)],
)
def test_every_change_of_a_target_is_found(name: str, tmp_path: Path) -> None:
    made = Made(tmp_path, *TARGETS[name])
    for number, (path, arrays) in enumerate(made.arrays.items()):
        check_bits(made, path, arrays, number)
        check_exchanged(made, path, arrays)
    check_framing(made)


def check_bits(made: Made, path: Path, arrays: list[Array], number: int) -> None:
    """One bit of every array of a file: in its first, an inner and its last element that is not zero, as padding is."""
    for position in range(3):
        content, changed = bytearray(made.sound[path]), []
        for array in arrays:
            if array.elements.size:
                element = int(array.elements[(0, array.elements.size // 2, -1)[position]])
                itemsize = array.values.itemsize
                bit = (0, 4 * itemsize - 1, 8 * itemsize - 1)[(number + position) % 3]
                content[array.start + element * itemsize + bit // 8] ^= 1 << bit % 8
                changed.append(array)
        if changed:
            made.check_values(path, content, changed)


def check_exchanged(made: Made, path: Path, arrays: list[Array]) -> None:
    """Arrays of one size change places: tensors of one shape, states of one tensor."""
    waiting: dict[int, Array] = {}
    content, changed = bytearray(made.sound[path]), []
    for array in arrays:
        other = waiting.pop(array.values.nbytes, None)
        if other is None or not array.elements.size or not other.elements.size:
            waiting[array.values.nbytes] = array
        elif other.values.tobytes("A") != array.values.tobytes("A"):
            content[array.start : array.stop], content[other.start : other.stop] = (
                content[other.start : other.stop],
                content[array.start : array.stop],
            )
            changed += [array, other]
    if changed:
        made.check_values(path, content, changed)


def check_framing(made: Made) -> None:
    """Bits of tensor files that are no values. What no comparison finds, another reader of the file does not see."""
    places = []
    for path, content in made.sound.items():
        if path in made.arrays or path.suffix == ".metadata":
            values = bytearray(len(content))
            for array in made.arrays.get(path, ()):
                values[array.start : array.stop] = b"\1" * array.values.nbytes
            places += [(path, at) for at, value in enumerate(values) if not value]
    for number, (path, at) in enumerate(places[:: -(-len(places) // FRAMING)]):
        content = bytearray(made.sound[path])
        content[at] ^= 1 << number % 8
        path.write_bytes(content)
        made.check_alone(path)
        if path in made.arrays and number % 8 == 0 and made.two() == set():
            assert seen(path, content) == seen(path, made.sound[path]), (path.name, at)
        path.write_bytes(made.sound[path])


def seen(path: Path, content: bytes) -> Any:
    """What another reader makes of a tensor file, without names that arrays have besides their keys."""
    try:
        if path.suffix == ".safetensors":
            return sorted(
                (name, [*entry.values()]) for name, entry in safetensors.deserialize(bytes(content))
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _plain(_Unpickler(io.BytesIO(content), encoding="latin1").load())
    except Exception as error:  # noqa: BLE001 (libraries raise anything)
        return str(error)


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]  # in Python: bytes that lie crash the other one
    def find_class(self, module: str, name: str) -> Any:
        return ALLOWED[module, name]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes("A"), value.flags.c_contiguous)
    if isinstance(value, dict):
        return [(key, _plain(entry)) for key, entry in value.items() if key != NAME_TABLE]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
        return _plain(value[1])
    return value


_BY_MASTER = "looks for accumulators by the name of the master weight"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (b"linear_0.w_0_fp32_master_0_moment1_0", b"linear_0.w_0_fp32_master_8_moment1_0", _BY_MASTER),
        (b"\x1alinear_0.w_0_fp32_master_0", b"\x1alinear_0.w_0_fp32_master_1", _BY_MASTER),
        (b"linear_0.w_0_fp32_master_0_beta1_pow_acc_0", b"linear_0.w_0_fp32_master_0_beta1_pow_acc_1", "end"),
    ],
    ids=["accumulator", "master weight", "number of the optimizer"],
)
def test_an_accumulator_that_the_trainer_would_not_find_is_refused(
    before: bytes, after: bytes, why: str, tmp_path: Path
) -> None:
    real, source = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3", tmp_path / "source"
    shutil.copytree(real, source, copy_function=shutil.copyfile)
    file = source / "optimizer.tp00_pp00_shard00.pdopt"
    content = file.read_bytes()
    assert before in content
    file.write_bytes(content.replace(before, after, 1))
    with pytest.raises(ReshardError, match=why):
        paddle_reshard.plan(source, to="tp=1")
    with pytest.raises(ReshardError, match=why):
        paddle_reshard.verify(real, source)


def test_accumulators_of_a_second_optimizer_are_named_as_such(tmp_path: Path) -> None:
    real, other = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3", tmp_path / "other"
    shutil.copytree(real, other, copy_function=shutil.copyfile)
    for file in other.glob("optimizer.*.pdopt"):
        file.write_bytes(re.sub(rb"(_acc|nt1|nt2)_0", rb"\1_1", file.read_bytes()))
    report = paddle_reshard.verify(real, other)
    assert report
    assert any("accumulators end with _0 in A, and with _1 in B" in remark for remark in report.remarks)
