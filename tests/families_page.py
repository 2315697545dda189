"""The table of ``docs/families.md`` and the counts in ``README.md``, made from the rule tables.

``python -m tests.families_page`` writes both.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import facts
from tests.families import Family, families

HEADINGS = (
    "family",
    "library",
    "axes",
    "Hugging Face",
    "MTP",
    "LoRA",
    "files proven by",
    "Hugging Face proven by",
)
REPO = Path(__file__).resolve().parents[1]
FILES = {
    "checkpoints": "real checkpoints",
    "classes": "the library's classes",
    "declarations": "declarations",
}
FORMS = {
    "transformers": "logits in `transformers`",
    "library": "the library's own export or import",
    "declarations": "declarations",
}


def table() -> str:
    """All families, as Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(_row, families(shipped_tables()))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(family: Family) -> tuple[str, ...]:
    """The cells under ``HEADINGS``."""
    return (
        family.name,
        family.library,
        " ".join(family.axes),
        family.huggingface,
        "yes" if family.multi_token_prediction else "no",
        "yes" if family.lora else "no",
        f"{family.proven.files}, facts" if _is_built(family) else family.proven.files,
        family.proven.huggingface or "no",
    )


def _is_built(family: Family) -> bool:
    """Whether the table is held against what the class builds, variant by variant (``tests/facts``)."""
    return family.library == "paddleformers" and family.name in {build.family for build in facts.builds()}


def counts() -> str:
    """How many families are proven in which way."""
    known = families(shipped_tables())
    files = Counter(family.proven.files for family in known)
    forms = Counter(family.proven.huggingface for family in known)
    return (
        f"{len(known)} families; files of ranks proven by {_listed(files, FILES)}, and {sum(map(_is_built, known))} "
        "tables also held against recorded facts of their classes; "
        f"Hugging Face by {_listed(forms, FORMS)}"
    )


def _listed(found: Counter[str] | Counter[str | None], words: dict[str, str]) -> str:
    return ", ".join(f"{said} ({found[kind]})" for kind, said in words.items() if found[kind])


def written(document: str) -> str:
    """What stands between the marks of a document."""
    return f"{table()}\n\n{counts()}." if document == "docs/families.md" else counts()


DOCUMENTS = ("docs/families.md", "README.md")
MARKS = re.compile(r"(<!-- families -->\n?).*?(\n?<!-- end -->)", re.DOTALL)


def with_current_facts(document: str) -> str:
    """A document with what it must say between its marks."""
    text = (REPO / document).read_text("utf-8")
    assert MARKS.search(text), document
    return MARKS.sub(lambda marks: f"{marks[1]}{written(document)}{marks[2]}", text)


if __name__ == "__main__":
    for name in DOCUMENTS:
        (REPO / name).write_text(with_current_facts(name), "utf-8")
