"""Which tensors a conversion keeps, by the fingerprints that manifests record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Lines = dict[tuple[str, str], list[Any]]
"""Key and state of a tensor → dtype, shape and checksum."""


def lines_of(target: Path) -> Lines:
    manifest = json.loads((target / "paddle_reshard.json").read_text())["fingerprints"]
    assert manifest["root"] is not None
    return {(key, state): rest for key, state, *rest in manifest["tensors"]}


def check_kept(way: str, before: Lines, after: Lines) -> None:
    """What a conversion may change: a format for models has only parameters, unified files no averages."""
    for (key, state), line in after.items():
        if (key, state) not in before:  # in unified files, float32 parameters have master weights
            assert (way, state, line[0]) == ("unified", "master_weight", "float32"), key
            state = "param"
        assert line == before[key, state], (key, state)
    lost = {state for _, state in before.keys() - after.keys()}
    if way == "model":
        assert {state for _, state in after} == {"param"}
        assert "param" not in lost
    elif way == "unified":
        assert lost <= {"ema_master_weight", "ema_param"}
    else:
        assert before == after
