"""Where the files of a checkpoint store values, found without the package: by ``pickletools`` and ``safetensors``.

Every stored array of every file is listed, also copies and arrays that are never read. Its label is that of
``verify``: the key and the state of the logical tensor.
"""

from __future__ import annotations

import json
import pickletools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import NAME_TABLE, unpickle

STATES = {
    "w_0": "master_weight",
    "moment1_0": "moment1",
    "moment2_0": "moment2",
    "beta1_pow_acc_0": "beta1_pow_acc",
    "beta2_pow_acc_0": "beta2_pow_acc",
    "ema_w_0": "ema_master_weight",
}
_STATE = re.compile("(.*?)(?:_fp32_master_0)?[._/](" + "|".join(sorted(STATES, key=len, reverse=True)) + ")")
PICKLES = (".pdparams", ".pdopt", ".distcp", ".metadata")
TENSOR_FILES = (".pdparams", ".pdopt", ".distcp", ".safetensors")
FUSED = {  # transformers has several tensors where Paddle has one
    r"\.(q|k|v)_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".up_gate_proj.",
}


@dataclass(frozen=True)
class Place:
    """A stored array."""

    file: str
    label: str
    start: int
    nbytes: int
    itemsize: int
    name: str
    """Its name in the file."""
    values: int
    """How many of its bytes are values; the rest is padding at the end."""

    @property
    def key(self) -> str:
        """The last part of its name."""
        return self.name if self.file.endswith(".safetensors") else self.name.split("/")[-1]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def places(folder: Path) -> list[Place]:
    """All stored arrays of a checkpoint."""
    found: list[Place] = []
    for path in tensor_files(folder):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            found += _of_safetensors(path, name)
        else:
            found += _of_pickle(path, name, _names(folder, path))
    halves = {place.label for place in found if place.label.endswith("(param)") and place.itemsize == 2}
    copies = [
        replace(place, label=place.label.replace("(master_weight)", "(param)"))
        if place.file.startswith("master_weights")
        and place.label.replace("master_weight", "param") not in halves
        else place
        for place in found
    ]
    return _without_padding(folder, copies)


def tensor_files(folder: Path) -> list[Path]:
    """The files with tensors."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix in TENSOR_FILES)
    return [path for path in files if path.name not in ("scheduler.pdparams", "scaler.pdparams")]


def header_bytes(content: bytes) -> int:
    """Length of the header of a safetensors file."""
    return 8 + int.from_bytes(content[:8], "little")


def _of_safetensors(path: Path, name: str) -> Iterator[Place]:
    content = path.read_bytes()
    first = header_bytes(content)
    header = json.loads(content[8:first])
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        label_key, (start, stop) = key, entry["data_offsets"]
        itemsize = {"BF16": 2, "F16": 2, "F32": 4}[entry["dtype"]]
        kind = path.name.partition("-")[0].partition(".")[0]
        if path.name.startswith("model.safetensors"):  # an export
            for pattern, fused in FUSED.items():
                label_key = re.sub(pattern, fused, label_key)
        yield Place(name, _label(label_key, kind), first + start, stop - start, itemsize, key, stop - start)


def _label(key: str, kind: str) -> str:
    if kind == "master_weights":
        return f"{key} (master_weight)"
    match = _STATE.fullmatch(key)
    if match and kind == "optimizer":
        return f"{match[1]} ({STATES[match[2]]})"
    return f"{key} (param)"


def _of_pickle(path: Path, name: str, names: Mapping[str, str]) -> Iterator[Place]:
    arrays = list(_arrays(unpickle(path), ()))
    stored = [(position, operand) for position, operand in bytes_in(path.read_bytes()) if operand > 1]
    assert [array.nbytes for _, array in arrays] == [nbytes for _, nbytes in stored], path
    for (at, array), (start, nbytes) in zip(arrays, stored, strict=True):
        label = _label_in_pickle(path, at, names)
        yield Place(name, label, start, nbytes, array.itemsize, "/".join(at), nbytes)


def bytes_in(content: bytes) -> Iterator[tuple[int, int]]:
    """First byte and length of every bytes object of a pickle."""
    sizes = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}
    for opcode, operand, position in pickletools.genops(content):
        if opcode.name in sizes:
            yield position + sizes[opcode.name], len(operand)


def _arrays(value: Any, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield at, value
    elif isinstance(value, tuple):
        yield from _arrays(value[1], at)
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _arrays(entry, (*at, key))


def _label_in_pickle(path: Path, at: tuple[str, ...], names: Mapping[str, str]) -> str:
    ema = path.name.startswith("ema.") or path.parent.name == "ema_state"
    name = at[-1].removeprefix("slice@")
    if path.suffix == ".distcp":
        match = _STATE.fullmatch(name)
        key, state = (match[1], STATES[match[2]]) if match else (name, "param")
    elif at[0] == "master_weights":
        key, state = names[name], "master_weight"
    elif name in names.values():
        key, state = name, "param"
    else:
        match = _STATE.fullmatch(name)
        assert match, name
        key, state = names[match[1]], STATES[match[2]]
    return f"{key} ({f'ema_{state}' if ema and not state.startswith('ema_') else state})"


def _coordinate(file: str) -> dict[str, str]:
    """The parts of a rank's file name: ``{"tp": "01", "pp": "00"}``."""
    return dict(re.findall(r"(?<=[._])(tp|pp|shard)(\d+)", file))


def _cells(folder: Path) -> dict[tuple[str, str, str], Any]:
    """(tp, pp, ep) → entry of ``model_meta.json``."""
    meta = folder / "model_meta.json"
    if not meta.exists():
        return {}
    found = {}
    for name, entry in json.loads(meta.read_text()).get("sharding_metas", {}).items():
        parts = dict(re.findall(r"(tp|pp|ep)(\d+)", name))
        found[parts["tp"], parts["pp"], parts.get("ep", "00")] = entry
    return found


def _names(folder: Path, path: Path) -> dict[str, str]:
    """Parameter name → structured key, in the files of one rank."""
    if path.suffix == ".distcp":
        return {}
    at = _coordinate(path.name)
    cells = _cells(folder)
    for ep in (at.get("shard", "00"), "00"):  # a rank of sharding has its own experts, or the same as all
        cell = cells.get((at.get("tp", "00"), at.get("pp", "00"), ep))
        if cell is not None:
            return {name: key for key, name in cell["structure_name_mapping"].items()}
    own = path.name.replace("optimizer", "model_state").replace("pdopt", "pdparams")
    table = unpickle(folder / own if (folder / own).exists() else folder / "model_state.pdparams")[NAME_TABLE]
    return {name: key for key, name in table.items()}


def _local_elements(folder: Path) -> dict[tuple[str, str, str], int]:
    """(tp, pp, key) → elements of a parameter on a rank."""
    found = {
        (tp, pp, key): prod(parameter[0])
        for (tp, pp, _), entry in _cells(folder).items()
        for key, parameter in entry["param_meta"].items()
    }
    for path in folder.glob("model_state*.pdparams"):
        at = _coordinate(path.name)
        for key, array in unpickle(path).items():
            if isinstance(array, np.ndarray):
                found.setdefault((at.get("tp", "00"), at.get("pp", "00"), key), array.size)
    return found


def _whole_elements(found: list[Place]) -> dict[str, int]:
    """Key → elements of a parameter of unified files; the trainer pads its other states as the buffer was."""
    return {
        place.key: place.nbytes // place.itemsize
        for place in found
        if place.file.startswith("model-") and place.file.endswith(".safetensors")
    }


def _without_padding(folder: Path, found: list[Place]) -> list[Place]:
    """The arrays with the number of bytes that are values, which the last slices of a flat buffer do not fill.

    The slices of a local tensor lie in the files of its sharding ranks, in order; unified files may share a tensor.
    """
    of_unified = _whole_elements(found)
    local, has_meta = _local_elements(folder), bool(_cells(folder))
    taken: Counter[tuple[str, str, str]] = Counter()
    result = []
    for place in sorted(found, key=lambda place: place.file):
        at = _coordinate(place.file)
        rank = at.get("tp", "00"), at.get("pp", "00")
        key = place.label.rpartition(" ")[0]
        values = place.nbytes
        whole = local.get((*rank, key), 0) * place.itemsize
        # Stage 3 leaves short tensors whole.
        is_sliced = place.file.endswith(".pdopt") and (has_meta or place.nbytes != whole)
        if place.file.startswith(("master_weights-", "optimizer-")):
            whole, is_sliced = of_unified.get(key, 0) * place.itemsize, True
        if is_sliced and "pow_acc" not in place.label:
            rest = whole - taken[(*rank, place.label)]
            values = min(place.nbytes, max(0, rest))
            taken[(*rank, place.label)] += place.nbytes
        if values < place.nbytes:
            padding = (folder / place.file).read_bytes()[place.start + values : place.stop]
            assert not any(padding), place
        result.append(replace(place, values=values))
    return result
