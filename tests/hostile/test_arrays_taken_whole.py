"""Arrays that are taken whole mean, and are refused, as their opcodes are one by one."""

from __future__ import annotations

import pickle
import pickletools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files.paddle_pickle import Machine, Window, plain_value
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, encode_pickle
from tests.sampling import examples

READ_AHEAD_BYTES = 1 << 16


class OneByOne(Machine):
    """The machine that takes every opcode alone."""

    __slots__ = ()

    def take_arrays(self) -> None:
        pass


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.state = (name, array)

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (self.state,)


def outcome(machine: type[Machine], data: bytes, read_ahead_bytes: int = READ_AHEAD_BYTES) -> object:
    """What becomes of a file: its root, and what was counted; or the whole refusal."""

    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 <= byte_offset <= byte_offset + nbytes <= len(data)
        return data[byte_offset : byte_offset + nbytes]

    m = machine(Window(read, len(data), "a.pdopt", read_ahead_bytes))
    try:
        root, opcodes = m.run()
        value = plain_value(m, root, opcodes)
    except FormatError as error:
        return type(error), str(error), error.byte_offset
    return repr(value), opcodes, m.containers, m.text_bytes, m.window.skipped_bytes


def assert_alike(data: bytes, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
    assert outcome(Machine, data, read_ahead_bytes) == outcome(OneByOne, data, read_ahead_bytes)


def arrays() -> Iterator[np.ndarray]:
    """Of several dtypes, ranks and orders, each twice so that the second is like the first; one is large."""
    for _ in range(2):
        yield np.zeros((4, 300), "f4")
        yield np.ones(3, "u2")
        yield np.array(2, "f4")
        yield np.zeros((1, 2, 3, 4), "f4")
        yield np.asfortranarray(np.ones((2, 70000), "u1"))
        yield np.zeros((5, 0), "f4")
        yield np.zeros((2, 2), "f4")


def files() -> list[bytes]:
    named = {f"linear_{n}.w_0": Tensor("".join((f"linear_{n}", ".w_0")), a) for n, a in enumerate(arrays())}
    named |= {"another": Tensor("name", np.ones(3, "u2")), "ü": Tensor("ü", np.ones(3, "u2"))}
    bare = {f"model.layers.{n}.w": array for n, array in enumerate(arrays())}
    slots = {
        key: ArraySlot(n, "f4", (n % 3, 2), name)
        for n, (key, name) in enumerate([("a", None), ("b", "b"), ("c", None), ("d", "other"), ("e", "e")])
    }
    laid_out = encode_pickle(slots)
    written = bytearray(laid_out.size_bytes)
    for offset, literal in laid_out.literals:
        written[offset : offset + len(literal)] = literal
    return [
        *(pickle.dumps(named, protocol) for protocol in (3, 4)),
        pickle.dumps({**bare, "StructuredToParameterName@@": {key: key for key in bare}, "again": bare}, 4),
        bytes(written),
    ]


FILES = files()


def without_frames(data: bytes) -> bytes:
    """The same file without the opcodes that are only hints, of large payloads too."""
    ops = [(op.name, at) for op, _, at in pickletools.genops(data)]
    ends = [at for _, at in ops[1:]] + [len(data)]
    return b"".join(data[at:end] for (name, at), end in zip(ops, ends, strict=True) if name != "FRAME")


@pytest.mark.parametrize("number", range(len(FILES)))
def test_most_arrays_are_taken_whole(number):
    """Or the others of these tests would compare the slow path with itself."""

    class Counting(Machine):
        __slots__ = ("alone",)

        def take_arrays(self) -> None:
            before = len(self.stack)
            super().take_arrays()
            taken.append(sum(not isinstance(value, str) for value in self.stack[before:]))

    taken: list[int] = []
    outcome(Counting, FILES[number])
    assert (sum(taken) > 8) == (number in (1, 2))


@pytest.mark.parametrize("read_ahead_bytes", [97, 200, 333, 1000, 4096, READ_AHEAD_BYTES])
@pytest.mark.parametrize("number", range(len(FILES)))
def test_undamaged_files(number, read_ahead_bytes):
    root, *_ = outcome(Machine, FILES[number], read_ahead_bytes)
    assert isinstance(root, str)
    assert_alike(FILES[number], read_ahead_bytes)
    assert_alike(without_frames(FILES[number]), read_ahead_bytes)


@pytest.mark.parametrize("number", [1, 2])
def test_whatever_is_in_the_memo_can_be_referred_to(number):
    data = without_frames(FILES[number])[:-2]
    count = sum(op.name == "MEMOIZE" for op, _, _ in pickletools.genops(FILES[number]))
    read = [
        outcome(Machine, data + b"\x8c\x01!" + b"j" + n.to_bytes(4, "little") + b"u.") for n in range(count)
    ]
    alone = [
        outcome(OneByOne, data + b"\x8c\x01!" + b"j" + n.to_bytes(4, "little") + b"u.") for n in range(count)
    ]
    assert read == alone
    assert any(isinstance(value[0], str) for value in read)


@pytest.mark.parametrize("number", [1, 2])
def test_every_byte_of_an_array_changed(number):
    data = FILES[number]
    payloads = [(at, len(arg)) for op, arg, at in pickletools.genops(data) if isinstance(arg, bytes)]
    start = next((at + size for at, size in payloads[-3:]), 0)
    for at in range(start, min(start + 120, len(data))):
        for value in (0, data[at] ^ 1, 0x94, ord("h"), 255):
            assert_alike(data[:at] + bytes([value]) + data[at + 1 :])


@examples(200)
@given(st.sampled_from(FILES), st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_files(base, seed, count):
    rng = random.Random(seed)
    data = bytearray(base if rng.random() < 0.5 else without_frames(base))
    payloads = [
        (at + 9, len(arg)) for op, arg, at in pickletools.genops(bytes(data)) if isinstance(arg, bytes)
    ]
    large = [range(at, at + size - 9) for at, size in payloads if size > 1000]
    for _ in range(count):
        at = rng.choice([at for at in range(2, min(len(data), 1 << 12)) if not any(at in r for r in large)])
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.choice(b"\x00\x01\x85\x86\x87\x88\x89\x8c\x94\x95hjKMJ(tbRBC)\xff")
        elif kind == 1:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            data[at] = rng.randrange(256)
    assert_alike(bytes(data), rng.choice([97, 500, READ_AHEAD_BYTES]))
