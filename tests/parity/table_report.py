"""losses.md: the table of losses, from what the runs have left behind."""

import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import table, write_figures

STEPS = ("4", "5", "6")
SAYS_LENGTH = 160


def write_report(document: Path, rows: list[dict[str, Any]]) -> None:
    """Write the figures into the document; the prose around them stays."""
    parts = [_machine(rows), _count(rows)]
    plain = [row for row in rows if not row["row"]["flex"]]
    for model in dict.fromkeys(row["row"]["model"] for row in plain):
        parts += [f"### {model}", _table([row for row in plain if row["row"]["model"] == model])]
    parts += ["### FlexCheckpoint as the target", _table([row for row in rows if row["row"]["flex"]])]
    write_figures(document, "\n\n".join(part for part in [*parts, *_unfinished(rows)] if part))


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether the job went on as the one that began with the truth: every loss, every bit of every state."""
    return "losses" in row and not row["found"]


def _apart(row: Mapping[str, Any]) -> float:
    return max(abs(row["losses"][step] - row["losses_of_own"][step]) for step in STEPS)


def _machine(rows: Iterable[Mapping[str, Any]]) -> str:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    versions = next((row["versions"] for row in rows if "versions" in row), {})
    return (
        f"- {len(os.sched_getaffinity(0))} cores ({model[0].split(':')[1].strip() if model else platform.machine()}), "
        f"Linux {platform.release().split('-')[0]}; up to 8 processes share them, so the times say little\n"
        f"- {', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"paddle-reshard {metadata.version('paddle-reshard')}, Python {platform.python_version()}"
    )


def _count(rows: list[dict[str, Any]]) -> str:
    run = [row for row in rows if "losses" in row]
    exact = [row for row in run if is_exact(row)]
    tensors = sum(row["tensors"] for row in exact)
    with_ema = sum(row["row"]["ema"] for row in exact)
    return (
        f"- **{len(exact)} of {len(run)} rows that the trainer could run are exact**: {tensors:,} tensors after step 6 "
        f"and {3 * len(exact)} losses are, bit for bit, those of a job that began with the truth; "
        f"{with_ema} with the moving average"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["before", "after", "average", "loss 3", "losses 4, 5, 6", "never changed", "apart"]
    head += ["tensors", "differ", "convert s", "resume s"]
    lines = []
    for row in rows:
        if "losses" not in row:
            continue
        lines.append(
            [
                row["row"]["before"],
                row["row"]["after"],
                "yes" if row["row"]["ema"] else "–",
                f"{row['loss_before']:.5f}",
                " ".join(f"{row['losses'][step]:.5f}" for step in STEPS),
                " ".join(f"{row['losses_of_own'][step]:.5f}" for step in STEPS),
                f"{_apart(row):.1e}",
                str(row["tensors"]),
                str(len(row["found"])),
                f"{row['convert_seconds']:.1f}",
                f"{row['resume_seconds']:.0f}",
            ]
        )
    return table(head, lines) if lines else ""


def _unfinished(rows: list[dict[str, Any]]) -> list[str]:
    parts = []
    if refused := [row for row in rows if "says" in row]:
        lines = "\n".join(f"- {row['name']}: {_short(row['says'])}" for row in refused)
        parts += ["### Rows that did not come to their end", lines]
    if missing := [row["name"] for row in rows if "losses" not in row and "says" not in row]:
        parts += ["### Rows not run yet", "\n".join(f"- {name}" for name in missing)]
    return parts


def _short(says: str) -> str:
    """The error that a log ends with, without this machine's folders."""
    parts = re.sub(r"(?:/[\w.@+-]+)+/", "", says.replace("|", "¦").replace("`", "'")).split(" / ")
    errors = [part for part in parts if re.match(r"\w+(?:Error|Exception)\b", part)]
    text = (errors or parts)[-1]
    return f"`{text if len(text) <= SAYS_LENGTH else text[:SAYS_LENGTH] + ' …'}`"
