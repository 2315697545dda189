"""What a pickle file can try, and the ``reason`` that stops it.

Every attack is spelled in opcodes by hand, so that none of them depends on what a pickler agrees to write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PROTO = b"\x80\x04"
PROTO_5 = b"\x80\x05"
STOP = b"."


@dataclass(frozen=True)
class Attack:
    idea: str
    data: bytes
    reason: str


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def frame(nbytes: int) -> bytes:
    return b"\x95" + struct.pack("<Q", nbytes)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def payload(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


DTYPE = named("numpy", "dtype")
RECONSTRUCT = named("numpy.core.multiarray", "_reconstruct")
SCALAR = named("numpy.core.multiarray", "scalar")
NEW_ARRAY = RECONSTRUCT + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
TENSOR = named("builtins", "tuple")
EVAL = named("builtins", "eval")


def dtype(
    code: str = "f4", order: str = "<", rest: bytes = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"
) -> bytes:
    return DTYPE + text(code) + b"\x89\x88\x87R(K\x03" + text(order) + rest + b"tb"


def array(
    shape: bytes = b"K\x02\x85", data: bytes = b"\x00" * 8, kind: bytes = b"", fortran: bytes = b"\x89"
) -> bytes:
    return NEW_ARRAY + b"(K\x01" + shape + (kind or dtype()) + fortran + payload(data) + b"tb"


FROMBUFFER = named("numpy.core.numeric", "_frombuffer")
ORDER_C = b"\x8c\x01C"


def bytearray8(data: bytes) -> bytes:
    return b"\x96" + struct.pack("<Q", len(data)) + data


def buffered(
    data: bytes | None = None, kind: bytes = b"", shape: bytes = b"K\x02\x85", order: bytes = ORDER_C
) -> bytes:
    """An array as protocol 5 writes it; ``order`` may hold a fifth argument."""
    stored = bytearray8(b"\x00" * 8) if data is None else data
    return FROMBUFFER + b"(" + stored + (kind or dtype()) + shape + order + b"tR"


def file_of(*items: bytes, protocol: bytes = PROTO) -> bytes:
    """A file whose root is a dict of these keys and values."""
    return protocol + b"}(" + b"".join(items) + b"u" + STOP


def split(info: bytes, *items: bytes) -> bytes:
    return file_of(*items, text("UnpackBigParamInfor@@") + info)


def entry(shape: bytes, *names: str) -> bytes:
    slices = b"](" + b"".join(map(text, names)) + b"e"
    return b"}(" + text("w") + b"}(" + text("OriginShape") + shape + text("slices") + slices + b"uu"


def laughs(empty: bytes, mark: bytes, add: bytes, levels: int = 40) -> bytes:
    """Ten-fold sharing, level upon level: 10**levels values in a few hundred bytes."""
    out = PROTO + b"(" + empty + b"\x94"
    for level in range(levels):
        out += empty + mark + (b"h" + bytes([level])) * 10 + add + b"\x94"
    return out + b"t" + STOP


def tuple_laughs(levels: int = 40) -> bytes:
    pairs = [b"h%c" % level * 2 + b"\x86\x94" for level in range(levels)]
    return PROTO + b"()\x94" + b"".join(pairs) + b"t" + STOP


def dict_laughs(levels: int = 40) -> bytes:
    out = PROTO + b"(}\x94"
    for level in range(levels):
        below = b"h%c" % level
        out += b"}(" + text("a") + below + text("b") + below + b"u\x94"
    return out + b"t" + STOP


def call(module: str, name: str, argument: str = "touch MARKER") -> bytes:
    return PROTO + named(module, name) + text(argument) + b"\x85R" + STOP


def _globals() -> list[Attack]:
    plain = (
        "os.system posix.system nt.system subprocess.Popen builtins.exec builtins.getattr builtins.__import__ "
        "builtins.compile __builtin__.exec builtins.open operator.attrgetter operator.methodcaller "
        "functools.partial importlib.import_module pickle.loads _pickle.loads copyreg._reconstructor numpy.load "
        "numpy.fromfile numpy.testing._private.utils.runstring paddle.load torch.load BUILTINS.eval "
        "paddle.distributed.flex_checkpoint.dcp.metadata.Metadata "
        "paddle.distributed.checkpoint.metadata.LocalTensorIndex paddle.base.libpaddle.GeneratorState"
    )
    wanted = [word.rsplit(".", 1) for word in plain.split()]
    wanted += [["numpy", "ndarray.tofile"], ["builtins", "eval.__call__"], ["builtins", "tuple.__class__"]]
    wanted += [["numpy.core", "multiarray._reconstruct"], ["numpy.core.multiarray.", "scalar"], ["", "eval"]]
    wanted += [["collections", "OrderedDict.__init__.__globals__"], ["builtins ", "eval"]]
    found = [Attack(f"REDUCE of {m}.{n}", call(m, n), "forbidden_global") for m, n in wanted]
    stack = PROTO + text("os") + b"\x94" + text("system") + b"\x940" + STOP
    together = PROTO + b"(" + text("system") + b"\x94" + text("os") + b"\x94tK\x00\x86h\x01h\x00\x93"
    together += text("touch MARKER") + b"\x85R" + STOP
    return [
        *found,
        Attack("a global put together from memoised text", together, "forbidden_global"),
        Attack("a global whose names are numbers", PROTO + b"K\x01K\x02\x93" + STOP, "forbidden_global"),
        Attack("a global named by an array", PROTO + text("os") + array() + b"\x93" + STOP, "forbidden_global"),
        Attack("discarding what was called", stack, "forbidden_opcode"),
    ]  # fmt: skip


def _calls() -> list[Attack]:
    scope = b"}(" + text("data") + array() + b"u"
    code = "__import__('os').system('touch MARKER')"
    forms = {
        "eval of other code": EVAL + text(code) + scope + b"\x86R",
        "eval of other code alone": EVAL + text(code) + b"\x85R",
        "eval with builtins in its scope": EVAL + text("data") + b"}(" + text("data") + array()
            + text("__builtins__") + b"}u\x86R",
        "eval of a scope without an array": EVAL + text("data") + b"}(" + text("data") + text(code) + b"u\x86R",
        "eval of an array without state": EVAL + text("data") + b"}(" + text("data") + NEW_ARRAY + b"u\x86R",
        "eval with locals": EVAL + text("data") + scope + b"}\x87R",
        "eval of a whole other scope": EVAL + text("x") + b"}(" + text("x") + array() + b"u\x86R",
        "eval of bytes": EVAL + b"C\x04data" + scope + b"\x86R",
        "eval without arguments": EVAL + b")R",
        "arguments that are no tuple": EVAL + b"](" + text("data") + b"eR",
        "calling text": text("os.system") + text("touch MARKER") + b"\x85R",
        "calling an array": array() + b")R",
        "calling ndarray itself": named("numpy", "ndarray") + b"K\x02\x85\x85R",
        "calling what a call returned": TENSOR + text("n") + array() + b"\x86\x85R)R",
        "tuple of a list": TENSOR + b"](K\x01K\x02e\x85R",
        "tuple of a pair of texts": TENSOR + text("n") + text("m") + b"\x86\x85R",
        "tuple of an array without state": TENSOR + text("n") + NEW_ARRAY + b"\x86\x85R",
        "tuple with two arguments": TENSOR + b"))\x86R",
        "bytes of a huge count": named("builtins", "bytes") + b"J\xff\xff\xff\x7f\x85R",
        "OrderedDict with arguments": named("collections", "OrderedDict") + b"]\x85R",
        "encode with a code that runs": named("_codecs", "encode") + text("x") + text("zlib_codec") + b"\x86R",
        "encode without a code": named("_codecs", "encode") + text("x") + b"\x85R",
        "_reconstruct of another class": RECONSTRUCT + DTYPE + b"K\x00\x85C\x01b\x87R",
        "_reconstruct of another shape": RECONSTRUCT + named("numpy", "ndarray")
            + b"J\xff\xff\xff\x7f\x85C\x01b\x87R",
        "_reconstruct of objects": RECONSTRUCT + named("numpy", "ndarray") + b"K\x00\x85C\x01O\x87R",
        "dtype with a third meaning": DTYPE + text("f4") + b"\x88\x88\x87R",
        "dtype of a dict": DTYPE + b"}\x89\x88\x87R",
        "scalar of no dtype": SCALAR + text("f4") + b"C\x04abcd\x86R",
        "scalar of a dtype without state": SCALAR + DTYPE + text("f4") + b"\x89\x88\x87RC\x04abcd\x86R",
        "an instance of a class": TENSOR + b")\x81",
    }  # fmt: skip
    found = [Attack(idea, PROTO + data + STOP, "forbidden_call") for idea, data in forms.items()]
    states = {
        "state for a dict": b"}}b",
        "state for a global": named("collections", "OrderedDict") + b"}b",
        "state for a tensor": TENSOR + text("n") + array() + b"\x86\x85R}b",
        "a second state for an array": array() + b"(K\x01K\x00\x85" + dtype() + b"\x89C\x00tb",
        "a second state for a dtype": dtype() + b"(K\x03" + text(">") + b"NNNK\x00K\x00K\x00tb",
    }
    return found + [Attack(idea, PROTO + data + STOP, "forbidden_build") for idea, data in states.items()]


def _lengths() -> list[Attack]:
    huge = struct.pack("<Q", 2**60)
    every = struct.pack("<Q", 2**64 - 1)
    claims = {
        "text of 2**60 bytes": b"\x8d" + huge,
        "bytes of 2**60 bytes": b"\x8e" + huge,
        "bytes of 2**64 - 1 bytes": b"\x8e" + every,
        "bytes of 2**32 - 1 bytes": b"B\xff\xff\xff\xff",
        "short text past the end": b"\x8c\xffabc",
        "text of 2**32 - 1 bytes": b"X\xff\xff\xff\xff",
        "a frame of 2**60 bytes": b"\x95" + huge,
        "a frame one byte too long": frame(3) + b"N",
    }
    found = [Attack(idea, PROTO + data + STOP, "length_beyond_end") for idea, data in claims.items()]
    wrapped = b"\x8a\x05\x00\x00\x00\x00\x01" * 2 + b"\x86"
    shapes = {
        "one element too many": (array(b"K\x03\x85"), "size_mismatch"),
        "one element too few": (array(b"K\x01\x85"), "size_mismatch"),
        "2**32 x 2**32, zero in 64 bits": (array(wrapped, b""), "size_mismatch"),
        "2**62 elements of 4 bytes, zero in 64 bits": (array(b"\x8a\x08" + b"\x00" * 7 + b"\x40\x85", b""),
            "size_mismatch"),
        "two negative extents": (array(b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"), "bad_array"),
        "a negative extent and none": (array(b"J\xff\xff\xff\xffK\x00\x86", b""), "bad_array"),
        "an extent past 2**63": (array(b"\x8a\x09" + b"\x00" * 8 + b"\x01K\x00\x86", b""), "bad_array"),
        "an extent of True": (array(b"\x88\x85", b"\x00" * 4), "bad_array"),
        "an extent of 2.0": (array(b"G" + struct.pack(">d", 2.0) + b"\x85"), "bad_array"),
        "a list for a shape": (array(b"](K\x02e"), "bad_array"),
        "rank 1000": (array(b"(" + b"K\x01" * 1000 + b"t", b"\x00" * 4), "bad_array"),
        "an array for a Fortran flag": (array(fortran=array()), "bad_array"),
        "objects": (array(b"K\x01\x85", b"\x00" * 8, dtype("O8", "|")), "unsupported_dtype"),
        "records": (array(b"K\x01\x85", b"\x00" * 8, dtype("V8", "|")), "unsupported_dtype"),
        "texts": (array(b"K\x01\x85", b"\x00" * 8, dtype("U2")), "unsupported_dtype"),
        "dates": (array(b"K\x01\x85", b"\x00" * 8, dtype("M8")), "unsupported_dtype"),
        "numbers of 2**40 bytes": (array(b"K\x00\x85", b"", dtype("f1099511627776")), "unsupported_dtype"),
        "an order inside the code": (array(kind=dtype(">f4")), "unsupported_dtype"),
        "big-endian numbers": (array(kind=dtype("f4", ">")), "big_endian"),
        "numbers without an order": (array(kind=dtype("f4", "|")), "bad_dtype"),
        "native order": (array(kind=dtype("f4", "=")), "bad_dtype"),
        "a dtype with fields": (array(kind=dtype(rest=b"N(" + text("a")
            + b"t}J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00")), "bad_dtype"),
        "a dtype with flags": (array(kind=dtype(rest=b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3f")), "bad_dtype"),
        "a dtype with a short state": (array(kind=dtype(rest=b"")), "bad_dtype"),
        "a dtype without state": (array(kind=DTYPE + text("f4") + b"\x89\x88\x87R"), "bad_array"),
        "no dtype": (array(kind=text("f4")), "bad_array"),
        "an array without state": (NEW_ARRAY, "bad_array"),
        "an array with a short state": (NEW_ARRAY + b"(K\x01tb", "bad_array"),
        "a list as state": (NEW_ARRAY + b"]b", "bad_array"),
        "text for a payload": (NEW_ARRAY + b"(K\x01K\x01\x85" + dtype() + b"\x89" + text("abcd") + b"tb",
            "bad_array"),
        "a list for a payload": (NEW_ARRAY + b"(K\x01K\x01\x85" + dtype() + b"\x89]tb", "bad_array"),
        "a number with a short payload": (SCALAR + dtype("f8") + b"C\x04abcd\x86R", "size_mismatch"),
        "a number whose payload is long": (SCALAR + dtype("f8") + payload(b"a" * 100) + b"\x86R", "size_mismatch"),
        "a number whose payload is text": (SCALAR + dtype("f4") + text("abcd") + b"\x86R", "size_mismatch"),
        "a type for a value": (DTYPE, "bad_value"),
        "a dtype for a value": (dtype(), "bad_value"),
    }  # fmt: skip
    return found + [
        Attack(idea, file_of(text("w") + data), reason) for idea, (data, reason) in shapes.items()
    ]


def _sizes() -> list[Attack]:
    deep = 5_000
    return [
        Attack("a billion laughs, lists", laughs(b"]", b"(", b"e"), "too_many_values"),
        Attack("a billion laughs, tuples", tuple_laughs(), "too_many_values"),
        Attack("a billion laughs, dicts", dict_laughs(), "too_many_values"),
        Attack("one long list a thousand times", PROTO + b"(]" + (b"(" + b"K\x01" * 1000 + b"e") * 70 + b"\x94]("
            + b"h\x00" * 1000 + b"et" + STOP, "too_many_values"),
        Attack("lists 5,000 deep", PROTO + b"]" * deep + b"a" * (deep - 1) + STOP, "nesting_too_deep"),
        Attack("tuples 5,000 deep", PROTO + b")" + b"\x85" * deep + STOP, "nesting_too_deep"),
        Attack("dicts 5,000 deep", PROTO + b"}K\x01" * deep + b"N" + b"s" * deep + STOP, "nesting_too_deep"),
        Attack("a deep tuple as a dict key", PROTO + b"})" + b"\x85" * deep + b"Ns" + STOP, "bad_key"),
        Attack("a deep tuple as call arguments", PROTO + RECONSTRUCT + b")" + b"\x85" * deep + b"R" + STOP,
            "forbidden_call"),
        Attack("a deep tuple for a shape", file_of(text("w") + array(b")" + b"\x85" * deep)), "bad_array"),
        Attack("200 marks", PROTO + b"(" * 200 + b"N" + STOP, "stack_leftover"),
        Attack("a list in itself", PROTO + b"]\x94h\x00a" + STOP, "cyclic"),
        Attack("a dict in itself", PROTO + b"}\x94" + text("a") + b"h\x00s" + STOP, "cyclic"),
        Attack("a tuple in itself, by a list", PROTO + b"]\x94h\x00\x85a" + STOP, "cyclic"),
        Attack("text of 64 KiB and one byte", PROTO + text("a" * 65537) + STOP, "value_too_long"),
        Attack("bytes of 64 KiB and one byte", PROTO + payload(b"a" * 65537) + STOP, "value_too_long"),
        Attack("a global with a long name", PROTO + b"c" + b"a" * 10**6 + b"\n\n" + STOP, "value_too_long"),
    ]  # fmt: skip


def _keys() -> list[Attack]:
    one, two = text("w") + array(), text("w") + array(b"K\x01\x85", b"\x00" * 4)
    ordered = named("collections", "OrderedDict") + b")R"
    keys = {
        "None": b"N",
        "True": b"\x88",
        "a float": b"G" + b"\x00" * 8,
        "a tuple": b")",
        "a list": b"]",
        "a dict": b"}",
        "bytes": b"C\x01w",
        "an array": array(),
        "a type": DTYPE,
        "an integer of 255 bytes": b"\x8a\xff" + b"\x01" * 255,
    }
    return [
        Attack("one key twice in one batch", file_of(one, two), "duplicate_key"),
        Attack("one key twice in two batches", PROTO + b"}(" + one + b"u(" + two + b"u" + STOP, "duplicate_key"),
        Attack("one key twice, one by one", PROTO + b"}" + one + b"s" + two + b"s" + STOP, "duplicate_key"),
        Attack("one key twice in an OrderedDict", PROTO + ordered + b"(" + one + two + b"u" + STOP, "duplicate_key"),
        Attack("one integer key twice", file_of(b"K\x01N", b"M\x01\x00N"), "duplicate_key"),
        *[Attack(f"{idea} as a key", file_of(key + b"N"), "bad_key") for idea, key in keys.items()],
        Attack("an array under an integer key", file_of(b"K\x01" + array()), "bad_key"),
        Attack("half an item", PROTO + b"}(" + text("w") + b"u" + STOP, "bad_target"),
        Attack("items for a list", PROTO + b"](" + one + b"u" + STOP, "bad_target"),
        Attack("items for a tuple", PROTO + b")(K\x01e" + STOP, "bad_target"),
        Attack("items for a dict, appended", PROTO + b"}K\x01a" + STOP, "bad_target"),
    ]  # fmt: skip


def _streams() -> list[Attack]:
    good = file_of(text("w") + array())
    text_payload = named("_codecs", "encode") + text("\x00" * 8) + text("latin1") + b"\x86R"
    text_array = NEW_ARRAY + b"(K\x01K\x02\x85" + dtype() + b"\x89" + text_payload + b"tb"
    long_text = named("_codecs", "encode") + text("\xff" * 65536) + text("latin1") + b"\x86R"
    return [
        Attack("an empty file", b"", "another_file"),
        Attack("only a header", PROTO, "truncated"),
        Attack("no STOP", good[:-1], "truncated"),
        Attack("not a pickle", b"safetensors", "not_a_pickle"),
        Attack("a pickle of protocol 0", b"(dp0\n.", "not_a_pickle"),
        Attack("protocol 6", b"\x80\x06N.", "unsupported_protocol"),
        Attack("protocol 1", b"\x80\x01N.", "unsupported_protocol"),
        Attack("protocol 255", b"\x80\xffN.", "unsupported_protocol"),
        Attack("a second header", PROTO + PROTO + b"N.", "forbidden_opcode"),
        Attack("a second pickle behind the first", good + good, "trailing_bytes"),
        Attack("one byte behind the end", good + b"\x00", "trailing_bytes"),
        Attack("two values", PROTO + b"NN.", "stack_leftover"),
        Attack("an open mark", PROTO + b"N(.", "stack_leftover"),
        Attack("no value", PROTO + b".", "stack_underflow"),
        Attack("a call without a function", PROTO + b")R.", "stack_underflow"),
        Attack("items without a mark", PROTO + b"}Nu.", "stack_underflow"),
        Attack("items without a dict", PROTO + b"(u.", "stack_underflow"),
        Attack("a frame that ends within an opcode", PROTO + frame(2) + text("ab") + b".", "frame_cut"),
        Attack("a frame within a frame", PROTO + frame(11) + b"N" + frame(1) + b"\x85.", "frame_cut"),
        Attack("a tuple of what is not there", PROTO + b"N\x87.", "stack_underflow"),
        Attack("a tuple reaching below a mark", PROTO + b"N(\x85t.", "stack_underflow"),
        Attack("state for nothing", PROTO + b"Nb.", "stack_underflow"),
        Attack("remembering nothing", PROTO + b"\x94N.", "stack_underflow"),
        Attack("a memory that is not there", PROTO + b"h\x07.", "missing_memo"),
        Attack("a memory far away", PROTO + b"j\xff\xff\xff\xff.", "missing_memo"),
        Attack("a memory rewritten", PROTO + b"Nq\x00K\x01q\x00\x86.", "memo_overwritten"),
        Attack("a memory rewritten by counting", PROTO + b"Nq\x01K\x01\x94\x86.", "memo_out_of_order"),
        Attack("text that is not UTF-8", PROTO + b"X\x02\x00\x00\x00\xff\xfe.", "bad_text"),
        Attack("half a surrogate pair", PROTO + text("\ud800") + b".", "bad_text"),
        Attack("a global that is not UTF-8", PROTO + b"c\xff\n\xff\n.", "bad_text"),
        Attack("bytes that are not latin-1", PROTO + named("_codecs", "encode") + text("\u20ac") + text("latin1")
            + b"\x86R.", "bad_text"),
        Attack("a payload stored as text", b"\x80\x02" + text_array + b".", "protocol_2_payload"),
        Attack("a payload stored as text in protocol 4", PROTO + text_array + b".", "protocol_2_payload"),
        Attack("a long payload stored as text", b"\x80\x02" + long_text + b".", "protocol_2_payload"),
    ]  # fmt: skip


def _splits() -> list[Attack]:
    half = text("w@@.0") + array()
    rest = text("w@@.1") + array()
    other = text("w@@.1") + array(kind=dtype("i4"))
    square = text("w@@.1") + array(b"K\x01K\x02\x86")
    both = entry(b"K\x04\x85", "w@@.0", "w@@.1")
    twice = (
        b"}("
        + b"".join(
            text(k)
            + b"}("
            + text("OriginShape")
            + b"K\x02\x85"
            + text("slices")
            + b"]("
            + text("w@@.0")
            + b"euu"[:2]
            for k in "ab"
        )
        + b"u"
    )
    cases = {
        "a part that is not there": split(both, half),
        "a part of another dtype": split(both, half, other),
        "a part of rank 2": split(both, half, square),
        "a part that is a number": split(both, half, text("w@@.1") + b"K\x02"),
        "parts that are too few": split(entry(b"K\x05\x85", "w@@.0", "w@@.1"), half, rest),
        "parts that are too many": split(entry(b"K\x03\x85", "w@@.0", "w@@.1"), half, rest),
        "one part twice": split(entry(b"K\x04\x85", "w@@.0", "w@@.0"), half),
        "one part in two arrays": split(twice, half),
        "split and whole": split(both, half, rest, text("w") + array()),
        "no parts": split(entry(b"K\x00\x85"), half),
        "a negative shape": split(entry(b"J\xff\xff\xff\xffJ\xfc\xff\xff\xff\x86", "w@@.0", "w@@.1"), half, rest),
        "a table that is a list": split(b"]", half),
        "an entry that is a list": split(b"}(" + text("w") + b"]u", half),
        "an entry with more in it": split(b"}(" + text("w") + b"}(" + text("slices") + b"]u" + b"u", half),
        "an integer for a key": split(b"}(K\x01}u", half),
    }  # fmt: skip
    return [Attack(idea, data, "bad_split") for idea, data in cases.items()]


def _protocol_5() -> list[Attack]:
    huge = struct.pack("<Q", 2**60)
    order = {"K": b"\x8c\x01K", "F": b"\x8c\x01F", "A": b"\x8c\x01A"}
    two = b"K\x01K\x02\x86"
    wrapped = b"\x8a\x05\x00\x00\x00\x00\x01" * 2 + b"\x86"
    arrays = {
        "a buffer out of band": (buffered(b"\x97"), "forbidden_opcode"),
        "a read-only buffer out of band": (buffered(b"\x97\x98"), "forbidden_opcode"),
        "a buffer made read-only": (buffered(bytearray8(b"\x00" * 8) + b"\x98"), "forbidden_opcode"),
        "a bytearray of 2**60 bytes": (buffered(b"\x96" + huge), "length_beyond_end"),
        "a bytearray of 2**64 - 1 bytes": (buffered(b"\x96" + b"\xff" * 8), "length_beyond_end"),
        "a payload one byte too short": (buffered(bytearray8(b"\x00" * 7)), "size_mismatch"),
        "a payload one byte too long": (buffered(bytearray8(b"\x00" * 9)), "size_mismatch"),
        "a payload that is bytes, too long": (buffered(payload(b"\x00" * 9)), "size_mismatch"),
        "2**32 x 2**32 of protocol 5": (buffered(bytearray8(b""), shape=wrapped), "size_mismatch"),
        "a negative extent of protocol 5": (buffered(shape=b"J\xff\xff\xff\xff\x85"), "bad_array"),
        "an extent of -1 that numpy would infer": (buffered(shape=b"K\x02J\xff\xff\xff\xff\x86"), "bad_array"),
        "a number for a shape": (buffered(shape=b"K\x02"), "bad_array"),
        "text for a payload of protocol 5": (buffered(text("\x00" * 8)), "bad_array"),
        "an array for a payload": (buffered(buffered()), "bad_array"),
        "a list for a payload of protocol 5": (buffered(b"]"), "bad_array"),
        "no dtype in protocol 5": (buffered(kind=text("f4")), "bad_array"),
        "a dtype without state in protocol 5": (buffered(kind=DTYPE + text("f4") + b"\x89\x88\x87R"), "bad_array"),
        "big-endian numbers of protocol 5": (buffered(kind=dtype("f4", ">")), "big_endian"),
        "objects of protocol 5": (buffered(kind=dtype("O8", "|")), "unsupported_dtype"),
        "order A": (buffered(order=order["A"]), "bad_order"),
        "order K without an order of dims": (buffered(order=order["K"]), "bad_order"),
        "no order": (buffered(order=b"N"), "forbidden_call"),
        "an order of bytes": (buffered(order=b"C\x01C"), "forbidden_call"),
        "order C with an order of dims": (buffered(order=ORDER_C + b"K\x00\x85"), "bad_order"),
        "an order of two dims for one": (buffered(order=order["K"] + b"K\x00K\x01\x86"), "bad_order"),
        "one dim twice in an order": (buffered(shape=two, order=order["K"] + b"K\x01K\x01\x86"), "bad_order"),
        "a dim that is not there in an order": (buffered(shape=two, order=order["K"] + b"K\x00K\x02\x86"),
            "bad_order"),
        "a negative dim in an order": (buffered(shape=two, order=order["K"] + b"K\x00J\xff\xff\xff\xff\x86"),
            "bad_order"),
        "a list for an order of dims": (buffered(shape=two, order=order["K"] + b"](K\x00K\x01e"), "bad_order"),
        "None for an order of dims": (buffered(shape=two, order=order["K"] + b"N"), "bad_order"),
        "_frombuffer with six arguments": (buffered(shape=two, order=order["K"] + b"K\x00K\x01\x86N"),
            "forbidden_call"),
        "_frombuffer of a payload alone": (FROMBUFFER + bytearray8(b"") + b"\x85R", "forbidden_call"),
        "state for an array of protocol 5": (buffered() + b"(K\x01K\x00\x85" + dtype() + b"\x89C\x00tb",
            "forbidden_build"),
        "state with a bytearray": (NEW_ARRAY + b"(K\x01K\x02\x85" + dtype() + b"\x89" + bytearray8(b"\x00" * 8)
            + b"tb", "bad_array"),
        "a bytearray for a value": (bytearray8(b"abc"), "bad_value"),
        "a bytearray in a list": (b"]" + bytearray8(b"abc") + b"a", "bad_value"),
        "a number from a bytearray": (SCALAR + dtype() + bytearray8(b"abcd") + b"\x86R", "size_mismatch"),
        "_reconstruct with a bytearray": (RECONSTRUCT + named("numpy", "ndarray") + b"K\x00\x85" + bytearray8(b"b")
            + b"\x87R", "forbidden_call"),
        "a raw tensor of text": (named("paddle.framework.io_utils", "_reconstruct_dense_tensor_data") + text("x")
            + b"\x85R", "forbidden_call"),
        "a raw tensor of two arrays": (named("paddle.framework.io_utils", "_reconstruct_dense_tensor_data")
            + buffered() + buffered() + b"\x86R", "forbidden_call"),
        "the bytearray class": (named("builtins", "bytearray") + b")R", "forbidden_global"),
        "a buffer of pickle": (named("pickle", "PickleBuffer") + b")R", "forbidden_global"),
        "another function of numpy": (named("numpy", "frombuffer") + b")R", "forbidden_global"),
    }  # fmt: skip
    shared = bytearray8(b"\x00" * 8) + b"\x94"
    twice = buffered(shared) + text("v") + buffered(b"h\x00")
    return [
        *[Attack(idea, file_of(text("w") + data, protocol=PROTO_5), reason) for idea,
            (data, reason) in arrays.items()],
        Attack("one payload of two arrays", file_of(text("w") + twice, protocol=PROTO_5), "shared_payload"),
        Attack("a payload that is also a value", file_of(text("w") + buffered(shared) + text("v") + b"h\x00",
            protocol=PROTO_5), "bad_value"),
        Attack("a bytearray in protocol 4", file_of(text("w") + buffered()), "forbidden_opcode"),
        Attack("a bytearray for a key", file_of(bytearray8(b"w") + b"N", protocol=PROTO_5), "bad_key"),
        Attack("a bytearray for a global", PROTO_5 + bytearray8(b"os") * 2 + b"\x93.", "forbidden_global"),
        Attack("a file cut in a bytearray", PROTO_5 + b"}\x8c\x01w\x96\x08\x00", "truncated"),
    ]  # fmt: skip


ATTACKS: list[Attack] = [
    *_globals(),
    *_calls(),
    *_lengths(),
    *_sizes(),
    *_keys(),
    *_streams(),
    *_splits(),
    *_protocol_5(),
]
