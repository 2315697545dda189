"""The model card of an export, ``README.md``: what the model was made from.

It says what the plan knows. Locations are left out, because a card is published; the manifest has them, along with the
id of the plan and the checksums of all files, the card among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Completion
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.file_names import MANIFEST

CARD = "README.md"
LARGEST_CARD_BYTES = 1 << 20
_ENTRY = re.compile(r"(license|license_name|license_link)\s*:\s*(\S.*?)\s*")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]*")
_MODEL_ID = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def license_of(card: bytes) -> dict[str, str]:
    """The entries about the licence in a model card; none if they are not plain words.

    >>> license_of(b"---\\nlicense: apache-2.0 \\ntags:\\n  - license: no\\n---\\nlicense: neither")
    {'license': 'apache-2.0'}
    >>> license_of(b"license: mit")
    {}
    """
    lines = card.decode(errors="replace").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    entries: dict[str, str] = {}
    for line in lines[1:]:
        if line.rstrip() == "---":
            return entries
        if entry := _ENTRY.fullmatch(line):
            value = entry[2].strip("\"'")
            if _PLAIN.fullmatch(value):
                entries[entry[1]] = value
    return {}


def model_id(location: str) -> str | None:
    """The id on the Hub of a model, if its location says so: a URL, or a folder in the Hub's cache.

    >>> model_id("/root/.cache/huggingface/hub/models--org--a-b/snapshots/0123")
    'org/a-b'
    >>> model_id("hf://org/name"), model_id("/data/org/name")
    ('org/name', None)
    """
    in_cache = re.search(rf"(?:^|/)models--({_MODEL_ID}?)--({_MODEL_ID})/snapshots/", location)
    on_hub = re.fullmatch(rf"hf://({_MODEL_ID})/({_MODEL_ID})/?", location)
    match = in_cache or on_hub
    return None if match is None else f"{match[1]}/{match[2]}"


def model_card(wanted: Checkpoint, config: Mapping[str, Any], facts: Mapping[str, str]) -> bytes:
    """The card of an export.

    ``wanted`` is the source as the target holds it, ``config`` that of the export, and ``facts`` are what tells the
    export from others of the same source.
    """
    completion = wanted.history.completion
    title = config.get("model_type")
    header = _header(completion)
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in header.items()),
        "---",
        "",
        f"# {code(title) if isinstance(title, str) and title else 'Model'}",
        "",
        f"Converted from a training checkpoint by paddle-reshard {version.__version__}.",
        "",
        *(f"- {name}: {code(value)}" for name, value in _facts(wanted, facts).items()),
        "",
        f"`{MANIFEST}` holds the id of the plan, the files of the training checkpoint, and checksums of the files",
        "here; `paddle-reshard verify DIR` compares them.",
    ]
    return ("\n".join(lines) + "\n").encode()


def _header(completion: Completion | None) -> dict[str, str]:
    """The entries that the Hub reads."""
    header = {"library_name": "transformers"}
    if completion is not None:
        base = model_id(completion.location)
        header |= {"base_model": base} if base else {}
        header |= completion.license
    return header


def _facts(wanted: Checkpoint, facts: Mapping[str, str]) -> dict[str, str]:
    """What the model was made from, name by name."""
    schedule = wanted.job.lr_scheduler
    step = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    entries = {
        "source": wanted.format,
        "topology": "" if wanted.job.topology is None else str(wanted.job.topology),
        "sharding": wanted.job.strategy or "",
        "step": str(step) if type(step) is int and not wanted.model.table.scheduler_ahead else "",
        **{name: value for name, value in facts.items() if name != "layout"},
    }
    if wanted.history.completion is not None and wanted.history.completion.tensors:
        entries["tensors of the model that training began from"] = str(len(wanted.history.completion.tensors))
    return {name: value for name, value in entries.items() if value}


def code(text: str) -> str:
    r"""Any text as a code span of one line, in which Markdown and HTML have no meaning.

    >>> print(code("a`b\n<script>"), code("`"))
    ``a`b <script>`` `` ` ``
    """
    shown = "".join(c if c.isprintable() else " " for c in text)[:200]
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{space}{shown}{space}{fence}"
