"""A report as one HTML document that loads nothing: template, style, script and data are in it.

Jinja2 escapes every text. A content security policy allows only the style and the script of this package, by their
hashes, so that a name that were to escape could still run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from paddle_reshard.pipeline.report.data import Chart, ReportData, Table
from paddle_reshard.pipeline.report.picture import Held, Picture
from paddle_reshard.pipeline.report.places import Side
from paddle_reshard.pipeline.report.run_record import RunData

SIGNIFICANT = 6
"""Digits of figures that are drawn."""
EXACT = 9
"""Digits in tables: enough to tell two values of float32 apart."""


def render(report: ReportData) -> str:
    """The document."""
    style, script = _static("report.css"), _static("report.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    template = environment.from_string(_static("report.html"))
    made_at = (
        "" if report.made is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.made.at))
    )
    return template.render(
        report=report, data=embedded(report), made_at=made_at, policy=policy, style=style, script=script
    )


def embedded(report: ReportData) -> dict[str, Any]:
    """The data that the page's script draws, as plain columns."""
    return {
        "picture": None if report.picture is None else _picture(report.picture),
        "run": None if report.run is None else _run(report.run),
        "budget_bytes": report.budget_bytes,
        "footprint_bytes": report.footprint_bytes,
        "charts": [_chart(chart) for chart in report.charts],
        "findings": [_table(table) for table in report.findings],
        "tables": [_table(table) for table in report.tables],
    }


def _static(name: str) -> str:
    return (files(__package__) / "static" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# ------------------------------------------------------------------------------------------------- columns


def _picture(picture: Picture) -> dict[str, Any]:
    keys = list(dict.fromkeys(picture.keys))
    numbers = {key: number for number, key in enumerate(keys)}
    return {
        "source": _side(picture.source),
        "target": _side(picture.target),
        "states": picture.states,
        "source_bytes": picture.source_bytes,
        "target_bytes": picture.target_bytes,
        "keys": keys,
        "row_keys": _steps([numbers[key] for key in picture.keys]),
        "row_states": picture.row_states,
        "source_held": _held(picture.source_held),
        "target_held": _held(picture.target_held),
        "moves": {**asdict(picture.moves), "source": _steps(picture.moves.source)},
        "joined": picture.joined,
    }


def _side(side: Side) -> dict[str, Any]:
    return {"blocks": list(map(asdict, side.blocks)), "labels": side.labels, "files": side.files}


def _held(held: Held) -> dict[str, Any]:
    return {**asdict(held), "row": _steps(held.row)}


def _steps(values: Sequence[int]) -> list[int]:
    """Each value less the one before it: small numbers, where values are sorted."""
    return [value - before for value, before in zip(values, (0, *values), strict=False)]


def _run(run: RunData) -> dict[str, Any]:
    workers = list(dict.fromkeys(stretch.worker for stretch in run.stretches))
    return {
        "seconds": _rounded(run.seconds),
        "steps": [[step.name, _rounded(step.start), _rounded(step.stop), step.summary] for step in run.steps],
        "workers": workers,
        "stretches": [
            [workers.index(worker), _rounded(start), _rounded(stop), *figures]
            for worker, start, stop, *figures in run.stretches
        ],
        "curves": {
            name: [_rounded(value) for value in getattr(run.curves, name)]
            for name in ("seconds", "read", "written", "copied", "memory")
        },
        "resident": [[_rounded(at), nbytes] for at, nbytes in run.resident],
        "waited_for": run.waited_for,
    }


def _chart(chart: Chart) -> dict[str, Any]:
    return {"title": chart.title, "bars": [[bar.name, _rounded(bar.value), bar.label] for bar in chart.bars]}


def _table(table: Table) -> dict[str, Any]:
    rows = [
        [_rounded(cell, EXACT) if isinstance(cell, float) else cell for cell in row] for row in table.rows
    ]
    return {
        "title": table.title,
        "headings": table.headings,
        "rows": rows,
        "more": table.more,
        "first": table.first,
    }


def _rounded(value: float | None, digits: int = SIGNIFICANT) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
