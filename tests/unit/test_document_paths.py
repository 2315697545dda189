"""Files, classes and layers that documents and docstrings name are there."""

from __future__ import annotations

import re

from tests.conftest import REPO

FOLDERS = "pipeline|storage|tasks|clusters|tests|benchmarks|examples|docs|deploy|src"
NAMED = re.compile(rf"(?<![\w/.{{}}*-])(?:{FOLDERS})/[\w./-]*\w(?!\w*[*{{<(])")
REFERENCE = re.compile(r":(?:class|func|mod|data):`~?(?:[^`<]*<)?paddle_reshard\.([\w.]+)>?`")
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tests/**/*.md", "pipeline/**/*.md")
    for path in REPO.glob(pattern)
    if "cases" not in path.parts
)
SOURCES = sorted(
    path for folder in ("pipeline", "storage", "tasks", "clusters") for path in (REPO / folder).rglob("*.py")
)
OTHERS = [REPO / "Makefile", REPO / "pyproject.toml", *sorted((REPO / "examples").glob("*.py"))]
ARCHITECTURE = (REPO / "docs" / "architecture.md").read_text("utf-8")


def missing(text: str) -> list[str]:
    """Paths in a text that are not there, with or without ``.py``; NAME and FAMILY stand for what is to be added."""
    return sorted(
        name
        for name in set(NAMED.findall(text))
        if not re.search(r"\b(?:NAME|FAMILY)\b", name)
        and not (REPO / name).exists()
        and not (REPO / f"{name}.py").exists()
    )


def test_every_file_that_is_named_exists() -> None:
    assert len(DOCUMENTS) > 30
    assert len(SOURCES) > 100
    found = {path: missing(path.read_text("utf-8")) for path in (*DOCUMENTS, *SOURCES, *OTHERS)}
    assert {str(path.relative_to(REPO)): names for path, names in found.items() if names} == {}


def test_a_file_that_is_gone_is_found() -> None:
    assert missing("see `pipeline/workflow.py`, tasks/flex_index and `storage/store.py`") == [
        "pipeline/workflow.py",
        "tasks/flex_index",
    ]


def is_defined(reference: str) -> bool:
    """Whether a module, or a class, function or constant of one, is there; names without a module are public ones."""
    inner = reference.replace(".", "/")
    folder, _, name = inner.rpartition("/")
    if any((REPO / f"{inner}{end}").exists() for end in (".py", "/__init__.py")):
        return True
    if not folder:
        return f'"{name}"' in (REPO / "src/paddle_reshard/__init__.py").read_text("utf-8")
    homes = [home for home in (REPO / f"{folder}.py", REPO / folder / "__init__.py") if home.exists()]
    return any(
        re.search(rf"^(?:class |def )?{name}\b", home.read_text("utf-8"), re.MULTILINE) for home in homes
    )


def test_every_reference_in_a_docstring_leads_somewhere() -> None:
    references = {
        (str(path.relative_to(REPO)), name)
        for path in SOURCES
        for name in REFERENCE.findall(path.read_text("utf-8"))
    }
    assert len(references) > 5
    assert {(path, name) for path, name in references if not is_defined(name)} == set()


def test_the_sketch_of_the_layers_is_the_import_contract() -> None:
    contract = re.search(
        r'name = "imports point one way".*?layers = \[\n(.*?)\n\]',
        (REPO / "pyproject.toml").read_text("utf-8"),
        re.DOTALL,
    )
    assert contract is not None
    held = [set(re.findall(r"paddle_reshard\.([\w.]+)", line)) for line in contract[1].splitlines()]
    drawn = re.search(r"## Imports point one way.*?```text\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert drawn is not None
    names = [re.split(r" {2,}", line)[0].split(", ") for line in drawn[1].splitlines()]
    assert [{name.replace("/", ".") for name in line} for line in names] == held


def test_values_live_where_the_architecture_says() -> None:
    rows = re.findall(r"^\| (?:[\w ]+\()?`(\w+)`\)? \| `([\w/.]+)` \|", ARCHITECTURE, re.MULTILINE)
    assert len(rows) > 10
    for name, path in rows:
        text = (REPO / path).read_text("utf-8")
        assert re.search(rf"^(?:class )?{name}\b", text, re.MULTILINE), f"{name} is not in {path}"
