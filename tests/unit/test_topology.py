"""Topologies as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_reshard import Topology
from paddle_reshard.pipeline.core.errors import UsageError

AXES = ("tp", "pp", "vpp", "sharding", "ep", "dp")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=2", Topology(tp=2)),
        ("tp=2,pp=4,sharding=8", Topology(tp=2, pp=4, sharding=8)),
        ("sharding=8,tp=2", Topology(tp=2, sharding=8)),
        (" tp = 2 , pp=1", Topology(tp=2)),
        ("pp=4,vpp=2,dp=3,ep=1", Topology(pp=4, vpp=2, dp=3)),
        ("tp=007", Topology(tp=7)),
    ],
)
def test_parse(text: str, expected: Topology) -> None:
    assert Topology.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mp=2", "unknown axis 'mp' in topology 'mp=2'; axes are tp, pp, vpp, sharding, ep, dp; did you mean tp?"),
        ("TP=2", "unknown axis 'TP' in topology 'TP=2'; axes are tp, pp, vpp, sharding, ep, dp; did you mean tp?"),
        ("tp2", "unknown axis 'tp2' in topology 'tp2'; axes are tp, pp, vpp, sharding, ep, dp; write tp=2"),
        ("", "unknown axis '' in topology ''; axes are tp, pp, vpp, sharding, ep, dp"),
        ("tp=2,", "unknown axis '' in topology 'tp=2,'; axes are tp, pp, vpp, sharding, ep, dp"),
        ("tp", "axis 'tp' in topology 'tp' needs a whole number, not ''"),
        ("tp=", "axis 'tp' in topology 'tp=' needs a whole number, not ''"),
        ("tp=two", "axis 'tp' in topology 'tp=two' needs a whole number, not 'two'"),
        ("tp=-1", "axis 'tp' in topology 'tp=-1' needs a whole number, not '-1'"),
        ("tp=1.5", "axis 'tp' in topology 'tp=1.5' needs a whole number, not '1.5'"),
        ("tp=2=2", "axis 'tp' in topology 'tp=2=2' needs a whole number, not '2=2'"),
        ("tp=²", "axis 'tp' in topology 'tp=²' needs a whole number, not '²'"),
        ("tp=٢", "axis 'tp' in topology 'tp=٢' needs a whole number, not '٢'"),
        ("tp=2,tp=2", "axis 'tp' is given twice in topology 'tp=2,tp=2'"),
        ("4,tp=2", "unknown axis '4' in topology '4,tp=2'; axes are tp, pp, vpp, sharding, ep, dp; a number of cards "
         "is given alone, --to 4"),
        ("4.0", "4.0 cards: a number of cards is a whole number, as in 4"),
        ("0", "0 cards: a job has 1 to 262144"),
        ("-1", "-1 cards: a job has 1 to 262144"),
        ("9" * 5000, f"{'9' * 40} cards: a job has 1 to 262144"),
        ("٤", "unknown axis '٤' in topology '٤'; axes are tp, pp, vpp, sharding, ep, dp"),
        ("4", "4 is a number of cards, which stands for a topology only as --to of convert and plan with one target, "
         "and as --cards of resume; write axes, such as tp=2,pp=2: plan SRC --cards 4 lists what is possible"),
        ("tp=0", "axis tp has size 0; sizes are whole numbers from 1"),
    ],
)  # fmt: skip
def test_what_is_not_a_topology(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Topology.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("size", [0, -2, 1.0, "2", None])
def test_sizes_are_whole_numbers(size: object) -> None:
    with pytest.raises(UsageError, match=r"axis pp has size .*; sizes are whole numbers from 1"):
        Topology(pp=size)


@given(st.fixed_dictionaries({axis: st.integers(1, 20) for axis in AXES}))
def test_what_is_printed_can_be_parsed(sizes: dict[str, int]) -> None:
    topology = Topology(**sizes)
    assert Topology.parse(str(topology)) == topology
    assert Topology.of(sizes) == Topology.of(str(topology)) == Topology.of(topology) == topology
    assert topology.world_size == sizes["tp"] * sizes["pp"] * sizes["sharding"] * sizes["dp"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"pt": 2}, "unknown axis 'pt' in topology"),
        ({"tp": "2"}, "axis tp has size '2'"),
        (
            3,
            "3 is a number of cards, which stands for a topology only as --to of convert and plan with one target",
        ),
        (None, "None is no topology"),
    ],
)
def test_a_mapping_is_checked_as_text_is(given: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Topology.of(given)  # type: ignore[arg-type]
