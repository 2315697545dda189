"""Let vLLM's own loader read our exports on a CPU, and note which key fills which of its parameters.

``python -m tests.lab.engines export DIR`` writes the exports, with this package's environment. ``python
tests/lab/engines.py load DIR LIST`` loads them and writes ``tests/serving/vllm.json``; it runs with nothing but vLLM,
torch and transformers. vLLM's wheel on PyPI is enough: a model needs no compiled kernel to be built and loaded. Nothing
is computed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def export(folder: Path) -> None:
    """Write the export of every case."""
    from tests.serving.cases import CASES

    for case in CASES:
        target = folder / case.name.replace("/", "--") / "hf"
        target.parent.mkdir(parents=True)
        case.export(target)


class Recorder:
    """Notes from which keys each parameter is filled: a tensor is known by where it lies in memory."""

    def __init__(self, model: Any) -> None:
        self.filled: dict[str, set[str]] = {}
        self.keys: dict[int, str] = {}
        self.key = ""
        for name, parameter in model.named_parameters():
            self._wrap(name, parameter)

    def _wrap(self, name: str, parameter: Any) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        load: Callable[..., Any] = getattr(parameter, "weight_loader", default_weight_loader)

        def noting(*arguments: Any, **named: Any) -> Any:
            tensor = named["loaded_weight"] if "loaded_weight" in named else arguments[1]
            key = self.keys.get(tensor.untyped_storage().data_ptr(), self.key)
            self.filled.setdefault(name, set()).add(key)
            return load(*arguments, **named)

        parameter.weight_loader = noting

    def handed(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The weights as they are handed to the loader."""
        for key, tensor in weights:
            own = tensor.clone()
            self.key, self.keys[own.untyped_storage().data_ptr()] = key, key
            yield key, own


def load(folder: Path) -> dict[str, Any]:
    """What vLLM makes of an export.

    ``class`` is what it chooses, and ``parameters`` has the keys from which each parameter is filled. ``copied`` are
    parameters that the model fills without their loader, as it reports; ``further`` are all other keys.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(folder), enforce_eager=True, skip_tokenizer_init=True, dtype="bfloat16", runner="generate"
    ).create_engine_config()
    with set_current_vllm_config(config):
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            model = initialize_model(vllm_config=config)
        recorder = Recorder(model)
        weights = list(DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model))
        loaded = set(model.load_weights(recorder.handed(weights)) or ())
        copied = {name for name, _ in model.named_parameters()} - recorder.filled.keys()
        if missing := copied - loaded:
            raise ValueError(f"{folder}: not filled: {sorted(missing)}")
    used = set().union(*recorder.filled.values())
    return {
        "class": type(model).__name__,
        "parameters": {name: sorted(keys) for name, keys in sorted(recorder.filled.items())},
        "copied": sorted(copied),
        "further": sorted({key for key, _ in weights} - used),
    }


def main(folder: Path, target: Path) -> None:
    """Load every export and write the list."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_HOST_IP": "127.0.0.1"}
    import vllm
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = platforms.current_platform = CpuPlatform()
    from vllm.distributed import init_distributed_environment

    init_distributed_environment(1, 0, f"file://{folder.absolute()}/rendezvous", 0, backend="gloo")
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/hf")):
        name = path.parent.name.replace("--", "/")
        try:
            found[name] = load(path)
        except Exception as error:  # noqa: BLE001 (whatever vLLM raises is its answer)
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, found[name].get("error", "loaded"), file=sys.stderr, flush=True)  # noqa: T201
    head = {"engine": "vLLM", "version": vllm.__version__, "commit": vllm._version.__commit_id__}
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    text = json.dumps({**head, "cases": None}, indent=1)
    target.write_text(text.replace("null\n}", "{\n" + ",\n".join(lines) + "\n }\n}\n"))


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[2]), Path(sys.argv[3]))
