"""Let SGLang's own loader read our exports on a CPU, and note which key fills which of its parameters.

``python tests/lab/engines/sglang_loader.py DIR LIST`` loads what ``export.py`` wrote to DIR, and writes
``tests/serving/sglang.json``; it runs with nothing but SGLang, torch and transformers from PyPI. Kernels and
servers are absent. Nothing is computed.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from common import Absent, Recorder, write_list

ABSENT = ("sgl_kernel", "uvicorn", "torchaudio")


def prepare(model: Path) -> None:
    """Start SGLang's groups of one process, without a server."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    sys.meta_path.insert(0, Absent(*ABSENT))
    import torch

    torch.ops.sgl_kernel.fused_sigmoid_mul_cpu = MagicMock()
    torch.get_device_module = lambda *_: torch.cpu
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    options = ServerArgs(
        model_path=str(model), device="cpu", skip_tokenizer_init=True, attention_backend="torch_native"
    )
    publish(options, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    rendezvous = f"file://{model.absolute().parent}/rendezvous-{os.getpid()}"
    init_distributed_environment(1, 0, rendezvous, 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(options)


def load(folder: Path) -> dict[str, Any]:
    """What SGLang makes of an export: ``Recorder.entry``."""
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    recorder = Recorder(lambda tensor: tensor.untyped_storage().data_ptr(), lambda tensor: tensor.clone())

    class Noting(DefaultModelLoader):
        @staticmethod
        def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
            for name, parameter in model.named_parameters():
                parameter.data.fill_(float("nan"))
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                parameter.__dict__.pop("_weight_loader", None)
                parameter.weight_loader = recorder.noting(name, loader)
            DefaultModelLoader.load_weights_only(model, recorder.handed(weights), target_device)

    config = adjust_config_with_unaligned_cpu_tp(ModelConfig(str(folder), dtype="bfloat16"), LoadConfig(), 1)
    model = Noting(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))
    unfilled = [name for name, parameter in model.named_parameters() if torch.isnan(parameter).any()]
    return recorder.entry(model, unfilled)


if __name__ == "__main__":
    exports = Path(sys.argv[1])
    prepare(next(exports.glob("*/hf")))
    write_list({"engine": "SGLang", "version": version("sglang")}, load, exports, Path(sys.argv[2]))
