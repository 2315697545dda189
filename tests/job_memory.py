"""Where a real job finds its optimizer states: by file and parameter name, learned from the job itself.

The trainer looks in the file of its rank for the name of a parameter, and takes what is there. Which elements of which
tensor belong there is learned from a real checkpoint of such a job and from what the job held in memory when it saved
it (``truth.safetensors``): nearly every element of an optimizer state is a number that occurs once in the model, and
its master weight and moments together say where it is. So nothing here knows how tensors are cut, fused, padded,
distributed or named, and nothing is shared with the converter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import oracle

STATES = (oracle.MASTER, *oracle.MOMENTS)
"""The states that together tell elements apart."""
AVERAGE = "ema_w_0"
SLICE = "slice@"
"""Marks what stage 3 cuts; the parameter is called without it."""
NOWHERE, PADDING = -1, -2
_FACTORS = (np.uint64(1), np.uint64(1 << 32), np.uint64(0x9E3779B97F4A7C15))


@dataclass(frozen=True)
class Place:
    """What a file holds under a parameter name: which tensor, and which of its elements, one after the other."""

    key: str | None
    """``None``: it is all padding, or a copy that drifted from the one in the truth."""
    elements: np.ndarray
    """Positions in the flattened tensor; ``PADDING``, or ``NOWHERE`` if the number does not tell."""


Places = dict[tuple[str, str], Place]
"""``(file, parameter name)`` → what the job finds there."""


def places_of(job: Path) -> Places:
    """Every parameter in the optimizer files of a real case."""
    tensors = [oracle.read_truth(job / "truth.safetensors")]
    if (job / "truth_alt.safetensors").exists():  # copies that had drifted apart
        tensors += _copies(oracle.read_truth(job / "truth_alt.safetensors"), tensors[0])
    known: dict[bool, _Elements] = {}
    places: Places = {}
    for path in sorted((job / "checkpoint-3").glob("optimizer*.pdopt")):
        for name, states in states_of(path).items():
            master = oracle.MASTER in states
            if master not in known:
                known[master] = _Elements(tensors, STATES if master else oracle.MOMENTS)
            places[path.name, name] = known[master].find(f"{path.name}: {name}", states)
    return places


def states_of(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Parameter name → state → array in an optimizer file or a file of averages, as the optimizer takes it apart."""
    root = oracle.unpickle(path)
    of_file = AVERAGE if path.name.startswith("ema") else oracle.MASTER
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, value in root.pop("master_weights", {}).items():
        found[name.removeprefix(SLICE)] = {of_file: _array(value)}
    for entry, value in root.items():
        for state in (*oracle.MOMENTS, *oracle.POWERS):
            if entry.endswith(f"_{state}"):
                name = entry.removeprefix(SLICE).removesuffix(f"_{state}").removesuffix("_fp32_master_0")
                found.setdefault(name, {})[state] = _array(value)
    return found


def differences(converted: Path, places: Places, truth: Mapping[str, np.ndarray]) -> Iterator[str]:
    """What the job would find in converted files, by name, that is not the truth of the source."""
    files = {path.name: states_of(path) for path in sorted(converted.glob("*.pdopt"))}
    for (file, name), place in places.items():
        for holding in (file, file.replace("optimizer", "ema", 1)):
            for state, array in files.get(holding, {}).get(name, {}).items():
                if difference := _difference(place, state, array, truth):
                    yield f"{holding}: {name} ({place.key}, {state}): {difference}"
        if name not in files.get(file, {}):
            yield f"{file}: {name}: not there"


def _difference(place: Place, state: str, array: np.ndarray, truth: Mapping[str, np.ndarray]) -> str | None:
    found, known = array.reshape(-1), place.elements >= 0
    if state not in oracle.POWERS:
        if found.size != place.elements.size:
            return f"{found.size} elements, the job has {place.elements.size}"
        if found[place.elements == PADDING].any():
            return "padding is not zero"
    if place.key is None:
        return None
    expected = truth[f"{place.key}.{state}"].reshape(-1)
    if state in oracle.POWERS:
        return None if found.tobytes() == expected.tobytes() else f"{found}, not {expected}"
    wrong = np.count_nonzero(found[known].view(np.uint32) != expected[place.elements[known]].view(np.uint32))
    return f"{wrong} of {np.count_nonzero(known)} elements differ" if wrong else None


class _Elements:
    """The elements of all tensors of a job, found by what they are in several states."""

    def __init__(self, copies: list[oracle.Tensors], states: tuple[str, ...]) -> None:
        self.states = states
        self.keys = _untied(copies[0], states)
        numbers, tensors, elements = [], [], []
        for tensors_of_copy in copies:
            for number, key in enumerate(self.keys):
                together = _together([tensors_of_copy[f"{key}.{state}"] for state in states])
                numbers.append(together)
                tensors.append(np.full(together.size, number))
                elements.append(np.arange(together.size))
        together = np.concatenate(numbers)
        order = np.argsort(together, kind="stable")
        self.numbers, first, counts = np.unique(together[order], return_index=True, return_counts=True)
        self.tensors, self.elements = np.concatenate(tensors)[order], np.concatenate(elements)[order]
        last = first + counts - 1
        self.alone = (self.tensors[first] == self.tensors[last]) & (
            self.elements[first] == self.elements[last]
        )  # copies that did not drift are the same element
        self.tensors, self.elements = self.tensors[first], self.elements[first]

    def find(self, where: str, states: Mapping[str, np.ndarray]) -> Place:
        """The tensor and the elements that are these numbers."""
        wanted = _together([states[state] for state in self.states])
        at = np.minimum(np.searchsorted(self.numbers, wanted), self.numbers.size - 1)
        there = self.numbers[at] == wanted
        only = there & self.alone[at]
        keys = [self.keys[tensor] for tensor in np.unique(self.tensors[at[only]])]
        assert len(keys) <= 1, f"{where}: numbers of several tensors: {keys}"
        elements = np.where(only, self.elements[at], np.where((wanted == 0) & ~there, PADDING, NOWHERE))
        return Place(keys[0] if keys else None, elements)


def _untied(tensors: oracle.Tensors, states: tuple[str, ...]) -> list[str]:
    """Keys of the parameters with these states; of several that are one tensor, the first."""
    keys: dict[bytes, str] = {}
    for key in sorted(oracle.shapes_of(tensors)):
        if all(f"{key}.{state}" in tensors for state in states):
            keys.setdefault(b"".join(tensors[f"{key}.{state}"].tobytes() for state in states), key)
    return list(keys.values())


def _copies(drifted: oracle.Tensors, first: oracle.Tensors) -> list[oracle.Tensors]:
    """The further copies of a job's tensors, each a whole set: what did not drift is that of the first."""
    copies: dict[str, oracle.Tensors] = {}
    for name, value in drifted.items():
        key, _, copy = name.partition("@")
        copies.setdefault(copy, dict(first))[key] = value
    return list(copies.values())


def _together(states: list[np.ndarray]) -> np.ndarray:
    """The bits of an element's states as one number, 0 of zeros, which is sorted ten times as fast as a row of them.

    Two states fill its 64 bits. Where a third gives two elements the same number, they are not told apart.
    """
    numbers = [
        state.reshape(-1).view(np.uint32) * factor for state, factor in zip(states, _FACTORS, strict=False)
    ]
    return np.add.reduce(numbers)


def _array(value: Any) -> np.ndarray:
    return np.ascontiguousarray(value[1] if isinstance(value, tuple) else value)
