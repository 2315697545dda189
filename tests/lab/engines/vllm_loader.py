"""Let vLLM's own loader read our exports on a CPU, and note which key fills which of its parameters.

``python tests/lab/engines/vllm_loader.py DIR LIST`` loads what ``export.py`` wrote to DIR, and writes
``tests/serving/vllm.json``; it runs with nothing but vLLM, torch and transformers. vLLM's wheel on PyPI is enough: a
model needs no compiled kernel to be built and loaded. Nothing is computed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from common import Recorder, write_list


def load(folder: Path) -> dict[str, Any]:
    """What vLLM makes of an export: ``Recorder.entry``; ``copied`` are those that the model reports as loaded."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(folder), enforce_eager=True, skip_tokenizer_init=True, dtype="bfloat16", runner="generate"
    ).create_engine_config()
    recorder = Recorder(lambda tensor: tensor.untyped_storage().data_ptr(), lambda tensor: tensor.clone())
    with set_current_vllm_config(config):
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = initialize_model(vllm_config=config)
        for name, parameter in model.named_parameters():
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            parameter.weight_loader = recorder.noting(name, loader)
        weights = DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model)
        loaded = set(model.load_weights(recorder.handed(weights)) or ())
    entry = recorder.entry(model)
    if missing := set(entry["copied"]) - loaded:
        raise ValueError(f"{folder}: not filled: {sorted(missing)}")
    del entry["unfilled"]
    return entry


def prepare(folder: Path) -> dict[str, str]:
    """Start vLLM's groups of one process on a CPU, and say which vLLM it is."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_HOST_IP": "127.0.0.1"}
    import vllm
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = platforms.current_platform = CpuPlatform()
    from vllm.distributed import init_distributed_environment

    init_distributed_environment(1, 0, f"file://{folder.absolute()}/rendezvous", 0, backend="gloo")
    return {"engine": "vLLM", "version": vllm.__version__, "commit": vllm._version.__commit_id__}


if __name__ == "__main__":
    exports = Path(sys.argv[1])
    write_list(prepare(exports), load, exports, Path(sys.argv[2]))
