"""What may be replaced or pruned: what a manifest of ours lists, and nothing else."""

import json
import tarfile
from pathlib import Path

import pytest

from paddle_reshard.storage.replaceable import Entry, EntryKind, objection, removal_order
from tests.conftest import CORPUS

MANIFEST = json.dumps(
    {"format": "paddle-reshard manifest", "files": {"model.safetensors": 7, "notes.txt": 3}}
).encode()


def _files(*paths: str) -> list[Entry]:
    sizes = {"model.safetensors": 7, "notes.txt": 3}
    return [Entry(path, EntryKind.FILE, sizes.get(path, 0)) for path in paths]


def _real_checkpoints() -> dict[str, list[Entry]]:
    """Every checkpoint folder in the archives of real runs → what it holds."""
    found: dict[str, list[Entry]] = {}
    for archive in sorted(CORPUS.rglob("*.tar.xz"))[::16]:
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


def test_no_checkpoint_of_a_trainer_may_be_replaced() -> None:
    checkpoints = _real_checkpoints()
    assert len(checkpoints) > 8
    for entries in checkpoints.values():
        assert "which paddle-reshard did not write" in str(objection(entries, None))
        assert "which the manifest there does not list" in str(objection(entries, MANIFEST))


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (Entry("optimizer.pdopt", EntryKind.FILE), "optimizer.pdopt"),
        (Entry("saved_signal_0", EntryKind.FILE), "saved_signal_0"),
        (Entry("flex-ckpt.auto_generated.metadata", EntryKind.FILE), "flex-ckpt.auto_generated.metadata"),
        (Entry(".git", EntryKind.FOLDER), ".git/"),
        (Entry("runs", EntryKind.FOLDER), "runs/"),
        (Entry("checkpoint-100", EntryKind.FOLDER), "checkpoint-100/"),
        (Entry("model_state/old", EntryKind.FOLDER), "model_state/old/"),
        (Entry("model_state/diary.txt", EntryKind.FILE), "model_state/diary.txt"),
        (Entry("notes.txt", EntryKind.LINK), "notes.txt (a link)"),
        (Entry("notes.txt", EntryKind.OTHER), "notes.txt (a special file)"),
        (Entry("model.safetensors", EntryKind.FOLDER), "model.safetensors/"),
        (Entry("a\x1b[2Jb", EntryKind.FILE), "a\\x1b[2Jb"),
    ],
)
def test_what_the_manifest_does_not_list_is_named(entry: Entry, named: str) -> None:
    made = _files("paddle_reshard.json", "model.safetensors")
    assert objection(made, MANIFEST) is None
    assert objection([*made, entry], MANIFEST) == (
        f"there is also {named}, which the manifest there does not list"
    )


def test_a_manifest_says_exactly_what_may_go() -> None:
    made = _files("paddle_reshard.json", "model.safetensors", "notes.txt")
    assert objection(made, MANIFEST) is None
    many = [*made, Entry("finetuned", EntryKind.FOLDER), *_files("a", "b", "c")]
    assert "there is also finetuned/, a, b and 1 more," in str(objection(many, MANIFEST))


@pytest.mark.parametrize(
    "manifest", [b"", b"{", b"[]", b'{"format": "paddle-reshard manifest"}', b'{"files": {"notes.txt": 1}}']
)
def test_what_is_no_manifest_of_ours_allows_nothing(manifest: bytes) -> None:
    made = _files("paddle_reshard.json", "model.safetensors")
    assert "model.safetensors, paddle_reshard.json, which paddle-reshard did not" in str(
        objection(made, manifest)
    )
    assert objection([], manifest) is None


def test_a_file_of_another_size_is_not_what_was_made() -> None:
    made = [Entry("model.safetensors", EntryKind.FILE, 7), Entry("notes.txt", EntryKind.FILE, 3)]
    assert objection(made, MANIFEST) is None
    assert "the size of notes.txt" in str(
        objection([made[0], Entry("notes.txt", EntryKind.FILE, 4)], MANIFEST)
    )


def test_what_is_left_after_any_number_of_removals_may_still_go() -> None:
    listed = ["paddle_reshard.json", "model.safetensors", "notes.txt"]
    for gone in range(len(listed)):
        left = removal_order(listed)[gone:]
        manifest = MANIFEST if "paddle_reshard.json" in left else None
        assert objection(_files(*left), manifest) is None
