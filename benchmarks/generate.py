"""Checkpoints of any size to measure with: a llama, every byte of it deterministic.

The files of a single-card job are written here, as a stream: one block of values is in memory at a time. Any
other topology is made from them by the converter itself, whose files the golden tests hold against the real
trainer's.

    python -m benchmarks.generate OUT --size 4GB --to tp=2,pp=2,sharding=2 --sharding-strategy stage1v2
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

import paddle_reshard
from paddle_reshard.pipeline.core.topology import Strategy
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, encode_pickle

SOURCE = "tp=2,pp=2,sharding=2"
V2: Final = "stage1v2"
"""The job that most benchmarks convert from."""
BYTES_PER_PARAMETER = 12
"""With sharded saving: a float32 master weight and two float32 moments; the bf16 parameter is its cast."""
BLOCK_ELEMENTS = 1 << 20
MOMENTS = ("moment1_0", "moment2_0")
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")


@dataclass(frozen=True)
class Llama:
    """A model by the numbers of its ``config.json``. tp up to 4 divides them."""

    hidden: int
    layers: int = 8
    vocab: int = 8_000

    @property
    def intermediate(self) -> int:
        return self.hidden * 11 // 4 // 64 * 64

    @property
    def heads(self) -> int:
        return self.hidden // 64

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Structured key → shape, in model order."""
        h, ffn = self.hidden, self.intermediate
        layer = {
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (h, h // 2),
            "self_attn.v_proj": (h, h // 2),
            "self_attn.o_proj": (h, h),
            "mlp.gate_proj": (h, ffn),
            "mlp.up_proj": (h, ffn),
            "mlp.down_proj": (ffn, h),
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
        }
        return {
            "model.embed_tokens.weight": (self.vocab, h),
            **{f"model.layers.{i}.{leaf}.weight": s for i in range(self.layers) for leaf, s in layer.items()},
            "model.norm.weight": (h,),
            "lm_head.weight": (self.vocab, h),
        }

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def sharded_bytes(self) -> int:
        return self.parameters * BYTES_PER_PARAMETER

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 64,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads // 2,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


def llama_of(size_bytes: int) -> Llama:
    """The widest llama of at least 4 layers whose sharded checkpoint comes close to a size."""
    wide = [Llama(hidden, layers=4) for hidden in (512, 1024, 1536, 2048, 4096)]
    fitting = [model for model in wide if model.sharded_bytes <= size_bytes] or wide[:1]
    layers = range(4, 129)
    return min(
        (replace(fitting[-1], layers=count) for count in layers),
        key=lambda model: abs(model.sharded_bytes - size_bytes),
    )


def generate(model: Llama, directory: Path, to: str = "", strategy: Strategy | None = None) -> None:
    """Write a checkpoint of ``model``; ``to`` is a topology of the command line, a single card if empty."""
    if not to:
        write_single_card(model, directory)
        return
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        single = Path(scratch) / "single-card"
        write_single_card(model, single)
        paddle_reshard.convert(single, directory, to=to, sharding_strategy=strategy, replicas="first")


def write_single_card(model: Llama, directory: Path) -> None:
    """The files of a single-card job of PaddleFormers: bf16 parameters, float32 optimizer."""
    directory.mkdir(parents=True)
    names = dict(_names(model))
    _write(directory / "model_state.pdparams", model, _parameters(model, names))
    _write(directory / "optimizer.pdopt", model, _optimizer(model, names))
    (directory / "config.json").write_text(json.dumps(model.config, indent=2, sort_keys=True) + "\n")
    (directory / "saved_signal_0").write_text("1")


@dataclass(frozen=True)
class _Array:
    """A tensor on its way into a file."""

    key: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    name: str | None = None


def _names(model: Llama) -> Iterator[tuple[str, str]]:
    """Structured key → parameter name: a layer class and a counter."""
    counters: dict[str, int] = {}
    for key in model.shapes:
        kind = "linear"
        for part, layer_class in (
            ("embed", "embedding"),
            ("norm", "create_parameter"),
            ("lm_head", "lm_head"),
        ):
            if part in key:
                kind = layer_class
        yield key, f"{kind}_{counters.setdefault(kind, 0)}.w_0"
        counters[kind] += 1


def _parameters(model: Llama, names: dict[str, str]) -> dict[str, Any]:
    return {
        **{key: _Array(key, "param", "u2", shape) for key, shape in model.shapes.items()},
        "StructuredToParameterName@@": names,
    }


def _optimizer(model: Llama, names: dict[str, str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for state in (*MOMENTS, *POWERS):
        for key, shape in model.shapes.items():
            entry = f"{names[key]}_fp32_master_0_{state}"
            root[entry] = _Array(key, state, "f4", (1,) if state in POWERS else shape, entry)
    masters = {
        names[key]: _Array(key, "w_0", "f4", shape, f"{names[key]}_fp32_master_0")
        for key, shape in model.shapes.items()
    }
    return {**root, "master_weights": masters, "LR_Scheduler": {"last_epoch": 1, "last_lr": 0.001}}


def _write(path: Path, model: Llama, root: dict[str, Any]) -> None:
    """Literal bytes and values, in the order of the file."""
    arrays: list[_Array] = []

    def slots(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: slots(inner) for key, inner in value.items()}
        if not isinstance(value, _Array):
            return value
        arrays.append(value)
        return ArraySlot(len(arrays) - 1, value.dtype, value.shape, value.name)

    encoded = encode_pickle(slots(root))
    pieces: list[tuple[int, bytes | _Array]] = [*encoded.literals]
    pieces += [(start, arrays[slot]) for slot, start, _ in encoded.slots]
    with open(path, "xb") as file:
        for _, piece in sorted(pieces, key=lambda piece: piece[0]):
            if isinstance(piece, _Array):
                for block in _values(piece):
                    file.write(block.data)
            else:
                file.write(piece)


def _values(array: _Array) -> Iterator[np.ndarray]:
    """The values of a tensor, block by block; a parameter is its master weight, rounded."""
    if array.state in POWERS:
        beta = np.float32(0.9 if array.state == POWERS[0] else 0.999)
        yield np.full(1, beta * beta, np.float32)  # after the first step, as the schedule says
        return
    state = "w_0" if array.state == "param" else array.state
    random = np.random.Generator(np.random.SFC64(zlib.crc32(f"{array.key}.{state}".encode())))
    for start in range(0, prod(array.shape), BLOCK_ELEMENTS):
        values = random.random(min(BLOCK_ELEMENTS, prod(array.shape) - start), np.float32)
        if state != "moment2_0":
            values -= np.float32(0.5)
        yield values if array.dtype == "f4" else _rounded(values)


def _rounded(values: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even; there is no NaN here."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        "<u2"
    )


def parse_size(text: str) -> int:
    """Bytes of ``4GB`` or ``500MB``."""
    units = {"MB": 10**6, "GB": 10**9}
    return int(float(text[:-2]) * units[text[-2:].upper()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--size", default="4GB", type=parse_size, help="of the sharded checkpoint: 500MB, 4GB, …"
    )
    parser.add_argument(
        "--to", default="", help="topology, as the command line takes it; a single card if left out"
    )
    parser.add_argument("--sharding-strategy")
    arguments = parser.parse_args()
    model = llama_of(arguments.size)
    if arguments.directory.exists():
        parser.error(f"{arguments.directory} is there already")
    generate(model, arguments.directory, arguments.to, arguments.sharding_strategy)
    size = sum(path.stat().st_size for path in arguments.directory.iterdir())
    print(f"{arguments.directory}: llama of {model.parameters / 1e6:.0f} M parameters, {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
