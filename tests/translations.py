"""Which Chinese sections are older than their English ones.

Above the heading of a Chinese section is the digest of the English section that it was made from, as a comment::

    <!-- of 1a2b3c4d -->
    ## 安装

``python -m tests.translations PAGE…`` writes the digests of today, once the sections say the same again.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import REPO

PAGES = {"README.zh.md": "README.md"} | {
    str(path.relative_to(REPO)): str(path.relative_to(REPO)).replace("/zh/", "/")
    for path in sorted((REPO / "docs/zh").rglob("*.md"))
}
"""Translation → original."""
MARK = re.compile(r"<!-- of ([0-9a-f]{8}) -->")
_GENERATED = re.compile(r"<!-- (\w+) -->.*?<!-- end -->", re.DOTALL)


def sections(text: str) -> list[tuple[str, str]]:
    """``(heading, what follows up to the next)``, in order."""
    found: list[tuple[str, str]] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and re.match(r"#+ ", line):
            found.append((line, ""))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def digest(section: tuple[str, str]) -> str:
    """Of an English section; how its lines are broken does not matter, nor do counts that a command writes."""
    text = " ".join(_GENERATED.sub("", "\n".join(section)).split())
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def outdated(page: str) -> Iterator[str]:
    """The headings of a translation whose originals have changed."""
    text = (REPO / page).read_text("utf-8")
    ours, theirs = sections(text), sections((REPO / PAGES[page]).read_text("utf-8"))
    if [depth(heading) for heading, _ in ours] != [depth(heading) for heading, _ in theirs]:
        yield f"{page} has {len(ours)} sections, {PAGES[page]} {len(theirs)}, or of other depths"
        return
    before = ""
    marked = []
    for line in text.splitlines():
        marked.append((MARK.fullmatch(before), line))
        before = line
    marks = {line: mark[1] for mark, line in marked if mark is not None}
    for (heading, _), original in zip(ours, theirs, strict=True):
        if marks.get(heading) != digest(original):
            yield f"{page}: {heading}"


def depth(heading: str) -> int:
    """Number of its signs."""
    return len(heading) - len(heading.lstrip("#"))


def accept(page: str) -> None:
    """Write the digests of today."""
    path = REPO / page
    digests = iter([digest(section) for section in sections((REPO / PAGES[page]).read_text("utf-8"))])
    lines: list[str] = []
    fenced = False
    for line in path.read_text("utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced and re.match(r"#+ ", line):
            lines += [f"<!-- of {next(digests)} -->"]
        if not MARK.fullmatch(line):
            lines.append(line)
    path.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        accept(str(Path(name)))
