"""No file makes the parser run, import, hang, recurse or answer anything but a named refusal."""

from __future__ import annotations

import builtins
import io
import pathlib
import pickle
import random
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pickle_attacks import (
    ATTACKS,
    PROTO,
    PROTO_5,
    STOP,
    array,
    buffered,
    bytearray8,
    call,
    file_of,
    named,
    payload,
    text,
)

from paddle_reshard.pipeline.core.errors import FormatError, UnsafePickleError
from paddle_reshard.storage.files import paddle_pickle
from paddle_reshard.storage.files.paddle_pickle import READ_AHEAD_BYTES, ArrayRef, PicklePayload, parse_pickle
from paddle_reshard.storage.files.paddle_pickle_writer import encode_pickle
from tests.conftest import case_files
from tests.sampling import examples

ALLOWED_OPCODES = set(b"N\x88\x89KMJ\x8aG\x8cX\x8dCB\x8e}])(t\x85\x86\x87suae\x94qrhjc\x93R\x81b\x95.")
BYTEARRAY8 = 0x96
"""Only of protocol 5."""
FUZZ = examples(400)


def parse(data: bytes) -> PicklePayload:
    """Parse, and check that no read ever leaves the file or asks for more than one window."""

    def read(byte_offset: int, nbytes: int) -> bytes:
        assert 0 <= byte_offset <= byte_offset + nbytes <= len(data)
        assert nbytes <= READ_AHEAD_BYTES
        return data[byte_offset : byte_offset + nbytes]

    return parse_pickle(read, len(data), "attack.pdopt")


def refusal(data: bytes) -> FormatError | None:
    try:
        parse(data)
    except FormatError as error:
        assert error.path == "attack.pdopt"
        assert (error.byte_offset is None) == (error.reason == "another_file")
        assert 0 <= (error.byte_offset or 0) <= len(data)
        return error
    return None


def small_file(protocol: int = 4) -> bytes:
    """What ``paddle.save`` writes for a tiny optimizer: the pickle route, without needing Paddle."""

    class Tensor:
        def __init__(self, name, data):
            self.state = (name, data)

        def __reduce__(self):
            return (tuple, (self.state,))

    moment = Tensor("w_moment1_0", np.arange(6, dtype="f4").reshape(2, 3))
    root = {
        "w_moment1_0": moment,
        "master_weights": {"w": moment, "v": Tensor("v", np.asfortranarray(np.ones((2, 3), "u2")))},
        "LR_Scheduler": {"last_epoch": 3, "last_lr": np.float64(0.5), "flags": [True, None, (1, 2)]},
    }
    return pickle.dumps(root, protocol)


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.idea for attack in ATTACKS])
def test_every_attack_is_stopped_for_its_reason(attack, monkeypatch):
    def forbidden(*_args, **_kwargs):
        raise AssertionError("the parser tried to import or run something")

    started = time.process_time()  # of a busy machine the clock says nothing
    with monkeypatch.context() as patched:
        for name in ("eval", "exec", "compile", "open", "__import__"):
            patched.setattr(builtins, name, forbidden)
        error = refusal(attack.data)
    assert error is not None
    assert error.reason == attack.reason
    assert isinstance(error, UnsafePickleError) == attack.reason.startswith("forbidden_")
    assert len(str(error)) < 1000
    assert time.process_time() - started < 5


def test_the_list_of_attacks_is_not_hollow():
    assert len({attack.idea for attack in ATTACKS}) == len(ATTACKS) > 150
    assert parse(file_of(text("w") + array())).root["w"].shape == (2,)
    assert parse(file_of(text("w") + buffered(), protocol=PROTO_5)).root["w"].shape == (2,)


@pytest.mark.parametrize("opcode", sorted(set(range(256)) - ALLOWED_OPCODES))
def test_every_other_opcode_is_refused(opcode):
    with pytest.raises(UnsafePickleError) as caught:
        parse(
            (PROTO if opcode == BYTEARRAY8 else PROTO_5)
            + b"NN"
            + bytes([opcode])
            + b"os\nsystem\n"
            + b"\x00" * 20
            + STOP
        )
    assert caught.value.reason == "forbidden_opcode"
    assert caught.value.byte_offset == 4


class Touch:
    """A pickle of this creates a file when it is loaded the usual way."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_is_executed(tmp_path, protocol):
    marker = tmp_path / "marker"
    data = pickle.dumps({"w": Touch(marker)}, protocol)
    pickle.loads(data)
    assert marker.exists()  # the attack is real
    marker.unlink()
    with pytest.raises(UnsafePickleError, match="forbidden_global"):
        parse(data)
    assert not marker.exists()


def test_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "marker_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for data in (call("marker_module", "run"), PROTO + text("marker_module") + text("run") + b"\x93" + STOP):
        with pytest.raises(UnsafePickleError, match=r"marker_module\.run"):
            parse(data)
    assert "marker_module" not in sys.modules


def test_eval_is_not_called_even_in_its_allowed_form(monkeypatch):
    ran = []
    scope = b"}(" + text("data") + array() + b"u"
    data = file_of(text("w") + named("builtins", "eval") + text("data") + scope + b"\x86R")
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "eval", lambda *arguments: ran.append(arguments))
        root = parse(data).root
    assert isinstance(root["w"], ArrayRef)
    assert not ran


def test_a_refusal_names_the_global_the_file_and_the_byte():
    with pytest.raises(UnsafePickleError) as caught:
        parse(call("os", "system"))
    assert str(caught.value) == (
        "attack.pdopt at byte 2: asks for the global 'os.system', which is not allowed; "
        "nothing was executed [forbidden_global]"
    )


def test_names_that_look_like_paths_are_only_text():
    names = ["../../etc/passwd", "/etc/passwd", "a\x00b", "C:\\x", "http://x/y", "${HOME}", "'; drop table"]
    root = parse(file_of(*[text(name) + array() for name in names])).root
    assert list(root) == names


def test_a_file_cut_anywhere_is_refused():
    """Small files of real checkpoints too."""
    real = {
        path.read_bytes()
        for path in case_files(("dense",), "checkpoint-*/*.pdparams")
        if path.stat().st_size < 2000
    }
    assert real
    for data in (*map(small_file, (3, 4, 5)), *real):
        assert refusal(data) is None
        for stop in range(len(data)):
            error = refusal(data[:stop])
            assert error is not None
            assert error.reason in (("truncated", "length_beyond_end") if stop else ("another_file",))


def test_a_store_that_returns_too_little_is_noticed():
    data = small_file()
    with pytest.raises(FormatError, match="short_read"):
        parse_pickle(lambda byte_offset, nbytes: data[byte_offset : byte_offset + nbytes - 1], len(data), "x")


def test_one_list_may_occur_twice():
    shared = [1, 2, 3]
    data = pickle.dumps({"a": shared, "b": shared, "c": [shared, shared]}, 4)
    root = parse(data).root
    assert root == {"a": [1, 2, 3], "b": [1, 2, 3], "c": [[1, 2, 3], [1, 2, 3]]}
    assert root["a"] is not root["b"]


def test_the_number_of_opcodes_is_bounded(monkeypatch):
    data = PROTO + b"(" + b"N" * 100 + b"t" + STOP
    monkeypatch.setattr(paddle_pickle, "MAX_OPCODES", 103)
    assert refusal(data) is None
    monkeypatch.setattr(paddle_pickle, "MAX_OPCODES", 102)
    assert refusal(data).reason == "too_many_opcodes"


def test_the_amount_of_text_is_bounded(monkeypatch):
    data = PROTO + b"(" + text("a" * 50) * 2 + payload(b"b" * 100) + b"t" + STOP
    monkeypatch.setattr(paddle_pickle, "MAX_TOTAL_TEXT_BYTES", 200)
    assert refusal(data) is None
    monkeypatch.setattr(paddle_pickle, "MAX_TOTAL_TEXT_BYTES", 199)
    assert refusal(data).reason == "too_much_text"


def test_colliding_integer_keys_do_not_slow_the_parser_down():
    """2**61 - 1 is the modulus of Python's integer hash: 5,000 such keys would share one bucket."""
    modulus = 2**61 - 1
    items = b"".join(b"\x8a\x0a" + (modulus * k).to_bytes(10, "little") + b"N" for k in range(1, 5000))
    assert refusal(PROTO + b"}(" + items + b"u" + STOP).reason == "bad_key"


@FUZZ
@given(
    st.lists(st.sampled_from([*sorted(ALLOWED_OPCODES), BYTEARRAY8]), max_size=60),
    st.randoms(use_true_random=False),
)
def test_random_opcodes_are_parsed_or_refused(opcodes, rng):
    """Opcodes with small arguments: gets further into the machine than random bytes do."""
    widths = {
        ord("K"): 1,
        ord("M"): 2,
        ord("J"): 4,
        ord("G"): 8,
        ord("q"): 1,
        ord("h"): 1,
        ord("j"): 4,
        ord("r"): 4,
    }
    parts = {
        ord("c"): named("numpy", "dtype"),
        ord("C"): b"C\x01b",
        ord("B"): payload(b"abcd"),
        ord("X"): text("f4"),
        BYTEARRAY8: bytearray8(b"abcd"),
    }
    out = io.BytesIO()
    out.write(PROTO_5)
    for opcode in opcodes:
        width = widths.get(opcode)
        out.write(parts.get(opcode, bytes([opcode])))
        if width is not None:
            out.write(bytes([rng.randrange(4)]) + b"\x00" * (width - 1))
    refusal(out.getvalue() + STOP)


BASES = [
    small_file(2),
    small_file(3),
    small_file(4),
    small_file(5),
    pickle.dumps(
        {"w": np.ones((3, 4), "f4"), "b": np.zeros(3, "u2"), "StructuredToParameterName@@": {"w": "p"}}, 4
    ),
    file_of(text("w") + array(), text("v") + array()),
    encode_pickle({"a": [1, 2.5, "x"], "b": {"c": (1, 2, 3, 4)}}).literals[0][1],
]


@FUZZ
@given(st.sampled_from(BASES), st.integers(0, 2**32), st.integers(1, 6))
def test_damaged_files_are_parsed_or_refused(base, seed, count):
    rng = random.Random(seed)
    data = bytearray(base)
    for _ in range(count):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            data[at] = rng.choice(sorted(ALLOWED_OPCODES))
        if not data:
            break
    refusal(bytes(data))


def test_damaged_real_files_are_parsed_or_refused():
    found = case_files(("dense",), "checkpoint-*/*.pd[po]*")
    real = sorted(found, key=lambda path: (path.stat().st_size, path))[::12]
    rng = random.Random(7)
    for path in real:
        for _ in range(20):
            data = bytearray(path.read_bytes())
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(min(len(data), 3000))] = rng.randrange(256)
            refusal(bytes(data))
