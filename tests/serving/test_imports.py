"""What ``transformers`` loads without a missing or unexpected key, we read with equal values; the rest is refused.

Over the models of every family that we read, made by the library itself of an exported config: with a language head,
cut into files, in the layout that the library keeps in memory, with words tied the other way, without a head, as a
classifier. ``make serving``, as it needs torch and transformers. The oracle is what the same class of the library holds
after it has loaded our export of our import.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.golden.test_folders_as_found import tensors_of
from tests.golden.unified_cases import write_safetensors
from tests.serving.cases import CASES, ServedCase

pytestmark = [
    pytest.mark.serving,
    pytest.mark.filterwarnings("default"),  # other people's libraries
]
FAMILIES = {(case.config["model_type"], case.convention): case for case in reversed(CASES)}
"""One case of each family and library."""
REFUSED = {
    "tokens": r"score\.bias: the classifiers of paddle\w+ have no bias",
    # The library keeps the correction bias under another key; nobody publishes the model so.
    "ernie4_5_moe kept": r"moe_statics\.e_score_correction_bias: no row",
    # Parameters of the trainer's class that the library ties, or leaves out of its own.
    **{f"glm_ocr {name}": r"lm_head\.weight: no file holds it" for name in ("whole", "cut")},
    **{
        f"paddleocr_vl {name}": r"packing_position_embedding\.weight: no file holds it"
        for name in ("whole", "cut", "kept", "tied", "headless")
    },
    # The classes of PaddleNLP without a language head are not known.
    "paddlenlp headless": r"lm_head\.weight: no file holds it",
    **{f"paddlenlp {name}": r"classifiers of paddlenlp are not known" for name in ("sequences", "tokens")},
    # The trainer's class ties them whatever the config says, so it has no place for two.
    "gemma3_text tied": r"embed_tokens\.weight",
}
"""Variant, or family and variant → why no class of the trainer holds it."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _variants(export: Path) -> Iterator[tuple[str, Any, Any]]:
    """The name of a variant, the class that loads it, and its config."""
    import transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    def config() -> Any:
        read = transformers.AutoConfig.from_pretrained(export)
        if (
            read.model_type == "qwen3_vl_moe"
        ):  # square experts do not tell the library in which layout they are
            read.text_config.moe_intermediate_size = 24
        return read

    images = getattr(config(), "vision_config", None) is not None
    whole = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    kept = get_checkpoint_conversion_mapping(config().model_type)
    for name in ("whole", "cut", "kept") if kept else ("whole", "cut"):
        yield name, whole, config()
    other = config()
    other.tie_word_embeddings = not other.tie_word_embeddings
    yield "tied", whole, other
    yield "headless", transformers.AutoModel, config()
    for name, loader in (
        ("sequences", transformers.AutoModelForSequenceClassification),
        ("tokens", transformers.AutoModelForTokenClassification),
    ):
        labelled = config()
        labelled.num_labels, labelled.pad_token_id = 3, 0
        if type(labelled) in loader._model_mapping:
            yield name, loader, labelled


def _made(loader: Any, config: Any, folder: Path, variant: str) -> None:
    """A model of the library's own, every parameter random; ``kept``: in the layout that the library keeps it in."""
    import torch

    torch.manual_seed(1)
    model = loader.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    largest = "60KB" if variant == "cut" else "5GB"
    model.save_pretrained(folder, max_shard_size=largest, save_original_format=variant != "kept")


def _loaded(loader: Any, folder: Path) -> tuple[dict[str, Any], set[str]]:
    """The state of the library's model, and the keys that it misses or does not expect, or why it has loaded none."""
    import torch

    try:
        model, found = loader.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    except RuntimeError as error:  # it stacks experts, of which some are missing
        return {}, {str(error)}
    odd = {*found["missing_keys"], *found["unexpected_keys"], *map(str, found["mismatched_keys"])}
    return model.state_dict(), odd


def _without_mtp(folder: Path) -> dict[str, Any]:
    """The library's own models have no layers of multi-token prediction, whatever their config says."""
    announced = json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers")
    return {"drop": ["mtp"]} if announced else {}


def _through_a_job(folder: Path, to: Path, convention: str, **options: Any) -> Path:
    paddle_reshard.convert(folder, to / "job", format="flex", convention=convention, **options)
    paddle_reshard.convert(to / "job", to / "back", format="huggingface", **options)
    return to / "back"


def _refused(family: str, convention: str, variant: str) -> str | None:
    asked = (f"{convention} {variant}", variant, f"{family} {variant}")
    return next((REFUSED[each] for each in asked if each in REFUSED), None)


@pytest.mark.parametrize("case", FAMILIES.values(), ids=[" ".join(family) for family in FAMILIES])
def test_what_the_library_loads_is_read_with_equal_values(case: ServedCase, tmp_path: Path) -> None:
    import torch

    case.export(tmp_path / "x/export")
    family = case.config["model_type"]
    for name, loader, config in _variants(tmp_path / "x/export"):
        folder = tmp_path / name
        _made(loader, config, folder / "model", name)
        drop = _without_mtp(folder / "model")
        held, odd = _loaded(loader, folder / "model")
        assert not odd, name
        refused = _refused(family, case.convention, name)
        if refused is not None:
            with pytest.raises(ReshardError, match=refused):
                _through_a_job(folder / "model", folder, case.convention, **drop)
            continue
        back, odd = _loaded(loader, _through_a_job(folder / "model", folder, case.convention, **drop))
        assert not odd, name
        assert held.keys() == back.keys(), name
        assert [key for key in held if not torch.equal(held[key], back[key])] == [], name


@pytest.mark.parametrize("case", FAMILIES.values(), ids=[" ".join(family) for family in FAMILIES])
def test_what_the_library_misses_is_refused(case: ServedCase, tmp_path: Path) -> None:
    """One class of tensors after the other is taken out, of all layers."""
    case.export(tmp_path / "x/export")
    name, loader, config = next(_variants(tmp_path / "x/export"))
    _made(loader, config, tmp_path / name, name)
    whole = tensors_of(tmp_path / name)
    options = _without_mtp(tmp_path / name)
    kinds = {"".join("*" if part.isdigit() else f".{part}" for part in key.split(".")) for key in whole}
    (tmp_path / "less").mkdir()
    text = (tmp_path / name / "config.json").read_text()
    (tmp_path / "less/config.json").write_text(text)
    assert json.loads(text)["model_type"]
    for kind in sorted(kinds):
        left = {
            key: tensor
            for key, tensor in whole.items()
            if "".join("*" if part.isdigit() else f".{part}" for part in key.split(".")) != kind
        }
        write_safetensors(tmp_path / "less/model.safetensors", left)
        _, odd = _loaded(loader, tmp_path / "less")
        if odd:
            with pytest.raises(ReshardError):
                paddle_reshard.plan(tmp_path / "less", format="flex", convention=case.convention, **options)
