"""The tensors that statements can name."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from paddle_reshard.pipeline.changes.aoa.values import Value, source_value
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, DTYPES, PARAM


def is_number(state: str) -> bool:
    """Whether the state is a single number for each parameter."""
    return state in ACCUMULATORS and ACCUMULATORS[state].per_parameter


class SourceTensors:
    """The tensors of a catalog, by key."""

    def __init__(self, catalog: Catalog) -> None:
        if catalog.mixtures:
            label = catalog.tensors[min(catalog.mixtures)].label
            raise UnsupportedError(
                f"{label}: it is an average of several tensors; apply AOA statements before averaging"
            )
        self.catalog = catalog
        self.states: dict[str, dict[str, int]] = {}
        """Key → state → index into ``catalog.tensors``."""
        for index, tensor in enumerate(catalog.tensors):
            self.states.setdefault(tensor.key, {})[tensor.state] = index
        self.owners = {key: key for key in self.states}
        """Key or alias → key."""
        for tensor in catalog.tensors:
            for alias in tensor.aliases:
                if self.owners.setdefault(alias, tensor.key) != tensor.key:
                    raise PlanError(
                        f"{tensor.label}: its alias {alias} is also a name of {self.owners[alias]}"
                    )
        self.values = {key: self._value(key) for key in self.states}
        """Key → its unchanged value."""
        self._stored = defaultdict[int, set[str]](set)
        stored = catalog.fragments["tensor"].astype(np.int64) * len(DTYPES) + catalog.fragments["dtype"]
        for pair in np.unique(stored).tolist():
            number, dtype = divmod(pair, len(DTYPES))
            self._stored[number].add(DTYPES[dtype].name)

    def _value(self, key: str) -> Value:
        states = self.states[key]
        following = [state for state in states if not is_number(state)]
        shaped = PARAM if PARAM in states else next(iter([*following, *states]))
        tensor = self.catalog.tensors[states[shaped]]
        return source_value(key, tensor.global_shape, tensor.dtype if PARAM in states else None)

    def key_preference(self, name: str) -> int:
        """Rank of a name as key: 0 for a key of the source, 1 for a new name, 2 for an alias in the source."""
        return 0 if name in self.states else 2 if name in self.owners else 1

    def stored_dtypes(self, key: str) -> set[str]:
        """The stored dtypes of a parameter's values, or of the master weight that implies it."""
        parameter = self.states[key][PARAM]
        return self._stored[self.catalog.implied.get(parameter, parameter)]
