"""losses.md: the table of losses, from what the runs have left behind."""

import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import table, write_figures
from tests.parity.table_rows import MODELS

STEPS = ("4", "5", "6")
SAYS_LENGTH = 160


def write_report(
    document: Path,
    rows: list[dict[str, Any]],
    pairs: Mapping[str, list[Mapping[str, Any]]],
    converter: Mapping[str, Mapping[str, str]],
) -> None:
    """Write the figures into the document; the prose around them stays."""
    by_way: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_way.setdefault(row["row"]["way"], []).append(row)
    parts = [_machine(rows), _count(by_way["ours"] + by_way.get("ours to flex", []))]
    for model in dict.fromkeys(row["row"]["model"] for row in by_way["ours"]):
        of_model = [row for row in by_way["ours"] if row["row"]["model"] == model]
        parts += [f"### {model}", _spread(model, pairs[model]), _table(of_model, pairs[model])]
    parts += ["### FlexCheckpoint as the target", _table(by_way["ours to flex"], pairs["llama"])]
    parts += [
        "### Upstream's own ways",
        _upstream(by_way["flex"] + by_way["sharding_io"]),
        _converter(converter),
    ]
    parts += _unfinished(rows)
    write_figures(document, "\n\n".join(part for part in parts if part))


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether the job went on as the one that began with the truth: every loss, every bit of every state."""
    return (
        "losses" in row
        and not (row["not_loaded"] or row["not_overwritten"] or row["different"])
        and row["losses"] == row["losses_of_truth"]
    )


def drift_allowed(row: Mapping[str, Any], pairs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """How far apart strategies alone bring a job, by kind of state and for the loss.

    From pairs of jobs without any conversion: from the same state, in two strategies. The row's own pair does
    not count, nor does one whose strategies differ in a quirk in which those of the row do not.
    """
    before, after = _slug(row["row"]["before"]), _slug(row["row"]["after"])
    of_row = _differ_in(row["row"]["model"], before, after)
    allowed: dict[str, float] = {}
    for pair in pairs:
        own = pair["start"] == before and {pair["one"], pair["other"]} == {before, after}
        if not own and _differ_in(row["row"]["model"], pair["one"], pair["other"]) <= of_row:
            for kind, apart in {**pair["kinds"], "loss": pair["loss"]}.items():
                allowed[kind] = max(allowed.get(kind, 0.0), apart)
    return allowed


def quirks_of(model: str, strategy: str) -> set[str]:
    """Where the trainer's arithmetic is known to depend on the strategy beyond rounding; docs/parity.md explains."""
    found = {quirk for quirk in ("pp", "stage-3") if quirk in strategy}
    return found | ({"mp"} if MODELS[model].replicas_drift and "mp" in strategy else set())


def _differ_in(model: str, one: str, other: str) -> set[str]:
    return quirks_of(model, one) ^ quirks_of(model, other)


def share_of_drift(row: Mapping[str, Any], allowed: Mapping[str, float]) -> float:
    """How much of what strategies drift apart a row is away from the run that never changed; at most 1 is good."""
    apart = {**row["drift"], "loss": _apart(row)}
    return max((found / allowed[kind] for kind, found in apart.items() if allowed.get(kind)), default=0.0)


def _slug(name: str) -> str:
    return name.replace(" ", "-")


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


def _table(rows: list[dict[str, Any]], pairs: list[Mapping[str, Any]]) -> str:
    head = ["before", "after", "average", "loss 3", "losses 4, 5, 6", "never changed", "apart", "of drift"]
    head += ["tensors", "ulp", "convert s", "resume s"]
    lines = []
    for row in rows:
        if "losses" not in row:
            continue
        ulp = max([*row["different"].values(), *row["not_loaded"].values()], default=0)
        lines.append(
            [
                row["row"]["before"],
                row["row"]["after"],
                "yes" if row["row"]["ema"] else "–",
                f"{row['loss_before']:.5f}",
                " ".join(f"{row['losses'][step]:.5f}" for step in STEPS),
                " ".join(f"{row['losses_of_own'][step]:.5f}" for step in STEPS),
                f"{_apart(row):.1e}",
                f"{share_of_drift(row, drift_allowed(row, pairs)):.2f}",
                str(row["tensors"]),
                f"{ulp}" if ulp >= 0 else "missing",
                f"{row['convert_seconds']:.1f}",
                f"{row['resume_seconds']:.0f}",
            ]
        )
    return table(head, lines) if lines else ""


def _spread(model: str, pairs: list[Mapping[str, Any]]) -> str:
    kinds = ["parameter", "master weight", "moment1", "moment2", "average"]
    groups: dict[frozenset[str], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        groups.setdefault(frozenset(_differ_in(model, pair["one"], pair["other"])), []).append(pair)
    lines = []
    for quirks, chosen in sorted(groups.items(), key=lambda group: (len(group[0]), sorted(group[0]))):
        name = "that differ in " + ", ".join(sorted(quirks)) if quirks else "without a quirk between them"
        most = [max(pair["kinds"].get(kind, 0.0) for pair in chosen) for kind in kinds]
        loss = max(pair["loss"] for pair in chosen)
        lines.append([f"{len(chosen)} pairs {name}", *(f"{apart:.1e}" for apart in (loss, *most))])
    return table(["drift in three steps, at most", "loss", *kinds], lines) if lines else ""


def _upstream(rows: list[dict[str, Any]]) -> str:
    names = {
        "flex": "FlexCheckpoint, loaded in the other strategy",
        "sharding_io": "sharding_io, resharded while loading",
    }
    lines = []
    for row in rows:
        if "losses" in row:
            says = "the same bits" if is_exact(row) else _how_different(row)
        elif "says" in row:
            says = _short(row["says"])
        else:
            continue
        asked = row["row"]
        lines.append(
            [names[asked["way"]], asked["before"], asked["after"], "yes" if asked["ema"] else "–", says]
        )
    return (
        table(["way", "before", "after", "average", "after step 6, or what it says"], lines) if lines else ""
    )


def _how_different(row: Mapping[str, Any]) -> str:
    if row["missing"]:
        return f"{len(row['missing'])} tensors missing, {row['missing'][0]} first"
    loaded = row["not_loaded"]
    if loaded:
        return f"{len(loaded)} tensors loaded with other values, {next(iter(loaded))} first"
    return f"{len(row['different'])} tensors differ, by {max(row['different'].values())} ulp"


def _converter(converter: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for strategy, found_of in converter.items():
        says = found_of["says"]
        if found := re.search(r"compared (\d+) bad (\d+)", says):
            lines.append([strategy, f"{found[1]} tensors compared, {found[2]} differ"])
        else:
            lines.append(
                [
                    strategy,
                    _short(
                        re.sub(
                            r"^PEER_FAIL paddlenlp \S+ / paddle \S+ \S+ | @?sec [\d.]+$| sec [\d.]+$",
                            "",
                            says,
                        )
                    ),
                ]
            )
    if not lines:
        return ""
    return table(["CheckpointConverter (PaddleNLP), on one card, of what was saved by", "it says"], lines)


def _unfinished(rows: list[dict[str, Any]]) -> list[str]:
    parts = []
    ours = [row for row in rows if row["row"]["way"].startswith("ours")]
    if refused := [row for row in ours if "says" in row]:
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
