"""Choose nodes of a Ray cluster by their labels. Pure, and independent of Ray.

Operators label nodes (``ray start --labels``, KubeRay), and clouds name their zone and region:
``ray.io/availability-zone``, ``ray.io/region``, ``ray.io/market-type``. Ray runs an actor with a *label selector* only
on nodes that satisfy all of its conditions, and shows it to autoscalers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import UsageError

Labels = Mapping[str, str]

_NAME = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = rf"(?:[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{{0,251}}[a-zA-Z0-9])?/)?{_NAME}"
_CONDITION = re.compile(rf"(?P<key>{_KEY})=(?P<condition>!?(?:{_NAME}|in\({_NAME}(?:,{_NAME})*\)))")
_OF_ONE_NODE = "ray.io/node-id"
SHOWN_NODES = 5
"""Sets of labels that a message lists."""


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Conditions that the labels of a node must satisfy, all of them."""

    conditions: tuple[tuple[str, str], ...] = ()
    """Pairs of a key and ``VALUE``, ``!VALUE``, ``in(A,B)`` or ``!in(A,B)``, as Ray writes them."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> LabelSelector:
        """Parse conditions ``KEY=CONDITION``.

        >>> print(LabelSelector.parse(["ray.io/region=us-east-1", "ray.io/market-type=!spot"]))
        ray.io/region=us-east-1 and ray.io/market-type=!spot
        """
        conditions: dict[str, str] = {}
        for text in texts:
            match = _CONDITION.fullmatch(text)
            if match is None:
                raise UsageError(
                    f"--label-selector {text!r}: give KEY=VALUE, as in ray.io/region=us-east-1, or KEY=!VALUE, "
                    "KEY=in(A,B), KEY=!in(A,B)"
                )
            if match["key"] in conditions:
                raise UsageError(
                    f"--label-selector {match['key']} is given twice; use in(A,B) for several values"
                )
            conditions[match["key"]] = match["condition"]
        return cls(tuple(conditions.items()))

    def selects(self, labels: Labels) -> bool:
        """Whether a node with these labels satisfies all conditions.

        >>> LabelSelector.parse(["zone=in(a,b)"]).selects({"zone": "b"}), LabelSelector.parse(["zone=!a"]).selects({})
        (True, True)
        """
        return all(_holds(condition, labels.get(key)) for key, condition in self.conditions)

    @property
    def option(self) -> dict[str, str] | None:
        """Ray's option ``label_selector`` of actors, tasks and bundles."""
        return dict(self.conditions) or None

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def __str__(self) -> str:
        return " and ".join(f"{key}={condition}" for key, condition in self.conditions)


def _holds(condition: str, value: str | None) -> bool:
    """Whether a label satisfies a condition; ``value`` is ``None`` if the node does not have it."""
    negated = condition.startswith("!")
    positive = condition.removeprefix("!")
    values = positive[3:-1].split(",") if positive.startswith("in(") else [positive]
    return (value in values) != negated


def labels_in_words(nodes: Iterable[Labels]) -> str:
    """The labels that nodes have, and how many have them.

    >>> labels_in_words([{"zone": "a"}, {"zone": "b"}, {"zone": "b"}, {}])
    'zone=b (2 nodes); zone=a (1 node); none (1 node)'
    """
    counts = Counter(
        ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if key != _OF_ONE_NODE)
        for labels in nodes
    )
    shown = [
        f"{labels or 'none'} ({count} node{'s'[: count > 1]})"
        for labels, count in counts.most_common(SHOWN_NODES)
    ]
    return "; ".join([*shown, *["…"][: len(counts) > SHOWN_NODES]])
