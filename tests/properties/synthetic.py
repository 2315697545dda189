"""Small random checkpoints of llama-like models, written the way a single-card job saves them.

Shares no code with the package: names, shapes and the two container shapes of ``paddle.save`` are written
down here again. Values are random bits, with what floating point has in store mixed in: NaN payloads,
infinities, negative zero, denormals, and ties of the rounding to bfloat16.
"""

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle import MASTER, MOMENTS, NAME_TABLE, POWERS, Shape, Tensors

LR_SCHEDULER = {"last_epoch": 3, "last_lr": 0.0019399999999999999}

_SPECIAL_BITS = np.array(
    [
        0x00000000,  # zero
        0x80000000,  # negative zero
        0x00000001,  # the smallest denormal
        0x807FFFFF,  # the largest denormal, negative
        0x00008000,  # a denormal that is a tie
        0x3F808000,  # ties: to even is down,
        0x3F818000,  # to even is up
        0x3F808001,  # just above a tie
        0x7F7FFFFF,  # the largest number: rounds to infinity
        0x7F800000,  # infinity
        0xFF800000,  # negative infinity
        0x7F800001,  # a signalling NaN whose payload does not survive in the upper half
        0x7FC01234,  # a quiet NaN with payload
        0xFFFFFFFF,  # a negative NaN, all ones
    ],
    dtype=np.uint32,
)


@dataclass(frozen=True)
class Model:
    """What a model is, and how its job trains it."""

    library: str = "paddleformers"
    hidden: int = 6
    intermediate: int = 12
    vocab: int = 10
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 3
    layers: int = 2
    tied: bool = False
    fused_attention: bool = False
    fused_ffn: bool = False
    bfloat16: bool = True
    float32_norms: bool = False
    """Norms stay float32, without a master weight, in a model that is bfloat16 otherwise."""
    ema: bool = False
    column_major: bool = False
    """Arrays are stored transposed in memory, as Paddle saves a tensor that was made by a transpose."""
    seed: int = 0

    @property
    def items(self) -> int:
        """Pipeline items: embedding, decoder layers, norm and head."""
        return self.layers + 3

    def accepts_tp(self, tp: int) -> bool:
        """Whether heads, the MLP and the vocabulary divide by ``tp``.

        PaddleNLP replicates a vocabulary that does not, and kv heads unless they are fused with the others.
        """
        nlp = self.library == "paddlenlp"
        kv_heads = (nlp and not self.fused_attention) or self.kv_heads % tp == 0
        vocab = nlp or self.vocab % tp == 0
        return self.heads % tp == 0 and kv_heads and vocab and self.intermediate % tp == 0

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Structured key → shape, in model order."""
        prefix = "model" if self.library == "paddleformers" else "llama"
        shapes: dict[str, Shape] = {f"{prefix}.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            for leaf, shape in self._layer():
                shapes[f"{prefix}.layers.{layer}.{leaf}.weight"] = shape
        shapes[f"{prefix}.norm.weight"] = (self.hidden,)
        transposed = self.library == "paddlenlp" and not self.tied
        shapes["lm_head.weight"] = (self.hidden, self.vocab) if transposed else (self.vocab, self.hidden)
        return shapes

    def _layer(self) -> Iterator[tuple[str, Shape]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused_attention:
            yield "self_attn.qkv_proj", (self.hidden, q + 2 * kv)
        else:
            yield "self_attn.q_proj", (self.hidden, q)
            yield "self_attn.k_proj", (self.hidden, kv)
            yield "self_attn.v_proj", (self.hidden, kv)
        yield "self_attn.o_proj", (q, self.hidden)
        if self.fused_ffn:
            yield "mlp.gate_up_fused_proj", (self.hidden, 2 * self.intermediate)
        else:
            yield "mlp.gate_proj", (self.hidden, self.intermediate)
            yield "mlp.up_proj", (self.hidden, self.intermediate)
        yield "mlp.down_proj", (self.intermediate, self.hidden)
        yield "input_layernorm", (self.hidden,)
        yield "post_attention_layernorm", (self.hidden,)

    @cached_property
    def names(self) -> dict[str, str]:
        """Structured key → parameter name on a single card."""
        counters: dict[str, int] = {}
        names: dict[str, str] = {}
        for key in self.shapes:
            if key == "lm_head.weight" and self.tied:
                names[key] = next(iter(names.values()))
                continue
            layer_class = self._layer_class(key)
            counters[layer_class] = counters.get(layer_class, -1) + 1
            names[key] = f"{layer_class}_{counters[layer_class]}.w_0"
        return names

    def _layer_class(self, key: str) -> str:
        if "embed" in key:
            return "embedding"
        if "norm" in key:
            return "create_parameter"
        if "head" in key:
            return "lm_head" if self.library == "paddleformers" else "llama_lm_head"
        return "linear"

    def has_master(self, key: str) -> bool:
        """Whether the parameter is bfloat16, with a master weight in the optimizer."""
        return self.bfloat16 and not (self.float32_norms and "norm" in key)

    @property
    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        }


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; every NaN becomes 0x7fff, as Paddle has it."""
    upper, lower = np.divmod(np.ascontiguousarray(values).view(np.uint32), 1 << 16)
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    return np.where(np.isnan(values), 0x7FFF, upper + up).astype(np.uint16)


def logical_tensors(model: Model) -> Tensors:
    """Every tensor of the model, keyed as ``tests.oracle`` keys them; tied keys have equal values."""
    random = np.random.default_rng(model.seed)

    def bits(shape: Shape) -> np.ndarray:
        values = random.integers(0, 1 << 32, shape, dtype=np.uint32)
        special = random.random(shape) < 0.2
        values[special] = random.choice(_SPECIAL_BITS, int(special.sum()))
        return values.view(np.float32)

    tensors: Tensors = {}
    for key, shape in model.shapes.items():
        if key == "lm_head.weight" and model.tied:
            twin = next(iter(model.shapes))
            states = [full.removeprefix(twin) for full in tensors if full.startswith(twin)]
            tensors.update({key + state: tensors[twin + state] for state in states})
            continue
        values = bits(shape)
        if model.has_master(key):
            tensors[key] = round_to_bfloat16(values)
            tensors[f"{key}.{MASTER}"] = values
        else:
            tensors[key] = values
        tensors |= {f"{key}.{state}": bits(shape) for state in MOMENTS}
        # Negative, for a positive value may happen to be a power of some beta, and then all of them have to be.
        tensors |= {f"{key}.{state}": np.copysign(bits((1,)), np.float32(-1)) for state in POWERS}
        if model.ema:
            tensors[f"{key}.ema_w_0" if model.has_master(key) else f"{key}.ema"] = bits(shape)
    return tensors


class _NamedTensor:
    """Pickled as ``paddle.save`` reduces a tensor: ``tuple((name, array))``."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.named = (name, array)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.named,)


def write_checkpoint(model: Model, directory: Path) -> Tensors:
    """Write the files of a single card; returns the logical tensors."""
    tensors = logical_tensors(model)
    directory.mkdir()

    if model.column_major:
        tensors = {key: np.asfortranarray(array) for key, array in tensors.items()}

    def save(name: str, content: object) -> None:
        (directory / name).write_bytes(pickle.dumps(content, protocol=4))

    save("model_state.pdparams", {key: tensors[key] for key in model.shapes} | {NAME_TABLE: model.names})
    save("optimizer.pdopt", _optimizer(model, tensors))
    if model.ema:
        save("ema.pdopt", _ema(model, tensors))
    save("scheduler.pdparams", LR_SCHEDULER)
    config = json.dumps(model.config, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(config)
    (directory / "training_args.bin").write_bytes(b"\x80\x04opaque: nobody may load this")
    (directory / "saved_signal_0").write_bytes(b"1")
    return tensors


def _parameters(model: Model) -> dict[str, str]:
    """Structured key → name of every parameter that the optimizer knows: tied ones once."""
    return {key: name for key, name in model.names.items() if not (model.tied and key == "lm_head.weight")}


def _optimizer(model: Model, tensors: Tensors) -> dict[str, Any]:
    accumulators: dict[str, Any] = {}
    for state in (*MOMENTS, *POWERS):
        for key, name in _parameters(model).items():
            infix = "_fp32_master_0" if model.has_master(key) else ""
            accumulators[f"{name}{infix}_{state}"] = tensors[f"{key}.{state}"]
    masters = _masters(model, tensors, MASTER)
    if not masters:
        return accumulators | {"LR_Scheduler": LR_SCHEDULER, NAME_TABLE: {key: key for key in accumulators}}
    named = {key: _NamedTensor(key, array) for key, array in accumulators.items()}
    return named | {"master_weights": masters, "LR_Scheduler": LR_SCHEDULER}


def _masters(model: Model, tensors: Tensors, state: str) -> dict[str, _NamedTensor]:
    return {
        name: _NamedTensor(f"{name}_fp32_master_0", tensors[f"{key}.{state}"])
        for key, name in _parameters(model).items()
        if model.has_master(key)
    }


def _ema(model: Model, tensors: Tensors) -> dict[str, Any]:
    masters = _masters(model, tensors, "ema_w_0")
    plain = {key: name for key, name in model.names.items() if not model.has_master(key)}
    if not masters:
        averages = {key: tensors[f"{key}.ema"] for key in plain}
        return {"master_weights": {}} | averages | {NAME_TABLE: plain}
    averages = {key: _NamedTensor(name, tensors[f"{key}.ema"]) for key, name in plain.items()}
    return {"master_weights": masters} | averages
