"""Writes the tables of docs/peers.md and of README.md here; ``python -m tests.peers.page`` does so of the last run."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from paddle_reshard import __version__
from tests.conftest import REPO
from tests.peers.cases import FOLDER

FOUND = FOLDER / "outcomes.json"
PAGE = REPO / "docs" / "peers.md"
PAIRS = REPO / "tests" / "peers" / "README.md"
KINDS = ("parameters", "master weights", "moments", "beta powers", "EMA")


@dataclass
class Outcome:
    """What one converter made of one case and topology."""

    converter: str
    case: str
    format: str
    topology: str
    source: str
    refused: str = ""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Of each kind of state that the job had: what differs."""
    seconds: float = 0.0
    peak_mib: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything that the job had came over bit for bit."""
        return not self.refused and not any(self.wrong.values())

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        return "; ".join(f"{kind}: {lines[0]}" for kind, lines in self.wrong.items() if lines) or "equal"


def found() -> list[Outcome]:
    """What the last run has found so far."""
    return [Outcome(**one) for one in json.loads(FOUND.read_text())]


def write_page(outcomes: list[Outcome]) -> None:
    """Write the tables of both pages anew; what is said around them is the pages' own."""
    for page, name, lines in (
        (PAGE, "table", lines_of_table),
        (PAIRS, "wrong", _wrong),
        (PAIRS, "all", _all),
    ):
        block = f"<!-- {name} -->\n" + "\n".join(lines(outcomes)) + "\n<!-- end -->"
        page.write_text(
            re.sub(
                rf"<!-- {name} -->.*?<!-- end -->",
                lambda _, block=block: block,
                page.read_text(),
                flags=re.DOTALL,
            )
        )


def _groups(outcomes: list[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    found: dict[tuple[str, str], list[Outcome]] = {}
    formats = list(dict.fromkeys(one.format for one in outcomes))
    for one in sorted(outcomes, key=lambda one: formats.index(one.format)):
        found.setdefault((one.format, one.converter), []).append(one)
    return found


def lines_of_table(outcomes: list[Outcome]) -> Iterator[str]:
    """A row a format and converter: of how many pairs each kind of state came over."""
    cases, pairs = {one.case for one in outcomes}, {(one.case, one.topology) for one in outcomes}
    yield ""
    yield f"{len(cases)} checkpoints, {len(pairs)} pairs; paddle-reshard {__version__}:"
    yield ""
    yield f"| format | converter | everything equal | {' | '.join(KINDS)} | seconds | MiB |"
    yield "| --- | --- |" + " ---: |" * (len(KINDS) + 3)
    states = {(one.case, one.topology, kind) for one in outcomes for kind in one.wrong}
    for (name, converter), group in _groups(outcomes).items():
        loaded = [one for one in group if not one.refused]
        cells = [f"{sum(one.equal for one in group)} of {len(group)}"]
        for kind in KINDS:
            having = [one for one in group if (one.case, one.topology, kind) in states]
            equal = sum(not one.refused and not one.wrong[kind] for one in having)
            cells.append(f"{equal} of {len(having)}" if having else "–")
        cells.append(f"{median(one.seconds for one in loaded):.1f}" if loaded else "–")
        cells.append(f"{max(one.peak_mib for one in loaded):,}" if loaded else "–")
        yield f"| `{name}` | {converter} | {' | '.join(cells)} |"


def _wrong(outcomes: list[Outcome]) -> Iterator[str]:
    yield "| format | converter | how often | what happened |"
    yield "| --- | --- | ---: | --- |"
    for (name, converter), group in _groups(outcomes).items():
        reasons: dict[str, list[Outcome]] = {}
        for one in group:
            if not one.equal:
                reasons.setdefault(_reason(one), []).append(one)
        for reason, ones in reasons.items():
            yield f"| `{name}` | {converter} | {len(ones)} | {reason} |"


def _reason(one: Outcome) -> str:
    """One line: the words of a refusal, or how much of which states differs without a word."""
    if one.refused:
        return f"ends with `{_words(one.refused)}`"
    kinds = [kind for kind, lines in one.wrong.items() if lines]
    lines = [line for kind in kinds for line in one.wrong[kind]]
    lacking = sum(line.endswith(": not loaded") for line in lines)
    told = [f"{lacking} are not there"] * bool(lacking)
    told += [f"{len(lines) - lacking} have other values"] * (lacking < len(lines))
    return (
        f"ends without an error; of {', '.join(kinds)}, {' and '.join(told)}, the first `{_words(lines[0])}`"
    )


def _words(text: str) -> str:
    text = re.sub(r"\S*/(?=[^/\s]+)", "", text).replace("|", "/").replace("`", "'")
    return text if len(text) <= 160 else text[:157] + "…"


def _all(outcomes: list[Outcome]) -> Iterator[str]:
    yield "| case | its job | target | " + "result |"
    yield "| --- | --- | --- | --- |"
    pairs: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        pairs.setdefault((one.case, one.topology), []).append(one)
    for (case, topology), ones in pairs.items():
        results = "; ".join(f"{one.converter}: {_verdict(one)}" for one in ones)
        yield f"| `{case}` | {ones[0].source} | `{topology}` | {results} |"


def _verdict(one: Outcome) -> str:
    if one.refused:
        return "fails"
    differing = [kind for kind, lines in one.wrong.items() if lines]
    return f"**other {', '.join(differing)}**" if differing else "equal"


if __name__ == "__main__":
    write_page(found())
