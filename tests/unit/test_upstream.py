"""Changes of upstream code are distinguished from mere reformatting."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.conftest import REPO
from tests.lab import upstream

RECORD = REPO / "tests" / "lab" / "upstream.json"
MODULE = f"{upstream.FLEX}/dcp/metadata.py"
OLD = '''
"""What it is."""
LIMIT = 3

@dataclass
class Piece:
    """One piece."""
    offset: tuple
    def end(self, more: int = 0) -> int:
        # where it ends
        return self.offset[0] + more

def first(pieces):
    return pieces[0]
'''


def tree(folder: Path, text: str) -> Path:
    (folder / MODULE).parent.mkdir(parents=True)
    (folder / MODULE).write_text(text)
    return folder


def found(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    text = OLD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    sides = (tree(tmp_path / "old", OLD), tree(tmp_path / "new", text))
    return list(upstream.differences(*map(upstream.read_folder, sides)))


def test_comments_docstrings_annotations_and_format_are_no_change(tmp_path: Path) -> None:
    assert not found(
        tmp_path,
        ("# where it ends", "# its end"),
        ('"""One piece."""', '"""Something else."""'),
        ("more: int = 0) -> int", "more = 0)"),
        ("return pieces[0]", "return pieces[\n        0\n    ]"),
    )


def test_what_changed_came_and_went_is_named_with_its_lines(tmp_path: Path) -> None:
    lines = found(
        tmp_path,
        ("LIMIT = 3", "LIMIT = 4"),
        ("offset: tuple", "offset: tuple\n    shape: tuple"),
        ("self.offset[0] + more", "self.offset[1] + more"),
        ("def first(pieces)", "def last(pieces)"),
    )
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{MODULE}: LIMIT changed",
        f"{MODULE}: Piece changed",
        f"{MODULE}: Piece.end changed",
        f"{MODULE}: first is gone",
        f"{MODULE}: last is new",
    ]
    assert "    +    shape: tuple" in lines
    assert "    -    return self.offset[0] + more" in lines


def test_a_field_of_another_type_is_a_change(tmp_path: Path) -> None:
    assert f"{MODULE}: Piece changed" in found(tmp_path, ("offset: tuple", "offset: list"))


def test_the_installed_paddle_is_the_recorded_one() -> None:
    """A new version of Paddle in the tests' environment is to be looked at before it is recorded."""
    found_at = find_spec("paddle")
    assert found_at is not None
    packages = Path(str(found_at.origin)).parents[1]
    recorded, installed = upstream.read_record(RECORD), upstream.read_folder(packages)
    assert version("paddlepaddle") == recorded.versions["paddlepaddle"]
    lines = list(upstream.differences(recorded, installed))
    assert [line for line in lines if not line.startswith("paddleformers: ")] == []
    assert len(recorded.digests) > 20


def test_it_exits_with_whether_something_changed(tmp_path: Path, capsys) -> None:
    old, new = tree(tmp_path / "old", OLD), tree(tmp_path / "new", OLD.replace("LIMIT = 3", "LIMIT = 4"))
    assert upstream.main(["compare", str(old), str(new)]) == 1
    assert "LIMIT changed" in capsys.readouterr().out
    assert upstream.main(["record", str(old)]) == 0
    (tmp_path / "old.json").write_text(capsys.readouterr().out)
    assert upstream.main(["compare", str(tmp_path / "old.json"), str(old)]) == 0
    assert "nothing that the formats depend on has changed" in capsys.readouterr().out
    assert upstream.main(["compare", str(tmp_path), str(old)]) == 2
    assert upstream.main([]) == 2
    assert "none of the watched modules is below it" in capsys.readouterr().err
