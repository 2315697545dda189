"""Nothing of a user's is lost: what --overwrite, clean and a staging folder may touch, on a disk and in stores."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import OccupiedError, ReshardError, TargetError
from paddle_reshard.pipeline.core.events import Event, StepStarted
from tests.storage.contents import ONE_CARD, SMALL, fill_bucket, in_bucket
from tests.storage.servers import Store


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its manifest."""
    folder = tmp_path_factory.mktemp("made") / "t"
    paddle_reshard.convert(SMALL, folder, **ONE_CARD)
    return folder


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    folder = tmp_path / "beside" / "t"
    shutil.copytree(made, folder)
    return folder


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def _put(path: Path, text: str = "years of work") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name", ["scaler.pdparams", "config.json"])
def test_a_folder_with_a_link_in_it_is_kept(name: str, target: Path) -> None:
    """Also in the place of a file of ours. What else may lie beside a conversion: ``test_stores.py``."""
    shutil.copy(target / "config.json", target.parent)
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(target.parent / "config.json")
    before = tree(target.parent)
    told = rf"there is also {name} \(a link\), which the manifest there does not list; move that away"
    for overwrite in (True, False):
        with pytest.raises(OccupiedError, match=told):
            paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=overwrite)
        assert tree(target.parent) == before


def test_a_trainer_that_saved_over_a_conversion_keeps_its_files(target: Path) -> None:
    with open(target / "scheduler.pdparams", "ab") as file:
        file.write(b"more")
    before = tree(target)
    with pytest.raises(
        OccupiedError, match=r"the size of scheduler\.pdparams differs from the manifest there"
    ):
        paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True)
    assert tree(target) == before


# ------------------------------------------------------------------------------------ source and target exchanged

EXCHANGED = (
    "holds a checkpoint of paddleformers, tp=2,pp=2,sharding=2, with optimizer states and moving averages, that "
    "paddle-reshard did not write; are SRC and DST exchanged? Choose another target, or move that away"
)


def _average(source: Path, target: str, **options: Any) -> object:
    return paddle_reshard.average([source, source], target, uniform=True, **options)


def _several(source: Path, target: str, to: str, **options: Any) -> object:
    return paddle_reshard.convert(source, {f"{target}-new": {"to": "pp=2"}, target: {"to": to}}, **options)


@pytest.mark.parametrize(
    ("attempt", "resume"),
    [
        (paddle_reshard.plan, False),
        (_average, False),
        (_several, False),
        (_several, True),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_checkpoint_of_a_trainer_is_never_replaced(
    attempt: Callable[..., object], overwrite: bool, resume: bool, made: Path, tmp_path: Path
) -> None:
    """Whoever exchanges the two is told what the target is, and is offered no option."""
    trained = tmp_path / "trained"
    shutil.copytree(SMALL, trained)
    before = tree(tmp_path)
    with pytest.raises(OccupiedError) as refused:
        attempt(made, str(trained), overwrite=overwrite, resume=resume, **ONE_CARD)
    assert EXCHANGED in str(refused.value)
    assert overwrite or "--overwrite" not in str(refused.value)
    assert tree(tmp_path) == before


RANK = "optimizer.tp01_pp01_shard01.pdopt"


def _replace(folder: Path, name: str, put: Callable[[Path], object]) -> None:
    (folder / name).unlink()
    put(folder / name)


def _no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / ".git").mkdir(parents=True)
    _put(folder / "optimizer.py")


THERE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a checkpoint": (
        lambda folder: (folder / RANK).unlink(),
        r"holds files of a checkpoint \(ema\.tp00_pp00_shard00\.pdopt and 22 more\), that paddle-reshard did not",
    ),
    "hostile files": (
        lambda folder: [path.write_bytes(b"\x80\x02" + b"(" * 1000) for path in folder.iterdir()],
        r"holds files of a checkpoint \(ema",
    ),
    "a pipe": (
        lambda folder: _replace(folder, RANK, os.mkfifo),
        r"there is optimizer\.tp01_pp01_shard01\.pdopt \(a special file\), config\.json, .* did not write; move",
    ),
    "a link elsewhere": (
        lambda folder: _replace(folder, "config.json", lambda path: path.symlink_to(SMALL / "config.json")),
        r"there is config\.json \(a link\), .* did not write; move that away",
    ),
    "a huge file": (
        lambda folder: [
            (folder / "trainer_state.json").touch(),
            os.truncate(folder / "trainer_state.json", 1 << 40),
        ],
        r"holds files of a checkpoint \(ema",
    ),
    "another program's manifest": (
        lambda folder: _put(folder / "paddle_reshard.json", '{"format": "another"}'),
        "holds a checkpoint of paddleformers, tp=2",
    ),
    "no checkpoint": (
        _no_checkpoint,
        r"there is \.git/, optimizer\.py, which paddle-reshard did not write; move that away",
    ),
}


@pytest.mark.parametrize(("put", "told"), THERE.values(), ids=THERE)
def test_whatever_lies_there_the_refusal_is_a_sentence(
    put: Callable[[Path], object], told: str, made: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(SMALL, there, copy_function=shutil.copyfile)
    put(there)
    before = sorted(os.listdir(there))
    with pytest.raises(OccupiedError, match=told):
        paddle_reshard.convert(made, there, overwrite=True, **ONE_CARD)
    assert sorted(os.listdir(there)) == before


def test_the_states_that_only_the_old_one_held_are_named(target: Path) -> None:
    report = paddle_reshard.convert(SMALL, target, format="huggingface", overwrite=True)
    (lost,) = (said for name, said in report.facts() if name == "lost")
    assert lost.startswith(
        "beta1_pow_acc, beta2_pow_acc, ema_master_weight, master_weight, moment1, moment2: held by"
    )
    again = paddle_reshard.convert(SMALL, target, format="huggingface", overwrite=True)
    assert "lost" not in dict(again.facts())


# ---------------------------------------------------------------------------------------- what comes in between


def _at_publish(act: Callable[[], Any]) -> Callable[[Event], None]:
    def observe(event: Event) -> None:
        if isinstance(event, StepStarted) and event.step == "publish":
            act()

    return observe


def test_what_came_while_it_was_made_is_kept(target: Path) -> None:
    with pytest.raises(TargetError, match=r"there is also notes\.txt"):
        paddle_reshard.convert(
            SMALL, target, to="pp=2", overwrite=True, observe=_at_publish(lambda: _put(target / "notes.txt"))
        )
    assert (target / "notes.txt").read_text() == "years of work"
    assert (target / "optimizer.pdopt").exists()
    (target / "notes.txt").unlink()
    paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True, resume=True)
    assert paddle_reshard.check(target).intact


def _before_rename(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], Any]) -> None:
    """Have something happen in the instant before the operating system renames a folder of this name."""
    rename, done = os.rename, []

    def renaming(one: Any, other: Any) -> None:
        if Path(one).name == name and not done:
            done.append(act())
        rename(one, other)

    monkeypatch.setattr(os, "rename", renaming)


def test_what_came_after_the_last_look_brings_the_old_one_back(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _before_rename(monkeypatch, "t", lambda: shutil.copytree(SMALL, target / "finetuned"))
    with pytest.raises(TargetError, match="is not replaced, because there is also finetuned/"):
        paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True)
    assert (target / "finetuned" / "config.json").exists()
    shutil.rmtree(target / "finetuned")
    assert paddle_reshard.check(target).intact


def test_what_came_into_the_old_one_aside_is_kept_and_named(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that has the folder open continues to write into it, whatever its name."""
    aside = target.parent / ".t.reshard" / "replaced"
    _before_rename(monkeypatch, "files", lambda: _put(aside / "notes.txt"))
    paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True)
    assert paddle_reshard.check(target).intact
    kept = target.parent / "t.replaced"
    assert sorted(target.parent.iterdir()) == [target, kept]
    assert (kept / "notes.txt").exists() and (kept / "optimizer.pdopt").exists()
    assert f"the old contents are kept in {kept}: there is also notes.txt" in caplog.text


def test_cleaning_brings_a_set_aside_checkpoint_back_unless_its_path_is_occupied(
    target: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs() -> None:
        target.mkdir()
        _put(target / "notes.txt")

    _before_rename(monkeypatch, "files", theirs)
    with pytest.raises(TargetError, match="not empty"):
        paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True)
    before = tree(target.parent)
    with pytest.raises(TargetError, match=r"set aside in .*replaced; move one of the two away"):
        paddle_reshard.clean(target)
    assert tree(target.parent) == before
    shutil.rmtree(target)
    paddle_reshard.clean(target)
    assert tree(target) == tree(made)
    assert list(target.parent.iterdir()) == [target]


# ------------------------------------------------------------------------------------------- staging folders


def _a_link_elsewhere(folder: Path) -> None:
    _put(folder.parent / "elsewhere" / "thesis.tex")
    folder.symlink_to("elsewhere")


STAGING: dict[str, Callable[[Path], object]] = {
    "files of theirs": lambda folder: _put(folder / "thesis.tex"),
    "a record of theirs": lambda folder: _put(folder / "session.json", '{"editor": "vi"}'),
    "a lock with words": lambda folder: _put(folder / "lock", "the combination is 1234"),
    "a ledger without a record": lambda folder: [
        (folder / "files").mkdir(parents=True),
        _put(folder / "ledger", "1"),
    ],
    "a link elsewhere": _a_link_elsewhere,
    "a file": _put,
}


@pytest.mark.parametrize("put", STAGING.values(), ids=STAGING)
def test_a_folder_that_only_has_the_name_of_a_staging_folder_is_kept(
    put: Callable[[Path], object], tmp_path: Path
) -> None:
    target = tmp_path / "beside" / "t"
    put(target.parent / ".t.reshard")
    before = tree(tmp_path)
    attempts: list[Callable[[], object]] = [
        lambda: paddle_reshard.convert(SMALL, target, **ONE_CARD),
        lambda: paddle_reshard.convert(SMALL, target, resume=True, **ONE_CARD),
        lambda: paddle_reshard.plan(SMALL, target, **ONE_CARD),
        lambda: paddle_reshard.clean(target),
    ]
    for attempt in attempts:
        with pytest.raises(TargetError, match=r"\.t\.reshard"):
            attempt()
        assert tree(tmp_path) == before


@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("begun", [None, b"", b'{\n "ide', b'{\n "identity": {\n  "plan_id": "12'])
def test_remains_of_a_kill_before_the_record_are_harmless(
    lock: bool, begun: bytes | None, tmp_path: Path
) -> None:
    staging = tmp_path / ".t.reshard"
    staging.mkdir()
    if lock:
        (staging / "lock").touch()
    if begun is not None:
        (staging / "session.json.new").write_bytes(begun)
    assert paddle_reshard.clean(tmp_path / "t") == (str(staging),)
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_put_into_a_staging_folder_is_kept(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = target.parent / ".t.reshard"
    observe = _at_publish(lambda: (staging / "thesis.tex").write_text("years of work"))
    paddle_reshard.convert(SMALL, target, to="pp=2", overwrite=True, observe=observe)
    assert paddle_reshard.check(target).intact
    assert tree(staging) == {"thesis.tex": b"years of work"}


# ---------------------------------------------------------------------------------------------------- in stores


def test_what_came_under_a_prefix_while_it_was_replaced_stays(store: Store, bucket: str, made: Path) -> None:
    fill_bucket(store, bucket, "t/", made)

    def put() -> None:
        store.client.put_object(Bucket=bucket, Key="t/notes.txt", Body=b"mine")

    where = f"s3://{bucket}/t"
    request = {"storage_options": store.options, "overwrite": True, "to": "pp=2"}
    paddle_reshard.convert(SMALL, where, observe=_at_publish(put), **request)
    found = in_bucket(store, bucket, "t/")
    assert found.pop("notes.txt") == b"mine"
    listed = json.loads(found["paddle_reshard.json"])["files"]
    assert found.keys() == {*listed, "paddle_reshard.json"}


# ------------------------------------------------------------------------------------------- what cannot be made


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("file/t", "{root}/file is a file, not a folder"),
        ("file/deep/t", "{root}/file is a file, not a folder"),
        ("link", "link: is a link to {root}/folder; give the folder itself"),
        ("dangling", "dangling: is a link to nowhere; give the folder itself"),
        ("file", "file: exists and is not a folder"),
        ("x" * 300, "the name is too long for the file system"),
    ],
)
def test_a_location_that_cannot_be_a_target_is_named(where: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = tree(tmp_path)
    for attempt in (paddle_reshard.convert, paddle_reshard.plan):
        with pytest.raises(TargetError) as refused:
            attempt(SMALL, tmp_path / where, **ONE_CARD)
        assert told.format(root=tmp_path) in str(refused.value)
        assert str(tmp_path / where) in str(refused.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("where", ["/proc/x", "/proc/x/y"])
def test_a_file_system_that_takes_no_folders_is_refused(where: str) -> None:
    with pytest.raises(TargetError, match=rf"^{where}: no such file or folder"):
        paddle_reshard.convert(SMALL, where, **ONE_CARD)


def test_a_folder_that_takes_no_lock_is_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder can be made and is there, and still no file can be made in it."""
    tries = []
    really = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".reshard/lock"):
            tries.append(path)
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return really(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(TargetError, match="no such file or folder"):
        paddle_reshard.convert(SMALL, tmp_path / "t", **ONE_CARD)
    assert len(tries) < 50


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("file", "file: is a file; give the folder of the checkpoint"),
        ("file/t", "{root}/file is a file, not a folder"),
        ("none", "none: no such folder"),
        ("dangling", "dangling: is a link to nowhere, which does not exist"),
    ],
)
def test_a_location_that_cannot_be_a_source_is_named(where: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ReshardError) as refused:
        paddle_reshard.inspect(tmp_path / where)
    assert told.format(root=tmp_path) in str(refused.value)
