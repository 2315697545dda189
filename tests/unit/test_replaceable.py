"""What may be replaced or pruned: a checkpoint and nothing else."""

import json
import tarfile
from pathlib import Path

import pytest

from paddle_reshard.pipeline.core.trainer_files import is_tensor_file
from paddle_reshard.storage.replaceable import Entry, EntryKind, changed, objection, removal_order
from tests.conftest import CORPUS

MANIFEST = json.dumps(
    {"format": "paddle-reshard manifest", "files": {"model.safetensors": 7, "notes.txt": 3}}
).encode()


def _files(*paths: str) -> list[Entry]:
    return [Entry(path, EntryKind.FILE) for path in paths]


def _real_checkpoints() -> dict[str, list[Entry]]:
    """Every checkpoint folder in the archives of real runs → what it holds."""
    found: dict[str, list[Entry]] = {}
    for archive in sorted(CORPUS.rglob("*.tar.xz"))[::4]:
        with tarfile.open(archive) as tar:
            for member in tar:
                parts = Path(member.name).parts
                steps = [i for i, part in enumerate(parts) if part.startswith("checkpoint-")]
                if steps and len(parts) > steps[0] + 1:
                    path = "/".join(parts[steps[0] + 1 :])
                    kind = EntryKind.FOLDER if member.isdir() else EntryKind.FILE
                    folder = f"{archive.name}:{'/'.join(parts[: steps[0] + 1])}"
                    found.setdefault(folder, []).append(Entry(path, kind))
    return found


def test_every_real_checkpoint_may_be_replaced() -> None:
    checkpoints = _real_checkpoints()
    assert len(checkpoints) > 20
    assert {name: reason for name, e in checkpoints.items() if (reason := objection(e, None))} == {}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (Entry("optimizer.py", EntryKind.FILE), "optimizer.py"),
        (Entry("model_state.py", EntryKind.FILE), "model_state.py"),
        (Entry("model_state.best.pdparams", EntryKind.FILE), "model_state.best.pdparams"),
        (Entry("notes.txt", EntryKind.FILE), "notes.txt"),
        (Entry(".git", EntryKind.FOLDER), ".git/"),
        (Entry("runs", EntryKind.FOLDER), "runs/"),
        (Entry("checkpoint-100", EntryKind.FOLDER), "checkpoint-100/"),
        (Entry("model_state/old", EntryKind.FOLDER), "model_state/old/"),
        (Entry("model_state/diary.txt", EntryKind.FILE), "model_state/diary.txt"),
        (Entry("optimizer.pdopt", EntryKind.LINK), "optimizer.pdopt (a link)"),
        (Entry("optimizer.pdopt", EntryKind.OTHER), "optimizer.pdopt (a special file)"),
        (Entry("model.safetensors", EntryKind.FOLDER), "model.safetensors/"),
        (Entry("a\x1b[2Jb", EntryKind.FILE), "a\\x1b[2Jb"),
    ],
)
def test_what_no_trainer_writes_is_named(entry: Entry, named: str) -> None:
    checkpoint = _files("model_state.pdparams", "config.json")
    assert objection(checkpoint, None) is None
    assert objection([*checkpoint, entry], None) == f"there is also {named}, which no trainer writes"


def test_small_files_of_a_model_are_no_checkpoint() -> None:
    assert "no file with tensors" in str(
        objection(_files("config.json", "vocab.txt", "trainer_state.json"), None)
    )
    assert objection([], None) is None


def test_a_manifest_says_exactly_what_may_go() -> None:
    made = _files("paddle_reshard.json", "model.safetensors", "notes.txt")
    assert objection(made, MANIFEST) is None
    assert objection([*made, *_files("paddle_reshard.json.sig")], MANIFEST) is None
    assert objection([*made, *_files("flex-ckpt.auto_generated.metadata")], MANIFEST) is None
    for other in ("optimizer.pdopt", "config.json", "more.txt"):
        assert objection([*made, *_files(other)], MANIFEST) == (
            f"there is also {other}, which the manifest there does not list"
        )
    many = [*made, Entry("finetuned", EntryKind.FOLDER), *_files("a", "b", "c")]
    assert "there is also finetuned/, a, b and 1 more," in str(objection(many, MANIFEST))


@pytest.mark.parametrize(
    "manifest", [b"", b"{", b"[]", b'{"format": "paddle-reshard manifest"}', b'{"files": {"notes.txt": 1}}']
)
def test_what_is_no_manifest_of_ours_allows_nothing(manifest: bytes) -> None:
    made = _files("paddle_reshard.json", "model.safetensors")
    assert objection(made, manifest) is None
    assert "notes.txt" in str(objection([*made, *_files("notes.txt")], manifest))


def test_a_file_of_another_size_is_not_what_was_made() -> None:
    made = [Entry("model.safetensors", EntryKind.FILE, 7), Entry("notes.txt", EntryKind.FILE, 3)]
    assert changed(made, MANIFEST) is None
    assert "the size of notes.txt" in str(changed([made[0], Entry("notes.txt", EntryKind.FILE, 4)], MANIFEST))


def test_what_is_left_after_any_number_of_removals_may_still_go() -> None:
    for entries in _real_checkpoints().values():
        files = [entry.path for entry in entries if entry.kind is EntryKind.FILE]
        order = removal_order(files)
        assert sorted(order) == sorted(files)
        assert is_tensor_file(order[-1])
        for gone in range(len(order) + 1):
            assert objection(_files(*order[gone:]), None) is None
    listed = ["paddle_reshard.json", "model.safetensors", "notes.txt"]
    for gone in range(len(listed)):
        assert objection(_files(*removal_order(listed)[gone:]), MANIFEST) is None
