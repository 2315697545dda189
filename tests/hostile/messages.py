"""``tests/golden/messages.txt``: every refusal of ``refusals.py``, word by word. ``python -m tests.hostile.messages``
writes it, so that a change of a text is read by whoever reviews it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import GOLDEN
from tests.hostile.damage import copied
from tests.hostile.refusals import DAMAGES, Damage

DOCUMENT = GOLDEN / "messages.txt"


def damaged(damage: Damage, folder: Path) -> Path:
    """A damaged copy, ``folder / "source"``."""
    source = copied(damage.case, folder / "source")
    damage.change(source)
    return source


def entry(damage: Damage, refusal: ReshardError, folder: Path) -> str:
    """What the document holds of a refusal."""
    return f"{damage.name} ({damage.case}), {type(refusal).__name__}\n{refusal}".replace(f"{folder}/", "")


def recorded() -> list[str]:
    """The entries of the document."""
    return DOCUMENT.read_text().removesuffix("\n").split("\n\n")


def main() -> None:
    """Write the document."""
    entries = []
    for damage in DAMAGES:
        with tempfile.TemporaryDirectory() as name:
            source = damaged(damage, Path(name))
            try:
                paddle_reshard.convert(source, Path(name) / "target", **damage.request)
            except ReshardError as refusal:
                entries.append(entry(damage, refusal, Path(name)))
    DOCUMENT.write_text("\n\n".join(entries) + "\n")


if __name__ == "__main__":
    main()
