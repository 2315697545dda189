"""What a user without a converter writes: load every file with Paddle, concatenate, save for a single card.

For a llama of PaddleFormers that was saved with sharding stage 1 v2 and ``model_meta.json``. Holds everything in
memory, knows this one model, checks nothing.

    python -m benchmarks.naive SRC DST
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import paddle

STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
TP_DIM = {
    "q_proj": 1,
    "k_proj": 1,
    "v_proj": 1,
    "gate_proj": 1,
    "up_proj": 1,
    "o_proj": 0,
    "down_proj": 0,
    "embed_tokens": 0,
    "lm_head": 0,
}


def join(source: Path) -> dict[str, dict[str, Any]]:
    """Structured key → state → whole tensor."""
    meta = json.loads((source / "model_meta.json").read_text())
    sharding = meta["parallel_config"]["sharding_degree"]
    whole: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for cell, described in meta["sharding_metas"].items():
        shards = [paddle.load(str(source / f"optimizer.{cell}_shard{s:02d}.pdopt")) for s in range(sharding)]
        for key, name in described["structure_name_mapping"].items():
            shape = described["param_meta"][key][0]
            for state in (*STATES, "w_0"):
                pieces = []
                for shard in shards:
                    entry = f"{name}_fp32_master_0_{state}"
                    tensors, entry = (shard["master_weights"], name) if state == "w_0" else (shard, entry)
                    if entry in tensors:
                        pieces.append(tensors[entry])
                if "pow" in state:
                    whole[key][state] = pieces[:1]
                else:
                    flat = paddle.concat(pieces)
                    whole[key][state].append(flat[: prod(shape)].reshape(shape))
    dims = {key: TP_DIM.get(key.split(".")[-2]) for key in whole}
    return {
        key: {
            state: locals_[0]
            if dims[key] is None or "pow" in state
            else paddle.concat(locals_, axis=dims[key])
            for state, locals_ in states.items()
        }
        for key, states in whole.items()
    }


def model_order(key: str) -> tuple[int, int]:
    """Embedding, layers, norm, head."""
    parts = key.split(".")
    if "layers" in parts:
        return 1, int(parts[2])
    return {"embed_tokens": 0, "norm": 2, "lm_head": 3}[parts[-2]], 0


def save(tensors: dict[str, dict[str, Any]], target: Path) -> None:
    """Write what a single-card job would have written."""
    target.mkdir()
    keys = sorted(tensors, key=model_order)
    counters: dict[str, int] = defaultdict(int)
    names = {}
    for key in keys:
        kind = "linear"
        for part, layer_class in (
            ("embed", "embedding"),
            ("norm", "create_parameter"),
            ("lm_head", "lm_head"),
        ):
            if part in key:
                kind = layer_class
        names[key] = f"{kind}_{counters[kind]}.w_0"
        counters[kind] += 1
    parameters, optimizer, masters = {}, {}, {}
    for key in keys:
        parameters[key] = tensors[key]["w_0"].astype("bfloat16")
        parameters[key].name = names[key]
        masters[names[key]] = tensors[key]["w_0"]
        masters[names[key]].name = f"{names[key]}_fp32_master_0"
    for state in STATES:
        for key in keys:
            entry = f"{names[key]}_fp32_master_0_{state}"
            optimizer[entry] = tensors[key][state]
            optimizer[entry].name = entry
    optimizer |= {"master_weights": masters, "LR_Scheduler": {"last_epoch": 1, "last_lr": 0.001}}
    paddle.save(parameters, str(target / "model_state.pdparams"))
    paddle.save(optimizer, str(target / "optimizer.pdopt"))


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    paddle.set_device("cpu")
    save(join(source), target)
    shutil.copy(source / "config.json", target)


if __name__ == "__main__":
    main()
