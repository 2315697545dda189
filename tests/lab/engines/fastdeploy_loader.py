"""Let FastDeploy's own loader read our exports on a CPU, and note which key fills which of its parameters.

``python tests/lab/engines/fastdeploy_loader.py DIR LIST SOURCES COMMIT`` loads what ``export.py`` wrote to DIR, and
writes ``tests/serving/fastdeploy.json``. SOURCES is FastDeploy's repository at COMMIT; it runs in the laboratory's
environment ``venv-pf``. FastDeploy runs on accelerators only: it is made to believe that it has a GPU, and kernels and
servers are absent. Nothing is computed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Absent, Recorder, write_list

ABSENT = ("fastdeploy.model_executor.ops", "triton")
"""Kernels."""
SERVERS = ("crcmod", "fastapi", "msgspec", "prometheus_client", "pynvml", "redis", "zmq")


def prepare(sources: Path) -> None:
    """Let FastDeploy be imported without a GPU."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "FD_LOG_DIR": tempfile.mkdtemp()}
    sys.path.insert(0, str(sources))
    sys.meta_path.insert(0, Absent(*ABSENT, *SERVERS))
    import paddle
    from paddle import distributed
    from paddle.distributed import fleet

    device = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="GPU")
    for module in (paddle.device, paddle.device.cuda):
        module.get_device_properties = lambda *_: device
        module.get_device_capability = lambda *_: (9, 0)
        module.empty_cache = module.synchronize = lambda *_: None
    paddle.Tensor.cuda = lambda self, *_: self
    # The package itself starts an engine; its modules are enough.
    spec = importlib.util.find_spec("fastdeploy")
    assert spec is not None
    sys.modules["fastdeploy"] = importlib.util.module_from_spec(spec)
    from fastdeploy import platforms

    platforms._current_platform = platform = platforms.CUDAPlatform()
    platform.is_cuda = lambda: True
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    distributed.new_group = cache(distributed.new_group)  # each model asks for the same
    from fastdeploy.model_executor import utils

    utils._support_new_h2d = False


def config_of(folder: Path) -> Any:
    """FastDeploy's configuration for a model, as its worker makes it."""
    from fastdeploy.worker.worker_process import initialize_fd_config, parse_args

    options = {"model": folder, "dtype": "bfloat16", "load_choices": "default_v1"}
    options |= {"max_model_len": 512, "max_num_batched_tokens": 2048}
    sys.argv = [sys.argv[0], *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
    config = initialize_fd_config(parse_args())
    if config.model_config.model_type.startswith("qwen3_vl"):
        # FastDeploy knows no activation but that of the published models; the cases have another one.
        config.model_config.vision_config.hidden_act = "gelu_pytorch_tanh"
    return config


def load(folder: Path) -> dict[str, Any]:
    """What FastDeploy makes of an export: ``Recorder.entry``, and a checksum of the values of all parameters."""
    import paddle
    from fastdeploy.model_executor.model_loader import default_loader_v1
    from fastdeploy.model_executor.utils import default_weight_loader

    config = config_of(folder)
    recorder = Recorder(lambda tensor: tensor.data_ptr(), lambda tensor: tensor.clone())
    load_weights, weights_of = (
        default_loader_v1.DefaultModelLoaderV1.load_weights,
        default_loader_v1.get_weight_iterator,
    )

    @wraps(load_weights)
    def noting(self: Any, model: Any, fd_config: Any, enable_cache: bool = False) -> None:
        for name, parameter in model.named_parameters():
            if not parameter._is_initialized():
                parameter.initialize()
            parameter.set_value(paddle.full(parameter.shape, float("nan"), parameter.dtype))
            loader = getattr(parameter, "weight_loader", default_weight_loader(fd_config))
            parameter.weight_loader = recorder.noting(name, loader)
        load_weights(self, model, fd_config, enable_cache)

    default_loader_v1.DefaultModelLoaderV1.load_weights = noting
    default_loader_v1.get_weight_iterator = lambda *arguments: recorder.handed(weights_of(*arguments))
    try:
        model = default_loader_v1.DefaultModelLoaderV1(config.load_config).load_model(config)
    finally:
        default_loader_v1.DefaultModelLoaderV1.load_weights = load_weights
        default_loader_v1.get_weight_iterator = weights_of
    unfilled = []
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.astype("float32").numpy()
        if (values != values).any():
            unfilled.append(name)
        digest.update(f"{name} {list(values.shape)} ".encode() + values.tobytes())
    format_ = config.model_config.model_format
    return {**recorder.entry(model, unfilled), "format": format_, "sha256": digest.hexdigest()}


def load_both(folder: Path) -> dict[str, Any]:
    """What FastDeploy makes of an export, and the checksum of what it makes of the same model in ERNIE's layout."""
    found, other = load(folder), folder.with_name("ernie")
    if not other.exists():
        return found
    of_other = load(other)
    if of_other["format"] != "paddle" or of_other["unfilled"] or of_other["further"]:
        raise ValueError(f"{other}: not filled")
    return {**found, "ernie_layout": of_other["sha256"]}


if __name__ == "__main__":
    prepare(Path(sys.argv[3]))
    head = {"engine": "FastDeploy", "commit": sys.argv[4]}
    write_list(head, load_both, Path(sys.argv[1]), Path(sys.argv[2]))
