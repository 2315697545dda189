"""How large is a published delta, and what does it cost beside compressing the exclusive or alone?

``python -m benchmarks.deltas [--gigabytes 1] [--shares 0.01,0.02,0.03]``

The old export has bfloat16 weights of a normal distribution; in the new one, a share of them is one unit in the last
place larger or smaller. Processor seconds are those of a process of its own, less those for an export of two bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

TENSOR = 16 << 20
RULES = Path(__file__).parent.parent / "pipeline" / "model" / "rules" / "llama.paddleformers.json"
ZSTD = """
import sys, numpy as np, zstandard
old, new, target = sys.argv[1:]
with open(old, "rb") as a, open(new, "rb") as b, open(target, "wb") as out:
    frame = zstandard.ZstdCompressor(level=3).compressobj()
    while one := a.read(8 << 20):
        out.write(frame.compress((np.frombuffer(one, "u1") ^ np.frombuffer(b.read(8 << 20), "u1")).data))
    out.write(frame.flush())
"""
COPY = "import sys, shutil; shutil.copy(*sys.argv[2:])"
PUBLISH = "import sys, paddle_reshard; paddle_reshard.publish(*sys.argv[1:3], encoding=sys.argv[3], rules=sys.argv[4])"
PULL = "import sys, paddle_reshard; paddle_reshard.pull(*sys.argv[1:])"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 4096,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    """Key → shape of a llama with square layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (4096, 4096),
        "model.norm.weight": (4096,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        for part in (*parts, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            shapes[f"{at}{part}.weight"] = (4096, 4096)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{part}.weight"] = (4096,)
    return {**shapes, "lm_head.weight": (4096, 4096)}


def write_export(folder: Path, layers: int, share: float) -> int:
    """Write an export without the safetensors library, which knows no bfloat16 in NumPy; its size in bytes."""
    shapes = tensors(layers)
    header, at = {}, 0
    for key, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    values, changes = np.random.default_rng(0), np.random.default_rng(1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            weights = values.standard_normal(shape, "f4") * np.float32(0.02)
            before = (weights.view("u4") >> 16).astype("u2")
            if share:
                hit = changes.random(shape, "f4") < share
                before = before + hit * changes.choice(np.array([1, 65535], "u2"), shape)
            file.write(before.tobytes())
    return at


def seconds(program: str, *arguments: object) -> float:
    """Processor seconds of a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(work: Path, layers: int, share: float) -> None:
    """Print the rows of a share."""
    for name, of in (("old", 0.0), ("new", share)):
        size = write_export(work / name, layers, of)
    files = [work / name / "model.safetensors" for name in ("old", "new")]
    gigabytes = size / 1e9
    started = seconds(
        "import paddle_reshard.pipeline.versions.publish, paddle_reshard.pipeline.versions.pull"
    )
    rows = [("copy", size, seconds(COPY, "", files[1], work / "copied"))]
    rows.append(("Zstandard alone", 0, seconds(ZSTD, *files, work / "frame")))
    rows[-1] = (rows[-1][0], (work / "frame").stat().st_size, rows[-1][2])
    for encoding in ("xor", "overwrite"):
        versions = work / encoding
        seconds(PUBLISH, work / "old", versions, encoding, RULES)
        took = seconds(PUBLISH, work / "new", versions, encoding, RULES) - started
        stored = (versions / "weight_v000002" / "model-00000-of-00001.safetensors").stat().st_size
        rows.append((f"`publish --encoding {encoding}`", stored, took))
        seconds(PULL, versions, work / f"local-{encoding}")
        shutil.rmtree(work / f"local-{encoding}")
        rows.append(("`pull`", stored, seconds(PULL, versions, work / f"local-{encoding}") - started))
    for what, stored, took in rows:
        print(f"| {share:.0%} | {what} | {stored / size:.2%} | {took / gigabytes:.1f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shares", default="0.01,0.03")
    chosen = parser.parse_args()
    layers = max(1, int(chosen.gigabytes * 1e9 / (7 * 2 * TENSOR)))
    print("| elements changed | | bytes | CPU s per GB |\n| --- | --- | --- | --- |", flush=True)
    for share in map(float, chosen.shares.split(",")):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            measure(Path(folder), layers, share)


if __name__ == "__main__":
    main()
