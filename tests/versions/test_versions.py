"""Versions are what engines read: an independent receiver makes of them what a direct export holds."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError, TargetError, UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.storage.local.folders import temporary_folder
from tests.conftest import REPO, case_directory
from tests.golden.lora_base import write_base
from tests.jobs.command import run_here
from tests.versions.receiver import receive, tensors_of

LLAMA = "dense/mp2sh2_s1v2_meta_mid"
INDEX = "model.safetensors.index.json"
FRAMES = "model-00000-of-00001.safetensors"


def checkpoint(case: str) -> Path:
    return next(case_directory(case).glob("checkpoint-*"))


def step(export: Path, target: Path, seed: int, share: float = 0.02) -> Path:
    """An export with a share of all elements one unit in the last place away, and some tensors as they were."""
    random = np.random.default_rng(seed)
    shutil.copytree(export, target)
    (target / MANIFEST).unlink(missing_ok=True)
    for path in target.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        elements = np.frombuffer(data, "<u2", offset=8 + int.from_bytes(data[:8], "little"))
        elements[: len(elements) // 2][random.random(len(elements) // 2) < share] += 1
        path.write_bytes(data)
    return target


def name(number: int) -> str:
    return f"weight_v{number:06}"


# -------------------------------------------------------------------------------------------------- what is published


CHAINS: dict[str, dict[str, Any]] = {
    "dense/mp2sh2_s1v2_meta_mid": {"max_shard_size": "300KB"},
    "dense/single_tied": {},
    "moe/ep2_sh2_s1v2_meta_ema": {"dtype": "float16", "drop": ["ema"]},
}


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_of_ten_versions_is_what_direct_exports_hold(
    case: str, encoding: str, tmp_path: Path
) -> None:
    """A real checkpoint, then steps of it, then a full version, published and received."""
    source, options = checkpoint(case), CHAINS[case]
    wanted = []
    for number in range(1, 11):
        report = paddle_reshard.publish(
            source,
            tmp_path / "versions",
            encoding=encoding,
            checksum=("adler32", "xxh3-128", "blake3")[number % 3],
            full_every=7,
            **options,
        )
        assert (report.version, report.already) == (number, False)
        assert bool(report.reason) == (number in (1, 9))
        direct = tmp_path / "direct" / str(number)
        paddle_reshard.convert(source, direct, format="huggingface", **options)
        wanted.append(tensors_of(direct))
        source = step(direct, tmp_path / "steps" / str(number), number)
    assert (tmp_path / "versions" / "latest").read_text() == name(10)
    for first, last in ((1, 1), (1, 8), (9, 10)):
        receive(tmp_path / "versions", tmp_path / f"engine-{last}", first, last)
        assert tensors_of(tmp_path / f"engine-{last}") == wanted[last - 1]
    local = tmp_path / "local"
    for number in (1, 2, 6, 8, 10, 3):
        pulled = paddle_reshard.pull(tmp_path / "versions", local, version=number)
        assert pulled.version == number
        assert tensors_of(local) == wanted[number - 1]
        assert paddle_reshard.check(local).intact
    unchanged = {key for key, data in wanted[0].items() if wanted[1][key] == data}
    index = json.loads((tmp_path / "versions" / name(2) / INDEX).read_text())
    assert index["weight_map"].keys() == wanted[0].keys() - unchanged
    assert unchanged


def test_checkpoints_of_any_topology_and_their_averages_are_published(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    source = REPO / "tests/golden/cases/mp2pp2sh2_s1v2_meta_ema/checkpoint-3"
    paddle_reshard.publish(source, versions)
    other = tmp_path / "one-card"
    paddle_reshard.convert(source, other, to="tp=1")
    same = paddle_reshard.publish(other, versions)
    assert (same.version, same.changed_tensors, same.version_bytes < 1000) == (2, 0, True)
    assert not (versions / name(2) / FRAMES).exists()
    assert json.loads((versions / name(2) / INDEX).read_text())["weight_map"] == {}
    average = paddle_reshard.publish(other, versions, state="ema")
    assert average.changed_tensors > 30
    receive(versions, tmp_path / "engine", 1, 3)
    paddle_reshard.convert(source, tmp_path / "direct", format="huggingface", state="ema")
    assert tensors_of(tmp_path / "engine") == tensors_of(tmp_path / "direct")


def test_a_merged_adapter_is_a_delta_of_its_base(tmp_path: Path) -> None:
    base = write_base("lora_single", tmp_path / "base", "pt")
    versions = tmp_path / "versions"
    adapter = checkpoint("states/lora_single")
    first = paddle_reshard.publish(base, versions)
    merged = paddle_reshard.publish(adapter, versions, merge_into=base)
    paddle_reshard.convert(adapter, tmp_path / "direct", format="huggingface", merge_into=base)
    assert (first.reason, merged.reason) == ("the first version", "")
    receive(versions, tmp_path / "engine", 1, 2)
    assert tensors_of(tmp_path / "engine") == tensors_of(tmp_path / "direct")
    assert 0 < merged.changed_tensors < merged.tensors


def test_another_model_is_a_full_version(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    paddle_reshard.publish(checkpoint("dense/mp2"), versions)
    tied = paddle_reshard.publish(checkpoint("dense/mp2_tied"), versions)
    assert (tied.version, tied.reason) == (2, "lm_head.weight is gone")
    smaller = paddle_reshard.publish(checkpoint("dense/mp2_tied"), versions, dtype="float32")
    assert "was BF16" in smaller.reason
    receive(versions, tmp_path / "engine", 3, 3)
    shutil.copytree(versions / name(3), tmp_path / "new")
    settings = json.loads((tmp_path / "new" / "config.json").read_text())
    (tmp_path / "new" / "config.json").write_text(json.dumps({**settings, "rope_theta": 7.0}))
    (tmp_path / "new" / MANIFEST).unlink()
    assert paddle_reshard.publish(tmp_path / "new", versions).reason == "config.json has changed"


def test_a_checkpoint_is_published_once(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    source = checkpoint("dense/single")
    assert not paddle_reshard.publish(source, versions).already
    (versions / "latest").unlink()
    again = paddle_reshard.publish(source, versions)
    assert (again.version, again.already) == (1, True)
    assert (versions / "latest").read_text() == name(1)
    assert [path.name for path in sorted(versions.iterdir())] == ["latest", name(1)]
    assert not paddle_reshard.publish(source, versions, dtype="float16").already


@pytest.mark.parametrize("option", ["merge_into", "fill", "like"])
def test_what_a_change_brings_belongs_to_what_is_published(option: str, tmp_path: Path) -> None:
    """The same adapter and the same base are published once; another base under the same name is another version."""
    versions, brought = tmp_path / "versions", tmp_path / "brought"
    if option == "merge_into":
        source = checkpoint("states/lora_single")
        write_base("lora_single", brought, "pt")
    else:
        source = checkpoint("dense/single")
        paddle_reshard.convert(source, brought, format="huggingface")
    options: dict[str, Any] = {option: brought}
    for number, already in ((1, False), (1, True)):
        report = paddle_reshard.publish(source, versions, **options)
        assert (report.version, report.already) == (number, already)
    step(brought, tmp_path / "moved", 1)
    shutil.rmtree(brought)
    (tmp_path / "moved").rename(brought)
    report = paddle_reshard.publish(source, versions, **options)
    assert (report.version, report.already) == (2, False)
    assert (report.changed_tensors > 0) == (option == "merge_into")


def test_object_stores(tmp_path: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    source = checkpoint("dense/single")
    paddle_reshard.convert(source, tmp_path / "one", format="huggingface")
    for number, place in enumerate((source, step(tmp_path / "one", tmp_path / "two", 1)), 1):
        assert paddle_reshard.publish(place, f"{root}/versions").version == number
    memory = fsspec.filesystem("memory")
    memory.get(f"{root}/versions/", f"{tmp_path}/fetched/", recursive=True)
    receive(tmp_path / "fetched", tmp_path / "engine", 1, 2)
    assert tensors_of(tmp_path / "engine") == tensors_of(tmp_path / "two")
    assert (tmp_path / "fetched" / "latest").read_text() == name(2)
    paddle_reshard.pull(f"{root}/versions", tmp_path / "local")
    assert tensors_of(tmp_path / "local") == tensors_of(tmp_path / "two")


def test_an_export_is_private_and_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user puts where an export is made next must not be published."""
    temporary, theirs = tmp_path / "temporary", tmp_path / "theirs"
    temporary.mkdir()
    theirs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    versions, modes = f"memory://{uuid.uuid4().hex}/versions", set[int]()
    source = checkpoint("dense/single")
    paddle_reshard.convert(source, tmp_path / "one", format="huggingface")
    new = step(tmp_path / "one", tmp_path / "two", 1)
    paddle_reshard.publish(source, versions)

    def look(_: object) -> None:
        modes.update(path.stat().st_mode & 0o777 for path in temporary.iterdir())

    paddle_reshard.publish(new, versions, observe=look)
    assert modes == {0o700}
    assert not list(temporary.iterdir())
    temporary_folder(f"export {versions}").symlink_to(theirs)
    with pytest.raises(TargetError, match="belongs to a different user; set TMPDIR"):
        paddle_reshard.publish(step(new, tmp_path / "three", 2), versions)
    assert not list(theirs.iterdir())


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full version and four deltas: three of one encoding, one of the other."""
    folder = tmp_path_factory.mktemp("published")
    source = checkpoint(LLAMA)
    for number in range(1, 6):
        encoding = "overwrite" if number == 4 else "xor"
        paddle_reshard.publish(source, folder / "versions", encoding=encoding)
        direct = folder / f"direct-{number}"
        paddle_reshard.convert(source, direct, format="huggingface")
        source = step(direct, folder / f"step-{number}", number)
    return folder


def change_bit(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


def change_head(versions: Path, number: int, **entries: str) -> None:
    path = versions / name(number) / INDEX
    index = json.loads(path.read_text())
    index["metadata"] |= entries
    path.write_text(json.dumps(index))


def foreign_overwrite(versions: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the frame of the first tensor of version 4."""
    import zstandard

    path = versions / name(4) / FRAMES
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    content, at = b"", 0
    for key, entry in entries.items():
        if key != "__metadata__":
            first, last = entry["data_offsets"]
            frame = data[8 + size + first : 8 + size + last]
            if at == 0:
                plain = zstandard.ZstdDecompressor().decompress(frame)
                frame = zstandard.ZstdCompressor().compress(change(plain))
            content += frame
            entry["data_offsets"], entry["shape"] = [at, at + len(frame)], [len(frame)]
            at += len(frame)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a frame": (lambda v: change_bit(v / name(3) / FRAMES, 0.9), name(3)),
    "a bit of a full version": (
        lambda v: change_bit(v / name(1) / "model.safetensors", 0.1),
        "not what it was made",
    ),
    "a bit of a header": (lambda v: change_bit(v / name(3) / FRAMES, 0.01), FRAMES),
    "a frame that ends early": (
        lambda v: (v / name(5) / FRAMES).write_bytes((v / name(5) / FRAMES).read_bytes()[:-9]),
        FRAMES,
    ),
    "a version that is missing": (lambda v: shutil.rmtree(v / name(3)), rf"{name(3)}: is missing"),
    "another order": (lambda v: change_head(v, 3, base_version="000001"), "base_version is '000001'"),
    "another number": (lambda v: change_head(v, 3, version="000004"), "version is '000004'"),
    "an unknown encoding": (lambda v: change_head(v, 3, delta_encoding="add"), "'xor' or 'overwrite'"),
    "an unknown compression": (lambda v: change_head(v, 3, compression_format="lz4"), "'zstd'"),
    "two versions exchanged": (
        lambda v: (
            (v / name(2)).rename(v / "x"),
            (v / name(3)).rename(v / name(2)),
            (v / "x").rename(v / name(3)),
        ),
        "version is",
    ),
    "a pointer to nothing": (lambda v: (v / "latest").write_text(name(9)), "is not there"),
    "a pointer that is no version": (
        lambda v: (v / "latest").write_text("../x"),
        "names no version|no version like",
    ),
    "positions beyond the tensor": (
        lambda v: foreign_overwrite(v, lambda p: p[:4] + b"\xff\xff\xff\xff" + p[8:]),
        "do not ascend|changes byte",
    ),
    "more positions than bytes": (
        lambda v: foreign_overwrite(v, lambda p: b"\xff" * 4 + p[4:]),
        "changes 4294967295",
    ),
    "values that are missing": (lambda v: foreign_overwrite(v, lambda p: p[:-1]), "too early"),
    "values that are too many": (
        lambda v: foreign_overwrite(v, lambda p: p + b"x"),
        "more than the tensor needs",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_versions_are_refused_and_the_copy_stays(what: str, published: Path, tmp_path: Path) -> None:
    versions, local = tmp_path / "versions", tmp_path / "local"
    shutil.copytree(published / "versions", versions)
    if what != "a bit of a full version":
        paddle_reshard.pull(versions, local, version=1)
    damage, words = DAMAGES[what]
    damage(versions)
    with pytest.raises(CheckpointError, match=words):
        paddle_reshard.pull(versions, local)
    if local.exists():
        assert tensors_of(local) == tensors_of(published / "direct-1")
        assert paddle_reshard.check(local).intact


def test_the_newest_version_is_published_on_what_it_is_made_of_only(published: Path, tmp_path: Path) -> None:
    """A publisher reads the version before, and sees when it is damaged."""
    versions = tmp_path / "versions"
    shutil.copytree(published / "versions", versions)
    change_bit(versions / name(3) / FRAMES, 0.9)
    with pytest.raises(CheckpointError, match=name(3)):
        paddle_reshard.publish(published / "step-5", versions)
    assert (versions / "latest").read_text() == name(5)
    assert not (versions / name(6)).exists()


def test_a_copy_that_somebody_has_changed_is_not_taken_for_a_version(published: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    paddle_reshard.pull(published / "versions", local, version=2)
    index = json.loads((published / "versions" / name(3) / INDEX).read_text())
    header = (local / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    entries = json.loads(header[8 : 8 + size])
    for key in (next(iter(index["weight_map"])), next(k for k in entries if k not in index["weight_map"])):
        if key != "__metadata__":
            shutil.rmtree(local)
            paddle_reshard.pull(published / "versions", local, version=2)
            data = bytearray((local / "model.safetensors").read_bytes())
            data[8 + size + entries[key]["data_offsets"][0]] ^= 1
            (local / "model.safetensors").write_bytes(data)
            with pytest.raises(CheckpointError, match=key):
                paddle_reshard.pull(published / "versions", local, version=3)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("file", "change"),
    [
        (
            "config.json",
            lambda path: path.write_bytes(path.read_bytes().replace(b"vocab_size", b"vocab_sizf")),
        ),
        ("config.json", lambda path: path.write_bytes(path.read_bytes() + b" ")),
        ("config.json", Path.unlink),
        ("notes.txt", lambda path: path.write_text("mine")),
    ],
    ids=["changed", "longer", "removed", "added"],
)
def test_small_files_of_a_copy_must_be_those_that_were_pulled(
    file: str, change: Callable[[Path], object], version: int, published: Path, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    paddle_reshard.pull(published / "versions", local, version=2)
    change(local / file)
    left = {path.name: path.read_bytes() for path in local.iterdir()}
    with pytest.raises(ReshardError, match=file):
        paddle_reshard.pull(published / "versions", local, version=version)
    assert {path.name: path.read_bytes() for path in local.iterdir()} == left


@pytest.mark.parametrize("version", [2, 3])
def test_versions_that_were_published_anew_are_not_those_of_the_copy(
    version: int, published: Path, tmp_path: Path
) -> None:
    """A run that began again, at the same place: its numbers stand for other weights."""
    versions, local = tmp_path / "versions", tmp_path / "local"
    for numbers in ((1, 2), (3, 4, 5)):
        shutil.rmtree(versions, ignore_errors=True)
        for number in numbers:
            paddle_reshard.publish(published / f"direct-{number}", versions)
        paddle_reshard.pull(versions, local, version=min(version, len(numbers)))
    assert tensors_of(local) == tensors_of(published / f"direct-{2 + version}")


@pytest.mark.parametrize("kind", ["training", "model"])
def test_a_checkpoint_that_pull_has_not_made_is_not_replaced(
    kind: str, published: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    if kind == "training":
        shutil.copytree(checkpoint(LLAMA), own)
    else:
        paddle_reshard.convert(checkpoint(LLAMA), own, format="huggingface")
    before = sorted(path.name for path in own.iterdir())
    with pytest.raises(TargetError, match="pull has not made this folder"):
        paddle_reshard.pull(published / "versions", own)
    assert sorted(path.name for path in own.iterdir()) == before


def test_folders_of_others_stay(published: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="notes"):
        paddle_reshard.pull(published / "versions", tmp_path / "mine")
    foreign = tmp_path / "foreign"
    shutil.copytree(published / "direct-1", foreign / name(1), ignore=shutil.ignore_patterns(MANIFEST))
    with pytest.raises(ReshardError, match=name(1)):
        paddle_reshard.publish(published / "step-1", foreign)
    assert tensors_of(foreign / name(1)) == tensors_of(published / "direct-1")
    paddle_reshard.pull(foreign, tmp_path / "local")  # a full version of any publisher can be read
    assert tensors_of(tmp_path / "local") == tensors_of(published / "direct-1")


def test_a_delta_is_not_taken_for_a_checkpoint(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a published delta, not a checkpoint"):
        paddle_reshard.convert(published / "versions" / name(2), tmp_path / "x", format="huggingface")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encoding": "add"}, "neither xor nor overwrite"),
        ({"checksum": "md5"}, "none of adler32"),
        ({"full_every": 0}, "at least 1"),
        ({"format": "flex"}, "not flex"),
        ({"to": "tp=2"}, "--to"),
    ],
)
def test_options_that_make_no_version_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        paddle_reshard.publish(checkpoint("dense/single"), tmp_path / "versions", **options)


def test_positions_of_large_tensors_need_more_than_four_bytes(tmp_path: Path) -> None:
    """A sparse file of 4 GiB; the other encoding takes it."""
    for number, first in enumerate((0, 5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 32], "data_offsets": [0, 1 << 32]}}).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header + bytes([first]))
            file.truncate(8 + len(header) + (1 << 32))
    from paddle_reshard.pipeline.versions.chain import Chain, read_model
    from paddle_reshard.pipeline.versions.form import Encoding
    from paddle_reshard.pipeline.versions.publish import why_full
    from paddle_reshard.storage.locate import open_source

    old, new = (read_model(open_source(str(tmp_path / number), {})) for number in "01")
    with pytest.raises(UsageError, match="w: has 4294967296 bytes"):
        why_full(Chain(1, old, ()), new, Encoding.OVERWRITE)
    assert why_full(Chain(1, old, ()), new, Encoding.XOR) == ""


# ------------------------------------------------------------------------------------------------------- kills


def killed_runs(command: str, start: Path, work: Path, step: int, *arguments: str) -> list[list[str]]:
    line = [sys.executable, "-m", "tests.versions.killed", command, start, work, str(step), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=REPO, timeout=600)
    assert done.returncode == 0, done.stderr
    runs = [text.split() for text in done.stdout.splitlines()]
    assert [run[2] for run in runs] == ["0"] * len(runs), done.stderr
    assert {run[1] for run in runs[:-1]} == {"9"}
    assert runs[-1][1] == "0"
    return runs


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_killed_publishers_publish_nothing_and_go_on(step: int, published: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(published / "step-5", start / "source")
    shutil.copytree(published / "versions", start / "versions")
    for run in killed_runs("publish", start, tmp_path / "work", step, "source", "versions"):
        made = tmp_path / f"work-{run[0]}"
        receive(made / "versions", tmp_path / f"engine-{run[0]}", 1, 6)
        assert tensors_of(tmp_path / f"engine-{run[0]}") == tensors_of(published / "step-5")
        assert sorted(path.name for path in (made / "versions").iterdir()) == [
            "latest",
            *map(name, range(1, 7)),
        ]
        if name(6) in run[4:]:  # it was there when the first run was killed: then it was complete
            assert paddle_reshard.check(made / "versions" / name(6)).intact


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_killed_copies_are_whole_and_go_on(step: int, published: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(published / "versions", start / "versions")
    paddle_reshard.pull(start / "versions", start / "local", version=2)
    for run in killed_runs("pull", start, tmp_path / "work", step, "versions", "local"):
        made = tmp_path / f"work-{run[0]}"
        assert run[3] in (digest(published / "direct-2"), digest(published / "direct-5"))
        assert tensors_of(made / "local") == tensors_of(published / "direct-5")
        assert sorted(path.name for path in made.iterdir()) == ["local", "versions"]


# ------------------------------------------------------------------------------------------------------ command line


def test_commands_that_were_replaced_name_what_replaces_them(tmp_path: Path) -> None:
    for command, word in (("delta", "publish"), ("apply", "pull")):
        done = run_here(command, "a", "b", "c")
        assert (done.returncode, f"; {word} replaces it" in done.stderr) == (2, True), done.stderr
    watch = run_here("watch", tmp_path, tmp_path / "out", "--to", "tp=1", "--once", "--delta")
    assert (watch.returncode, "--publish VERSIONS" in watch.stderr) == (2, True), watch.stderr
    with pytest.raises(AttributeError, match="publish and pull"):
        paddle_reshard.apply_delta  # noqa: B018


def test_commands_say_what_they_made(tmp_path: Path) -> None:
    published = run_here("publish", checkpoint("dense/single"), tmp_path / "v")
    assert "weight_v000001, full: the first version" in published.stdout
    pulled = run_here("pull", tmp_path / "v", tmp_path / "local", "--quiet")
    assert (published.returncode, pulled.returncode, pulled.stdout, pulled.stderr) == (0, 0, "", "")
    assert tensors_of(tmp_path / "local") == tensors_of(tmp_path / "v" / name(1))
