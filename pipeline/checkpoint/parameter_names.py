"""What a checkpoint calls its parameters, held against the naming rules and against another checkpoint.

Trainers look up the optimizer states of a parameter by its name, such as ``linear_3.w_0``, which a process gives when
it builds the layer. Two parameters that have each other's name get each other's states.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from paddle_reshard.pipeline.core.shown import counted

_NUMBER: Final = re.compile(r"\d+")
_COUNTED: Final = re.compile(r"(\w+)_(\d{1,9})(\.\w+|)")
Place = tuple[str, tuple[int, ...]]
"""A key or a name without its numbers, and the numbers: ``linear_3.w_0`` is ``("linear_#.w_#", (3, 0))``."""


@dataclass(frozen=True, slots=True)
class CellNames:
    """The parameters of one cell, or of a program, whose optimizer states are found by name."""

    cell: str
    """The cell as messages name it; empty where there is only one."""
    path: str
    """The file that tells the names."""
    names: Mapping[str, str]
    """Structured key → parameter name."""
    predicted: Mapping[str, str]
    """The same by the naming rules."""
    optimizer: str = ""
    """The number at the end of accumulators in the optimizer's files; empty if nothing is found by it."""

    @property
    def where(self) -> str:
        """The file, and the cell in it."""
        return f"{self.path} ({self.cell})" if self.cell else self.path


@dataclass(frozen=True, slots=True)
class Misnamed:
    """A parameter that has the name of another one."""

    key: str
    name: str
    other: str
    """Key of the parameter that has this name by the naming rules."""
    own: str
    """Name by the naming rules."""
    where: str

    def __str__(self) -> str:
        return (
            f"{self.key} has the parameter name {self.name} in {self.where}, which by the naming rules is that of "
            f"{self.other}; its own is {self.own}: a job gives each the master weight and the moments of the other"
        )


@dataclass(frozen=True, slots=True)
class NameComparison:
    """The names in two checkpoints whose cells hold the same parameters."""

    differences: tuple[tuple[str, str], ...] = ()
    """``(structured key, the two names with their files)``."""
    renamed: str = ""
    """The first name, or number of the optimizer, that differs, if all differ as those of two processes do."""


def misnamed(cells: Sequence[CellNames]) -> tuple[Misnamed, ...]:
    """The parameters that have exchanged their names, by the naming rules, within a cell.

    Names may be numbered from elsewhere throughout: a second model in the process counts too. An exchange that is the
    same in every layer is how a class builds its layers, not damage: rules may describe another version of it.

    >>> rules = {f"{layer}.{part}": f"linear_{2 * layer + at}.w_0" for layer in (0, 1) for at, part in enumerate("qk")}
    >>> names = rules | {"0.q": "linear_1.w_0", "0.k": "linear_0.w_0"}
    >>> [entry.key for entry in misnamed([CellNames("", "meta", names, rules)])]
    ['0.q', '0.k']
    >>> names |= {"1.q": "linear_3.w_0", "1.k": "linear_2.w_0"}
    >>> misnamed([CellNames("", "meta", names, rules)])
    ()
    """
    exchanged = [dict(_exchanged(cell)) for cell in cells]
    if not any(exchanged):
        return ()
    moves: dict[str, dict[str, Place]] = defaultdict(dict)
    for cell, others in zip(cells, exchanged, strict=True):
        for key in cell.names:
            moves[_place(key)[0]][key] = _move(key, others.get(key, key))
    alike = {kind for kind, of_kind in moves.items() if len(of_kind) > 1 and len({*of_kind.values()}) == 1}
    return tuple(
        Misnamed(key, cell.names[key], other, cell.predicted[key], cell.where)
        for cell, others in zip(cells, exchanged, strict=True)
        for key, other in others.items()
        if _place(key)[0] not in alike
    )


def in_words(exchanged: Sequence[Misnamed]) -> str:
    """The first parameter that has the name of another, and how many there are."""
    if others := {entry.key for entry in exchanged} - {exchanged[0].key}:
        return f"{exchanged[0]} ({counted(len(others), 'more parameter')} so)"
    return str(exchanged[0])


def as_in_a_fresh_process(names: Mapping[str, str], predicted: Mapping[str, str]) -> Mapping[str, str]:
    """The names of a cell as a process gives them that builds nothing before the model.

    A second model in the process shifts the counters of all classes, each by one number, and nothing else does that;
    other names are returned as they are.

    >>> rules = {"words": "embedding_0.w_0", "q": "linear_0.w_0", "k": "linear_1.w_0"}
    >>> second = {"words": "embedding_1.w_0", "q": "linear_9.w_0", "k": "linear_10.w_0"}
    >>> as_in_a_fresh_process(second, rules) == rules, as_in_a_fresh_process(rules | {"k": "linear_4.w_0"}, rules)["k"]
    (True, 'linear_4.w_0')
    """
    before: dict[str, int] = {}
    for key, name in names.items():
        match, known = _COUNTED.fullmatch(name), _COUNTED.fullmatch(predicted[key])
        if match is None or known is None or match.group(1, 3) != known.group(1, 3):
            return names
        shift = int(match[2]) - int(known[2])
        if shift <= 0 or before.setdefault(match[1], shift) != shift:
            return names
    return {key: predicted[key] for key in names}


def begun_elsewhere(cells: Sequence[CellNames]) -> str:
    """What becomes of names that a process with a second model gave; empty if none are."""
    for cell in cells:
        for key, name in cell.names.items():
            fresh = as_in_a_fresh_process(cell.names, cell.predicted)[key]
            if fresh != name:
                return (
                    f"the process built something before the model, as names such as {name} tell; those of the target, "
                    f"{fresh} and so on, are of a job that builds the model alone"
                )
            break
    return ""


def compare_names(a: Sequence[CellNames], b: Sequence[CellNames]) -> NameComparison:
    """Compare the names of every parameter in two checkpoints; nothing, if their cells hold different parameters.

    Names differ without damage if both follow the naming rules, which say other names with sequence parallelism, or if
    each class of layers is only called otherwise or counted from elsewhere.
    """
    if [(cell.cell, cell.names.keys()) for cell in a] != [(cell.cell, cell.names.keys()) for cell in b]:
        return NameComparison()
    differences, renamed = dict[str, str](), ""
    for first, second in zip(a, b, strict=True):
        numbers = (first.optimizer, second.optimizer)
        if all(numbers) and numbers[0] != numbers[1]:
            renamed = f"accumulators end with _{numbers[0]} in A, and with _{numbers[1]} in B"
        if first.names == second.names:
            continue
        told = {
            key: f"parameter name {name} in A, {first.where}, and {second.names[key]} in B, {second.where}"
            for key, name in first.names.items()
            if name != second.names[key]
        }
        by_rules = all(_is_renamed(side.predicted, side.names) for side in (first, second))
        if by_rules or _is_renamed(first.names, second.names):
            renamed = renamed or next(f"{key}: {detail}" for key, detail in told.items())
            continue
        as_in_a = _as_counted(first.names, second.names)
        odd = [key for key in told if as_in_a[key] != _place(first.names[key])]
        differences |= {key: told[key] for key in odd if key not in differences}
    return NameComparison(tuple(differences.items()), renamed)


def _exchanged(cell: CellNames) -> Iterator[tuple[str, str]]:
    """``(key, other key)``: the first has the name of the other, this one that of a third, …, the last that of the
    first."""
    if cell.names == cell.predicted:
        return
    holder: dict[Place, str] = {}
    for key in cell.names:
        holder.setdefault(_place(cell.predicted[key]), key)
    as_known = _as_counted(cell.predicted, cell.names)
    to = {key: holder[place] for key, place in as_known.items() if place in holder}
    for key in cell.names:
        at, seen = to.get(key), {key}
        while at is not None and at not in seen:
            seen.add(at)
            at = to.get(at)
        if at == key and len(seen) > 1:
            yield key, to[key]


def _is_renamed(known: Mapping[str, str], names: Mapping[str, str]) -> bool:
    """Whether every name is the known one but for the word of its class, and a number added to all of the class."""
    kinds = {(_place(known[key])[0], _place(name)[0]) for key, name in names.items()}
    one_to_one = len(kinds) == len({one for one, _ in kinds}) == len({other for _, other in kinds})
    as_known = _as_counted(known, names)
    return one_to_one and all(as_known[key] == _place(known[key]) for key in names)


def _as_counted(known: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Place]:
    """The place of each name, called and counted as known names are.

    Names of a class are shifted as all of them are, if that makes them the known ones in any order, and otherwise as
    most are: ``linear_8, linear_7, linear_9`` for ``linear_0, linear_1, linear_2`` are 1, 0, 2.
    """
    of_kind = defaultdict[str, list[str]](list)
    for key, name in names.items():
        of_kind[_place(name)[0]].append(key)
    numbers_of = defaultdict[str, list[tuple[int, ...]]](list)
    for key in names:
        kind, numbers = _place(known[key])
        numbers_of[kind].append(numbers)
    placed = {}
    for kind, keys in of_kind.items():
        moves = Counter(_move(names[key], known[key]) for key in keys)
        to, shift = moves.most_common(1)[0][0]
        if kind in numbers_of:
            to = kind
        here = sorted(_place(names[key])[1] for key in keys)
        steps = {_move_of(*pair) for pair in zip(here, sorted(numbers_of[to]), strict=False)}
        if len(steps) == 1 and len(here) == len(numbers_of[to]):
            (shift,) = steps
        for key in keys:
            placed[key] = (to, _added(_place(names[key])[1], shift))
    return placed


def _place(text: str) -> Place:
    return _NUMBER.sub("#", text), tuple(map(int, _NUMBER.findall(text)))


def _move(one: str, other: str) -> Place:
    """From one key or name to another: the kind of the other, and what is added to each number."""
    (_, here), (kind, there) = _place(one), _place(other)
    return kind, _move_of(here, there)


def _move_of(here: Sequence[int], there: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip_longest(here, there, fillvalue=0))


def _added(numbers: Sequence[int], shift: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(numbers, shift, fillvalue=0))
