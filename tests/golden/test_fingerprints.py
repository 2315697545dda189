"""Fingerprints of real checkpoints: those of what each training run held in memory, whatever the files look like."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from safetensors import deserialize

import paddle_reshard
from paddle_reshard import FormatError, TargetError, UsageError
from tests import oracle
from tests.conftest import COMMITTED, case_directory
from tests.golden.test_every_format import config_of, folder_of

CASE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema"
SOURCE = CASE / "checkpoint-3"
NAMES = {
    "w_0": "master_weight", "moment1_0": "moment1", "moment2_0": "moment2",
    "beta1_pow_acc_0": "beta1_pow_acc", "beta2_pow_acc_0": "beta2_pow_acc", "ema_w_0": "ema_master_weight",
    "ema": "ema_param",
}  # fmt: skip
CASES = (
    "dense/single", "dense/mp2pp2sh2_s1v1_meta_ema", "dense/fc_mp2pp2", "dense/nlp_uc_mp2pp2", "moe/ep2_mp2",
)  # fmt: skip


def identity(name: str, keys: set[str]) -> tuple[str, str]:
    """Key and state of a tensor of a truth."""
    key, _, state = name.rpartition(".")
    return (key, NAMES[state]) if state in NAMES and key in keys else (name, "param")


def of_truth(folder: Path) -> dict[tuple[str, str], int]:
    truth = oracle.read_truth(folder / "truth.safetensors")
    keys = set(truth)
    return {identity(name, keys): crc64nvme(values.tobytes()) for name, values in truth.items()}


def of(report: paddle_reshard.FingerprintReport) -> dict[tuple[str, str], int]:
    found = report.fingerprints
    return {(t.key, t.state): int(c) for t, c in zip(found.tensors, found.checksums, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_fingerprints_are_those_of_the_tensors_in_memory(case: str) -> None:
    report = paddle_reshard.fingerprint(folder_of(case), config=config_of(case))
    found, truth = of(report), of_truth(case_directory(case))
    tied = {key for key in truth if key not in found}
    assert {key: truth[key] for key in truth.keys() - tied} == found
    assert all(key[0] == "lm_head.weight" for key in tied)


def in_hybrid(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Key, state and bytes of every tensor, as ``paddle.load`` has them."""
    model = oracle.load_with_paddle(folder / "model_state.pdparams")
    keys = {name: key for key, name in model.pop(oracle.NAME_TABLE).items()}
    optimizer = oracle.load_with_paddle(folder / "optimizer.pdopt")
    for key, array in model.items():
        yield key, "param", np.asarray(array).tobytes()
    for name, array in optimizer.pop("master_weights").items():
        yield keys[name], "master_weight", np.asarray(array).tobytes()
    for name, array in optimizer.items():
        parameter, _, state = name.partition("_fp32_master_0_")
        if state:
            yield keys[parameter], NAMES[state], np.asarray(array).tobytes()


def in_flex(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    for path in sorted(folder.glob("*/*.distcp")):
        held = oracle.load_with_paddle(path)
        ema = "ema_" if path.parent.name == "ema_state" else ""
        held.pop(oracle.NAME_TABLE, None)
        for name, array in held.items():
            key, _, state = name.rpartition(".")
            known = NAMES.get(state)
            yield (key if known else name), ema + (known or "param"), np.asarray(array).tobytes()


def in_unified(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """As the library of safetensors has them."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(path.read_bytes()):
            key, _, state = name.partition("/")
            own = "master_weight" if path.name.startswith("master_weights") else "param"
            yield key, NAMES[state] if state else own, bytes(entry["data"])


@pytest.mark.parametrize(
    ("held", "options", "count"),
    [
        (in_hybrid, {"to": "tp=1"}, 39 * 6),
        (in_flex, {"format": "flex"}, 39 * 7),
        (in_unified, {"format": "unified", "drop": ["ema"]}, 39 * 6),
    ],
    ids=["hybrid", "flex", "unified"],
)
def test_three_lines_with_another_library_check_a_tensor(
    held: Any, options: Any, count: int, tmp_path: Path
) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "made", **options)
    found = of(paddle_reshard.fingerprint(SOURCE))
    checked = 0
    for key, state, content in held(tmp_path / "made"):
        assert crc64nvme(content) == found[key, state], (key, state)
        checked += 1
    assert checked == count


def tree(leaves: list[bytes]) -> bytes:
    """The hash of RFC 9162, as its recursive definition has it."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + tree(leaves[:half]) + tree(leaves[half:])).digest()


def test_the_root_follows_from_the_lines_of_the_written_file(tmp_path: Path) -> None:
    written = tmp_path / "fingerprints.json"
    report = paddle_reshard.fingerprint(SOURCE, output=written)
    lines = [line.strip().rstrip(",") for line in written.read_text().splitlines() if line.startswith("  [")]
    assert len(lines) == 273
    assert lines == sorted(lines, key=lambda line: json.loads(line)[:2])
    assert report.root == "sha256:" + tree([line.encode() for line in lines]).hex()
    of_param = [line.encode() for line in lines if json.loads(line)[1] == "param"]
    assert report.fingerprints.states["param"] == "sha256:" + tree(of_param).hex()


def test_a_target_is_verified_against_the_fingerprints_of_its_source(tmp_path: Path) -> None:
    written = tmp_path / "fingerprints.json"
    paddle_reshard.fingerprint(SOURCE, output=written)
    whole, model = tmp_path / "whole", tmp_path / "model"
    paddle_reshard.convert(SOURCE, {whole: {"format": "flex"}, model: {"format": "huggingface"}})
    assert paddle_reshard.verify(whole, against=written)
    assert len(paddle_reshard.verify(model, against=written).differences) == 273 - 39
    assert paddle_reshard.verify(model, against=written, subset=True)
    assert paddle_reshard.verify(model, against=written, states=["param"])

    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    differs = paddle_reshard.verify(model, against=written, states=["param"])
    assert len(differs.differences) == 1
    assert "crc64nvme" in differs.differences[0].detail

    with pytest.raises(UsageError, match="either a second checkpoint or --against"):
        paddle_reshard.verify(whole, model, against=written)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    events: list[object] = []
    with pytest.raises(TargetError, match=r"the folder .*nowhere does not exist"):
        paddle_reshard.fingerprint(SOURCE, output=tmp_path / "nowhere" / "f.json", observe=events.append)
    assert not events


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (lambda text: text.replace('"root": "sha256:', '"root": "sha256:0', 1), "the root of its tensors is"),
        (lambda text: text.replace("bfloat16", "brainfloat", 1), "dtype 'brainfloat' is not supported"),
        (lambda text: text.replace('"crc64nvme"', '"md5"', 1), "algorithm"),
        (lambda text: text[:-9], "not valid JSON"),
        (lambda text: text.replace('"generation": 1', '"generation": 7'), "generation 7"),
        (lambda text: text.replace("paddle-reshard fingerprints", "else"), "not a document"),
        (lambda text: "\n".join(sorted(text.splitlines(), reverse=True)), "not valid JSON"),
        (lambda text: re.sub(r"(\n  \[.*)(\n  \[.*)", r"\2\1", text, count=1), "not sorted"),
    ],
)
def test_damaged_fingerprints_are_refused(damage: object, refusal: str, tmp_path: Path) -> None:
    written = tmp_path / "fingerprints.json"
    paddle_reshard.fingerprint(SOURCE, output=written)
    written.write_text(damage(written.read_text()))  # type: ignore[operator]
    with pytest.raises(FormatError, match=refusal):
        paddle_reshard.verify(SOURCE, against=written)


def test_little_memory_gives_the_same_root() -> None:
    from paddle_reshard.pipeline.core.events import ignore_events
    from paddle_reshard.pipeline.examine.fingerprint import fingerprint_with
    from paddle_reshard.pipeline.examine.reading import Reader
    from paddle_reshard.pipeline.planning.settings import PlanSizes

    small = PlanSizes(group_bytes=8192, pass_bytes=2048)  # most tensors are larger
    found = fingerprint_with(str(SOURCE), Reader.of({"memory": "256MiB"}, ignore_events, small))
    assert found.root == paddle_reshard.fingerprint(SOURCE).root


def test_fingerprints_replace_a_file_whole_and_go_through_links(tmp_path: Path) -> None:
    written, link = tmp_path / "f.json", tmp_path / "link"
    written.write_text("before")
    written.chmod(0o444)  # what is replaced need not be writable
    report = paddle_reshard.fingerprint(SOURCE, output=written)
    link.symlink_to(written)
    written.chmod(0o644)
    paddle_reshard.fingerprint(SOURCE, output=link)
    assert link.is_symlink()
    assert json.loads(written.read_text())["root"] == report.root
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.json", "link"]


def test_against_fingerprints_other_copies_are_compared_too(tmp_path: Path) -> None:
    """Every rank of tensor parallelism stores the norms."""
    two, written = tmp_path / "two", tmp_path / "fingerprints.json"
    paddle_reshard.convert(SOURCE, two, to="tp=2", sharding_strategy="none")
    paddle_reshard.fingerprint(SOURCE, output=written)
    file = two / "optimizer.tp01.pdopt"
    moment = oracle.unpickle(file)["create_parameter_0.w_0_fp32_master_0_moment1_0"][1].tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(moment)] ^= 1
    file.write_bytes(content)
    (found,) = paddle_reshard.verify(two, against=written).differences
    assert "optimizer.tp00.pdopt and " in found.detail
    assert paddle_reshard.verify(two, against=written, replicas="first")
