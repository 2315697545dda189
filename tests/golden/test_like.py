"""An export takes what training has not kept from the model that it began from, and is as whole as that.

The donor is an export of a real job that trained multi-token prediction too, with other values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError, UnsupportedError, UsageError
from tests.conftest import checkpoint_of
from tests.golden.unified_cases import read as _read
from tests.golden.unified_cases import read_file, write_safetensors

MTP = "model.layers.2."
TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}', "chat_template.jinja": b"{{ 1 }}"}
BIAS = "*.e_score_correction_bias"


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a job without multi-token prediction, on four cards."""
    made = tmp_path_factory.mktemp("like") / "checkpoint-3"
    case = checkpoint_of("families/deepseek_v3_mtp_single")
    paddle_reshard.convert(case, made, to="pp=2,sharding=2", drop=["mtp"])
    return made


@pytest.fixture(scope="session")
def whole_donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the same model with other values, and with multi-token prediction."""
    donor = tmp_path_factory.mktemp("like") / "donor"
    case = checkpoint_of("families/deepseek_v3_mtp_single")
    paddle_reshard.convert(case, donor, format="huggingface", max_shard_size="60KB")
    (donor / "paddle_reshard.json").unlink()
    for path in donor.glob("*.safetensors"):
        held = read_file(path).items()
        write_safetensors(path, {key: (dtype, shape, data[::-1]) for key, (dtype, shape, data) in held})
    for name, content in {**TOKENIZER, "modeling_deepseek.py": b"1/0", "README.md": b"a donor"}.items():
        (donor / name).write_bytes(content)
    changed = {**_config(donor), "auto_map": {"AutoModel": "modeling_deepseek.Model"}, "first_seen": 1}
    (donor / "config.json").write_text(json.dumps(changed))
    return donor


@pytest.fixture
def donor(whole_donor: Path, tmp_path: Path) -> Path:
    """A copy that may be changed: one file, without an index."""
    folder = tmp_path / "donor"
    shutil.copytree(
        whole_donor, folder, ignore=shutil.ignore_patterns("model*"), copy_function=shutil.copyfile
    )
    write_safetensors(folder / "model.safetensors", _read(whole_donor))
    return folder


def _completed(source: Path, target: Path, donor: Path, **options: Any) -> Any:
    return paddle_reshard.convert(source, target, format="huggingface", like=donor, **options).plan


def test_what_training_has_not_kept_is_taken_and_named(
    source: Path, whole_donor: Path, tmp_path: Path
) -> None:
    planned = _completed(source, tmp_path / "hf", whole_donor)
    paddle_reshard.convert(source, tmp_path / "alone", format="huggingface")
    theirs, ours, made = _read(whole_donor), _read(tmp_path / "alone"), _read(tmp_path / "hf")
    assert {key: entry[1] for key, entry in made.items()} == {key: entry[1] for key, entry in theirs.items()}
    assert {key: made[key] for key in ours} == ours != {key: theirs[key] for key in ours}
    mtp = {key: entry for key, entry in theirs.items() if key.startswith(MTP)}
    assert {key: made[key] for key in mtp} == mtp
    assert sorted([*ours, *mtp]) == sorted(made)

    assert {name: (tmp_path / "hf" / name).read_bytes() for name in TOKENIZER} == TOKENIZER
    assert not (tmp_path / "hf/modeling_deepseek.py").exists()
    config = _config(tmp_path / "hf")
    assert config == {**_config(tmp_path / "alone"), "num_nextn_predict_layers": 1, "first_seen": 1}

    told = dict(planned.facts())["like"]
    for word in (MTP, f"({len(mtp)})", *TOKENIZER, "first_seen of config.json", str(whole_donor)):
        assert word in told
    manifest = json.loads((tmp_path / "hf/paddle_reshard.json").read_text())
    assert sorted(manifest["like"]["tensors"]) == sorted(mtp)
    assert manifest["like"] == {
        "location": str(whole_donor),
        "tensors": manifest["like"]["tensors"],
        "files": sorted(TOKENIZER),
        "config": ["first_seen", "num_nextn_predict_layers"],
    }
    assert paddle_reshard.verify(tmp_path / "hf").equal


def test_what_an_engine_would_lack_is_named_without_a_donor(
    source: Path, whole_donor: Path, tmp_path: Path
) -> None:
    (alone,) = paddle_reshard.plan(source, tmp_path / "hf", format="huggingface").targets
    assert [r for r in alone.remarks if "no tokenizer beside the weights" in r and "--like DIR" in r]
    (completed,) = paddle_reshard.plan(
        source, tmp_path / "hf", format="huggingface", like=whole_donor
    ).targets
    assert not [remark for remark in completed.remarks if "--like" in remark]


def test_buffers_that_the_trainer_lost_are_taken_if_they_may_be_missing(tmp_path: Path) -> None:
    source, donor = checkpoint_of("moe/glm4moe_ep2_sh2_s1v2_meta_ema"), tmp_path / "donor"
    paddle_reshard.convert(checkpoint_of("moe/glm4moe_single"), donor, format="huggingface")
    with pytest.raises(ReshardError, match="e_score_correction_bias"):
        _completed(source, tmp_path / "hf", donor)
    _completed(source, tmp_path / "hf", donor, allow_missing=[BIAS], dtype="float32")
    theirs, made = _read(donor), _read(tmp_path / "hf")
    assert made.keys() == theirs.keys()
    lost = [key for key in theirs if key.endswith("e_score_correction_bias")]
    assert len(lost) >= 2
    assert all(made[key] == theirs[key] for key in lost)
    assert {tag for tag, _, _ in made.values()} == {"F32"}


def test_the_vocabulary_has_the_size_of_the_donor_if_that_is_asked_for(tmp_path: Path) -> None:
    source = checkpoint_of("mp2_tied")
    paddle_reshard.convert(source, tmp_path / "donor", format="huggingface", vocab_size=160)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: shape \(128, 64\).*--vocab-size"):
        _completed(source, tmp_path / "hf", tmp_path / "donor")
    _completed(source, tmp_path / "hf", tmp_path / "donor", vocab_size=160)
    assert _read(tmp_path / "hf") == _read(tmp_path / "donor")


def test_a_tied_head_is_not_taken(tmp_path: Path) -> None:
    """In the donor it is a copy of a word embedding that has been trained since."""
    source, donor = checkpoint_of("mp2_tied"), tmp_path / "donor"
    paddle_reshard.convert(source, donor, format="huggingface")
    whole = _read(donor)
    head = whole["model.embed_tokens.weight"]
    write_safetensors(donor / "model.safetensors", {**whole, "lm_head.weight": head})
    _completed(source, tmp_path / "hf", donor)
    assert _read(tmp_path / "hf") == whole


def _without(key: str) -> Callable[[Path], None]:
    def change(donor: Path) -> None:
        whole = {k: entry for k, entry in _read(donor).items() if k != key}
        write_safetensors(donor / "model.safetensors", whole)

    return change


def _with(key: str, shape: tuple[int, ...]) -> Callable[[Path], None]:
    def change(donor: Path) -> None:
        size = 4
        for extent in shape:
            size *= extent
        write_safetensors(donor / "model.safetensors", {**_read(donor), key: ("F32", shape, bytes(size))})

    return change


def _configured(**entries: Any) -> Callable[[Path], None]:
    return lambda donor: (
        (donor / "config.json").write_text(json.dumps({**_config(donor), **entries})) and None
    )


def _pickled(donor: Path) -> None:
    (donor / "model.safetensors").unlink()
    (donor / "pytorch_model.bin").write_bytes(b"")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without(NORM), CheckpointError, "model.norm.weight: in the export, but not in .*donor"),
        (_with(NORM, (63,)), CheckpointError, r"norm.weight: shape \(32,\) in the export and \(63,\) in"),
        (
            _with("model.layers.0.mlp.experts.7.up_proj.weight", (4, 4)),
            CheckpointError,
            r"experts\.7\.up_proj\.weight: .*donor, but missing from the checkpoint; it is not copied",
        ),
        (_with("model.{0.__class__}", (4,)), CheckpointError, "with a key that cannot be copied"),
        (_configured(num_hidden_layers=4), CheckpointError, "num_hidden_layers is 2 in the checkpoint and 4 in"),
        (_configured(model_type="llama"), CheckpointError, "model_type is 'deepseek_v3' in the checkpoint"),
        (_configured(quantization_config={"quant_method": "fp8"}), UnsupportedError, "are quantised"),
        (_pickled, CheckpointError, "needs the safetensors files of a Hugging Face model"),
    ],
)  # fmt: skip
def test_a_donor_of_another_model_is_refused(
    change: Callable[[Path], None],
    error: type[Exception],
    message: str,
    source: Path,
    donor: Path,
    tmp_path: Path,
) -> None:
    change(donor)
    with pytest.raises(error, match=message):
        _completed(source, tmp_path / "hf", donor)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "tp=2"}, "--like applies only to --format huggingface"),
        ({"format": "huggingface", "drop": ["mtp"]}, "--like would take what --drop mtp drops"),
    ],
)
def test_requests_that_contradict_themselves(
    options: dict[str, Any], message: str, source: Path, whole_donor: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        paddle_reshard.plan(source, tmp_path / "hf", like=whole_donor, **options)


def test_a_target_inside_the_donor_is_refused(source: Path, donor: Path) -> None:
    with pytest.raises(ReshardError, match="donor"):
        _completed(source, donor / "hf", donor)
    assert not (donor / "hf").exists()


def test_a_link_that_leads_out_of_the_donor_is_refused(source: Path, donor: Path, tmp_path: Path) -> None:
    (donor / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (donor / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ReshardError, match=r"model\.safetensors"):
        _completed(source, tmp_path / "hf", donor)
    _completed(source, tmp_path / "hf", donor, allow_links=True)
