"""Compare what converters bring to other topologies: ``make peers``, or ``make peers ARGS='dense/fc_single'``.

Every case is a checkpoint, of the corpus or of a drawn job, and what its job had in memory. A converter brings it to
two other topologies; what a job of such a topology then holds is compared with that memory bit for bit, each kind of
state by itself. Without names of cases all are run and docs/peers.md is written. Ends with 1 if ours is wrong or
refuses anywhere.
"""

import argparse
import json
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict

from tests.lab.job import Topology
from tests.lab.laboratory import Laboratory
from tests.parity.lab import LabError, alone, python_of, say
from tests.parity.tensors import Tensor, differences
from tests.peers.cases import CASES, FOLDER, Case, case_of
from tests.peers.converters import OURS, Brought, Converter, Refused, converters_of
from tests.peers.page import FOUND, KINDS, Outcome, found, write_page

SUFFIXES = {
    "master weights": re.compile(r"\.w_0$"),
    "moments": re.compile(r"\.(moment1_0|moment2_0)$"),
    "beta powers": re.compile(r"\.beta[12]_pow_acc_0$"),
    "EMA": re.compile(r"\.(ema_w_0|ema)$"),
}


def main() -> int:
    """Run what is asked for; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="make peers", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="run these alone, and write no page")
    parser.add_argument(
        "--go-on", action="store_true", help="keep the pairs that an interrupted run has done"
    )
    given = parser.parse_args()
    wanted = given.cases
    if unknown := set(wanted) - CASES.keys():
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes = found() if given.go_on and FOUND.exists() else []
    try:
        with alone(FOLDER), Laboratory() as lab:
            python_of("nlp")
            for name in wanted or CASES:
                done = {one.topology for one in outcomes if one.case == name}
                left = [topology for topology in CASES[name] if str(topology) not in done]
                case = case_of(name, lab) if left else None
                for topology in left if case else ():
                    for converter, function in converters_of(case, topology).items():
                        outcomes.append(_outcome(converter, function, case, topology, lab))
                        say(f"{name} -> {topology}: {converter}: {str(outcomes[-1])[:300]}")
                    shutil.rmtree(FOLDER / name / str(topology))
                    FOUND.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    except LabError as error:
        say(f"peers: {error}")
        return 2
    if not wanted:
        write_page(outcomes)
    return 0 if all(one.equal for one in outcomes if one.converter == OURS) else 1


def _outcome(name: str, converter: Converter, case: Case, topology: Topology, lab: Laboratory) -> Outcome:
    outcome = Outcome(name, case.name, case.job.format, str(topology), str(case.job))
    folder = FOLDER / case.name / str(topology) / re.sub(r"\W+", "-", name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        brought = converter(case, topology, lab, folder)
    except Refused as refusal:
        outcome.refused = " ".join(str(refusal).split())
    else:
        outcome.wrong = compared(case.memory, brought)
        if not case.target(topology).ema:
            outcome.wrong.pop("EMA", None)
        outcome.seconds, outcome.peak_mib = brought.seconds, brought.peak_mib
    return outcome


def compared(memory: Mapping[str, Tensor], brought: Brought) -> dict[str, list[str]]:
    """Of every kind of state that the job had: the tensors that are not the same in each bit.

    Of copies that had drifted apart in the job, each counts. What a converter holds beyond that is no difference.
    """
    copies: dict[str, list[Tensor]] = {}
    for key, tensor in memory.items():
        copies.setdefault(key.partition("@")[0], []).append(tensor)
    wrong: dict[str, list[str]] = {}
    for key, values in copies.items():
        lines = wrong.setdefault(_kind_of(key), [])
        mine = brought.memory.get(key)
        if mine not in values:
            lines += differences({key: mine} if mine else {}, {key: values[0]})
    return wrong


def _kind_of(key: str) -> str:
    return next((kind for kind, pattern in SUFFIXES.items() if pattern.search(key)), KINDS[0])


if __name__ == "__main__":
    sys.exit(main())
