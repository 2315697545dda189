"""Execute the statements of a program.

A statement gives its resulting names new values. So that no tensor is lost silently, a value must be used before a
later statement replaces it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paddle_reshard.pipeline.changes.aoa.expand import Keys, expand
from paddle_reshard.pipeline.changes.aoa.language import (
    FLOATING,
    AoaProgram,
    Cast,
    Fused,
    Join,
    Name,
    Permute,
    Rename,
    Statement,
)
from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors
from paddle_reshard.pipeline.changes.aoa.values import Value, concatenated, permuted, regrouped, split
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.tensors import DType, dtype_named

_WIDENINGS = {("bfloat16", "float32"), ("float16", "float32")}
"""Exact casts."""


@dataclass(slots=True)
class _Binding:
    """The value of a name at some point of a program."""

    value: Value
    root: str | None
    """The source tensor with the same values, except for dtype and order of dims."""
    made_by: Statement | None
    used_by: Statement | None = None
    followed: tuple[Statement, ...] = ()
    """The statements that made the value, in order."""


class Interpreter:
    """Executes statements in order. Call :meth:`all`, then :meth:`outputs`."""

    def __init__(
        self,
        source: SourceTensors,
        program: AoaProgram,
        wanted: Collection[str] | None,
        source_blocks: Mapping[str, int],
        target_blocks: Mapping[str, int],
    ) -> None:
        self.source, self.program, self.wanted = source, program, wanted
        self.source_blocks, self.target_blocks = source_blocks, target_blocks
        self.names = {
            name: _Binding(source.values[owner], name, None) for name, owner in source.owners.items()
        }
        self.created: dict[str, Statement] = {}
        self.dropped: dict[str, Statement] = {}
        self.idle: list[str] = []
        """File and line of each statement that matches no tensor."""
        self._next_name: dict[str, list[tuple[int, str]]] = defaultdict(list)
        """Name → ``(number, new name)`` of the statements that only rename it."""

    def all(self) -> None:
        """Execute the program.

        Raises
        ------
        UsageError, PlanError
            With the line and the tensor.
        """
        statements = self._expanded()
        for number, statement in enumerate(statements):
            if statement.only_renames:
                self._next_name[statement.left[0].text].append((number, statement.right[0].text))
        for number, statement in enumerate(statements):
            if statement.left[0].is_nothing:
                self._create(statement, statement.right[0].text)
            elif statement.right[0].is_nothing:
                self._drop(statement, statement.left[0].text)
            else:
                self._execute(number, statement)

    def _expanded(self) -> list[Statement]:
        keys = Keys(self.source.owners)
        wanted = None if self.wanted is None else Keys(self.wanted)
        statements: list[Statement] = []
        for written in self.program.in_order():
            found = expand(written, keys, wanted)
            if not found:
                made = Keys(name.text for statement in statements for name in statement.right)
                if expand(written, made, wanted):
                    raise written.refused(
                        "placeholders take numbers from the keys of the source, but only earlier statements make "
                        "these names; write the numbers out"
                    )
                self.idle.append(written.where)
            statements += found
        return statements

    def _create(self, statement: Statement, name: str) -> None:
        if name in self.names:
            raise statement.impossible(
                f"cannot create {name} without values, because it has values; to drop them, write {name} -> _ first"
            )
        self.created[name] = statement

    def _drop(self, statement: Statement, name: str) -> None:
        binding = self.names.get(name)
        if binding is None:
            self.idle.append(statement.where)
            return
        if binding.used_by is not None:
            raise statement.impossible(f"cannot drop {name}, because {binding.used_by.where} uses it")
        del self.names[name]
        self.dropped[name] = statement

    def _execute(self, number: int, statement: Statement) -> None:
        bindings = [self._read(statement, name.text) for name in statement.left]
        try:
            values = [_turned(m.value, name) for m, name in zip(bindings, statement.left, strict=True)]
            results = self._results(number, statement, values)
            results = [_turned(v, name) for v, name in zip(results, statement.right, strict=True)]
        except PlanError as error:
            raise statement.impossible(str(error)) from error
        root = bindings[0].root if statement.only_renames else None
        before = dict.fromkeys(made for binding in bindings for made in binding.followed)
        followed = (*before, statement)
        for name, result in zip(statement.right, results, strict=True):
            self._write(statement, name.text, _Binding(result, root, statement, followed=followed))

    def _read(self, statement: Statement, name: str) -> _Binding:
        binding = self.names.get(name)
        if binding is not None:
            binding.used_by = statement
            return binding
        why = "is neither in the source nor made by an earlier statement"
        if name in self.dropped:
            why = f"is dropped in {self.dropped[name].where}"
        if name in self.created:
            why = f"is created without values in {self.created[name].where}"
        raise statement.impossible(f"{name} {why}")

    def _write(self, statement: Statement, name: str, binding: _Binding) -> None:
        if name in self.created:
            raise statement.impossible(f"{name} is made twice, first in {self.created[name].where}")
        before = self.names.pop(name, None)
        if before is not None and before.used_by is None and before.value != binding.value:
            if before.made_by is not None:
                raise statement.impossible(
                    f"{name} is made twice, first in {before.made_by.where}, whose result is not used"
                )
            raise statement.impossible(
                f"{name} of the source would be lost, because no statement uses it; to drop it, write {name} -> _ first"
            )
        self.names[name] = binding

    def _results(self, number: int, statement: Statement, values: Sequence[Value]) -> list[Value]:
        operation, wanted = statement.operation, len(statement.right)
        match operation:
            case Permute(order):
                return [permuted(values[0], order)]
            case Cast(expected, target):
                return [self._cast(values[0], expected, dtype_named(target))]
            case Join(axis) if len(values) > 1:
                return [concatenated(values, axis)]
            case Join(axis) if wanted > 1:
                return split(values[0], axis, wanted)
            case Fused():
                before = self._blocks_before(statement.left[0].text)
                after = self._blocks_after(statement.right[0].text, number)
                return regrouped(values, operation, wanted, before, after)
            case Rename() | Join():
                return list(values)

    def _blocks_before(self, name: str) -> int:
        root = self.names[name].root
        return 1 if root is None else self.source_blocks.get(root, 1)

    def _blocks_after(self, name: str, number: int) -> int:
        """Blocks of the target tensor that a name becomes after the ``number``-th statement."""
        while name not in self.target_blocks:
            renames = self._next_name.get(name, [])
            following = bisect_right(renames, number, key=lambda entry: entry[0])
            if following == len(renames):
                return 1
            number, name = renames[following]
        return self.target_blocks[name]

    def _cast(self, value: Value, expected: str | None, target: DType) -> Value:
        """The value with a new dtype, provided that stored values are rounded at most once."""
        if value.dtype is None:
            return value  # only parameters are cast, and this checkpoint has none
        now = value.dtype.name
        if expected is not None and expected != now:
            raise PlanError(f"src_dtype is {expected}, but the tensor is {now}")
        if target.name == now:
            return value
        if now not in FLOATING:
            raise PlanError(f"a tensor of dtype {now} cannot be cast to {target.name}")
        for key in value.sources:
            for stored in sorted(self.source.stored_dtypes(key)):
                if stored != now and (stored, now) not in _WIDENINGS:
                    raise PlanError(
                        f"{key} is stored as {stored} and is {now} here; as {target.name} it would be rounded twice; "
                        "remove the cast"
                    )
        return replace(value, dtype=target)

    def outputs(self, allow_created: bool) -> dict[str, Value]:
        """Name → value of every tensor of the target, except created ones.

        Raises
        ------
        PlanError
            If a tensor would be lost, or is missing.
        """
        if self.wanted is not None:
            self.created = {name: made for name, made in self.created.items() if name in self.wanted}
        if self.created and not allow_created:
            name, statement = next(iter(self.created.items()))
            raise statement.impossible(f"cannot create {name}: no file holds its values")
        if self.wanted is None:
            return {name: m.value for name, m in self.names.items() if m.used_by is None}
        wanted = frozenset(self.wanted)
        for name in sorted(self.wanted):
            if name not in self.names and name not in self.created:
                why = "which is neither in the source nor made by a statement"
                if name in self.dropped:
                    why = f"which is dropped in {self.dropped[name].where}"
                raise PlanError(f"{self.program.where}: the target needs {name}, {why}")
        found = {name: m.value for name, m in self.names.items() if name in wanted}
        self._check_nothing_lost(found)
        return found

    def statements(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Name → the statements that made its value, in order, with file and line."""
        return {
            name: tuple(f"{made.where}: {made.text}" for made in self.names[name].followed)
            for name in names
            if self.names[name].followed
        }

    def _check_nothing_lost(self, found: Mapping[str, Value]) -> None:
        """Check that every value is written or used."""
        reached = {key for value in found.values() for key in value.sources}
        for name, binding in self.names.items():
            if name in found or binding.used_by is not None:
                continue
            if binding.made_by is not None:
                raise binding.made_by.impossible(f"{name} is made, but the target has no such tensor")
            if self.source.owners[name] not in reached:  # else it is an alias of a tensor that is written
                raise PlanError(
                    f"{self.program.where}: no statement uses {name}, and the target has no such tensor; to drop it, "
                    f"write {name} -> _"
                )


def _turned(value: Value, name: Name) -> Value:
    return permuted(value, None) if name.transposed else value
