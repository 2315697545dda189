"""The model card of an export (``--card``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from tests.conftest import case_directory

HOSTILE = 'x"\n---\nlicense: mit\n<script>`a`</script>\x1b[31m|'
DONOR_CARD = """---
license: other
license_name: 'some-license'
license_link: http://a b
base_model: x
---
license: no
"""


def checkpoint(case: str) -> Path:
    return next(case_directory(case).glob("checkpoint-*"))


def header_and_text(card: str) -> tuple[dict[str, Any], str]:
    before, header, text = card.split("---\n", 2)
    assert not before
    return yaml.safe_load(header), text


def test_a_card_names_source_topology_step_and_manifest(tmp_path: Path) -> None:
    source = checkpoint("dense/mp2sh2_s1v2_meta_mid")
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", card=True)
    header, text = header_and_text((tmp_path / "hf/README.md").read_text())
    assert header == {"library_name": "transformers"}
    for line in (
        "- source: `hybrid`",
        "- topology: `tp=2,sharding=2`",
        "- sharding: `stage1v2`",
        "- step: `3`",
    ):
        assert line in text.splitlines()
    assert "- state: `param`" in text and "- dtype: `as trained`" in text
    assert paddle_reshard.__version__ in text
    assert str(source.parent) not in text
    assert paddle_reshard.check(tmp_path / "hf").intact
    plain = paddle_reshard.convert(source, tmp_path / "plain", format="huggingface")
    assert not (tmp_path / "plain/README.md").exists()
    assert "card" not in json.dumps(plain.plan.facts())


def test_a_hostile_model_says_nothing_but_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("dense/single"), source, copy_function=shutil.copyfile)
    (source / "README.md").write_text("mine")
    rules = tmp_path / "rules.json"
    path = Path(paddle_reshard.__file__).parent / "pipeline/model/rules/llama.paddleformers.json"
    rules.write_text(json.dumps({**json.loads(path.read_text()), "model_types": [HOSTILE]}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": HOSTILE}))
    report = paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", card=True, rules=rules)
    header, text = header_and_text((tmp_path / "hf/README.md").read_text())
    assert header == {"library_name": "transformers"}
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title == "# ``" + HOSTILE.replace("\n", " ").replace("\x1b", " ") + "``"
    assert "replaced by the model card" in dict(report.plan.targets[0].not_carried)["README.md"]


def test_the_donor_gives_its_licence_and_its_id(tmp_path: Path) -> None:
    source = checkpoint("dense/single")
    donor = tmp_path / "models--org--the-model/snapshots/0123"
    paddle_reshard.convert(source, donor, format="huggingface")
    (donor / "README.md").write_text(DONOR_CARD)
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", card=True, like=donor)
    header, _ = header_and_text((tmp_path / "hf/README.md").read_text())
    assert header == {
        "library_name": "transformers",
        "base_model": "org/the-model",
        "license": "other",
        "license_name": "some-license",
    }
    with pytest.raises(UsageError, match="card: True or False is expected, not str"):
        paddle_reshard.plan(source, {tmp_path / "t": {"format": "huggingface", "card": "yes"}})  # type: ignore[dict-item]
    paddle_reshard.convert(source, tmp_path / "without", format="huggingface", like=donor)
    assert not (tmp_path / "without/README.md").exists()


def test_cards_are_of_models_for_the_hub_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--card"):
        paddle_reshard.plan(checkpoint("dense/single"), tmp_path / "t", to="tp=1", card=True)
    with pytest.raises(UnsupportedError, match="--card is not supported for LoRA"):
        paddle_reshard.plan(checkpoint("states/lora_pp2"), tmp_path / "t", format="huggingface", card=True)


@pytest.mark.parametrize("allowed", [(), ("hf",)])
def test_a_target_on_the_hub_is_refused_with_what_to_do(allowed: tuple[str, ...]) -> None:
    told = "not supported.*hf upload org/model FOLDER"
    with pytest.raises(UnsupportedError, match=told):
        paddle_reshard.plan(
            checkpoint("dense/single"), "hf://org/model/", format="huggingface", allow_scheme=allowed
        )
