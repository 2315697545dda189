"""Store weights as integers and let compressed-tensors dequantise them: ``tests/golden/integers``.

``python tests/lab/integers.py DIR`` runs with nothing but torch, safetensors and compressed-tensors (made with torch
2.13.0 for CPUs and compressed-tensors 0.20.0). For each scheme, DIR receives the tensors as a checkpoint stores them,
``quantization_config``, and what the library's own ``decompress`` makes of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file

SCHEMES = {
    # name: format, bits, group size (None: channel), dtype, shapes
    "int4_group32_bfloat16": ("pack-quantized", 4, 32, torch.bfloat16, [(48, 96), (3, 32), (1, 1024)]),
    "int4_channel_float16": ("pack-quantized", 4, None, torch.float16, [(40, 37), (5, 8), (2, 1)]),
    "int8_group64_float16": ("pack-quantized", 8, 64, torch.float16, [(20, 192), (1, 64)]),
    "int8_channel_bfloat16": ("pack-quantized", 8, None, torch.bfloat16, [(33, 30), (7, 5)]),
    "int8_unpacked_bfloat16": ("int-quantized", 8, None, torch.bfloat16, [(30, 41), (260, 1)]),
}


def _scales(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Of all sizes: products that are subnormal, overflow, or lie halfway between two numbers."""
    spread = 60 if dtype == torch.bfloat16 else 12
    exponents = (torch.rand(shape, generator=generator) - 0.5) * 2 * spread
    scales = torch.exp2(exponents).to(dtype)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    extreme = torch.tensor([largest, smallest, smallest / 64, 0.0, -1.0, largest / 3], dtype=dtype)
    flat = scales.view(-1)
    flat[: min(len(extreme), len(flat) // 2)] = extreme[: len(flat) // 2]
    return scales


def make(folder: Path, name: str, generator: torch.Generator) -> None:
    """Write the checkpoint of one scheme, and the library's answer."""
    format, bits, group, dtype, shapes = SCHEMES[name]
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights={
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
        },
        input_activations=activations if format == "int-quantized" else None,
    )
    stored: dict[str, torch.Tensor] = {"norm.weight": torch.ones(5, dtype=dtype)}
    answer: dict[str, torch.Tensor] = dict(stored)
    for number, shape in enumerate(shapes):
        half = 1 << (bits - 1)
        integers = torch.randint(-half, half, shape, dtype=torch.int8, generator=generator)
        tensors = {
            "weight_scale": _scales((shape[0], shape[1] // group if group else 1), dtype, generator),
        }
        if format == "pack-quantized":
            tensors["weight_packed"] = pack_to_int32(integers, bits)
            tensors["weight_shape"] = torch.tensor(shape, dtype=torch.int32 if number else torch.int64)
        else:
            tensors["weight"] = integers
        library = BaseCompressor.get_value_from_registry(format)
        stored |= {f"layer{number}.{key}": tensor for key, tensor in tensors.items()}
        answer[f"layer{number}.weight"] = library.decompress(tensors, scheme)["weight"].contiguous()
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, quantization_status="compressed"
    )
    entries = json.loads(json.dumps(config.to_dict(), default=str))
    (folder / name).mkdir(parents=True)
    save_file(stored, folder / name / "model.safetensors", {"format": "pt"})
    save_file(answer, folder / name / "answer.safetensors", {"format": "pt"})
    (folder / name / "config.json").write_text(
        json.dumps({"quantization_config": entries}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    chosen = torch.Generator().manual_seed(17)
    for one in SCHEMES:
        make(Path(sys.argv[1]), one, chosen)
