"""Compare a one-card checkpoint with ground truth, sharing no code with the converter.

    python tests/golden/compare_one_card.py CHECKPOINT truth.safetensors

The files are opened with Python's own unpickler, restricted to NumPy arrays; the truth, taken from the live
memory of the training job, with the safetensors library. Everything is compared bit for bit.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
from safetensors import deserialize

NAMES = "StructuredToParameterName@@"
STATES = ("moment1_0", "moment2_0", "moment2_max_0", "velocity_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


class ArraysOnly(pickle.Unpickler):
    """Resolves what a file of arrays needs and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "tuple"):
            return tuple
        if module.startswith("numpy") and name in ("ndarray", "dtype", "_reconstruct"):
            return np.ndarray if name == "ndarray" else np.dtype if name == "dtype" else _empty_array
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _array_of_buffer  # protocol 5
        raise pickle.UnpicklingError(f"{module}.{name} is not expected here")


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> np.ndarray:
    return np.ndarray.__new__(kind, shape, code)


def _array_of_buffer(content: bytes, kind: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(content, kind).reshape(shape, order=order)


def load(path: Path) -> dict:
    with path.open("rb") as file:
        return ArraysOnly(file).load()


def bits(array: object) -> bytes:
    return np.ascontiguousarray(array[1] if isinstance(array, tuple) else array).tobytes()


def read_one_card(folder: Path) -> dict[str, bytes]:
    """Every tensor of a one-card checkpoint, called as in the truth."""
    lora = folder / "lora_model_state.pdparams"
    parameters = load(lora if lora.exists() else folder / "model_state.pdparams")
    names = parameters.pop(NAMES)
    found = {key: bits(value) for key, value in parameters.items()}
    if not (folder / "optimizer.pdopt").exists():
        return found
    keys = {name: key for key, name in reversed(names.items())}
    optimizer = load(folder / "optimizer.pdopt")
    for name, value in optimizer.pop("master_weights", {}).items():
        found[f"{keys[name]}.w_0"] = bits(value)
    for entry, value in optimizer.items():
        for suffix in STATES:
            name = entry.removesuffix(f"_{suffix}").removesuffix("_fp32_master_0")
            if entry.endswith(f"_{suffix}") and name in keys:
                found[f"{keys[name]}.{suffix}"] = bits(value)
    if (folder / "ema.pdopt").exists():
        ema = load(folder / "ema.pdopt")
        for name, value in ema.pop("master_weights").items():
            found[f"{keys[name]}.ema_w_0"] = bits(value)
        ema.pop(NAMES, None)
        found |= {f"{key}.ema": bits(value) for key, value in ema.items()}
    return found


def read_flex(folder: Path) -> dict[str, bytes]:
    """Every tensor of a FlexCheckpoint whose files hold whole tensors, called as in the truth."""
    found = {}
    for path in sorted(folder.glob("*/*.distcp")):
        for key, value in load(path).items():
            if path.parent.name == "ema_state":
                key = f"{key.removesuffix('.w_0')}.ema{'_w_0' * key.endswith('.w_0')}"
            if not key.startswith(NAMES):
                found[key] = bits(value)
    return found


def main() -> int:
    folder, truth_path = Path(sys.argv[1]), Path(sys.argv[2])
    truth = {name: bytes(entry["data"]) for name, entry in deserialize(truth_path.read_bytes())}
    found = read_one_card(folder)
    wrong = sorted(name for name in truth if found.get(name) != truth[name])
    wrong += sorted(set(found) - set(truth))
    for name in wrong[:10]:
        print(f"{name}: differs from the ground truth")
    size = sum(len(value) for value in truth.values())
    print(
        f"{len(truth) - len(wrong)} of {len(truth)} tensors ({size:,} bytes) equal the ground truth bit for bit"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
