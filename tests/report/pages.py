"""A report as a browser reads it: its elements, its policy and its data. Shares no code with what makes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "input", "br", "img", "wbr"}
LOADING = {"src", "srcset", "href", "action", "poster", "background", "data", "xlink:href"}


class Page(HTMLParser):
    """Every element must be closed by its own end tag."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.size_bytes = path.stat().st_size
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.text = ""
        self.html = path.read_text("utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []
        (data,) = [text for name, text in self._scripts() if name == "data"]
        self.data: dict[str, Any] = json.loads(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def _scripts(self) -> list[tuple[str | None, str]]:
        ids = [attributes.get("id") for tag, attributes in self.elements if tag == "script"]
        return list(zip(ids, self.texts["script"], strict=True))

    def commands(self) -> list[str]:
        """What can be copied into a shell: the next steps, and then the command that made the page."""
        classes = [attributes.get("class") for tag, attributes in self.elements if tag == "code"]
        return [text for name, text in zip(classes, self.texts["code"], strict=True) if name == "line"]

    def tile(self, name: str) -> tuple[str, str]:
        """The figure of this name, and its note."""
        found = re.search(rf"<dt>{name}</dt><dd><b>(.*?)</b><small>(.*?)</small>", self.html)
        assert found, name
        return found[1], found[2]

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def check_closed(self) -> None:
        """Nothing is loaded, no element has an attribute that runs, and only the page's own code may run."""
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                assert not name.startswith("on"), (tag, name)
                assert name != "style", (tag, value)
                if name in LOADING:
                    assert value is not None
                    assert value.startswith("#") or value == "data:,", (tag, name, value)
        (policy,) = [
            attributes["content"] or ""
            for tag, attributes in self.elements
            if attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        scripts = [text for name, text in self._scripts() if name != "data"]
        for rule, texts in (("script-src", scripts), ("style-src", self.texts["style"])):
            hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
            assert rules[rule] == " ".join(f"'sha256-{one}'" for one in hashes)

    # ------------------------------------------------------------------------------------------- the data

    def held(self, side: str) -> dict[tuple[str, str, int], int]:
        """``(key, state, place)`` → bytes."""
        picture = self.data["picture"]
        held = picture[f"{side}_held"]
        assert held["fold"] == 1
        keys, rows = list(accumulate(picture["row_keys"])), accumulate(held["row"])
        found = {}
        for row, place, nbytes in zip(rows, held["place"], held["nbytes"], strict=True):
            found[picture["keys"][keys[row]], picture["states"][picture["row_states"][row]], place] = nbytes
        return found

    def moves(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Source and target place → bytes through memory, and bytes that the storage copied."""
        moves = self.data["picture"]["moves"]
        pairs = zip(accumulate(moves["source"]), moves["target"], strict=True)
        return dict(zip(pairs, zip(moves["memory"], moves["copied"], strict=True), strict=True))

    def table(self, title: str) -> list[list[Any]]:
        """The rows of a table."""
        tables = [*self.data["findings"], *self.data["tables"]]
        (found,) = [table["rows"] for table in tables if table["title"] == title]
        return list(found)

    def rank(self, side: str, path: str) -> int:
        """The place of a file, counted from the coordinates in its name."""
        (block,) = self.data["picture"][side]["blocks"]
        axes = block["axes"]
        at = {axis: int(number) for axis, number in re.findall(r"(tp|pp|shard)(\d+)", path)}
        stage = at.get("pp", 0) * axes["sharding"] + at.get("shard", 0)
        return stage * axes["tp"] + at.get("tp", 0)
