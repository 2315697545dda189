"""How large is a delta, and what does it cost beside copying and beside compressing the exclusive or?

``python -m benchmarks.deltas [--gigabytes 1] [--shares 0.01,0.02,0.03]``

The old export has bfloat16 weights of a normal distribution; in the new one, a share of them is one unit in the last
place larger or smaller. CPU seconds are those of a process of its own, less those for two exports of two bytes.
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
import time
from pathlib import Path

import numpy as np

TENSOR = 16 << 20
XOR = """
import sys, numpy as np, pyarrow as pa
old, new, target = sys.argv[1:]
with open(old, "rb") as a, open(new, "rb") as b, open(target, "wb") as out:
    while one := a.read(8 << 20):
        two = b.read(8 << 20)
        differs = np.frombuffer(one, "u1") ^ np.frombuffer(two, "u1")
        out.write(pa.Codec("zstd", compression_level=3).compress(differs.tobytes(), asbytes=True))
"""


def write_export(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file without the library, which knows no bfloat16 in NumPy."""
    header, at = {}, 0
    for key, value in tensors.items():
        header[key] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.tobytes())


def make(folder: Path, gigabytes: float, share: float) -> int:
    """Write both exports; the size of one in bytes."""
    random = np.random.default_rng(0)
    old, new = {}, {}
    for number in range(max(1, int(gigabytes * 1e9 / 2 / TENSOR))):
        weights = random.standard_normal(TENSOR, "f4") * np.float32(0.02)
        before = (weights.view("u4") >> 16).astype("u2").reshape(-1, 4096)
        hit = random.random(before.shape, "f4") < share
        after = before + hit * random.choice(np.array([1, 65535], "u2"), before.shape)
        old[f"layers.{number}.weight"], new[f"layers.{number}.weight"] = before, after
    write_export(folder / "old" / "model.safetensors", old)
    write_export(folder / "new" / "model.safetensors", new)
    return (folder / "new" / "model.safetensors").stat().st_size


def measured(*command: str | Path) -> tuple[float, float]:
    """CPU and wall seconds of a process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([str(word) for word in command], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - began


def started(*ours: str) -> tuple[float, float]:
    """What ``delta`` takes where there is nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("old", "new"):
            write_export(root / name / "model.safetensors", {"w": np.zeros((1, 1), "u2")})
        return measured(*ours, "delta", "--quiet", root / "old", root / "new", root / "delta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shares", default="0.01,0.02,0.03")
    given = parser.parse_args()
    ours = [sys.executable, "-m", "paddle_reshard"]
    start = started(*ours)
    print("share\twhat\tbytes\tof the export\tCPU s/GB\ts/GB")
    for share in map(float, given.shares.split(",")):
        folder = Path(tempfile.mkdtemp(prefix="deltas-"))
        try:
            size = make(folder, given.gigabytes, share)
            os.sync()
            old, new, delta, made = (folder / name for name in ("old", "new", "delta", "made"))
            file = "model.safetensors"
            rows = {
                "cp": (measured("cp", new / file, folder / "copy"), folder / "copy", (0.0, 0.0)),
                "zstd of the xor": (
                    measured(sys.executable, "-c", XOR, old / file, new / file, folder / "xor"),
                    folder / "xor",
                    (0.0, 0.0),
                ),
                "delta": (measured(*ours, "delta", "--quiet", old, new, delta), delta / "delta.bin", start),
                "apply": (measured(*ours, "apply", "--quiet", old, delta, made), made / file, start),
            }
            for what, ((cpu, wall), path, less) in rows.items():
                made_bytes, per = path.stat().st_size, 1e9 / size
                costs = f"{(cpu - less[0]) * per:.2f}\t{(wall - less[1]) * per:.2f}"
                print(f"{share:.2f}\t{what}\t{made_bytes}\t{made_bytes / size:.2%}\t{costs}")
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
