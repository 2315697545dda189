"""A kill before every effect of a conversion to a disk; each is resumed to the very same bytes.

``make full`` kills at every seventh effect, ``make exhaustive`` at those between.
"""

import shutil
from pathlib import Path

import pytest

from tests.resume.conftest import Driver
from tests.storage.contents import in_folder

KILLED = {"killed": 9}
CHUNKS = 7


def _lines(target: Path) -> int:
    """Groups of which the ledger has a whole line."""
    ledger = target.parent / f".{target.name}.reshard" / "ledger"
    lines = ledger.read_bytes().splitlines(keepends=True) if ledger.exists() else []
    return sum(line.endswith(b"\n") for line in lines)


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(chunk, marks=pytest.mark.exhaustive) for chunk in range(1, CHUNKS))]
)
def test_a_kill_at_any_effect_is_made_good(chunk: int, driver: Driver, source: Path, tmp_path: Path) -> None:
    whole = driver.convert(source, tmp_path / "whole" / "t")
    wanted = in_folder(tmp_path / "whole" / "t")
    assert whole["groups"] == whole["planned"] == 4
    assert len(whole["effects"]) > 40
    staged = [i for i, effect in enumerate(whole["effects"], 1) if effect.startswith("os.truncate")]
    numbers = [i for i in range(1, len(whole["effects"]) + 1) if not staged[1] < i < staged[-1]]
    for number in numbers[chunk::CHUNKS]:
        target = tmp_path / f"{number}" / "t"
        before = whole["effects"][number - 1]
        assert driver.convert(source, target, kill_at=number) == KILLED, before
        lines = _lines(target)
        if target.exists():
            assert in_folder(target) == wanted, before
        # What was asked is on record from the first moment at which there is something to resume.
        recorded = target.with_name(".t.reshard").joinpath("session.json").exists()
        asked = {"to": None} if recorded and not target.exists() else {}
        again = driver.convert(source, target, request={**asked, "resume": True})
        assert "error" not in again, (before, again)
        assert in_folder(target) == wanted, before
        assert [path.name for path in target.parent.iterdir()] == ["t"], before
        if again["groups"]:  # else the target was there already
            assert again["resumed"] == min(lines, 4), before
            assert again["groups"] + again["resumed"] == 4, before
        shutil.rmtree(target.parent)


@pytest.mark.parametrize("at", ["renames", pytest.param("everything", marks=pytest.mark.exhaustive)])
def test_an_overwritten_checkpoint_is_there_until_the_new_one_is(
    at: str, driver: Driver, source: Path, tmp_path: Path
) -> None:
    request = {"overwrite": True}
    driver.convert(source, tmp_path / "whole" / "t")
    wanted = in_folder(tmp_path / "whole" / "t")
    old = tmp_path / "old"
    driver.convert(source, old, request={"to": "pp=2"})
    shutil.copytree(old, tmp_path / "tried" / "t", copy_function=shutil.copyfile)
    effects = driver.convert(source, tmp_path / "tried" / "t", request=request)["effects"]
    first = next(i for i, effect in enumerate(effects, 1) if effect == "open paddle_reshard.json")
    numbers = range(first, len(effects) + 1)
    if at == "renames":  # just before each, and after it
        numbers = [n for n in numbers if any(e.startswith("os.rename") for e in effects[n - 2 : n])]
    seen = set()
    for number in [20, *numbers]:
        target = tmp_path / f"{number}" / "t"
        shutil.copytree(old, target, copy_function=shutil.copyfile)
        assert driver.convert(source, target, request=request, kill_at=number) == KILLED
        if target.exists():
            assert in_folder(target) in (in_folder(old), wanted)
        else:  # between two renames; the old one stands aside
            assert in_folder(target.parent / ".t.reshard" / "replaced") == in_folder(old)
        seen.add(target.exists())
        again = driver.convert(source, target, request={**request, "resume": True})
        assert "error" not in again
        assert in_folder(target) == wanted
        assert [path.name for path in target.parent.iterdir()] == ["t"]
        shutil.rmtree(target.parent)
    assert seen == {True, False}


def test_what_a_machine_lost_that_went_down_is_made_again(
    driver: Driver, source: Path, tmp_path: Path
) -> None:
    """The ledger says more than the files hold: writes of another boot are not believed."""
    driver.convert(source, tmp_path / "whole" / "t")
    effects = driver.convert(source, tmp_path / "counted" / "t")["effects"]
    last_line = max(i for i, effect in enumerate(effects, 1) if effect == "open ledger")
    target = tmp_path / "lost" / "t"
    driver.convert(source, target, kill_at=last_line)
    staging = target.parent / ".t.reshard"
    with open(staging / "files" / "optimizer.pdopt", "r+b") as file:
        file.truncate(100_000)
        file.truncate(1_700_747)
    session = staging / "session.json"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    session.write_text(session.read_text().replace(boot, "another boot"))
    with open(staging / "ledger", "ab") as ledger:
        ledger.write(b'[9,[["optimizer.pdopt",0,17')
    again = driver.convert(source, target, request={"resume": True})
    assert 0 < again["resumed"] < 4
    assert in_folder(target) == in_folder(tmp_path / "whole" / "t")
