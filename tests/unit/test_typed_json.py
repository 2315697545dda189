"""What a file of JSON may hold is what the annotations say, and every refusal names the entry and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

import pytest

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.documents.strict_json import parse_json
from paddle_reshard.storage.documents.typed_json import Bounds, EntryError, typed
from paddle_reshard.storage.session.holder import this_process
from paddle_reshard.storage.session.ledger import Lock, Phase, SessionRecord, parse_ledger
from paddle_reshard.storage.store import Identity


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: Annotated[int, Bounds(0, 9)] = 0


@dataclass(frozen=True)
class Open:
    OPEN: ClassVar[bool] = True
    name: str


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...] = ()
    colour: Colour | None = None
    scale: float = 1.0
    kind: Literal["line", "area"] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    label: str | tuple[int, ...] = ""
    pair: tuple[str, int] | None = None
    made: Open | None = None
    anything: Any = None


def test_a_value_gets_its_types() -> None:
    text = (
        '{"name": "a", "points": [{"x": 1}, {"x": -2, "y": 9}], "colour": "blue", "scale": 2, "kind": "area", '
        '"sizes": {"b": 3}, "label": [1, 2], "pair": ["c", 4], "made": {"name": "d", "by": []}, "anything": {"e": [1]}}'
    )
    found = typed(parse_json(text), Shape)
    points = (Point(1), Point(-2, 9))
    assert found == Shape(
        "a", points, Colour.BLUE, 2.0, "area", {"b": 3}, (1, 2), ("c", 4), Open("d"), {"e": [1]}
    )
    assert (type(found.scale), type(found.points)) == (float, tuple)
    assert typed({"name": "a", "colour": None}, Shape) == Shape("a")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"points": [{"x": True}]}, "points[0].x cannot be true: a whole number is expected"),
        ({"points": [{"x": 1.0}]}, "points[0].x cannot be 1.0: a whole number is expected"),
        ({"points": [{"y": 1}]}, "'x' is missing in {\"y\": 1}"),
        ({"points": {"x": 1}}, 'points cannot be {"x": 1}: a list is expected'),
        ({"points": [{"x": 1, "y": 10}]}, "points[0].y cannot be 10: it must be at most 9"),
        ({"points": [{"x": 1, "y": -1}]}, "points[0].y cannot be -1: it must be at least 0"),
        ({"colour": "green"}, 'colour cannot be "green": one of red, blue is expected'),
        ({"scale": "2"}, 'scale cannot be "2": a number is expected'),
        ({"kind": "lines"}, 'kind cannot be "lines": one of line, area is expected'),
        ({"sizes": {"b": "3"}}, "sizes['b'] cannot be \"3\": a whole number is expected"),
        ({"label": [1, "2"]}, 'label[1] cannot be "2": a whole number is expected'),
        ({"pair": ["c", 4, 5]}, 'pair cannot be ["c", 4, 5]: a list is expected'),
        ({"made": {"by": "me"}}, '\'name\' is missing in {"by": "me"}'),
        ({"name": None}, "name cannot be null: a text is expected"),
        ({"colr": "red"}, 'unknown entry \'colr\' in {"name": "a", "colr": "red"}; did you mean colour?'),
        ({"points": [{"x": 1, "q": 2}]}, 'unknown entry \'q\' in {"x": 1, "q": 2}; known: x, y'),
    ],
)
def test_what_is_refused_and_why(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(EntryError) as caught:
        typed({"name": "a", **entries}, Shape)
    assert str(caught.value) == message


def test_a_long_value_is_cut() -> None:
    with pytest.raises(EntryError) as caught:
        typed({"name": ["x" * 5000]}, Shape)
    assert len(str(caught.value)) < 200


def record() -> dict[str, Any]:
    lock = Lock(this_process(), "n", 1.0, 120.0, True)
    made = SessionRecord(Identity("p", "1", "/a", {"f": "v"}), lock, Phase.MOVE, "boot")
    return parse_json(made.data())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("lock", "lease_seconds"), "120"),
        (("lock", "held"), 1),
        (("lock", "holder", "pid"), "7"),
        (("identity", "files"), {"f": 3}),
        (("identity", "target"), "0"),
        (("phase",), "moved"),
        (("replaces",), [["a"]]),
        (("uploads",), [1]),
    ],
)
def test_a_session_whose_values_have_other_types_is_none(path: tuple[str, ...], value: object) -> None:
    """A lock whose lease is a text would only fail where it is compared, with a bare TypeError."""
    found = values = record()
    for name in path[:-1]:
        values = values[name]
    values[path[-1]] = value
    with pytest.raises(TargetError, match=f"is not the record of a conversion .*{path[-1]}"):
        SessionRecord.parse(json.dumps(found).encode(), "/x")


@pytest.mark.parametrize(
    "line",
    [
        '["3", [], []]', '[3, [["a", "0", 7, "", "", ""]], []]', '[3, [["a", 0, 7]], []]',
        "[3, [], [5]]", "[3, [], [], []]", "[3, []]",
    ],
)  # fmt: skip
def test_a_line_of_a_ledger_with_other_types_ends_it(line: str) -> None:
    good = b'[1,[["a",0,7,"","",""]],[]]\n'
    records, nbytes = parse_ledger(good + line.encode() + b"\n" + good)
    assert ([found.unit for found in records], nbytes) == ([1], len(good))
