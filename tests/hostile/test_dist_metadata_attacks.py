"""No ``.metadata`` file makes the parser run, import, hang, recurse or believe what ``pickle`` would not find in it."""

from __future__ import annotations

import builtins
import io
import pickle
import random
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pickle_attacks import ATTACKS, PROTO, STOP, named, payload, text

from paddle_reshard.pipeline.core.errors import FormatError, UnsafePickleError
from paddle_reshard.storage.files import dist_metadata
from paddle_reshard.storage.files.dist_metadata import READ_AHEAD_BYTES, DistMetadata, parse_dist_metadata
from tests.dist_metadata_oracle import classes_of, dumped, entries, expected, flattened, replicated
from tests.sampling import examples

FUZZ = examples(300)
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
NEW, PIECE, INDEX = (
    named(MODULE, kind) + b")\x81" for kind in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
)


def parse(data: bytes) -> DistMetadata:
    """Parse, and check that no read ever leaves the file or asks for more than one window."""

    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 <= byte_offset <= byte_offset + nbytes <= len(data)
        assert nbytes <= READ_AHEAD_BYTES
        return data[byte_offset : byte_offset + nbytes]

    return parse_dist_metadata(read, len(data), "0.metadata")


def refusal(data: bytes) -> FormatError | None:
    try:
        parse(data)
    except FormatError as error:
        assert error.path == "0.metadata"
        assert len(str(error)) < 1000
        return error
    return None


def state(*items: bytes) -> bytes:
    return b"}(" + b"".join(items) + b"ub"


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"


def piece(offset: bytes = numbers(0), shape: bytes = numbers(4), *more: bytes) -> bytes:
    return PIECE + state(text("global_offset"), offset, text("local_shape"), shape, *more)


def index(key: bytes = text("w"), offset: bytes = numbers(0), *more: bytes) -> bytes:
    return INDEX + state(text("tensor_key"), key, text("global_offset"), offset, *more)


def file_of(pieces: bytes, places: bytes, *more: bytes) -> bytes:
    """Metadata whose two dicts have these items."""
    items = (
        text("state_dict_metadata"),
        b"}(" + pieces + b"u",
        text("storage_metadata"),
        b"}(" + places + b"u",
    )
    return PROTO + NEW + state(*items, *more) + STOP


W = text("w") + b"](" + piece() + b"e"
AT = index() + text("0_0.distcp")
LAUGHS = b"()\x94" + b"".join(b"h%c" % level * 2 + b"\x86\x94" for level in range(60)) + b"t"
DEEP = b")" + b"\x85" * 10_000

ATTEMPTS = {
    "os.system for the root": (PROTO + named("os", "system") + text("touch MARKER") + b"\x85R.", "forbidden_global"),
    "os.system for a piece": (
        file_of(text("w") + b"](" + named("os", "system") + text("x") + b"\x85Re", AT), "forbidden_global"
    ),
    "os.system for a file name": (
        file_of(W, index() + named("os", "system") + text("x") + b"\x85R"), "forbidden_global"
    ),
    "another class of the same module": (PROTO + named(MODULE, "dataclass") + b")\x81.", "forbidden_global"),
    "an attribute of a class": (PROTO + named(MODULE, "Metadata.__init__") + b")R.", "forbidden_global"),
    "the class under another module": (PROTO + named(MODULE + ".x", "Metadata") + b")\x81.", "forbidden_global"),
    "a class called": (PROTO + named(MODULE, "Metadata") + b")R.", "forbidden_call"),
    "an instance with arguments": (PROTO + named(MODULE, "Metadata") + b"N\x85\x81.", "forbidden_call"),
    "an instance of a function": (PROTO + named("numpy", "dtype") + b")\x81.", "forbidden_call"),
    "an instance of an instance": (PROTO + NEW + b")\x81.", "forbidden_call"),
    "eval, which only files of arrays may name": (
        PROTO + named("builtins", "eval") + text("1") + b"\x85R.", "forbidden_global"
    ),
    "an array": (PROTO + named("numpy.core.multiarray", "_reconstruct") + b".", "forbidden_global"),
    "a second state": (PROTO + PIECE + b"}b}b.", "forbidden_build"),
    "a state that is a tuple": (PROTO + PIECE + b"}}\x86b.", "forbidden_build"),
    "a state that is text": (PROTO + PIECE + text("x") + b"b.", "forbidden_build"),
    "no root": (PROTO + b"}.", "bad_metadata"),
    "a root of another class": (PROTO + PIECE + b"}b.", "bad_metadata"),
    "a root without a state": (PROTO + NEW + b".", "bad_metadata"),
    "an unknown attribute of the root": (file_of(W, AT, text("x"), b"K\x01"), "unknown_attribute"),
    "an unknown attribute that is false": (file_of(W, AT, text("x"), b"\x89"), "unknown_attribute"),
    "a version that is a list": (file_of(W, AT, text("checkpoint_version"), b"]"), "unknown_attribute"),
    "a version that is a class": (
        file_of(W, AT, text("checkpoint_version"), named(MODULE, "Metadata")), "unknown_attribute"
    ),
    "a class as the name of an attribute": (
        file_of(W, AT, named(MODULE, "Metadata"), b"N"), "bad_key"
    ),
    "an attribute of every object": (file_of(W, AT, text("__dict__"), b"N"), "unknown_attribute"),
    "an unknown attribute of a piece": (
        file_of(text("w") + b"](" + piece(numbers(0), numbers(4), text("x"), b"K\x01") + b"e", AT), "unknown_attribute"
    ),
    "a version of a piece": (
        file_of(text("w") + b"](" + piece(numbers(0), numbers(4), text("checkpoint_version"), b"K\x01") + b"e", AT),
        "unknown_attribute",
    ),
    "an index as the name of an attribute": (
        file_of(text("w") + b"](" + piece(numbers(0), numbers(4), index(), b"N") + b"e", AT), "unknown_attribute"
    ),
    "an unknown attribute of an index": (
        file_of(W, index(text("w"), numbers(0), text("__class__"), b"N") + text("f")), "unknown_attribute"
    ),
    "a piece without a state": (file_of(text("w") + b"](" + PIECE + b"e", AT), "bad_metadata"),
    "an index for a piece": (file_of(text("w") + b"](" + index() + b"e", AT), "bad_metadata"),
    "a piece for an index": (file_of(W, piece() + text("f")), "bad_key"),
    "a piece that is not in a list": (file_of(text("w") + piece(), AT), "bad_metadata"),
    "a list in a list": (file_of(text("w") + b"](](" + piece() + b"ee", AT), "bad_metadata"),
    "one piece in two lists": (
        file_of(W[:-1] + b"e" + text("v") + b"](" + piece() + b"\x94h\x00e", AT), "shared_value"
    ),
    "one list for two keys": (
        file_of(text("w") + b"]\x94(" + piece() + b"e" + text("v") + b"h\x00", AT), "shared_value"
    ),
    "one dict in two places": (
        PROTO + NEW + state(text("state_dict_metadata"), b"}\x94", text("storage_metadata"), b"h\x00") + STOP,
        "shared_value",
    ),
    "one list of 65 numbers twice": (PROTO + b"(]\x94(" + b"K\x01" * 65 + b"eh\x00t.", "shared_value"),
    "a list in itself": (file_of(text("w") + b"]\x94h\x00a", AT), "shared_value"),
    "a key twice": (file_of(W + W, AT), "duplicate_key"),
    "an index twice": (file_of(W, AT + index() + text("1_0.distcp")), "duplicate_index"),
    "an index of an integer": (file_of(W, index(b"K\x01") + text("f")), "bad_key"),
    "a billion laughs for a shape": (file_of(text("w") + b"](" + piece(LAUGHS) + b"e", AT), "bad_shape"),
    "a billion laughs for a file": (file_of(W, index() + LAUGHS), "bad_file"),
    "a billion laughs for a replica": (
        file_of(W, index(text("w"), numbers(0), text("replica_id"), LAUGHS) + text("f")), "bad_replica"
    ),
    "a billion laughs for a dtype": (
        file_of(text("w") + b"](" + piece(numbers(0), numbers(4), text("dtype"), LAUGHS) + b"e", AT), "bad_dtype"
    ),
    "a billion laughs for a path": (
        file_of(W, AT, text("flat_mapping"), b"}(" + text("w") + LAUGHS + b"u"), "bad_metadata"
    ),
    "a tuple 10,000 deep for a shape": (file_of(text("w") + b"](" + piece(DEEP) + b"e", AT), "bad_shape"),
    "a tuple 10,000 deep for a file": (file_of(W, index() + DEEP), "bad_file"),
    "lists 10,000 deep for pieces": (file_of(text("w") + b"]" * 10_000 + b"a" * 9_999, AT), "bad_metadata"),
    "a shape of 65 dims": (file_of(text("w") + b"](" + piece(numbers(*[0] * 65)) + b"e", AT), "bad_shape"),
    "an extent of 2040 bits": (
        file_of(text("w") + b"](" + piece(numbers(0), b"\x8a\xff" + b"\x01" * 255 + b"\x85") + b"e", AT), "bad_shape"
    ),
    "a memo out of order": (PROTO + b"K\x01q\x05.", "memo_out_of_order"),
    "None remembered": (PROTO + b"N\x94.", "bad_memo"),
    "text of 2**60 bytes": (PROTO + b"\x8d" + struct.pack("<Q", 1 << 60) + STOP, "length_beyond_end"),
    "a file in another folder": (file_of(W, index() + text("../f")), "bad_file"),
    "an absolute file": (file_of(W, index() + text("/etc/passwd")), "bad_file"),
    "a payload for a piece": (file_of(text("w") + b"](" + payload(b"x" * 100) + b"e", AT), "bad_metadata"),
    "no path": (file_of(W, AT, text("flat_mapping"), b"}(" + text("w") + b")u"), "bad_metadata"),
    "a path of numbers": (file_of(W, AT, text("flat_mapping"), b"}(" + text("w") + numbers(1) + b"u"), "bad_metadata"),
    "a path that is text": (file_of(W, AT, text("flat_mapping"), b"}(" + text("w") + text("w") + b"u"), "bad_metadata"),
}  # fmt: skip


def test_the_attempts_start_from_a_file_that_is_read():
    pieces, places = entries(parse(file_of(W, AT)))
    assert list(pieces) == [("w", (0,), (4,), None, None, None)]
    assert list(places) == [("w", (0,), (4,), None, None, "0_0.distcp")]


def forbidden(*_args, **_kwargs):
    raise AssertionError("the parser tried to import or run something")


@pytest.fixture(autouse=True, scope="module")
def numpy_is_whole():
    """NumPy imports its reductions when the first one runs, which the parser is not to be blamed for."""
    np.zeros(1).any()
    parse(file_of(W, AT))


def refused_without_running(data: bytes, monkeypatch) -> FormatError:
    with monkeypatch.context() as patched:
        for name in ("eval", "exec", "compile", "open", "__import__"):
            patched.setattr(builtins, name, forbidden)
        error = refusal(data)
    assert error is not None
    return error


@pytest.mark.parametrize("idea", ATTEMPTS)
def test_every_attempt_is_stopped_for_its_reason(idea, monkeypatch):
    data, reason = ATTEMPTS[idea]
    error = refused_without_running(data, monkeypatch)
    assert error.reason == reason
    assert isinstance(error, UnsafePickleError) == reason.startswith("forbidden_")


def test_every_attack_on_files_of_arrays_is_stopped_here_too(monkeypatch):
    for attack in ATTACKS:
        error = refused_without_running(attack.data, monkeypatch)
        assert isinstance(error, UnsafePickleError) or not attack.reason.startswith("forbidden_"), attack.idea


def test_a_file_too_large_to_be_true_is_not_read():
    with pytest.raises(FormatError, match="file_too_large"):
        parse_dist_metadata(forbidden, dist_metadata.MAX_FILE_BYTES + 1, "0.metadata")


# --- many entries: what is taken in runs is what the opcodes say ---------------------------------------


class OnlyMetadata(pickle.Unpickler):
    """Python's own unpickler, with the globals of a ``.metadata`` file and no others."""

    def __init__(self, data: bytes, module) -> None:
        super().__init__(io.BytesIO(data))
        self.module = module

    def find_class(self, module, name):
        if module == self.module.__name__ and name in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex"):
            return getattr(self.module, name)
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return super().find_class("numpy._core.multiarray", name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def agrees_with_pickle(data: bytes) -> bool:
    """Whether the file is read; if it is, pickle must find the same in it."""
    if refusal(data) is not None:
        return False
    assert entries(parse(data)) == expected(OnlyMetadata(data, CLASSES).load())
    return True


CLASSES = classes_of("3.3")
LARGE = [
    dumped(make(CLASSES, keys, world), CLASSES)
    for make, keys, world in (
        (replicated, 5, 12),
        (flattened, 5, 12),
        (flattened, 40, 1),
        (replicated, 40, 1),
    )
]


@FUZZ
@given(st.sampled_from(LARGE), st.integers(0, 2**32), st.integers(1, 3))
@example(LARGE[2], 29887, 1)  # the length of a frame
def test_damaged_files_are_refused_or_read_as_pickle_reads_them(base, seed, count):
    rng = random.Random(seed)
    data = bytearray(base)
    for _ in range(count):
        at = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + rng.randrange(1, 4)]
        elif kind == 3:
            other = rng.randrange(len(data) - 60)
            data[at : at + 55] = data[other : other + 55]
        else:
            data[at] = rng.choice(b"hjKMJN\x88\x89\x94\x85\x86\x87ue()]}")
    agrees_with_pickle(bytes(data))


@pytest.mark.parametrize("base", LARGE, ids=["replicated", "flattened", "one piece a key", "one rank"])
def test_every_value_of_every_entry_counts(base):
    """Bytes in turn, one higher: what is still read differs as pickle says it does."""
    assert agrees_with_pickle(base)
    read = sum(agrees_with_pickle(base[:at] + bytes([base[at] + 1 & 255]) + base[at + 1 :])
               for at in range(len(base) // 3, len(base), 29))  # fmt: skip
    assert read > 10


def test_a_file_cut_anywhere_is_refused():
    for base in LARGE:
        assert all(refusal(base[:stop]) is not None for stop in range(0, len(base), 13))
