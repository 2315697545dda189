"""What the comparison of converters finds, and how its table counts."""

from tests.parity.tensors import Tensor
from tests.peers.__main__ import compared
from tests.peers.converters import Brought
from tests.peers.page import Outcome, lines_of_table

MEMORY = {
    "a": Tensor("BF16", (2,), b"\1\0\2\0"),
    "a@tp1": Tensor("BF16", (2,), b"\1\0\3\0"),
    "a.w_0": Tensor("F32", (1,), b"\0\0\0\1"),
    "a.moment1_0": Tensor("F32", (1,), b"\0\0\0\2"),
    "a.ema_w_0": Tensor("F32", (1,), b"\0\0\0\3"),
}


def _of(**changed: Tensor | None) -> dict[str, list[str]]:
    held = {key: one for key, one in {**MEMORY, **changed}.items() if one is not None and "@" not in key}
    return compared(MEMORY, Brought(held, 1.0, 100))


def test_each_kind_of_state_is_compared_by_itself() -> None:
    assert not any(_of().values())
    wrong = _of(**{"a.w_0": None, "a.moment1_0": Tensor("F32", (1,), b"\1\0\0\2")})
    assert {kind for kind, lines in wrong.items() if lines} == {"master weights", "moments"}
    assert wrong["master weights"] == ["a.w_0: not loaded"]
    assert _of(a=MEMORY["a@tp1"])["parameters"] == []  # the other copy in the job's own memory
    assert _of(a=Tensor("BF16", (1, 2), b"\1\0\2\0"))["parameters"]


def test_what_fails_stays_in_the_table() -> None:
    told = {"case": "c", "format": "flex", "source": "llama"}
    outcomes = [
        Outcome("theirs", topology="tp=1", refused="AssertionError", **told),
        Outcome("ours", topology="tp=1", wrong=_of(), seconds=1.0, peak_mib=100, **told),
        Outcome("ours", topology="tp=2", wrong=_of(**{"a.w_0": None}), seconds=3.0, peak_mib=90, **told),
    ]
    theirs, ours = list(lines_of_table(outcomes))[-2:]
    assert theirs == "| `flex` | theirs | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 1 | – | 0 of 1 | – | – |"
    assert ours == "| `flex` | ours | 1 of 2 | 2 of 2 | 1 of 2 | 2 of 2 | – | 2 of 2 | 2.0 | 100 |"
