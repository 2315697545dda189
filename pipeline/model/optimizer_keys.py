"""The names that Paddle's optimizer gives its states, in every format.

Accumulator keys (Paddle ``optimizer/optimizer.py``)::

    <parameter name> [ "_fp32_master_" m ] "_" <accumulator> "_" n
"""

from __future__ import annotations

import re
from collections.abc import Container

from paddle_reshard.pipeline.core.tensors import WRITTEN_NAMES, written_name

_ACCUMULATOR_TAIL = re.compile(
    r"(?P<master>_fp32_master_\d+)?_(?P<name>"
    + "|".join(sorted(WRITTEN_NAMES, key=len, reverse=True))
    + r")_\d+"
)
SLICE_PREFIX = "slice@"
MASTER_WEIGHTS = "master_weights"
"""The entry of an optimizer's state that holds the master weights, by the names of their parameters."""


def split_accumulator_key(key: str, parameter_names: Container[str]) -> tuple[str, str, bool] | None:
    """Split an accumulator key into ``(parameter name, accumulator, has the _fp32_master_ part)``.

    ``None`` if no known accumulator of a known parameter is spelled so. The parameter name is matched
    whole, never as a prefix or a substring.

    >>> split_accumulator_key("linear_0.w_0_fp32_master_0_moment1_0", {"linear_0.w_0"})
    ('linear_0.w_0', 'moment1', True)
    """
    for match in _ACCUMULATOR_TAIL.finditer(key):
        if match.end() == len(key) and key[: match.start()] in parameter_names:
            return key[: match.start()], match["name"], match["master"] is not None
    return None


def accumulator_key(parameter_name: str, accumulator: str, master: bool) -> str:
    """The key that the first optimizer of a process gives an accumulator."""
    name = master_tensor_name(parameter_name) if master else parameter_name
    return name + accumulator_ending(accumulator)


def accumulator_ending(accumulator: str) -> str:
    """What follows the name of a parameter, or of its master weight, in the key of an accumulator.

    >>> accumulator_ending("moment1")
    '_moment1_0'
    """
    return f"_{written_name(accumulator)}_0"


def master_tensor_name(parameter_name: str) -> str:
    """The framework name of a master weight under stage 1 or no sharding."""
    return f"{parameter_name}_fp32_master_0"
