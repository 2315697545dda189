"""The oracles, Python's own ``pickle`` with numpy and ``paddle.load``, share no code with the parser."""

from __future__ import annotations

import collections
import importlib
import inspect
import io
import itertools
import math
import pickle
import random
import types
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.geometry import strides_in_order
from paddle_reshard.storage.files.paddle_pickle import (
    BIG_PARAM_INFO,
    MAX_NESTING,
    READ_AHEAD_BYTES,
    STRUCTURED_NAMES,
    ArrayRef,
    PicklePayload,
    SplitArray,
    parse_pickle,
)
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, EncodedFile, encode_pickle
from tests import protocol5
from tests.conftest import case_directory, case_files, case_names
from tests.sampling import examples

pytestmark = pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")

DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


# --- what the tests share -----------------------------------------------------------------------------


class Ranges:
    """A store of one file that counts, and refuses what a store would refuse."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, []

    def __call__(self, byte_offset: int, nbytes: int) -> bytes:
        assert 0 <= byte_offset <= byte_offset + nbytes <= len(self.data)
        self.reads.append((byte_offset, nbytes))
        return self.data[byte_offset : byte_offset + nbytes]


def parse(data: bytes) -> PicklePayload:
    return parse_pickle(Ranges(data), len(data), "file")


class Oracle(pickle.Unpickler):
    """Python's own unpickler; a tensor's name and array stay the tuple they are in the file."""

    def find_class(self, module, name):
        if name == "eval":
            return lambda code, scope: scope[code]
        allowed = {
            "ndarray": np.ndarray, "dtype": np.dtype, "OrderedDict": collections.OrderedDict, "tuple": tuple,
        }  # fmt: skip
        if name in allowed:
            return allowed[name]
        if name in ("_reconstruct", "scalar"):
            return super().find_class("numpy._core.multiarray", name)
        if name == "_frombuffer":
            return super().find_class("numpy.core.numeric", name)
        return super().find_class({"encode": "_codecs"}.get(name, module), name)


def oracle(data: bytes) -> object:
    return Oracle(io.BytesIO(data), encoding="latin1").load()


def array_at(data: bytes, ref: ArrayRef | SplitArray) -> np.ndarray:
    if isinstance(ref, SplitArray):
        return np.concatenate([array_at(data, part) for part in ref.parts]).reshape(ref.shape)
    raw = data[ref.byte_offset : ref.byte_offset + ref.nbytes]
    axes = ref.axes or tuple(range(len(ref.shape)))
    stored = np.frombuffer(raw, "<" + ref.dtype).reshape([ref.shape[dim] for dim in axes])
    return stored.transpose(np.argsort(axes))


def assert_same_array(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def assert_same(data: bytes, actual: object, expected: object) -> int:
    """Compare what we parsed with what an oracle loaded; return the number of arrays."""
    if isinstance(actual, ArrayRef | SplitArray):
        name = getattr(actual, "name", None)
        if name is not None:
            assert expected[0] == name
            expected = expected[1]
        assert_same_array(array_at(data, actual), expected)
        return 1
    if isinstance(expected, dict):
        assert type(actual) is dict
        assert list(actual) == list(expected)
        return sum(assert_same(data, actual[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        return sum(assert_same(data, mine, its) for mine, its in zip(actual, expected, strict=True))
    if isinstance(expected, np.generic):
        expected = expected.item()
    assert type(actual) is type(expected)
    assert actual == expected or (math.isnan(actual) and math.isnan(expected))
    return 0


def filled(encoded: EncodedFile, seed: int = 0) -> tuple[bytes, dict[int, bytes]]:
    """Put random payloads into the slots, checking that literals and slots tile the file."""
    rng = random.Random(seed)
    payloads = {slot: rng.randbytes(nbytes) for slot, _, nbytes in encoded.slots}
    spans = sorted(
        [(byte_offset, 0, data) for byte_offset, data in encoded.literals]
        + [(byte_offset, 1, payloads[slot]) for slot, byte_offset, _ in encoded.slots],
        key=lambda span: (span[0], len(span[2]), span[1]),
    )
    out = bytearray()
    for byte_offset, _, data in spans:
        assert byte_offset == len(out)
        out += data
    assert len(out) == encoded.size_bytes
    assert list(encoded.literals) == sorted(encoded.literals)
    assert [span[1] for span in encoded.slots] == sorted(span[1] for span in encoded.slots)
    return bytes(out), payloads


def expected_of(value: object, payloads: dict[int, bytes]) -> object:
    """What a loader must give for an encoded tree."""
    if isinstance(value, ArraySlot):
        array = np.frombuffer(payloads[value.slot], "<" + value.dtype).reshape(value.shape)
        return array if value.name is None else (value.name, array)
    if isinstance(value, dict):
        return {key: expected_of(item, payloads) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(expected_of(item, payloads) for item in value)
    return value


def assert_same_loaded(actual: object, expected: object) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, np.ndarray):
        assert_same_array(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert [type(key) for key in actual] == [type(key) for key in expected]
        for key in expected:
            assert_same_loaded(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for mine, its in zip(actual, expected, strict=True):
            assert_same_loaded(mine, its)
    else:
        assert repr(actual) == repr(expected)


def saved(obj: object, protocol: int = 4) -> bytes:
    out = io.BytesIO()
    if protocol == 5:
        protocol5.save(obj, out)
    else:
        paddle.save(obj, out, protocol=protocol)
    return out.getvalue()


def loaded(data: bytes, **options) -> object:
    return paddle.load(io.BytesIO(data), **options)


# --- real files ---------------------------------------------------------------------------------------


def real_files() -> list[Path]:
    """Every tensor file of the checkpoints of both kinds of models, and of those of protocol 5."""
    suffixes = {".pdparams", ".pdopt", ".distcp"}
    found = case_files(("dense", "moe"), "checkpoint-*/**/*")
    for name in case_names("states"):
        if name.startswith("states/p5_"):
            found += case_directory(name).glob("checkpoint-*/**/*")
    return [path for path in found if path.suffix in suffixes]


def test_every_real_file_is_indexed_as_pickle_loads_it(tmp_path):
    (tmp_path / "made.pdparams").write_bytes(saved({"w": paddle.ones([3, 4])}))
    arrays = names = 0
    for path in [*real_files(), tmp_path / "made.pdparams"]:
        data = path.read_bytes()
        payload = parse(data)
        arrays += assert_same(data, payload.root, oracle(data))
        names += sum(ref.name is not None for ref in payload.root.values() if isinstance(ref, ArrayRef))
        assert payload.protocol == (5 if "p5_" in str(path) else 4)
    assert arrays > 10_000
    assert names > 1_000


# --- files made by Paddle -----------------------------------------------------------------------------


def make_tensors() -> dict[str, object]:
    weight = paddle.arange(12, dtype="float32").reshape([3, 4])
    weight.name = "linear_0.w_0"
    return {
        "weight": weight,
        "transposed": weight.t(),
        "transposed3": paddle.rand([2, 3, 4]).transpose([2, 1, 0]),
        "bf16": paddle.cast(weight, "bfloat16"),
        "fp16": paddle.cast(weight, "float16"),
        "bool": weight > 3,
        "int64": paddle.arange(3),
        "int8": paddle.cast(weight, "int8"),
        "uint8": paddle.cast(weight, "uint8"),
        "complex": paddle.to_tensor([1 + 2j]),
        "scalar": paddle.to_tensor(2.5),
        "empty": paddle.zeros([0, 3]),
        "empty2": paddle.zeros([2, 0]),
        "one_byte": paddle.cast(paddle.ones([1]), "uint8"),
        "one_byte_again": paddle.cast(paddle.ones([1]), "uint8"),
        "unframed": paddle.rand([200, 100]),
        "64KiB": paddle.rand([128, 128]),
        "weight_again": weight,
        "größe/层": paddle.ones([2]),
    }


OWNERS: list[object] = []
"""Tensors whose memory others refer to: Paddle does not keep it for them."""


def make_optimizer() -> dict[str, object]:
    tensors = make_tensors()
    OWNERS.append(owner := paddle.rand([4, 5]))
    return {
        **tensors,
        "master_weights": {**tensors, "tied": tensors["weight"], "tied_large": tensors["unframed"]},
        "LR_Scheduler": {
            "last_epoch": 3,
            "last_lr": np.float64(0.1),
            "f4": np.float32(0.25),
            "f2": np.float16(1.5),
            "i8": np.int64(-7),
            "u1": np.uint8(200),
            "b1": np.bool_(True),
            "c8": np.complex64(1 + 2j),
            "large": [2**31, -(2**63), 2**200, 1e300, -1, 255, 256, 65535, 65536],
            "steps": {0: "start", 1: "end", -1: None},
            "nan": math.nan,
            "flags": (True, False, None, (), [], {}),
        },
        "raw": owner.value().get_tensor(),
    }


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_legacy_route(protocol):
    tensors = make_tensors()
    data = saved(tensors, protocol)
    payload = parse(data)
    assert payload.protocol == protocol
    assert list(payload.root) == [*tensors, STRUCTURED_NAMES]
    assert assert_same(data, payload.root, oracle(data)) == len(tensors)
    assert payload.root[STRUCTURED_NAMES]["weight"] == "linear_0.w_0"
    assert payload.root["weight"].name is None
    assert payload.root["bf16"].dtype == "u2"
    assert payload.root["scalar"].shape == ()
    assert payload.root["transposed"].axes == (1, 0)
    assert payload.root["transposed3"].axes == (2, 1, 0)
    assert payload.root["weight"].axes is None
    assert payload.root["weight"].byte_offset != payload.root["weight_again"].byte_offset
    for key, array in loaded(data, return_numpy=True).items():
        assert_same_array(array_at(data, payload.root[key]), array)


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_pickle_route(protocol, kind):
    state = kind(make_optimizer())
    data = saved(state, protocol)
    root = parse(data).root
    assert list(root) == list(state)
    assert assert_same(data, root, oracle(data)) == 2 * len(make_tensors()) + 3
    assert root["weight"].name == "linear_0.w_0"
    assert root["raw"].name is None
    assert root["weight"] == root["weight_again"] == root["master_weights"]["tied"]  # written once
    assert root["unframed"] == root["master_weights"]["tied_large"]
    assert root["LR_Scheduler"]["last_lr"] == 0.1
    assert root["LR_Scheduler"]["b1"] is True


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("route", ["legacy", "pickle"])
def test_protocol_2_is_refused_with_the_way_out(size, route):
    tensor = paddle.rand([size])
    data = saved({"w": tensor} if route == "legacy" else {"m": {"w": tensor}}, 2)
    with pytest.raises(FormatError, match=r"save it again with paddle\.save\(\.\.\., protocol=4\)") as caught:
        parse(data)
    assert caught.value.reason == "protocol_2_payload"


def test_protocol_2_without_payloads_is_read():
    state = {"LR_Scheduler": {"last_lr": np.float64(0.3), "n": np.int64(3)}, "e": np.zeros((0, 2), "f4")}
    data = pickle.dumps(state, 2)
    payload = parse(data)
    assert payload.protocol == 2
    assert assert_same(data, payload.root, state) == 1
    assert payload.root["e"].nbytes == 0


def test_a_bare_tensor_and_a_list_of_tensors():
    tensor = paddle.ones([2, 3])
    for obj in (tensor, [tensor, tensor], (1, {"a": [tensor]})):
        data = saved(obj)
        assert_same(data, parse(data).root, oracle(data))


@pytest.fixture
def cut_small(monkeypatch):
    """Let Paddle's own code cut arrays of more than 255 bytes instead of 2**30 - 1."""
    module = importlib.import_module("paddle.framework.io")
    original = module._unpack_saved_dict
    constants = original.__code__.co_consts
    assert 2**30 - 1 in constants
    code = original.__code__.replace(co_consts=tuple(255 if c == 2**30 - 1 else c for c in constants))
    monkeypatch.setattr(module, "_unpack_saved_dict", types.FunctionType(code, original.__globals__))


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_that_paddle_cut_are_whole_again(cut_small, protocol):
    state = {
        "a": paddle.rand([50, 7]),
        "small": paddle.rand([3]),
        "b": paddle.cast(paddle.rand([3, 5, 40]), "bfloat16"),
        "t": paddle.rand([30, 20]).t(),
    }
    data = saved(state, protocol)
    root = parse(data).root
    assert BIG_PARAM_INFO not in root
    assert set(root) == {*state, STRUCTURED_NAMES}
    expected = loaded(data, return_numpy=True)
    for key in state:
        assert isinstance(root[key], SplitArray) == (protocol == 3 and key != "small")
        assert root[key].shape == tuple(state[key].shape)
        assert_same_array(array_at(data, root[key]), expected[key])
    if protocol == 3:
        assert list(root) == ["small", STRUCTURED_NAMES, "a", "b", "t"]
        assert list(root[STRUCTURED_NAMES]) == list(state)
        assert len(root["a"].parts) == 6
        assert root["b"].dtype == "u2"


# --- reading ------------------------------------------------------------------------------------------


def test_small_files_are_read_at_once():
    data = pickle.dumps({f"w{i}": np.zeros(10, "f4") for i in range(100)}, 4)
    store = Ranges(data)
    parse_pickle(store, len(data), "file")
    assert store.reads == [(0, len(data))]


def test_an_opcode_across_the_window():
    for length in range(READ_AHEAD_BYTES - 60, READ_AHEAD_BYTES):
        data = pickle.dumps({"pad": "x" * length, "w": np.arange(3), "s": "0123456789" * 30, "f": 1.5}, 4)
        assert_same(data, parse(data).root, pickle.loads(data))


@pytest.mark.parametrize("nbytes", [0, 1, 64, 65, 4096, 65535, 65536])
def test_bytes_outside_arrays(nbytes):
    value = {"b": bytes(nbytes), "again": [bytes(nbytes)]}
    for protocol in (3, 4):
        assert parse(pickle.dumps(value, protocol)).root == value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_dtype(dtype, protocol):
    rng = np.random.default_rng(0)
    array = np.frombuffer(rng.bytes(24 * np.dtype(dtype).itemsize), dtype).reshape(2, 3, 4)
    if dtype == "b1":
        array = array.view("u1") % 2 == 1
    cut = array[..., ::2]  # which NumPy writes as before in protocol 5
    data = pickle.dumps({"c": array, "f": array.T, "n": cut, "s": np.ones((), dtype)[()]}, protocol)
    root = parse(data).root
    assert root["c"].dtype == dtype
    assert root["f"].axes == (2, 1, 0)
    assert_same(data, root, pickle.loads(data))


@pytest.mark.parametrize("nbytes", [0, 4, 252, 256, 65532, 65536, 70000])
def test_payloads_of_writable_and_read_only_arrays(nbytes):
    """BYTEARRAY8, and SHORT_BINBYTES or BINBYTES by length; from 64 KiB on they lie outside of frames."""
    array = np.arange(nbytes // 4, dtype="f4")
    fixed = array.copy()
    fixed.flags.writeable = False
    data = pickle.dumps({"w": array, "r": fixed, "again": {"r": fixed}}, 5)
    payload = parse(data)
    assert payload.protocol == 5
    assert assert_same(data, payload.root, pickle.loads(data)) == 3
    assert payload.root["r"] == payload.root["again"]["r"]
    start = payload.root["w"].byte_offset
    assert data[start - 9 : start] == b"\x96" + nbytes.to_bytes(8, "little")
    assert data[payload.root["r"].byte_offset - (2 if nbytes < 256 else 5)] == (
        ord("C") if nbytes < 256 else ord("B")
    )


NUMPY_2 = {  # numpy 2.4.6: arange(8, dtype="u1").reshape(2, 2, 2) with other orders of dims
    (1, 0, 2): "8c014b944b014b004b028794",
    (2, 0, 1): "8c014b944b024b004b018794",
    (1, 2, 0): "8c014b944b014b024b008794",
}


@pytest.mark.parametrize("permutation", NUMPY_2)
def test_dims_in_another_order_as_numpy_2_writes_them(permutation):
    """Five arguments, which NumPy loads since 2.4: Python 3.10 has an older one."""
    shape = (2, 3, 4)
    stored = np.arange(24, dtype="u1").reshape(shape)
    data = (
        b"\x80\x05}\x94\x8c\x01w\x94\x8c\x13numpy._core.numeric\x94\x8c\x0b_frombuffer\x94\x93\x94(\x96"
        + (24).to_bytes(8, "little")
        + stored.tobytes()
        + b"\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94\x8c\x02u1\x94\x89\x88\x87\x94R\x94(K\x03"
        + b"\x8c\x01|\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t\x94bK\x02K\x03K\x04\x87\x94"
        + bytes.fromhex(NUMPY_2[permutation])
        + b"t\x94R\x94s."
    )
    ref = parse(data).root["w"]
    expected = stored.transpose(permutation)
    assert ref.shape == expected.shape
    assert_same_array(array_at(data, ref), expected)
    if "axis_order" in inspect.signature(np._core.numeric._frombuffer).parameters:  # from NumPy 2.4 on
        assert_same_array(oracle(data)["w"], expected)
    small = parse_pickle(Ranges(data), len(data), "file").root["w"]
    strides = strides_in_order(small.shape, 1, small.axes)
    assert strides == expected.strides


def test_a_raw_tensor_of_paddle_3_4():
    """Its test says of ``_reconstruct_dense_tensor_data`` that it returns the array as it is."""
    array = np.arange(6, dtype="f4").reshape(2, 3)
    opcodes = pickle.dumps(array, 5)[11:-1]  # without PROTO, FRAME and STOP
    called = b"cpaddle.framework.io_utils\n_reconstruct_dense_tensor_data\n" + opcodes + b"\x85R"
    data = b"\x80\x05}\x8c\x01w" + called + b"s."
    assert_same_array(array_at(data, parse(data).root["w"]), array)


def test_both_names_of_the_numpy_module():
    data = pickle.dumps({"w": np.arange(3.0), "s": np.float64(2)}, 3)
    old = data.replace(b"numpy._core", b"numpy.core")
    assert old != data or b"numpy.core" in data
    for version in (data, old):
        assert_same(version, parse(version).root, oracle(version))


# --- writing ------------------------------------------------------------------------------------------


def everything() -> dict[str, object]:
    slots = iter(range(1000))
    arrays = {f"a.{code}": ArraySlot(next(slots), code, (3, 4), None) for code in DTYPES if code != "b1"}
    return {
        **arrays,
        "named": ArraySlot(next(slots), "f4", (5,), "linear_0.w_0"),
        "named_again": ArraySlot(next(slots), "u2", (5, 1, 2), "linear_1.w_0"),
        "scalar": ArraySlot(next(slots), "f4", (), "s"),
        "empty": ArraySlot(next(slots), "f4", (0,), None),
        "empty_named": ArraySlot(next(slots), "u2", (3, 0, 70000), "e"),
        "rank_5": ArraySlot(next(slots), "u1", (1, 2, 3, 1, 2), None),
        "long": ArraySlot(next(slots), "u1", (70_000,), None),
        "tall": ArraySlot(next(slots), "i4", (300, 70), None),
        "größe/层\n": {"层": "é" * 300, "long": "x" * 65536, "empty": ""},
        "numbers": [
            sign * (2**bits + more)
            for sign, bits, more in itertools.product(
                (1, -1), (0, 7, 8, 15, 16, 31, 39, 63, 200, 999), (-1, 0, 1)
            )
        ],
        "floats": (0.0, -0.0, 1e-300, math.inf, -math.inf, math.nan, 0.1),
        "plain": [None, True, False, (), [], {}, (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "bytes": [b"", b"abc", b"x" * 300],
        "deep": {"a": {"b": [{"c": ({"d": ArraySlot(next(slots), "f8", (2, 2), "d")},)}]}},
        "LR_Scheduler": {"last_epoch": 3, "last_lr": 0.0019399999999999999, 0: "zero", -5: 1},
    }


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_is_written_is_what_pickle_loads_and_what_is_parsed(protocol):
    root = everything()
    encoded = encode_pickle(root, protocol)
    data, payloads = filled(encoded)
    assert_same_loaded(pickle.loads(data), expected_of(root, payloads))
    parsed = parse(data)
    assert parsed.protocol == protocol
    assert assert_same(data, parsed.root, expected_of(root, payloads)) == len(encoded.slots)
    ref = parsed.root["named"]
    assert (ref.name, ref.dtype, ref.shape, ref.axes) == ("linear_0.w_0", "f4", (5,), None)
    if protocol == 5:
        assert data == protocol5.dumps(made_of(root, payloads))


class Named:
    """A tensor, as Paddle's own function gives it to pickle."""

    def __init__(self, name, array):
        self.pair = name, array

    def __reduce__(self):
        return (tuple, (self.pair,))


def made_of(value: object, payloads: dict[int, bytes]) -> object:
    """The objects that a job would save: of texts and bytes, none is an object twice."""
    if isinstance(value, ArraySlot):
        array = np.frombuffer(payloads[value.slot], "<" + value.dtype).reshape(value.shape).copy()
        return array if value.name is None else Named(made_of(value.name, payloads), array)
    if isinstance(value, dict):
        return {made_of(key, payloads): made_of(item, payloads) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(made_of(item, payloads) for item in value)
    if isinstance(value, bytes):
        return bytes(bytearray(value))
    return "".join(list(value)) if isinstance(value, str) else value


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_batches_of_protocol_5_are_those_of_pickle(count):
    value = {"dict": {str(i) * 2: i for i in range(count)}, "list": list(range(count)), "names": {}}
    assert filled(encode_pickle(value, 5))[0] == protocol5.dumps(value)
    assert pickle.loads(filled(encode_pickle(value))[0]) == value


@pytest.mark.parametrize("step", range(20))
def test_frames_of_protocol_5_end_where_those_of_pickle_end(step):
    """64 KiB are reached within an array, its name, its shape or between two."""
    root = {
        "pad": "x" * (64_900 + 29 * step),
        **{f"weight_{i}": ArraySlot(i, "f4", (i % 3, 5 + step), f"name_{i}") for i in range(60)},
        "large": ArraySlot(100, "u1", (65535 + step % 3,), "large"),
        "last": ArraySlot(101, "u2", (), None),
    }
    data, payloads = filled(encode_pickle(root, 5))
    assert data == protocol5.dumps(made_of(root, payloads))


def test_the_table_of_names_has_the_keys_of_its_file_with_protocol_5():
    tensors = {f"layer.{i}.weight": paddle.full([i % 4, 3], i) for i in range(1100)}
    expected = saved(tensors, 5)
    root: dict[str, object] = {key: ArraySlot(i, "f4", (i % 4, 3), None) for i, key in enumerate(tensors)}
    root[STRUCTURED_NAMES] = {key: tensor.name for key, tensor in tensors.items()}
    encoded = encode_pickle(root, 5)
    out = bytearray(filled(encoded)[0])
    for slot, byte_offset, nbytes in encoded.slots:
        out[byte_offset : byte_offset + nbytes] = np.full(nbytes // 4, slot, "<f4").tobytes()
    assert bytes(out) == expected


def test_only_old_numpy_names_and_no_frames_are_written():
    literals = b"".join(data for _, data in encode_pickle(everything()).literals)
    assert literals.startswith(b"\x80\x04}")
    assert b"numpy._core" not in literals
    assert literals.count(b"numpy.core.multiarray") == 1
    assert literals.count(b"_reconstruct") == 1
    many = {str(i): ArraySlot(i, "f4", (1,), "n") for i in range(300)}
    text = b"".join(data for _, data in encode_pickle(many).literals)
    assert [text.count(word) for word in (b"builtins", b"dtype", b"f4", b"ndarray")] == [1, 1, 1, 1]


@pytest.mark.parametrize("nbytes", [2**32 - 2, 2**32, 2**60], ids=["below", "4 GiB", "an exbibyte"])
@pytest.mark.parametrize("protocol", [4, 5])
def test_a_payload_of_4_gib_is_parsed_from_the_layout_alone(protocol, nbytes):
    """The parser must not read the payload: there is none. From 4 GiB on a length has eight bytes."""
    slots = {"w": ArraySlot(0, "u2", (nbytes // 2,), "n"), "v": ArraySlot(1, "f4", (2,), "m")}
    encoded = encode_pickle(slots, protocol)
    long = protocol == 5 or nbytes >= 2**32
    length = {4: b"\x8e", 5: b"\x96"}[protocol] + nbytes.to_bytes(8, "little")
    assert encoded.literals[0][1].endswith(length if long else b"B" + nbytes.to_bytes(4, "little"))

    def read(byte_offset: int, nbytes: int) -> bytes:
        assert nbytes <= READ_AHEAD_BYTES
        out = bytearray(nbytes)
        for start, data in encoded.literals:
            low, high = max(start, byte_offset), min(start + len(data), byte_offset + nbytes)
            if low < high:
                out[low - byte_offset : high - byte_offset] = data[low - start : high - start]
        return bytes(out)

    root = parse_pickle(read, encoded.size_bytes, "file").root
    assert [(ref.byte_offset, ref.nbytes) for ref in root.values()] == [span[1:] for span in encoded.slots]
    assert root["w"].nbytes == nbytes


@pytest.mark.parametrize(
    ("root", "error"),
    [
        ({"a": {1, 2}}, TypeError),
        ({"a": np.float64(1.0)}, TypeError),
        ({"a": 1 + 2j}, TypeError),
        ({True: 1}, TypeError),
        ({2**31: 1}, TypeError),
        ({("a",): 1}, TypeError),
        ({"a": "x" * 65537}, ValueError),
        ({"a": "\ud800"}, ValueError),
        ({"a": 1 << 2040}, ValueError),
        ({"a": ArraySlot(0, "O8", (1,), None)}, ValueError),
        ({"a": ArraySlot(0, "<f4", (1,), None)}, ValueError),
        ({"a": ArraySlot(0, "f4", (-1,), None)}, ValueError),
        ({"a": ArraySlot(0, "f4", (True,), None)}, ValueError),
    ],
)
def test_unsupported_values_are_not_written(root, error):
    for protocol in (4, 5):
        with pytest.raises(error):
            encode_pickle(root, protocol)


def test_nesting_is_written_as_deep_as_it_is_read():
    value: object = 1
    for _ in range(MAX_NESTING):
        value = {"a": value}
    data, _ = filled(encode_pickle(value))
    assert parse(data).root == value
    with pytest.raises(ValueError, match="nested"):
        encode_pickle({"a": value})


# --- properties ---------------------------------------------------------------------------------------

KEYS = st.text(max_size=12)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NUMBERS = [code for code in DTYPES if code != "b1"]
SLOTS = st.builds(ArraySlot, st.just(-1), st.sampled_from(NUMBERS), SHAPES, st.none() | KEYS)
# Of bytes shorter than these, Python has one object each, which pickle stores once.
BINARY = st.binary(min_size=2, max_size=300)
PLAIN = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | KEYS | BINARY
VALUES = st.recursive(
    PLAIN | SLOTS,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=5)
        | st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=20,
)


def numbered(value: object, counter: list[int]) -> object:
    if isinstance(value, ArraySlot):
        counter.append(1)
        return ArraySlot(len(counter), value.dtype, value.shape, value.name)
    if isinstance(value, dict):
        return {key: numbered(item, counter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(numbered(item, counter) for item in value)
    return value


@examples(200)
@given(
    st.dictionaries(KEYS.filter(lambda key: key != BIG_PARAM_INFO), VALUES, max_size=6), st.integers(0, 99)
)
def test_any_tree_is_loaded_and_parsed_as_it_was_written(root, seed):
    tree = numbered(root, [])
    data, payloads = filled(encode_pickle(tree, 5), seed)
    assert data == protocol5.dumps(made_of(tree, payloads))
    data, payloads = filled(encode_pickle(tree), seed)
    expected = expected_of(tree, payloads)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="numpy.core")
        assert_same_loaded(pickle.loads(data), expected)
    assert_same(data, parse(data).root, expected)
