"""What a rank's file holds is the same as columns."""

from __future__ import annotations

import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.formats.hybrid.entries import MASTER_WEIGHTS, SPECIAL, FileEntries
from paddle_reshard.storage.files.paddle_pickle import ArrayRef

NAMES = st.one_of(st.sampled_from(SPECIAL), st.text(max_size=3), st.just("\ud800"))
ARRAYS = st.builds(
    ArrayRef,
    byte_offset=st.integers(0, 1 << 60),
    dtype=st.sampled_from(("f4", "u2")),
    shape=st.sampled_from(((), (3,), (3, 4))),
    axes=st.none() | st.just((1, 0)),
    name=st.none() | st.text(max_size=3),
)
ROOTS = st.recursive(
    st.dictionaries(NAMES, ARRAYS | st.integers() | st.none()),
    lambda inner: st.dictionaries(NAMES, inner),
    max_leaves=3,
)


def plain(items: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, plain([*v.items()]) if isinstance(v, FileEntries) else v) for name, v in items]


def expected(root: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, expected(value) if name == MASTER_WEIGHTS and isinstance(value, dict) else value)
        for name, value in root.items()
    ]


@given(ROOTS)
def test_entries_are_those_of_the_dict(root: dict[str, Any]) -> None:
    wanted = expected(root)
    for name, value in root.items():
        if isinstance(value, ArrayRef) and name not in SPECIAL:
            root[name] = ArrayRef(value.byte_offset, value.dtype, value.shape, value.axes, name)
            wanted = [(n, root[n] if n == name else v) for n, v in wanted]
            break
    entries = FileEntries(root)
    assert not root
    for found in (entries, pickle.loads(pickle.dumps(entries))):
        assert plain([*found.items()]) == wanted
        assert {name for name in SPECIAL if name in found} == {name for name, _ in wanted} & {*SPECIAL}
        assert plain([*found.drained([MASTER_WEIGHTS]).items()]) == [
            e for e in wanted if e[0] != MASTER_WEIGHTS
        ]
        assert not [*found.items()]
        assert plain([(name, found.get(name)) for name, _ in wanted if name in SPECIAL]) == [
            e for e in wanted if e[0] in SPECIAL
        ]
