"""Execute the statements of a program.

A statement gives its resulting names new values. So that no tensor is lost silently, a value must be used before a
later statement replaces it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    made_by: tuple[Statement, ...] = ()
    """The statements that made the value, in order; empty for a tensor of the source."""
    used_by: Statement | None = None
    kept_by: Statement | None = None
    """The statement ``a -> a`` by which the name stays in the target, whatever else uses its value."""

    @property
    def is_output(self) -> bool:
        """Whether the target has the name."""
        return self.used_by is None or self.kept_by is not None


class Interpreter:
    """Executes statements in order. Call :meth:`all`, then :meth:`outputs`."""

    def __init__(self, source: SourceTensors, program: AoaProgram) -> None:
        self.source, self.program = source, program
        self.names = {name: _Binding(source.values[owner]) for name, owner in source.owners.items()}
        self.dropped: dict[str, Statement] = {}
        self.idle: list[str] = []
        """File and line of each statement that matches no tensor."""
        self.unmade: dict[str, Statement] = {}
        """Names that the target is to have and no file holds (``_ -> name``)."""

    def all(self) -> None:
        """Execute the program."""
        for statement in self._expanded():
            if statement.right[0].is_nothing:
                self._drop(statement, statement.left[0].text)
            elif statement.left[0].is_nothing:
                self._leave_out(statement, statement.right[0].text)
            else:
                self._execute(statement)

    def _expanded(self) -> list[Statement]:
        keys = Keys(self.source.owners)
        statements: list[Statement] = []
        for written in self.program.in_order():
            expanded = expand(written, keys)
            if not expanded:
                made = Keys(name.text for statement in statements for name in statement.right)
                expanded = expand(written, made)
                if expanded and not self.program.reverse:  # reversed, they are all that was made of them
                    raise written.refused(
                        "placeholders take numbers from the keys of the source, but only earlier statements make "
                        "these names; write the numbers out"
                    )
                if not expanded:
                    self.idle.append(written.where)
            statements += expanded
        return statements

    def _drop(self, statement: Statement, name: str) -> None:
        binding = self.names.get(name)
        if binding is None:
            self.idle.append(statement.where)
            return
        if (user := binding.used_by or binding.kept_by) is not None:
            raise statement.impossible(f"cannot drop {name}, because {user.where} uses it")
        del self.names[name]
        self.dropped[name] = statement

    def _leave_out(self, statement: Statement, name: str) -> None:
        if name in self.names and self.names[name].is_output:
            raise statement.impossible(f"{name} would be lost: a file holds its values")
        self.unmade[name] = statement

    def _execute(self, statement: Statement) -> None:
        bindings = [self._read(statement, name.text) for name in statement.left]
        try:
            values = [_turned(m.value, name) for m, name in zip(bindings, statement.left, strict=True)]
            results = self._results(statement, values)
            results = [_turned(v, name) for v, name in zip(results, statement.right, strict=True)]
        except PlanError as error:
            raise statement.impossible(str(error)) from error
        before = dict.fromkeys(made for binding in bindings for made in binding.made_by)
        keeps = statement if statement.left == statement.right and statement.operation == Rename() else None
        for name, result in zip(statement.right, results, strict=True):
            self._write(statement, name.text, _Binding(result, (*before, statement), kept_by=keeps))

    def _read(self, statement: Statement, name: str) -> _Binding:
        binding = self.names.get(name)
        if binding is not None:
            binding.used_by = statement
            return binding
        why = "is neither in the source nor made by an earlier statement"
        if name in self.dropped:
            why = f"is dropped in {self.dropped[name].where}"
        elif name in self.unmade:
            why = f"is in no file, as {self.unmade[name].where} says"
        raise statement.impossible(f"{name} {why}")

    def _write(self, statement: Statement, name: str, binding: _Binding) -> None:
        before = self.names.pop(name, None)
        if before is not None and before.is_output and before.value != binding.value:
            if before.made_by:
                raise statement.impossible(
                    f"{name} is made twice, first in {before.made_by[-1].where}, whose result is not used"
                )
            raise statement.impossible(
                f"{name} of the source would be lost, because no statement uses it; to drop it, write {name} -> _ first"
            )
        self.names[name] = binding

    def _results(self, statement: Statement, values: Sequence[Value]) -> list[Value]:
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
                return regrouped(values, operation, wanted)
            case Rename() | Join():
                return list(values)

    def _cast(self, value: Value, expected: str | None, target: DType) -> Value:
        """The value with a new dtype, provided that stored values are rounded at most once."""
        if value.dtype is None:
            return value  # only parameters are cast, and this checkpoint has none
        now = value.dtype.name
        if expected is not None and now not in (expected, target.name):
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

    def outputs(self) -> dict[str, Value]:
        """Name → value of every tensor of the target: those that no statement uses, or that one keeps."""
        return {name: binding.value for name, binding in self.names.items() if binding.is_output}

    def statements(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Name → the statements that made its value, in order, with file and line."""
        return {
            name: tuple(f"{made.where}: {made.text}" for made in self.names[name].made_by)
            for name in names
            if self.names[name].made_by
        }


def _turned(value: Value, name: Name) -> Value:
    return permuted(value, None) if name.transposed else value
