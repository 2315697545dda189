"""Draw jobs, run them in the real trainer, convert, compare: ``make draws ARGS='--seed 7 --count 40'``.

Ends with a table, and with 1 if anything is wrong; a draw that fails is kept, and what is left of it after shrinking.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conftest import REPO
from tests.lab.draws.chance import EVERY_FAMILY, draw
from tests.lab.draws.check import WRONG, Draw, Outcome, check, draw_of, shrink
from tests.lab.draws.keep import keep
from tests.lab.laboratory import Laboratory
from tests.parity.lab import LabError, alone, say

FOLDER = REPO / ".draws"
SHOWN = 6


def main() -> int:
    """Parse what is asked; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="make draws", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first number; draws are numbered from it")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--families", nargs="+", metavar="FAMILY", choices=EVERY_FAMILY, default=EVERY_FAMILY)
    parser.add_argument("--again", metavar="FOLDER", help="run the draw that was kept in FOLDER again")
    parser.add_argument(
        "--keep", nargs=2, metavar=("FOLDER", "NAME"), help="add a kept draw to tests/golden/draws"
    )
    parser.add_argument("--no-shrink", action="store_true", help="leave a draw that fails as large as it is")
    parser.add_argument("--small", action="store_true", help="models of some thousand parameters")
    parser.add_argument(
        "--all", action="store_true", help="keep the folders of all draws, not of those that fail"
    )
    given = parser.parse_args()
    if given.keep:
        say(f"added {keep(Path(given.keep[0]), given.keep[1])}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with alone(FOLDER), Laboratory() as lab:
            if given.again:
                kept = Path(given.again)
                draws = {kept: draw_of(json.loads((kept / "draw.json").read_text()))}
            else:
                numbers = range(given.seed, given.seed + given.count)
                draws = {
                    FOLDER / str(number): draw(number, given.families, given.small) for number in numbers
                }
            shrinks = not (given.no_shrink or given.again)
            outcomes = [_report(one, folder, lab, shrinks, given.all) for folder, one in draws.items()]
    except LabError as error:
        say(f"draws: {error}")
        return 2
    say(table(outcomes))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _report(draw: Draw, folder: Path, lab: Laboratory, shrinks: bool, keeps: bool) -> Outcome:
    started = time.monotonic()
    outcome = check(draw, lab, folder)
    status = "WRONG" if outcome.wrong else "refused" if "source" in outcome.refused else "equal"
    say(
        f"{draw.number} {status} {time.monotonic() - started:.0f} s: {draw.source}  ->  {draw.target}"
        f"  ({outcome.tensors} tensors, {outcome.structures} structure, {outcome.resumed} resumed)"
    )
    for what, words in outcome.refused.items():
        say(f"    {what} refused: {words[:300]}")
    for line in outcome.wrong[:SHOWN]:
        say(f"    {line[:700]}")
    if outcome.wrong:
        (folder / WRONG).write_text("\n".join(outcome.wrong) + "\n")
        say(f"    {len(outcome.wrong)} in all: {folder / WRONG}")
    if not outcome.wrong:
        if not keeps:
            shutil.rmtree(folder)
    elif shrinks:
        kept = folder.with_name(f"{folder.name}-smaller")
        smaller = shrink(outcome, lab, kept)
        check(smaller.draw, lab, kept)
        say(f"    smaller: {smaller.draw.source}  ->  {smaller.draw.target}; both are kept in {kept.parent}")
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """One row a family: draws, how many the trainer refused, what was compared, what is wrong."""
    rows = {family: Counter[str]() for family in EVERY_FAMILY}
    for outcome in outcomes:
        rows[outcome.draw.source.family].update(
            draws=1,
            refused="source" in outcome.refused,
            limits="conversion" in outcome.refused,
            tensors=outcome.tensors,
            structures=outcome.structures,
            resumed=outcome.resumed,
            wrong=bool(outcome.wrong),
        )
    head = ("draws", "refused", "limits", "tensors", "structures", "resumed", "wrong")
    lines = [f"| {'family':14} | " + " | ".join(f"{name:>10}" for name in head) + " |"]
    lines.append("| --- |" + " ---: |" * len(head))
    total = sum(rows.values(), Counter[str]())
    for family, row in [*((f, r) for f, r in rows.items() if r["draws"]), ("all", total)]:
        lines.append(f"| {family:14} | " + " | ".join(f"{row[name]:>10,}" for name in head) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
