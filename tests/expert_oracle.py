"""Read expert-parallel checkpoints with pickle and NumPy alone, by the rules of the trainer, not by our code.

The ranks of PaddleFormers' expert parallelism (``EPHybridCommunicateGroup`` of Paddle 3.3): with D = ep / tp, the
file of tp rank t and sharding rank s is of the expert rank (s mod D) * tp + t. An expert is shared out among the
sharding ranks that hold it, a dense tensor among all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests import oracle

STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
NAMES = "StructuredToParameterName@@"
FUSED = "up_gate_proj"
Slices = dict[tuple[str, int], dict[int, np.ndarray]]
"""``(key with its state, tp rank)`` → sharding rank → what it stores."""


def read_expert_parallel(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], of_each: int = 0
) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint written under expert parallelism, called as in the truth, bit patterns kept.

    ``of_each``: the number of experts of a rank, if each rank numbers its own from 0 on.
    """
    found: Slices = {}
    whole: dict[tuple[str, int], np.ndarray] = {}
    names, ep = _names(folder, of_each)
    tp = 1 + max((_number(path, "tp") or 0 for path in folder.glob("optimizer*")), default=0)
    for path in sorted([*folder.glob("optimizer*.pdopt"), *folder.glob("ema*.pdopt")]):
        root = oracle.unpickle(path)
        rank, shard = _number(path, "tp") or 0, _number(path, "shard") or 0
        expert = (shard % (ep // tp)) * tp + rank
        keys: dict[str, list[str]] = {}  # of a parameter that a recipe gives to several modules, several
        for key, name in names[rank, _number(path, "pp") or 0, expert].items():
            keys.setdefault(name, []).append(key)
        ema = path.name.startswith("ema")
        masters = root.pop("master_weights", {})
        if ema:
            whole |= {(f"{entry}.ema", rank): _array(root[entry]) for entry in root if entry != NAMES}
        for name, state, value in [*_masters(masters, ema), *([] if ema else _states(root))]:
            for key in keys.get(name, ()):
                _put(found, f"{key}.{state}", rank, shard, value)
    for path in sorted(folder.glob("model_state*.pdparams")):
        for key, value in oracle.unpickle(path).items():
            if key != NAMES:
                first = (_number(path, "moe_sharding") or 0) * of_each
                whole[_in_model(key, first), _number(path, "tp") or 0] = _array(value)
    pieces = {place: _join(place[0], slices, shapes, tp) for place, slices in found.items()} | whole
    tensors = {key: _join_tp(key, pieces, shapes) for key in dict.fromkeys(key for key, _ in pieces)}
    for key, shape in shapes.items():
        if key not in tensors and f"{key}.w_0" in tensors:
            tensors[key] = oracle.round_to_bfloat16(tensors[f"{key}.w_0"]).reshape(shape)
    return tensors


def _masters(masters: Mapping[str, Any], ema: bool) -> Iterator[tuple[str, str, Any]]:
    for name, value in masters.items():
        yield name, "ema_w_0" if ema else "w_0", value


def _states(root: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Parameter name, state and array of every entry that is a state."""
    for entry, value in root.items():
        for state in STATES:
            if entry.endswith(f"_{state}"):
                yield entry.removesuffix(f"_{state}").removesuffix("_fp32_master_0"), state, value


def _in_model(key: str, first: int) -> str:
    return re.sub(r"(?<=\.experts\.)\d+", lambda found: str(int(found[0]) + first), key)


def slice_lengths(folder: Path, parameter: str) -> dict[int, int]:
    """Sharding rank → elements of a parameter's master weight in its file, padding included."""
    roots = {_number(path, "shard"): oracle.unpickle(path) for path in folder.glob("optimizer*.pdopt")}
    held = {shard: root["master_weights"].get(parameter) for shard, root in roots.items()}
    return {shard or 0: _array(value).size for shard, value in sorted(held.items()) if value is not None}


def _names(folder: Path, of_each: int) -> tuple[dict[tuple[int, int, int], dict[str, str]], int]:
    """Cell → structured key → parameter name, and the degree of expert parallelism."""
    names: dict[tuple[int, int, int], dict[str, str]] = {}
    if (folder / "model_meta.json").exists():
        meta = json.loads((folder / "model_meta.json").read_text())
        for cell, described in meta["sharding_metas"].items():
            tp, pp, ep = (int(number) for number in re.findall(r"\d+", cell))
            listed = described["structure_name_mapping"]
            names[tp, pp, ep] = {_in_model(key, ep * of_each): name for key, name in listed.items()}
        return names, meta["parallel_config"]["ep_degree"]
    for path in folder.glob("model_state*.pdparams"):
        ep = _number(path, "moe_sharding")
        assert ep is not None, path
        listed = oracle.unpickle(path)[NAMES]
        names[_number(path, "tp") or 0, _number(path, "pp") or 0, ep] = {
            _in_model(key, ep * of_each): name for key, name in listed.items()
        }
    return names, 1 + max(ep for _, _, ep in names)


def _number(path: Path, part: str) -> int | None:
    match = re.search(rf"[._]{part}(\d+)", path.name)
    return None if match is None else int(match[1])


def _array(value: Any) -> np.ndarray:
    return np.asarray(value[1] if isinstance(value, tuple) else value)


def _put(found: Slices, key: str, tp: int, shard: int, value: Any) -> None:
    held = found.setdefault((key, tp), {})
    assert shard not in held, (key, tp, shard)
    held[shard] = _array(value)


def _join(
    key: str, slices: Mapping[int, np.ndarray], shapes: Mapping[str, tuple[int, ...]], tp: int
) -> np.ndarray:
    """What one tp rank has of a tensor, of the slices in ascending order of sharding ranks."""
    arrays = [slices[shard] for shard in sorted(slices)]
    if "_pow_acc" in key:
        assert all(np.array_equal(array, arrays[0]) for array in arrays)
        return arrays[0]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    shape = shapes[key.rsplit(".", 1)[0]]
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    whole = ".experts." in key or not _is_cut(key)
    local = shape if whole else _local(key, shape, tp)
    return flat[: int(np.prod(local))].reshape(local)


def _is_cut(key: str) -> bool:
    return not re.search(r"norm|mlp\.gate\.|e_score_correction_bias", key)


def _local(key: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    rows = re.search(r"embed_tokens|lm_head|o_proj|down_proj", key)
    return (shape[0] // tp, *shape[1:]) if rows else (*shape[:-1], shape[-1] // tp)


def _join_tp(
    key: str, pieces: Mapping[tuple[str, int], np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> np.ndarray:
    """The logical tensor; a tensor that several tp ranks hold whole is that of the first one."""
    parts = [pieces[place] for place in sorted(pieces) if place[0] == key]
    shape = shapes.get(key) or shapes.get(key.rsplit(".", 1)[0]) or parts[0].shape
    if parts[0].shape == tuple(shape) or "_pow_acc" in key:
        return parts[0]
    (dim,) = (i for i, extent in enumerate(shape) if parts[0].shape[i] != extent)
    if FUSED in key:
        halves = [np.split(part, 2, axis=dim) for part in parts]
        return np.concatenate([*(half[0] for half in halves), *(half[1] for half in halves)], axis=dim)
    return np.concatenate(parts, axis=dim)


def differing(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Iterable[str]:
    """Keys that only one side has, or whose values are not the same bit for bit."""
    for key in sorted(actual.keys() | expected.keys()):
        if key not in actual or key not in expected or actual[key].tobytes() != expected[key].tobytes():
            yield key
