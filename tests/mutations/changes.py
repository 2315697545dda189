"""Changes of a checkpoint, enumerated: bits of values, swapped stretches, headers, names, files, manifests.

A change says what it puts into which files, and which tensors a comparison must name.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.mutations.places import Place, header_bytes, places, tensor_files
from tests.oracle import ALLOWED, NAME_TABLE, unpickle

MANIFEST = "paddle_reshard.json"
META = "model_meta.json"
OF_VALUES = "a bit of a value"
POSITIONS = ("first", "inner", "last")


@dataclass(frozen=True)
class Change:
    """One change, or several that affect different tensors."""

    kind: str
    files: Mapping[str, bytes | None]
    """File → content; ``None``: removed."""
    labels: frozenset[str] | None = None
    """Tensors that change, one for each change; ``None``: it is a single change, of anything."""
    where: str = ""
    """For messages."""

    def kinds(self) -> Mapping[str, frozenset[str] | None]:
        """Row of the table → the tensors in it that change."""
        if self.labels is None or self.kind != OF_VALUES:
            return {self.kind: self.labels}
        found: dict[str, frozenset[str]] = defaultdict(frozenset)
        for label in self.labels:
            found[f"{OF_VALUES}: {kind_of_value(label)}"] |= {label}
        return found


@dataclass
class Folder:
    """A sound checkpoint."""

    path: Path
    content: dict[str, bytes] = field(init=False)
    places: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        files = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        self.content = {path.relative_to(self.path).as_posix(): path.read_bytes() for path in files}
        self.places = places(self.path)
        self.tensor_files = [p.relative_to(self.path).as_posix() for p in tensor_files(self.path)]

    def of_label(self) -> dict[str, list[Place]]:
        """Label → where it is stored."""
        found: dict[str, list[Place]] = defaultdict(list)
        for place in self.places:
            if place.values:
                found[place.label].append(place)
        return found


class Edited:
    """Files of a folder, changed byte by byte."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.files: dict[str, bytearray] = {}

    def __getitem__(self, file: str) -> bytearray:
        if file not in self.files:
            self.files[file] = bytearray(self.folder.content[file])
        return self.files[file]

    def done(self) -> dict[str, bytes]:
        return {file: bytes(content) for file, content in self.files.items()}


def state_of(label: str) -> str:
    return label.rpartition("(")[2].rstrip(")")


def kind_of_value(label: str) -> str:
    """The rows of the table."""
    state = state_of(label)
    if state.startswith("ema"):
        return "average"
    return {"beta1_pow_acc": "beta power", "beta2_pow_acc": "beta power"}.get(state, state.replace("_", " "))


# --------------------------------------------------------------------------------------------------- of values


def bits_of_values(folder: Folder) -> Iterator[Change]:
    """One bit of every stored array at each position; a batch has one change for each tensor."""
    stored = folder.of_label()
    for copy_number in range(max(map(len, stored.values()))):
        for number, position in enumerate(POSITIONS):
            edited, labels = Edited(folder), set()
            for label, where in stored.items():
                if copy_number >= len(where):
                    continue
                place = where[copy_number]
                elements = place.values // place.itemsize
                element = {"first": 0, "inner": elements // 2, "last": elements - 1}[position]
                if number and element == 0:
                    continue
                bits = 8 * place.itemsize
                bit = (0, bits // 2 - 1, bits - 1)[(copy_number + number) % 3]
                edited[place.file][place.start + element * place.itemsize + bit // 8] ^= 1 << bit % 8
                labels.add(label)
            if labels:
                words = f"{position}, copy {copy_number}"
                yield Change(OF_VALUES, edited.done(), frozenset(labels), words)


def swapped_stretches(folder: Folder) -> Iterator[Change]:
    """Stretches of equal length that change places: within a tensor, between tensors, between states."""
    within, labels = Edited(folder), set()
    for label, where in folder.of_label().items():
        place = where[0]
        half = place.values // 2 // place.itemsize * place.itemsize
        data = folder.content[place.file][place.start : place.start + 2 * half]
        if half and data[:half] != data[half:]:
            within[place.file][place.start : place.start + 2 * half] = data[half:] + data[:half]
            labels.add(label)
    yield Change("two halves of a tensor swapped", within.done(), frozenset(labels))
    yield from _swapped_pairs(folder, "two tensors of one shape swapped", lambda place: state_of(place.label))
    yield from _swapped_pairs(
        folder, "two states of a tensor swapped", lambda place: place.label.rpartition(" ")[0]
    )


def _swapped_pairs(folder: Folder, kind: str, together: Any) -> Iterator[Change]:
    alike: dict[Any, list[Place]] = defaultdict(list)
    for where in folder.of_label().values():
        for place in where[:1]:
            alike[together(place), place.values, place.itemsize].append(place)
    edited, labels = Edited(folder), set()
    for group in alike.values():
        for one, two in zip(group[::2], group[1::2], strict=False):
            first, second = (folder.content[p.file][p.start : p.start + p.values] for p in (one, two))
            if first == second:
                continue
            edited[one.file][one.start : one.start + one.values] = second
            edited[two.file][two.start : two.start + two.values] = first
            labels |= {one.label, two.label}
    if labels:
        yield Change(kind, edited.done(), frozenset(labels))


def padding(folder: Folder, most: int) -> Iterator[Change]:
    """A bit of the padding of slices, of ``most`` at most."""
    padded = [place for place in folder.places if place.values < place.nbytes]
    for place in padded[:: 1 + len(padded) // most]:
        edited = Edited(folder)
        edited[place.file][place.stop - 1] ^= 1
        yield Change("a bit of the padding of a slice", edited.done(), where=f"{place.file} {place.name}")


# ----------------------------------------------------------------------------------------------- of the framing


def framing(folder: Folder, most: int, sorted_out: bool) -> Iterator[Change]:
    """A bit of bytes of tensor files that are no values, evenly spread, in ``most`` bytes at most.

    They are ``sorted_out`` by what another reader makes of the file, which takes time.
    """
    found: list[tuple[str, int]] = []
    for file in sorted(folder.content):
        if file not in folder.tensor_files and not file.endswith(".metadata"):
            continue
        values = bytearray(len(folder.content[file]))
        for place in folder.places:
            if place.file == file:
                values[place.start : place.stop] = b"\1" * place.nbytes
        found += ((file, at) for at, value in enumerate(values) if not value)
    for number, (file, at) in enumerate(found[:: -(-len(found) // most)]):
        edited = Edited(folder)
        edited[file][at] ^= 1 << number % 8
        kind = "any bit that is no value"
        if sorted_out:
            kind = _framing_of(file, folder.content[file], bytes(edited[file]))
        yield Change(kind, edited.done(), where=f"{file}, byte {at}")


def _framing_of(file: str, before: bytes, after: bytes) -> str:
    """The row of the table: by what another reader makes of the file."""
    if file.endswith(".metadata"):
        return "a bit of a `.metadata` file"
    if file.endswith(".safetensors"):
        assert len(before) == len(after)
        return "a bit of a safetensors header"
    try:
        found = _loaded(after)
    except Exception:  # noqa: BLE001 (the library raises anything)
        return "a bit of a pickle, which then cannot be loaded"
    sound = _loaded(before)
    if found == sound:
        return "a bit of a pickle, which then loads as before"
    if _without_names(found) == _without_names(sound):
        return "a bit of a name that an array has besides its key"
    return "a bit of a pickle, which then loads as something else"


def _loaded(content: bytes) -> Any:
    """A pickle, with arrays as shape, dtype and bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _plain(_Unpickler(io.BytesIO(content), encoding="latin1").load())


class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined]  # in Python: bytes that lie crash the other one
    def find_class(self, module: str, name: str) -> Any:
        return ALLOWED[module, name]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes("A"), value.flags.c_contiguous)
    if isinstance(value, dict):
        return [(key, _plain(entry)) for key, entry in value.items()]
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def _without_names(content: Any) -> Any:
    """The same without the names of Paddle's tensors, which are ``[name, array]``, and without their table."""
    found = []
    for key, entry in content if isinstance(content, list) else ():
        if key == NAME_TABLE:
            continue
        inner = entry
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            inner = entry[1]
        elif key == "master_weights":
            inner = _without_names(entry)
        found.append((key, inner))
    return found


def keys(folder: Folder, most: int) -> Iterator[Change]:
    """Names of arrays that become names of others, in the files themselves; and arrays taken out of files."""
    doubled, dropped = [], []
    for file in folder.tensor_files:
        names = list(dict.fromkeys(place.key for place in folder.places if place.file == file))
        pairs = [(a, b) for a, b in pairwise(sorted(names, key=len)) if len(a) == len(b)]
        doubled += [(file, *pair) for pair in pairs]
        dropped += [(file, name) for name in names]
    for file, one, two in doubled[:: 1 + len(doubled) // most]:
        content = folder.content[file].replace(_as_key(file, one), _as_key(file, two), 1)
        yield Change("a key doubled", {file: content}, where=f"{file}: {one} is named {two}")
    for file, name in dropped[:: 1 + len(dropped) // most]:
        yield Change(
            _dropped(folder, file, name), {file: _without(folder.path / file, name)}, where=f"{file}: {name}"
        )


def _dropped(folder: Folder, file: str, name: str) -> str:
    """The row of the table: whether all values are still there."""
    gone = [place for place in folder.places if place.file == file and place.key == name]
    data = {folder.content[place.file][place.start : place.stop] for place in gone}
    others = [p for p in folder.places if p not in gone and p.label in {place.label for place in gone}]
    kept = {folder.content[p.file][p.start : p.stop] for p in others}
    return "a copy dropped, of which there are others" if data <= kept else "a key dropped"


def _as_key(file: str, name: str) -> bytes:
    if file.endswith(".safetensors"):
        return f'"{name}"'.encode()
    return bytes([0x8C, len(name)]) + name.encode()


def _without(path: Path, name: str) -> bytes:
    if path.suffix == ".safetensors":
        content = path.read_bytes()
        first = header_bytes(content)
        header = json.loads(content[8:first])
        start, stop = header.pop(name)["data_offsets"]
        for entry in header.values():
            if entry.get("data_offsets", [0])[0] >= stop:
                entry["data_offsets"] = [at - (stop - start) for at in entry["data_offsets"]]
        text = json.dumps(header).encode()
        rest = content[first : first + start] + content[first + stop :]
        return len(text).to_bytes(8, "little") + text + rest
    data = unpickle(path)
    for table in (data, data.get("master_weights", {})):
        table.pop(name, None)
    return pickle.dumps(data, protocol=4)


def exchanged_names(folder: Folder, most: int) -> Iterator[Change]:
    """Two parameters of the first stage that have each other's name, in every file of the stage."""
    first = [file for file in folder.content if "pp" not in file or "pp00" in file]
    held = b"".join(folder.content[file] for file in first if file in folder.tensor_files)
    names = sorted({name.decode() for name in re.findall(rb"\blinear_\d\.w_0", held)})
    pairs = list(pairwise(names))
    for one, other in pairs[:: 1 + len(pairs) // most]:
        exchanged = {
            file: _exchanged(folder.content[file], one.encode(), other.encode())
            for file in first
            if file in folder.tensor_files
        }
        if META in folder.content:
            meta = json.loads(folder.content[META])
            for cell, entry in meta["sharding_metas"].items():
                if "pp00" in cell:
                    text = json.dumps(entry).encode()
                    meta["sharding_metas"][cell] = json.loads(_exchanged(text, one.encode(), other.encode()))
            exchanged[META] = json.dumps(meta).encode()
        kind = "names of two parameters exchanged, and those of their states"
        yield Change(kind, exchanged, where=f"{one} and {other}")


def _exchanged(content: bytes, one: bytes, other: bytes) -> bytes:
    to = {one: other, other: one}
    return re.sub(rb"\b(" + b"|".join(map(re.escape, to)) + rb")", lambda found: to[found[1]], content)


# -------------------------------------------------------------------------------------------------- of files


def whole_files(folder: Folder, files: Iterable[str]) -> Iterator[Change]:
    """Files cut, extended, removed, renamed, and swapped with another one."""
    chosen = list(files)
    for file in chosen:
        content = folder.content[file]
        for kind, found in {
            "a file cut by one byte": content[:-1],
            "a file cut in half": content[: len(content) // 2],
            "a file emptied": b"",
            "a file longer by one byte": content + b"\0",
            "a file longer by a copy of itself": content + content,
        }.items():
            yield Change(kind, {file: found}, where=file)
        yield Change("a file removed", {file: None}, where=file)
        stem, dot, suffix = file.rpartition(".")
        for kind, name in {
            "a file renamed": f"{stem}7{dot}{suffix}",
            "a file copied": f"{stem}8{dot}{suffix}",
        }.items():
            yield Change(
                kind, {name: content} if kind == "a file copied" else {file: None, name: content}, where=file
            )
    for one, two in pairwise(chosen):
        first, second = folder.content[one], folder.content[two]
        same_kind = (
            one.rpartition("/")[0] == two.rpartition("/")[0] and one.split(".")[0] == two.split(".")[0]
        )
        if first != second and (same_kind or one.endswith(".distcp")):
            of = "a FlexCheckpoint" if one.endswith(".distcp") else "two ranks"
            yield Change(f"two files of {of} swapped", {one: second, two: first}, where=f"{one}, {two}")


def of_another(folder: Folder, other: Mapping[str, bytes], kind: str) -> Iterator[Change]:
    """Every tensor file that of another checkpoint of the same layout, one at a time."""
    for file in folder.tensor_files:
        if file in other and other[file] != folder.content[file]:
            yield Change(kind, {file: other[file]}, where=file)


# -------------------------------------------------------------------------------------------- of small files


def json_entries(folder: Folder, file: str, kind: str, every: int = 1) -> Iterator[Change]:
    """Every leaf of a JSON file changed, and removed."""
    data = json.loads(folder.content[file])
    for number, path in enumerate(_leaves(data, ())):
        if number % every:
            continue
        for deed in ("changed", "removed"):
            changed = copy.deepcopy(data)
            node = changed
            for step in path[:-1]:
                node = node[step]
            if deed == "removed":
                del node[path[-1]]
            else:
                node[path[-1]] = _other(node[path[-1]])
            where = f"{file}: {'.'.join(map(str, path))} {deed}"
            yield Change(f"{kind} {deed}", {file: json.dumps(changed).encode()}, where=where)


def _leaves(node: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict | list) and node:
        for step in node if isinstance(node, dict) else range(len(node)):
            yield from _leaves(node[step], (*at, step))
    else:
        yield at


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return {dict: {"x": 1}, list: [1]}.get(type(value), "x")


def numbers_in_pickle(folder: Folder, file: str, kind: str, after: bytes) -> Iterator[Change]:
    """The number after each of the keys in a pickle of plain values, changed in its last bit."""
    content = folder.content[file]
    at = content.index(after) + len(after)
    sizes = {ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8}
    while content[at] not in sizes:  # memos
        at += 1
    edited = Edited(folder)
    opcode = content[at]
    edited[file][at + (8 if opcode == ord("G") else 1)] ^= 1
    yield Change(kind, edited.done(), where=f"{file}: {after.decode(errors='replace')}")


def any_byte(folder: Folder, file: str, kind: str, count: int) -> Iterator[Change]:
    """A bit of ``count`` bytes of a file, evenly spread: the length of a manifest depends on where the source lies."""
    for number in range(count):
        at = number * len(folder.content[file]) // count
        edited = Edited(folder)
        edited[file][at] ^= 1 << number % 8
        yield Change(kind, edited.done(), where=f"{file}, byte {at}")


def only(changes: Iterable[Change], kind: str) -> Iterator[Change]:
    """The same under another heading."""
    return (replace(change, kind=kind) for change in changes)
