"""Which keys and shapes does ``transformers`` write for the models of our exports?

``python -m tests.lab.transformers_keys`` makes ``tests/serving/transformers.json``; it needs torch and transformers
(the extra ``serving``). Of an export it takes ``config.json`` only: a model is built of that and saved.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors

from tests.serving.cases import CASES

LIST = Path(__file__).parents[1] / "serving" / "transformers.json"


def written_by_transformers(config_folder: Path, folder: Path) -> dict[str, list[int]]:
    """Key → shape, of a model of this configuration as ``transformers`` saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(config_folder)
    maker = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = maker.from_config(config)
    model.save_pretrained(folder)
    entries = safetensors.deserialize((folder / "model.safetensors").read_bytes())
    return {key: list(entry["shape"]) for key, entry in sorted(entries)}


def main() -> None:
    """Write the list."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    found: dict[str, Any] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as made:
            case.export(Path(made) / "case" / "hf")
            found[case.name] = written_by_transformers(Path(made) / "case" / "hf", Path(made) / "saved")
    lines = [f"  {json.dumps(name)}: {json.dumps(keys)}" for name, keys in found.items()]
    head = f' "transformers": {json.dumps(transformers.__version__)},\n "cases": '
    LIST.write_text("{\n" + head + "{\n" + ",\n".join(lines) + "\n }\n}\n")


if __name__ == "__main__":
    main()
