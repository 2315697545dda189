"""``transformers`` reads our exports: no key is missing or unexpected, and it computes what the Paddle model does.

Run by ``make serving``: it needs torch and transformers. The answers of the Paddle models (``logits``) are those of
``tests/lab/trainer/answers.py``, in float32, with the parameters that the trainer had in memory.
"""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from tests.golden.unified_cases import write_safetensors
from tests.serving.cases import CASES, FACTOR, ServedCase

pytestmark = [
    pytest.mark.serving,
    pytest.mark.filterwarnings("default"),  # other people's libraries
]
CLOSE = 1e-4
"""Of logits that are about 5 in size; what is different between two libraries in float32 is a tenth of it."""

IMAGE = 120
"""The token that stands for an image in the models of the laboratory."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _load(folder: Path, images: bool) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model, found = loader.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), found


def _let_change_places(path: Path, pattern: str) -> None:
    """Transpose square tensors, as ``transformers`` would if it saw that they are to be."""
    entries = {}
    for key, entry in safetensors.deserialize(path.read_bytes()):
        shape, data = entry["shape"], bytes(entry["data"])
        if fnmatchcase(key, pattern):
            assert shape[-1] == shape[-2]
            data = np.frombuffer(data, np.uint16).reshape(shape).swapaxes(-1, -2).tobytes()
        entries[key] = (entry["dtype"], shape, data)
    write_safetensors(path, entries)


def _answer(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)).logits.numpy()


def _answer_with_images(model: Any, answers: Any) -> np.ndarray:
    import torch

    ids = torch.from_numpy(answers["image_ids"])
    given = {name: torch.from_numpy(answers[name]) for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        return model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **given).logits.numpy()


def _with_ratio(model: Any) -> None:
    """Give a model the rope frequencies that PaddleFormers computes: of the ratio of the two lengths."""
    rope, config = model.model.rotary_emb, copy.deepcopy(model.config)
    original = config.rope_parameters["original_max_position_embeddings"]
    config.rope_parameters["factor"] = config.max_position_embeddings / original
    model.model.rotary_emb = type(rope)(config=config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_loads_and_computes_the_same(case: ServedCase, tmp_path: Path) -> None:
    report = case.export(tmp_path / "hf")
    # No donor was given, and the report names what an engine may miss; the remarks in question are about results.
    remarks = [remark for remark in report.plan.targets[0].remarks if "--like" not in remark]
    assert [case.remark in remark for remark in remarks] == [True] * bool(case.remark)
    if case.square:
        _let_change_places(tmp_path / "hf" / "model.safetensors", case.square)
    model, found = _load(tmp_path / "hf", "vision_config" in case.config)
    unexpected = [key for key in found.pop("unexpected_keys") if not case.is_mtp(key)]
    assert not unexpected
    assert not any(found.values()), found
    if not case.logits.exists():
        return
    answers = np.load(case.logits)
    ids, expected = answers["ids"], answers["logits"]
    got = _answer(model, ids)[
        :, : expected.shape[1]
    ]  # with multi-token prediction the last position has none
    if case.remark == FACTOR:
        assert np.abs(got - expected).max() > CLOSE  # so that the remark is needed
        _with_ratio(model)
        got = _answer(model, ids)[:, : expected.shape[1]]
    np.testing.assert_allclose(got, expected, rtol=CLOSE, atol=CLOSE)
    if "image_ids" in answers:
        np.testing.assert_allclose(
            _answer_with_images(model, answers), answers["image_logits"], rtol=CLOSE, atol=CLOSE
        )
