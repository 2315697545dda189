"""What a user without a converter writes: load every file with Paddle, concatenate, save for a single card.

For a llama of PaddleFormers that was saved with sharding stage 1 v2 and ``model_meta.json``. Holds everything in
memory, knows this one model, checks nothing.

    python -m benchmarks.naive SRC DST
    python -m benchmarks.naive SRC DST --as-3.4

With ``--as-3.4``, files are read and written as by Paddle 3.4 (``paddle.load(num_workers=8)`` and the protocol 5 of
``paddle.save``), which this emulates from descriptions, as far as time and memory depend on it: reads of 1 MiB and more
are made by 8 threads in chunks of 32 MiB; arrays go from memory to the file without a copy where they are float32.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import paddle

Load = Callable[[str], Any]
Save = Callable[[dict[str, Any], str], None]
READERS = 8
PARALLEL_FROM_BYTES = 1 << 20
CHUNK_BYTES = 32 << 20

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


class ParallelFile(io.RawIOBase):
    """A file whose large reads are made by several threads."""

    def __init__(self, path: str) -> None:
        self.descriptor, self.place = os.open(path, os.O_RDONLY), 0
        self.threads = ThreadPoolExecutor(READERS)
        self.small = open(path, "rb")  # noqa: SIM115 -- closed with this file

    def close(self) -> None:
        """Close both."""
        if not self.closed:
            self.threads.shutdown()
            self.small.close()
            os.close(self.descriptor)
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Read large payloads side by side."""
        view = memoryview(buffer).cast("B")
        if len(view) < PARALLEL_FROM_BYTES:
            self.small.seek(self.place)
            count = self.small.readinto(view)
        else:
            chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
            places = (self.place + start for start in range(0, len(view), CHUNK_BYTES))
            count = sum(self.threads.map(self._fill, chunks, places))
        self.place += count
        return count

    def _fill(self, chunk: memoryview, place: int) -> int:
        done = 0
        while done < len(chunk) and (count := os.preadv(self.descriptor, [chunk[done:]], place + done)):
            done += count
        return done

    def read(self, count: int = -1) -> bytes:
        """Small payloads of a pickle; large ones arrive in ``readinto``."""
        self.small.seek(self.place)
        found = self.small.read(count)
        self.place += len(found)
        return found

    def readline(self, size: int | None = -1) -> bytes:
        """A line of a pickle."""
        self.small.seek(self.place)
        line = self.small.readline()
        self.place += len(line)
        return line


def load_as_34(path: str) -> Any:
    """``paddle.load(path, num_workers=8)``."""
    with ParallelFile(path) as file:
        return _tensors(pickle.load(file, encoding="latin1"))  # noqa: S301 -- a file that we made


def _tensors(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _tensors(value) for key, value in found.items()}
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], np.ndarray):
        found = found[1]  # with the name of the tensor
    return paddle.to_tensor(found) if isinstance(found, np.ndarray) else found


def save_as_34(tensors: dict[str, Any], path: str) -> None:
    """``paddle.save(tensors, path)``: arrays, and the names of the tensors."""
    names = {key: value.name for key, value in tensors.items() if isinstance(value, paddle.Tensor)}
    with open(path, "wb") as file:
        pickle.dump({**_arrays(tensors), "StructuredToParameterName@@": names}, file, protocol=5)


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(inner) for key, inner in value.items()}
    if not isinstance(value, paddle.Tensor):
        return value
    return np.from_dlpack(value) if value.dtype == paddle.float32 else value.numpy()


def join(source: Path, load: Load) -> dict[str, dict[str, Any]]:
    """Structured key → state → whole tensor."""
    meta = json.loads((source / "model_meta.json").read_text())
    sharding = meta["parallel_config"]["sharding_degree"]
    whole: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for cell, described in meta["sharding_metas"].items():
        shards = [load(str(source / f"optimizer.{cell}_shard{s:02d}.pdopt")) for s in range(sharding)]
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


def save(tensors: dict[str, dict[str, Any]], target: Path, write: Save) -> None:
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
    write(parameters, str(target / "model_state.pdparams"))
    write(optimizer, str(target / "optimizer.pdopt"))


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    paddle.set_device("cpu")
    load, write = (load_as_34, save_as_34) if "--as-3.4" in sys.argv else (paddle.load, paddle.save)
    save(join(source, load), target, write)
    shutil.copy(source / "config.json", target)


if __name__ == "__main__":
    main()
