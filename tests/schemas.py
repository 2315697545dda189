"""``docs/schemas/output-1.json``, made from the types of the answers. ``python -m tests.schemas`` writes it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from paddle_reshard.pipeline.cli.answers import ANSWERS
from paddle_reshard.pipeline.core.answer import SCHEMA_VERSION, Answer
from tests.conftest import REPO

Schema = dict[str, Any]
DOCUMENT = REPO / "docs" / "schemas" / "output-1.json"
SCALARS: dict[object, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    NoneType: {"type": "null"},
}
FAILED: dict[str, Schema] = {
    "schema_version": {"const": SCHEMA_VERSION},
    "error": {"type": "string", "minLength": 1},
    "kind": {
        "type": "string",
        "minLength": 1,
        "description": "UsageError, the class of an error of paddle_reshard or of Python, Interrupted, or Defect",
    },
    "retryable": {
        "type": "boolean",
        "description": "whether the same request may end otherwise later, with neither it nor the source changed",
    },
}
SUCCEEDED = FAILED | {"error": {"type": "null"}, "kind": {"type": "null"}, "retryable": {"const": False}}


class Definitions:
    """The objects of a schema by name, each defined once."""

    def __init__(self) -> None:
        self.all: dict[str, Schema] = {}

    def of(self, hint: Any) -> Schema:
        """The schema of a type."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            base, *facts = arguments
            return {"type": "string", "pattern": facts[0]} if base is str else self._named(*facts)
        if is_typeddict(hint) or dataclasses.is_dataclass(hint):
            return self._named(hint)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in (Union, UnionType):
            return {"anyOf": [self.of(argument) for argument in arguments]}
        if origin in (list, tuple, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if origin in (dict, Mapping):
            return {"type": "object"} | (
                {} if arguments[1] is Any else {"additionalProperties": self.of(arguments[1])}
            )
        return dict(SCALARS[hint])

    def _named(self, made: type, *above: type) -> Schema:
        name = made.__name__
        if name not in self.all:
            self.all[name] = {}  # classes may hold each other
            self.all[name] = self.entries((made, *above))
        return {"$ref": f"#/$defs/{name}"}

    def entries(self, made: Sequence[type], further: Mapping[str, Schema] | None = None) -> Schema:
        """The object that ``asdict`` makes of a dataclass, or that a TypedDict describes; a later class adds to it."""
        entries, needed = dict(further or {}), dict.fromkeys(further or {})
        for one in made:
            hints = get_type_hints(one, include_extras=True)
            told = {name: text for each in reversed(lineage(one)) for name, text in documented(each).items()}
            for name, hint in hints.items():
                entries[name] = self.of(hint) | ({"description": told[name]} if name in told else {})
            optional: frozenset[str] = getattr(one, "__optional_keys__", frozenset())
            needed |= dict.fromkeys(name for name in hints if name not in optional)
        return {
            "description": " ".join((made[-1].__doc__ or "").replace("``", "").split()),
            "type": "object",
            "properties": entries,
            "required": list(needed),
            "additionalProperties": False,
        }


def lineage(made: type) -> list[type]:
    """A class and those that it extends; before Python 3.12 only its source tells those of a TypedDict."""
    if not is_typeddict(made):
        return list(made.__mro__)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    assert isinstance(tree, ast.ClassDef)
    above = [
        getattr(sys.modules[made.__module__], base.id) for base in tree.bases if isinstance(base, ast.Name)
    ]
    return [made, *(further for base in above if is_typeddict(base) for further in lineage(base))]


def documented(made: type) -> dict[str, str]:
    """The texts under the fields of a class."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(text.value.value).replace("``", "").split())
    return texts


def schema() -> Schema:
    """The whole document."""
    definitions = Definitions()
    commands: dict[str, Schema] = {}
    for command, answers in ANSWERS.items():
        for number, answer in enumerate(answers):
            made: Any = get_args(answer)[1:] if get_origin(answer) is Annotated else (answer,)
            head = {"schema_version": {"const": SCHEMA_VERSION}, "command": {"const": command}, **SUCCEEDED}
            commands[command + ("" if number == 0 else f"_{number + 1}")] = definitions.entries(made, head)
    submitted = commands["submit"]
    job = {"submission_id", "attached", "status", "result"}
    assert {field.name for field in dataclasses.fields(Answer)} >= {"command", "error", "kind", "retryable"}
    commands["failed"] = {
        "description": "Printed by any command that failed; the last four entries by submit alone.",
        "type": "object",
        "properties": {
            **FAILED,
            "command": {"anyOf": [SCALARS[str], SCALARS[NoneType]]},
            **{name: entry for name, entry in submitted["properties"].items() if name in job},
        },
        "required": ["schema_version", "command", "error", "kind", "retryable"],
        "additionalProperties": False,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What paddle-reshard prints with --json",
        "description": "The object that every command prints at its end with --json. schema_version grows when an "
        "entry changes its meaning or is removed; new entries do not change it.",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in commands],
        "$defs": commands | definitions.all,
    }


def text() -> str:
    """The document as it is stored."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(text(), "utf-8")
