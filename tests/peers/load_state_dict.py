"""Runs in the laboratory's Python: ``load_state_dict`` of Paddle fills tensors of another topology, without a trainer.

``load_state_dict.py CHECKPOINT RANKS OUT``: each rank holds its share of every tensor along the first axis, or the
whole where the ranks do not divide it; what they then hold is joined into the file OUT. Ends with a line of JSON.
"""

import json
import os
import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab" / "trainer"))

import cpu_gloo_shim  # noqa: F401  gloo in the place of NCCL
import numpy as np
import paddle
import paddle.distributed as dist
import truth
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from ranks import fork_ranks

paddle.set_device("cpu")
SECONDS = 240
SUFFIX = {"ema_state": ("w_0", "ema_w_0")}
"""What of a key is written otherwise in a folder than in memory."""


def main() -> None:
    """Load in forked ranks, and join."""
    checkpoint, count, out = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    told: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as logs:
        ends = fork_ranks(count, lambda rank: _be_rank(rank, count, checkpoint, logs), Path(logs), SECONDS)
        if any(ends):
            failed = next(rank for rank, end in enumerate(ends) if end)
            lines = Path(logs, f"rank{failed}.log").read_text().strip().splitlines()
            told["refused"] = lines[-1] if lines else f"exit statuses {ends}"
        else:
            of_ranks = [pickle.loads(Path(logs, f"{rank}.pkl").read_bytes()) for rank in range(count)]
            truth.write_safetensors(_joined([held for held, *_ in of_ranks]), out)
            told["seconds"] = round(max(seconds for _, seconds, _ in of_ranks), 2)
            told["peak_mib"] = max(peak for *_, peak in of_ranks)
    answers.write(json.dumps(told) + "\n")


def _be_rank(rank, count, checkpoint, folder):
    if count > 1:
        dist.init_parallel_env()
    held, seconds = {}, 0.0
    for metadata in sorted(checkpoint.glob("*/0.metadata")):
        state = {}
        for key, pieces in paddle.load(str(metadata)).state_dict_metadata.items():
            shape, dtype = tuple(pieces[0].global_shape), pieces[0].dtype
            share = shape[0] // count if shape and shape[0] % count == 0 else None
            local = (share, *shape[1:]) if share else shape
            offset = (share * rank if share else 0, *(0 for _ in shape[1:])) if shape else ()
            state[key] = ShardedWeight(key, paddle.full(local, 0.5, dtype=dtype), local, shape, offset)
        began = time.monotonic()
        dist.load_state_dict(state, str(metadata.parent))
        seconds += time.monotonic() - began
        old, new = SUFFIX.get(metadata.parent.name, ("", ""))
        for key, piece in state.items():
            local = piece.local_tensor
            dtype = str(local.dtype).split(".")[-1]
            name = key.removesuffix(old) + new if old and key.endswith(old) else key
            cut = piece.local_shape != piece.global_shape
            held[name] = (local.astype("float32").numpy(), dtype, cut)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps((held, seconds, peak)))
    if count > 1:
        dist.barrier()


def _joined(of_ranks):
    whole = {}
    for key, (first, dtype, cut) in of_ranks[0].items():
        array = np.concatenate([held[key][0] for held in of_ranks]) if cut else first
        whole[key] = paddle.to_tensor(array).astype(dtype)
    return whole


if __name__ == "__main__":
    main()
