"""Checkpoints of random arrays in one buffer, and what Paddle's own engine makes of the same arrays.

``gather`` reads boxes with NumPy alone. ``Engine`` asks ``AOAEngine`` where every value comes from and does with it
what Paddle's loader does (``flex_checkpoint/dcp/utils.py``, ``assign_sharded_slice``).
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product

import numpy as np
import paddle
from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog, fragment_row, fragment_rows
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES, Tensor, dtype_named

Array = np.ndarray
Name = tuple[str, str]
"""``(key, state)``."""
Arrays = dict[Name, tuple[Array, str]]
"""Values (bfloat16 as bit patterns) and the name of their dtype."""

SUFFIXES = {
    "param": "", "master_weight": ".w_0", "moment1": ".moment1_0", "moment2": ".moment2_0",
    "beta1_pow_acc": ".beta1_pow_acc_0", "beta2_pow_acc": ".beta2_pow_acc_0",
}  # fmt: skip
NUMBERS = ("beta1_pow_acc", "beta2_pow_acc")


def random_array(shape: Sequence[int], dtype: str, rng: np.random.Generator) -> Array:
    values = rng.standard_normal(tuple(shape)).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def trained(
    parameters: Mapping[str, tuple[Sequence[int], str]], rng: np.random.Generator, states: bool = True
) -> Arrays:
    """Parameters, and the states of an optimizer with master weights. All have taken the same number of steps."""
    found: Arrays = {}
    for key, (shape, dtype) in parameters.items():
        found[key, "param"] = random_array(shape, dtype, rng), dtype
        if not states:
            continue
        for state in (
            ("master_weight", "moment1", "moment2") if dtype != "float32" else ("moment1", "moment2")
        ):
            found[key, state] = random_array(shape, "float32", rng), "float32"
        for number, state in enumerate(NUMBERS):
            found[key, state] = np.float32([0.9 - number / 10]), "float32"
    return found


def stored(
    arrays: Arrays,
    rng: np.random.Generator,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    cuts: int = 2,
) -> tuple[Catalog, bytes]:
    """A checkpoint of these arrays: each is cut at random, its pieces lie in C or Fortran order, some twice."""
    content = bytearray()
    rows, tensors = [], []
    for number, ((key, state), (values, dtype)) in enumerate(arrays.items()):
        tensors.append(Tensor(key, state, dtype_named(dtype), values.shape, (aliases or {}).get(key, ())))
        for box in _boxes(values.shape, rng, cuts):
            for replica in range(1 + int(rng.integers(4) == 0)):
                piece = values[box]
                ordered = np.asfortranarray(piece) if rng.integers(2) else np.ascontiguousarray(piece)
                offset = [part.start for part in box]
                described = (ordered.shape, ordered.strides)
                rows.append(
                    fragment_row(number, 0, dtype_named(dtype), replica, len(content), offset, *described)
                )
                content += ordered.tobytes(order="A")
    catalog = Catalog(Tensors(tensors), (File("all", len(content)),), fragment_rows(rows), {})
    check_catalog(catalog)
    return catalog, bytes(content)


def _boxes(shape: Sequence[int], rng: np.random.Generator, cuts: int) -> Iterable[tuple[slice, ...]]:
    edges = [sorted({0, extent, *rng.integers(0, extent + 1, size=cuts).tolist()}) for extent in shape]
    dims = [[slice(a, b) for a, b in pairwise(e)] for e in edges]
    return product(*dims)


def gather(catalog: Catalog, content: bytes) -> Arrays:
    """The values of every tensor, as they are stored; all copies of a number or box must agree."""
    found: Arrays = {}
    for number, tensor in enumerate(catalog.tensors):
        pieces = catalog.fragments[catalog.fragments["tensor"] == number]
        kinds = {int(piece["dtype"]) for piece in pieces}
        assert len(kinds) == 1, tensor.label
        kind = DTYPES[kinds.pop()]
        values = np.zeros(tensor.global_shape, dtype=kind.code)
        filled = np.zeros(tensor.global_shape, dtype=np.int64)
        for piece in sorted(pieces, key=lambda piece: int(piece["replica"])):
            dims = len(tensor.global_shape)
            box = tuple(
                slice(int(o), int(o + n))
                for o, n in zip(piece["offset"][:dims], piece["extents"][:dims], strict=True)
            )
            seen = np.ndarray(
                piece["extents"][:dims], kind.code, content, int(piece["byte_base"]), piece["strides"][:dims]
            )
            if piece["replica"]:
                assert values[box].tobytes() == seen.tobytes(), tensor.label
            else:
                values[box], filled[box] = seen, filled[box] + 1
        assert (filled == 1).all(), tensor.label
        found[tensor.key, tensor.state] = values, kind.name
    return found


def cast(values: Array, stored: str, wanted: str) -> Array:
    """Paddle's own cast."""
    if stored == wanted:
        return values
    made = paddle.cast(
        paddle.to_tensor(values).view(stored) if stored == "bfloat16" else paddle.to_tensor(values), wanted
    )
    return made.view("uint16").numpy() if wanted == "bfloat16" else made.numpy()


class Engine:
    """Paddle's engine over arrays. ``blocks`` say into how many shards, along axis 1, a tensor is cut."""

    def __init__(
        self,
        config: Mapping[str, object],
        arrays: Arrays,
        wanted: Mapping[str, tuple[Sequence[int], str]] | None = None,
        source_blocks: Mapping[str, int] | None = None,
        target_blocks: Mapping[str, int] | None = None,
    ) -> None:
        self.arrays = {key + SUFFIXES[state]: found for (key, state), found in arrays.items()}
        self.states = {key: [s for k, s in arrays if k == key] for key, _ in arrays}
        source = {
            key + SUFFIXES[state]: _descriptions(
                key + SUFFIXES[state],
                values.shape,
                dtype,
                1 if state in NUMBERS else (source_blocks or {}).get(key, 1),
            )
            for (key, state), (values, dtype) in arrays.items()
        }
        target = wanted and {
            key: _descriptions(key, shape, dtype, (target_blocks or {}).get(key, 1))
            for key, (shape, dtype) in wanted.items()
        }
        self.engine = AOAEngine({"enable_traceback": False, **config}, source, target)
        self.wanted = wanted

    def parameters(self) -> Arrays:
        """Every parameter of the target."""
        keys = self.wanted or self.engine.output_vars
        found = {}
        for key in keys:
            meaning = self.engine.output_vars[key]
            if meaning is not None:
                dtype = self.wanted[key][1] if self.wanted else self._dtype(meaning)
                found[key, "param"] = self.made(key, "param", dtype), dtype
        return found

    def states_of(self, parameters: Iterable[Name], casts_leak: bool = False) -> Arrays:
        """Every optimizer state of these parameters."""
        found: Arrays = {}
        for key, _ in parameters:
            first = self.engine.output_vars[key].slices[0][0]
            for state in self.states[first]:
                if state != "param":
                    found[key, state] = self.made(key, state, "float32", casts_leak), "float32"
        return found

    def _dtype(self, meaning) -> str:
        post = [p for p in meaning.slices[0][3] or [] if not p.startswith("[")]
        return post[-1] if post else meaning.dtype

    def made(self, key: str, state: str, dtype: str, casts_leak: bool = False) -> Array:
        shape = (1,) if state in NUMBERS else self.engine.output_vars[key].shape
        (target,) = _descriptions(key + SUFFIXES[state], tuple(shape), dtype, 1)
        values = np.zeros(shape, dtype=dtype_named(dtype).code)
        for entry in self.engine.find_shard_sources(target):
            one, stored_as = self.arrays[entry.source_slice.key]
            one = one[_box(entry.source_slice)]
            for post in entry.postprocess_list or []:
                if post.startswith("["):
                    one = one.transpose(ast.literal_eval(post))
                elif state == "param":
                    one, stored_as = cast(one, stored_as, post), post
                elif casts_leak:
                    one = cast(cast(one, stored_as, post), post, stored_as)
            values[_box(entry.target_slice)] = one
        return values


def _box(description) -> tuple[slice, ...]:
    return tuple(
        slice(o, o + n) for o, n in zip(description.global_offset, description.local_shape, strict=True)
    )


def _descriptions(name: str, shape: Sequence[int], dtype: str, blocks: int) -> list:
    shape = tuple(shape)
    if blocks == 1:
        return [ShardedWeightDesc(name, shape, shape, (0,) * len(shape), dtype)]
    local = (shape[0], shape[1] // blocks)
    return [ShardedWeightDesc(name, local, shape, (0, r * local[1]), dtype) for r in range(blocks)]


def assert_same(ours: Arrays, theirs: Arrays) -> None:
    assert ours.keys() == theirs.keys()
    for name, (values, dtype) in theirs.items():
        assert ours[name][1] == dtype, name
        assert ours[name][0].shape == values.shape, name
        assert ours[name][0].tobytes() == values.tobytes(), name
