"""The oracle is Python's own ``pickle`` with Paddle's classes; it shares no code with the parser.

Entries that are taken in runs say what they say opcode by opcode. There windows are small, and every layout makes a
stencil, so that small files have what large ones have.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files import dist_metadata, dist_metadata_rows, dist_metadata_stencils
from paddle_reshard.storage.files.dist_metadata import (
    GENERATIONS,
    READ_AHEAD_BYTES,
    DistMetadata,
    encode_dist_metadata,
    parse_dist_metadata,
)
from tests.conftest import case_files
from tests.dist_metadata_oracle import (
    MODULES,
    classes_of,
    dumped,
    entries,
    expected,
    flattened,
    loaded,
    replicated,
)
from tests.sampling import examples


def parse(data: bytes) -> DistMetadata:
    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 < nbytes <= READ_AHEAD_BYTES
        assert byte_offset + nbytes <= len(data)
        return data[byte_offset : byte_offset + nbytes]

    return parse_dist_metadata(read, len(data), "0.metadata")


def in_order(metadata):
    """Paddle's own objects; the order of the pieces of a key says nothing."""
    for pieces in metadata.state_dict_metadata.values():
        pieces.sort(key=repr)
    return metadata


def same(a: DistMetadata, b: DistMetadata) -> bool:
    values = [(m.keys, m.dtypes, m.shapes, m.files, dict(m.flat_mapping)) for m in (a, b)]
    return values[0] == values[1] and (a.pieces == b.pieces).all() and (a.locations == b.locations).all()


# --- real files ---------------------------------------------------------------------------------------


def real_files() -> list[Path]:
    return case_files(("dense", "moe"), "checkpoint-*/*/*.metadata")


def test_real_files_say_what_pickle_finds_in_them_and_are_written_again():
    module = classes_of("3.3")
    files = real_files()
    flattened = 0
    for path in files:
        data = path.read_bytes()
        found, wanted = parse(data), loaded(data, module)
        assert entries(found) == expected(wanted), path
        assert found.flat_mapping == wanted.flat_mapping
        assert found.keys == tuple(sorted(wanted.state_dict_metadata))
        assert all((path.parent / name).exists() for name in found.files)
        flattened += int((found.pieces["flattened_range"] >= 0).sum())
        again = encode_dist_metadata(found)
        assert in_order(loaded(again, module)) == in_order(wanted)
        assert same(parse(again), found)
    assert len(files) >= 28
    assert flattened > 500


# --- every generation ---------------------------------------------------------------------------------

NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    st.sampled_from(["dtype", "global_offset", "float32", "model.w", "é", "k" * 300]),
)
EXTENTS = st.sampled_from([1, 2, 3, 255, 256, 65535, 65536, 1 << 31, 1 << 40])


@st.composite
def metadatas(draw, generation: str):
    """Metadata as Paddle makes it: tensors cut along dim 0, pieces flattened or not, replicas or not."""
    module = classes_of(generation)
    keys = draw(st.lists(NAMES, unique=True, max_size=6))
    number = draw(st.sampled_from([int, np.int64]))
    shared = draw(st.booleans())  # one process: the same objects in both dicts; gathered: copies
    wholly = generation == "3.3"
    pieces, places = {}, {}
    for key in keys:
        dims = draw(st.lists(EXTENTS, max_size=4))
        count = draw(st.integers(1, 3)) if dims else 1
        rows = []
        for part in range(count):
            whole = tuple([dims[0] * count, *dims[1:]]) if dims else ()
            offset = tuple([dims[0] * part] + [0] * (len(dims) - 1)) if dims else ()
            local = tuple(dims)
            elements = min(prod(dims), (1 << 60) - 1)
            cuts = [None]
            if wholly and draw(st.booleans()):
                middle = draw(st.integers(0, elements))
                cuts = [(number(0), number(middle)), (number(middle), number(elements))]
            for place, cut in enumerate(cuts):
                rows.append((offset, local, whole, cut, f"{part * 2 + place}_0.distcp"))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        pieces[key] = []
        for offset, local, whole, cut, file in rows:
            known = {"global_offset": offset, "local_shape": local, "dtype": dtype, "global_shape": whole}
            known |= {"is_flattened": cut is not None, "flattened_range": cut}
            fields = module.LocalTensorMetadata.__dataclass_fields__
            piece = module.LocalTensorMetadata(**{name: known[name] for name in fields})
            pieces[key].append(piece)
            if not shared:
                offset, local, cut = (tuple(list(v)) if v is not None else None for v in (offset, local, cut))
            own = key if shared else "".join(list(key))
            if not wholly:
                places[module.LocalTensorIndex(own, offset)] = file
                continue
            index = module.LocalTensorIndex(own, offset, cut is not None, cut, None, local)
            if draw(st.booleans()):
                places[index] = file
            else:
                places[replace(index, replica_id=0)] = file
                places[replace(index, replica_id=1)] = f"9{file}"
    metadata = module.Metadata(pieces, places)
    if generation != "2.6":
        metadata.flat_mapping = {key: tuple(key.split(".")) if "." in key else (key,) for key in keys}
    return module, metadata


@pytest.mark.parametrize("generation", MODULES)
@examples(25)
@given(st.data(), st.sampled_from([2, 3, 4, 5]), st.booleans())
def test_every_generation_says_what_pickle_finds_in_it(generation, data, protocol, python):
    module, metadata = data.draw(metadatas(generation))
    found = parse(dumped(metadata, module, protocol, python))
    assert entries(found) == expected(metadata)
    assert found.flat_mapping == (getattr(metadata, "flat_mapping", None) or {})


@pytest.mark.parametrize("generation", MODULES)
@examples(25)
@given(st.data())
def test_what_is_written_pickle_loads_as_it_was(generation, data):
    module, metadata = data.draw(metadatas(generation))
    found = parse(dumped(metadata, module))
    again = encode_dist_metadata(found, generation)
    assert in_order(loaded(again, module)) == in_order(metadata)
    assert same(parse(again), found)
    framed = encode_dist_metadata(found, generation, 5)
    assert in_order(loaded(framed, module)) == in_order(metadata)
    assert same(parse(framed), found)
    assert dumped(loaded(framed, module), module, 5) == framed  # pickle writes the same of what it loads


def test_the_written_modules_and_attributes_are_those_of_paddle():
    assert {name: module for name, (module, _, _) in GENERATIONS.items()} == MODULES
    for generation, (_, pieces, indexes) in GENERATIONS.items():
        module = classes_of(generation)
        assert tuple(module.LocalTensorMetadata.__dataclass_fields__) == pieces
        assert tuple(module.LocalTensorIndex.__dataclass_fields__) == indexes
    paddle = importlib.import_module(MODULES["3.3"])
    for name in ("LocalTensorMetadata", "LocalTensorIndex", "Metadata"):
        ours, theirs = getattr(classes_of("3.3"), name), getattr(paddle, name)
        assert list(ours.__dataclass_fields__) == list(theirs.__dataclass_fields__)


@pytest.mark.parametrize("generation", ["2.6", "3.0", "3.2"])
def test_what_an_older_form_cannot_say_is_refused(generation):
    module = classes_of("3.3")
    piece = module.LocalTensorMetadata((0,), (4,), "float32", (4,), True, (0, 2))
    index = module.LocalTensorIndex("w", (0,), True, (0, 2), None, (4,))
    found = parse(dumped(module.Metadata({"w": [piece]}, {index: "0_0.distcp"}, {}), module))
    with pytest.raises(ValueError, match="no flattened pieces"):
        encode_dist_metadata(found, generation)


def later(module, **attributes):
    """Metadata of one whole tensor with attributes that later versions may add."""
    piece = module.LocalTensorMetadata((0,), (4,), "float32", (4,))
    index = module.LocalTensorIndex("w", (0,), local_shape=(4,))
    metadata = module.Metadata({"w": [piece]}, {index: "0_0.distcp"}, {"w": ("w",)})
    metadata.__dict__.update(attributes)
    return metadata


def test_what_later_versions_say_besides_is_read():
    module = classes_of("3.3")
    remarks = {
        "model_type": "qwen3", "checkpoint_version": 2, "paddle_commit_id": None, "something_new": None,
    }  # fmt: skip
    found = parse(dumped(later(module, **remarks), module, 5))
    assert found.remarks == remarks
    assert entries(found) == expected(later(module))
    assert parse(dumped(later(module), module)).remarks == {}


def test_what_later_versions_say_besides_and_may_change_values_is_refused():
    module = classes_of("3.3")
    with pytest.raises(FormatError, match=r"Metadata has 'compression', which is not None .* 3\.4"):
        parse(dumped(later(module, compression="zstd"), module))


# --- large files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "keys", "world"), [(replicated, 40, 300), (flattened, 40, 64), (flattened, 3, 1500)]
)
def test_large_files_say_what_pickle_finds_in_them(make, keys, world, monkeypatch):
    """Long enough for frames, for batches of 1000 items, and for every width of a memo index.

    Opcode by opcode a real file takes minutes; how many entries are taken so is counted, not timed.
    """
    one_by_one = []
    follow = dist_metadata_rows._EntryRuns.follow
    monkeypatch.setattr(
        dist_metadata_rows._EntryRuns,
        "follow",
        lambda rows: one_by_one.append(follow(rows)) or one_by_one[-1],
    )
    module = classes_of("3.3")
    metadata = make(module, keys, world)
    found = parse(dumped(metadata, module))
    assert entries(found) == expected(metadata)
    framed = encode_dist_metadata(found, "3.3", 5)
    assert dumped(loaded(framed, module), module, 5) == framed
    assert same(parse(framed), found)
    assert len(one_by_one) * 50 < 2 * len(found.locations)


# --- what a file may not say --------------------------------------------------------------------------


def one(**changed):
    """Metadata of one piece ``w``; ``changed`` are attributes of the piece, ``index_*`` of its index."""
    module = classes_of("3.3")
    piece = {"global_offset": (0, 0), "local_shape": (2, 3), "dtype": "float32", "global_shape": (4, 3)}
    index = {"tensor_key": "w", "global_offset": (0, 0), "local_shape": (2, 3)}
    piece |= {name: value for name, value in changed.items() if not name.startswith("index_")}
    index |= {name[6:]: value for name, value in changed.items() if name.startswith("index_")}
    file = index.pop("file", "0_0.distcp")
    metadata = module.Metadata(
        {"w": [module.LocalTensorMetadata(**piece)]}, {module.LocalTensorIndex(**index): file}, {"w": ("w",)}
    )
    return dumped(metadata, module)


def test_lists_are_read_as_the_tuples_they_stand_for():
    both = [2, 3]
    assert same(parse(one(local_shape=both, global_shape=[4, 3])), parse(one()))
    assert same(parse(one(local_shape=both, global_shape=both)), parse(one(global_shape=(2, 3))))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"global_offset": (0,)}, "bad_piece"),
        ({"global_shape": (4, 3, 1)}, "bad_piece"),
        ({"global_offset": (5, 0)}, "bad_piece"),
        ({"local_shape": (2, -3)}, "bad_shape"),
        ({"local_shape": (2, 3.0)}, "bad_shape"),
        ({"local_shape": (2, True)}, "bad_shape"),
        ({"local_shape": (2, 1 << 60)}, "bad_shape"),
        ({"local_shape": None}, "bad_shape"),
        ({"local_shape": "23"}, "bad_shape"),
        ({"is_flattened": True}, "bad_range"),
        ({"flattened_range": (0, 2)}, "bad_range"),
        ({"is_flattened": 1, "flattened_range": (0, 2)}, "bad_range"),
        ({"is_flattened": True, "flattened_range": (0, 7)}, "bad_piece"),
        ({"is_flattened": True, "flattened_range": (3, 2)}, "bad_piece"),
        ({"is_flattened": True, "flattened_range": (3,)}, "bad_piece"),
        ({"dtype": 5}, "bad_dtype"),
        ({"index_tensor_key": "v"}, "unknown_piece"),
        ({"index_global_offset": (2, 0)}, "unknown_piece"),
        ({"index_local_shape": (3, 2)}, "unknown_piece"),
        ({"index_is_flattened": True, "index_flattened_range": (0, 2)}, "unknown_piece"),
        ({"index_replica_id": -1}, "bad_replica"),
        ({"index_replica_id": "0"}, "bad_replica"),
        ({"index_file": "../0_0.distcp"}, "bad_file"),
        ({"index_file": ""}, "bad_file"),
        ({"index_file": None}, "bad_file"),
    ],
)
def test_contradictions_are_refused(changed, reason):
    with pytest.raises(FormatError) as caught:
        parse(one(**changed))
    assert caught.value.reason == reason


def many(edit, count: int = 300) -> bytes:
    """Metadata of many pieces, one of which ``edit`` spoils: most of it is taken in runs."""
    module = classes_of("3.3")
    pieces = {f"k{i}": [module.LocalTensorMetadata((0,), (4,), "float32", (4,))] for i in range(count)}
    places = {
        module.LocalTensorIndex(f"k{i}", (0,), False, None, None, (4,)): f"{i}_0.distcp" for i in range(count)
    }
    edit(module, pieces, places)
    return dumped(module.Metadata(pieces, places, {}), module)


def _twice(module, pieces, places):
    pieces["k200"].append(replace(pieces["k200"][0]))


def _lost(module, pieces, places):
    del places[module.LocalTensorIndex("k200", (0,), False, None, None, (4,))]


def _same_file(module, pieces, places):
    pieces["k200"] = [
        replace(pieces["k200"][0], local_shape=(2,)),
        replace(pieces["k200"][0], global_offset=(2,), local_shape=(2,)),
    ]
    _lost(module, pieces, places)
    for at in (0, 2):
        places[module.LocalTensorIndex("k200", (at,), False, None, None, (2,))] = "200_0.distcp"


def _outside(module, pieces, places):
    pieces["k200"] = [replace(pieces["k200"][0], global_shape=(3,))]


def _unflagged(module, pieces, places):
    """Nothing says whether it is flattened, so nothing is; but one piece and its index have a range."""
    pieces["k200"] = [replace(pieces["k200"][0], flattened_range=(0, 2))]
    _lost(module, pieces, places)
    places[module.LocalTensorIndex("k200", (0,), False, (0, 2), None, (4,))] = "200_0.distcp"
    for index in list(places)[:100]:  # what comes last is taken opcode by opcode
        places[index] = places.pop(index)
    for value in (*places, *(piece for (piece,) in pieces.values())):
        del value.__dict__["is_flattened"]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_twice, "duplicate_piece"),
        (_lost, "lost_piece"),
        (_same_file, "two_pieces_in_one_file"),
        (_outside, "bad_piece"),
    ],
)
def test_one_bad_entry_among_many_is_found_and_named(edit, reason):
    with pytest.raises(FormatError, match="'k200'") as caught:
        parse(many(edit))
    assert caught.value.reason == reason
    assert parse(many(lambda *_: None)).pieces.size == 300


def test_a_range_without_a_flag_is_refused_among_many_entries_too():
    with pytest.raises(FormatError) as caught:
        parse(many(_unflagged))
    assert caught.value.reason == "bad_range"


# --- entries in runs ----------------------------------------------------------------------------------

CLASSES = classes_of("3.3")


@pytest.fixture
def fitted(monkeypatch) -> list[int]:
    """Small windows; and how many entries fitted a stencil, per comparison."""
    monkeypatch.setattr(dist_metadata, "READ_AHEAD_BYTES", 1 << 13)
    monkeypatch.setattr(dist_metadata_rows, "_FEWEST_ENTRIES", 1)
    counts: list[int] = []
    fitting = dist_metadata_stencils.Stencil.fitting

    def counted(stencil, rows):
        fits = fitting(stencil, rows)
        counts.append(int(np.count_nonzero(fits)))
        return fits

    monkeypatch.setattr(dist_metadata_stencils.Stencil, "fitting", counted)
    return counts


def one_by_one(data: bytes) -> DistMetadata:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist_metadata_rows._EntryRuns, "_ready", lambda rows: False)
        return parse(data)


def content(found: DistMetadata) -> tuple[object, ...]:
    return (
        found.keys, found.dtypes, found.shapes, found.files, dict(found.flat_mapping), found.remarks,
        found.pieces.tobytes(), found.locations.tobytes(),
    )  # fmt: skip


def answer(read, data: bytes) -> object:
    """What the file says; an error counts as none."""
    try:
        return content(read(data))
    except FormatError:
        return None


def test_real_files_say_the_same_in_runs_and_one_by_one(fitted):
    files = real_files()
    for path in files:
        data = path.read_bytes()
        assert content(parse(data)) == content(one_by_one(data)), path
    assert len(files) >= 28
    assert sum(fitted) > 1000


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("python", [False, True], ids=["C", "Python"])
def test_real_files_say_the_same_in_every_protocol(protocol, python, fitted):
    """Protocols 2 and 3 number what they store in the memo (BINPUT, LONG_BINPUT) and have no runs."""
    data = max((path.read_bytes() for path in real_files()), key=len)
    again = dumped(loaded(data, CLASSES), CLASSES, protocol, python)
    found = content(parse(again))
    assert (sum(fitted) > 200) == (protocol >= 4)
    assert found == content(one_by_one(again)) == content(parse(data))


def mutable():
    """Files with few entries: of one layout, and with numpy numbers and texts."""
    return [dumped(replicated(CLASSES, 1, 24), CLASSES), dumped(flattened(CLASSES, 1, 12), CLASSES)]


@pytest.mark.parametrize("base", mutable(), ids=["replicated", "flattened"])
def test_other_bytes_change_what_both_say_in_the_same_way(base, fitted):
    """Bytes in turn, with another bit: every byte of an entry in one entry or another, its opcodes included."""
    read = 0
    for at in range(len(base) // 2, len(base) - 512, 11):
        data = base[:at] + bytes([base[at] ^ 1 << at % 8]) + base[at + 1 :]
        found = answer(parse, data)
        assert found == answer(one_by_one, data), at
        read += found is not None
        if found is not None:
            assert entries(parse(data)) == expected(loaded(data, CLASSES)), at
    assert read > 1
    assert sum(fitted) > 200
