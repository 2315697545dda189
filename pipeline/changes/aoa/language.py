"""Parse AOA programs.

Paddle's FlexCheckpoint describes in *AOA statements* how the tensors of a target are made from the tensors of a source
(Paddle 3.3.1 ``distributed/flex_checkpoint/aoa``)::

    program   := { statement }
    statement := names "->" names [ "," attribute { "," attribute } ]     one side is a single name
    name      := [A-Za-z_][A-Za-z0-9_.$*]* [ "[" start ":" stop "]" | "^T" ]
    attribute := "axis" "=" NUMBER | "permute" "=" "[1,0]" | "dtype" "=" DTYPE
               | "src_dtype" "=" DTYPE "," "dst_dtype" "=" DTYPE
               | fused_ffn [ "," axis ]
               | ( fused_qkv | fused_qkv_old ) "," heads [ "," axis ]
    heads     := "num_heads" "=" NUMBER "," "num_key_value_groups" "=" NUMBER

``_`` alone on one side means no tensor. A file is Paddle's JSON (``{"aoa_statements": [...]}``) or plain text, one
statement per line, with ``#`` comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from paddle_reshard.pipeline.core.errors import PlanError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json

NOTHING = "_"
FLOATING = ("float16", "float32", "bfloat16")
"""Dtypes that can be cast."""
PLACEHOLDER = re.compile(r"\$(LAYER_ID_OFFSET|LAYER_ID|EXPERT_ID)")
_LONGEST_RANGE = 1 << 16


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tensor, or a template for several names."""

    text: str
    transposed: bool = False
    """Whether the tensor is read (in a reversed statement, written) with its dims reversed."""
    layer_shift: int = 0
    """What ``$LAYER_ID_OFFSET`` adds to the layer number."""

    @property
    def is_nothing(self) -> bool:
        """Whether it is ``_``."""
        return self.text == NOTHING

    @property
    def placeholders(self) -> frozenset[str]:
        """Which of ``LAYER_ID``, ``LAYER_ID_OFFSET`` and ``EXPERT_ID`` the name contains."""
        return frozenset(PLACEHOLDER.findall(self.text))


@dataclass(frozen=True, slots=True)
class Rename:
    """The same tensor under a new name."""


@dataclass(frozen=True, slots=True)
class Join:
    """Concatenate several tensors, or split a tensor into equal parts."""

    axis: int


@dataclass(frozen=True, slots=True)
class Permute:
    """Dim ``i`` of the result is dim ``order[i]``; ``None`` reverses all dims."""

    order: Shape | None


@dataclass(frozen=True, slots=True)
class Cast:
    """Cast to the dtype ``target``; the values must have the dtype ``source``, if given."""

    source: str | None
    target: str


@dataclass(frozen=True, slots=True)
class Fused:
    """Parts interleaved block by block: ``[gate_0 | up_0 | gate_1 | up_1]``.

    ``fused_qkv`` has a block for each group of heads; ``fused_ffn`` and ``fused_qkv_old`` for each tensor-parallel
    shard in Paddle, and a single one here, where tensors are whole.
    """

    macro: str
    axis: int
    heads: int = 0
    groups: int = 0


Operation = Rename | Join | Permute | Cast | Fused


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement, as written or reversed."""

    where: str
    """File and line."""
    text: str
    left: tuple[Name, ...]
    right: tuple[Name, ...]
    operation: Operation

    def refused(self, detail: str) -> UsageError:
        """The error for a malformed statement."""
        return UsageError(f"{self.where}: {detail}, in: {self.text}")

    def impossible(self, detail: str) -> PlanError:
        """The error for a statement that does not fit the tensors."""
        return PlanError(f"{self.where}: {detail}, in: {self.text}")


@dataclass(frozen=True, slots=True)
class AoaProgram:
    """All statements of a file, as written."""

    where: str
    """File name for messages."""
    statements: tuple[Statement, ...]
    reverse: bool
    """Whether to apply the statements last to first, from right to left."""

    def reversed(self) -> AoaProgram:
        """The program that undoes this one."""
        return replace(self, reverse=not self.reverse)

    def in_order(self) -> tuple[Statement, ...]:
        """The statements in the order and direction in which to apply them."""
        if not self.reverse:
            return self.statements
        return tuple(_inverse(statement) for statement in reversed(self.statements))


def _inverse(statement: Statement) -> Statement:
    operation = statement.operation
    if isinstance(operation, Permute) and operation.order is not None:
        inverse = sorted(range(len(operation.order)), key=operation.order.__getitem__)
        operation = Permute(tuple(inverse))
    if isinstance(operation, Cast):
        if operation.source is None:
            raise statement.refused("dtype= cannot be reversed; write src_dtype='...', dst_dtype='...'")
        operation = Cast(operation.target, operation.source)
    return replace(statement, left=statement.right, right=statement.left, operation=operation)


def parse_aoa(text: str, where: str) -> AoaProgram:
    """Parse a program: Paddle's JSON, or one statement per line. ``where`` is the file name for messages.

    Raises
    ------
    UsageError
        With the file, the line (in JSON, the number of the statement) and what was expected.
    """
    reverse = False
    if text.lstrip().startswith("{"):
        lines, reverse = _json_statements(text, where)
    else:
        lines = [
            (f"{where}, line {number}", line.partition("#")[0])
            for number, line in enumerate(text.splitlines(), 1)
        ]
    statements = tuple(_parse_statement(line.strip(), at) for at, line in lines if line.strip())
    return AoaProgram(where, statements, reverse)


_CONFIG: Mapping[str, type] = {"aoa_statements": list, "aoa_config_reverse": bool, "enable_traceback": bool}


def _json_statements(text: str, where: str) -> tuple[list[tuple[str, str]], bool]:
    try:
        config = parse_json(text)
    except JsonError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
    for key, value in config.items():
        if type(value) is not _CONFIG.get(key):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in _CONFIG.items())
            raise UsageError(
                f"{where}: {key!r} is unknown or of the wrong type; an AOA configuration has {known}"
            )
    if "aoa_statements" not in config:
        raise UsageError(f"{where}: 'aoa_statements' is missing")
    lines = []
    for number, statement in enumerate(config["aoa_statements"], 1):
        if not isinstance(statement, str):
            raise UsageError(f"{where}, statement {number}: {statement!r} is not a string")
        lines += [(f"{where}, statement {number}", line) for line in statement.splitlines()]
    return lines, config.get("aoa_config_reverse", False)


class _Token(NamedTuple):
    kind: str
    """``->``, ``=``, ``:``, ``[``, ``]``, ``,``, ``number``, ``string``, ``name`` or ``end``."""
    text: str
    column: int
    """From 1."""


_TOKEN = re.compile(
    r"(?P<mark>->|[=:\[\],])|(?P<number>[0-9]+)|(?P<string>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_.$*^]*)|(?P<space>[ \t]+)"
)
_NAME = re.compile(r"(?P<text>[A-Za-z_][A-Za-z0-9_.$*]*)(?P<transposed>\^T)?")
_MACROS = ("fused_ffn", "fused_qkv", "fused_qkv_old")
_HEADS = ("num_heads", "num_key_value_groups")
_ATTRIBUTES = {
    "axis": "number", "num_heads": "number", "num_key_value_groups": "number",
    "permute": "string", "dtype": "string", "src_dtype": "string", "dst_dtype": "string",
}  # fmt: skip


def _parse_statement(text: str, where: str) -> Statement:
    parsed = _Parser(text, where).statement()
    if not any("*" in name.text for name in (*parsed.left, *parsed.right)):
        check_statement(parsed)
    return parsed


class _Parser:
    """Reads one statement from left to right."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.tokens = list(self._tokens())
        self.next = 0

    def _fail(self, detail: str) -> NoReturn:
        raise UsageError(f"{self.where}: {detail}, in: {self.text}")

    def _tokens(self) -> Iterator[_Token]:
        at = 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                self._fail(f"unexpected character {self.text[at]!r} (column {at + 1})")
            kind = match.lastgroup or ""
            if kind != "space":
                yield _Token(match.group() if kind == "mark" else kind, match.group(), at + 1)
            at = match.end()
        yield _Token("end", "the end", at + 1)

    def _peek(self, ahead: int = 0) -> _Token:
        return self.tokens[min(self.next + ahead, len(self.tokens) - 1)]

    def _take(self, kind: str, expected: str) -> str:
        token = self._peek()
        if token.kind != kind:
            self._fail(f"expected {expected}, found {token.text!r} (column {token.column})")
        self.next += 1
        return token.text

    def statement(self) -> Statement:
        left = self._names(right=False)
        self._take("->", "'->'")
        right = self._names(right=True)
        macros, values = self._attributes()
        self._take("end", "',' or the end")
        return Statement(self.where, self.text, left, right, self._operation(macros, values))

    def _names(self, right: bool) -> tuple[Name, ...]:
        names = self._name(right)
        while self._peek().kind == "," and not self._attribute_follows(1):
            self.next += 1
            names += self._name(right)
        return tuple(names)

    def _attribute_follows(self, ahead: int) -> bool:
        token = self._peek(ahead)
        return token.kind == "name" and (token.text in _MACROS or self._peek(ahead + 1).kind == "=")

    def _name(self, right: bool) -> list[Name]:
        """A name, or all names of a range ``name[a:b]``."""
        spelled = self._take("name", "the name of a tensor")
        match = _NAME.fullmatch(spelled)
        if match is None:
            self._fail(f"expected the name of a tensor, optionally followed by ^T, found {spelled!r}")
        text, transposed = match["text"], match["transposed"] is not None
        if transposed and (right or text == NOTHING):
            self._fail(
                f"expected a name without ^T, found {spelled!r}: a transposed view cannot be written to"
            )
        if "$" in PLACEHOLDER.sub("", text):
            self._fail(f"expected $LAYER_ID, $LAYER_ID_OFFSET or $EXPERT_ID, found {spelled!r}")
        if text.count("*") > 1:
            self._fail(f"expected at most one '*' in a name, found {spelled!r}")
        shift = -1 if right and "$LAYER_ID_OFFSET" in text else 0
        if self._peek().kind != "[":
            return [Name(text, transposed, shift)]
        if transposed:
            self._fail(f"expected a name without ^T before '[', found {spelled!r}")
        return [Name(f"{text}_{number}", False, shift) for number in self._range()]

    def _range(self) -> range:
        self._take("[", "'['")
        start = int(self._take("number", "the start of a range"))
        self._take(":", "':'")
        stop = int(self._take("number", "the end of a range"))
        self._take("]", "']'")
        if not 0 < stop - start <= _LONGEST_RANGE:
            self._fail(f"expected a range of 1 to {_LONGEST_RANGE} names, found [{start}:{stop}]")
        return range(start, stop)

    def _attributes(self) -> tuple[list[str], dict[str, str]]:
        macros: list[str] = []
        values: dict[str, str] = {}
        while self._peek().kind == ",":
            self.next += 1
            word = self._take("name", "an attribute")
            if word in _MACROS:
                macros.append(word)
                continue
            if word not in _ATTRIBUTES:
                self._fail(f"expected one of {', '.join((*_ATTRIBUTES, *_MACROS))}, found {word!r}")
            self._take("=", f"'=' after {word}")
            if word in values:
                self._fail(f"{word} is given twice")
            kind = _ATTRIBUTES[word]
            values[word] = self._take(kind, f"a {kind} as {word}").strip("\"'")
        return macros, values

    def _operation(self, macros: Sequence[str], values: Mapping[str, str]) -> Operation:
        if macros:
            return self._fused(macros, values)
        match sorted(values.items()):
            case []:
                return Rename()
            case [("axis", axis)]:
                return Join(int(axis))
            case [("permute", order)]:
                return self._permute(order)
            case [("dtype", target)]:
                return Cast(None, self._dtype(target))
            case [("dst_dtype", target), ("src_dtype", source)]:
                return Cast(self._dtype(source), self._dtype(target))
            case [(word, _)]:
                self._fail(f"{word} requires a further attribute")
        self._fail(
            f"expected a single attribute (or src_dtype with dst_dtype), found {', '.join(values)}; "
            "use several statements"
        )

    def _fused(self, macros: Sequence[str], values: Mapping[str, str]) -> Fused:
        needed = () if macros[0] == "fused_ffn" else _HEADS
        if len(macros) > 1 or not set(needed) <= values.keys() <= {*needed, "axis"}:
            self._fail(
                f"expected {', '.join((macros[0], *needed))} and optionally axis, "
                f"found {', '.join((*macros, *values))}"
            )
        heads, groups = (int(values.get(name, "0")) for name in _HEADS)
        if needed and (groups < 1 or heads < 1 or heads % groups):
            self._fail(f"expected num_heads in {groups} equal groups, found {heads}")
        return Fused(macros[0], int(values.get("axis", "1")), heads, groups)

    def _permute(self, value: str) -> Permute:
        if not re.fullmatch(r"\[[ \t]*(?:[0-9]+[ \t]*(?:,[ \t]*[0-9]+[ \t]*)*)?\]", value):
            self._fail(f'expected permute as "[1, 0]", found {value!r}')
        order = tuple(map(int, re.findall("[0-9]+", value)))
        if sorted(order) != list(range(len(order))):
            self._fail(f"expected a permutation of the dims 0 to {len(order) - 1}, found {value!r}")
        return Permute(order or None)

    def _dtype(self, value: str) -> str:
        if value not in FLOATING:
            self._fail(f"expected one of {', '.join(FLOATING)}, found {value!r}")
        return value


_FUSED_COUNTS = {
    "fused_ffn": ((1, 1), (1, 2), (2, 1)),
    "fused_qkv": ((1, 3), (3, 1)),
    "fused_qkv_old": ((1, 1), (1, 3), (3, 1)),
}


def check_statement(statement: Statement) -> None:
    """Check that the number of names fits the operation; every ``*`` must be expanded."""
    left, right, operation = statement.left, statement.right, statement.operation
    names = (*left, *right)
    nothing = [name for name in names if name.is_nothing]
    if nothing:
        if len(names) != 2 or len(nothing) != 1 or operation != Rename():
            raise statement.refused("expected '_' alone on one side, and no attribute")
    elif isinstance(operation, Fused):
        if (len(left), len(right)) not in _FUSED_COUNTS[operation.macro]:
            counts = " or ".join(f"{a} -> {b}" for a, b in _FUSED_COUNTS[operation.macro])
            raise statement.refused(
                f"expected {counts} names with {operation.macro}, found {len(left)} -> {len(right)}"
            )
    elif len(left) > 1 and len(right) > 1:
        raise statement.refused(f"expected a single name on one side, found {len(left)} -> {len(right)}")
    elif len(names) > 2 and not isinstance(operation, Join):
        raise statement.refused("expected 'axis=NUMBER', to concatenate or split tensors")
    if len({name.placeholders for name in names if not name.is_nothing}) > 1:
        raise statement.refused("expected the same $LAYER_ID, $LAYER_ID_OFFSET, $EXPERT_ID in every name")
