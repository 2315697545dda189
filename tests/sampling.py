"""What `make test` leaves to other commands, and how many examples a property draws."""

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, Phase, settings

FULL = (
    "cluster/test_index.py",
    "cluster/test_nodes.py",
    "cluster/test_own_ray.py",
    "cluster/test_ray.py",
    "cluster/test_resume.py",
    "cluster/test_verify.py",
    "documents/test_blocks.py",
    "golden/test_flex_auto_parallel.py",
    "hostile/test_fuzz_",
    "jobs/test_real_head.py",
    "jobs/test_watch.py",
    "live/test_jobs.py",
    "memory/",
    "mutations/",
    "resume/test_kills_",
    "storage/test_failures.py",
    "unit/test_notebooks.py",
    "unit/test_readme.py",
    "unit/test_site.py",
)
"""How the paths of modules in `tests` begin that `make full` runs: those of what can only be seen on something whole,
a job, a Ray of its own, every request of a conversion that fails, every block of every document."""

SAMPLED = (
    "aoa/",
    "ema/",
    "golden/",
    "hostile/test_model_meta.py",
    "jobs/",
    "live/",
    "resume/",
    "storage/",
    "unit/test_copied_share.py",
    "unit/test_model_families.py",
    "unit/test_output.py",
    "unit/test_planning.py",
    "unit/test_starting.py",
)
"""Where a test is of whole checkpoints or commands: `make test` runs it with its first set of parameters, and
`make full` with others. A test that marks some of its sets ``full`` has chosen its sample itself."""
EVERY_SET = ("storage/test_stores.py",)
"""Modules in those folders whose tests `make test` runs with all of their sets: each is short, and of every store."""
MOST_SETS = 16
"""Of a test of whole checkpoints, `make full` runs so many sets of parameters at most, evenly spread; `make exhaustive`
runs them all."""
ELSEWHERE = ("exhaustive", "cluster", "serving", "browser")
"""Marks of what has a command of its own."""

# A busy machine fails no property.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
settings.register_profile("light", max_examples=25)
settings.register_profile("many", max_examples=2000)
# Whether a property fails is enough for a mutant.
settings.register_profile("unshrunk", max_examples=25, phases=(Phase.explicit, Phase.generate))


def examples(count: int) -> settings:
    """How many examples a property draws: a quarter of ``count`` in `make test`, 20 times ``count`` in `make fuzz`."""
    share = settings.default.max_examples / 100
    return settings(
        max_examples=max(2, round(count * share)), deadline=None, suppress_health_check=list(HealthCheck)
    )


def mark_full(modules: Sequence[tuple[pytest.Item, str]]) -> None:
    """Mark what `make full` runs. ``modules``: every test, and the path of its module in `tests`."""
    chosen = {_name(item) for item, _ in modules if item.get_closest_marker("full")}
    shown = set[str]()
    further: dict[str, list[pytest.Item]] = {}
    for item, path in modules:
        if path.startswith(FULL):
            item.add_marker("full")
        elif (
            path.startswith(SAMPLED)
            and not path.startswith(EVERY_SET)
            and _name(item) not in chosen
            and not any(map(item.get_closest_marker, ELSEWHERE))
        ):
            if _name(item) in shown:
                further.setdefault(_name(item), []).append(item)
            shown.add(_name(item))
    for items in further.values():
        of_checkpoints = "/golden/" in items[0].nodeid
        left = set(_evenly(len(items), MOST_SETS)) if of_checkpoints else set(range(len(items)))
        for number, item in enumerate(items):
            item.add_marker("full" if number in left else "exhaustive")


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` numbers, evenly spread.

    >>> _evenly(10, 4), _evenly(3, 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    return [number * count // min(count, most) for number in range(min(count, most))]


def _name(item: pytest.Item) -> str:
    """Of a test, whatever its parameters."""
    return item.nodeid.partition("[")[0]


def exhaustive(*values: object) -> ParameterSet:
    """One set of parameters for `make exhaustive` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def on_cluster(*values: object) -> ParameterSet:
    """One set of parameters for `make cluster` only."""
    return pytest.param(*values, marks=pytest.mark.cluster)
