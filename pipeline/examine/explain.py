"""Explain a target: what every byte of a file is, and from which bytes of which source file each value comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.convert.plan import ConversionPlan, source_in_words
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.examine.coverage import reasons_left_out
from paddle_reshard.pipeline.examine.explanation import ExplainedTensor, Explanation, Origin, Stretch
from paddle_reshard.pipeline.examine.origins import Origins, of_values
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.request.arguments import checked

SHOWN_NAMES = 20
"""Names that a message lists."""


@checked
def explain(
    plan: ConversionPlan,
    file: str | None = None,
    key: str | None = None,
    *,
    element: Sequence[int] | None = None,
) -> Explanation:
    """Explain a file of a target, a tensor, or one element.

    Parameters
    ----------
    plan
        From :func:`plan`.
    file
        Path of a file as the plan names it. Without it, ``key`` is explained wherever it lies.
    key
        Structured key of a tensor: only its values are explained, in all states.
    element
        Index of an element of it, one number for each dim; states of another shape are left out.

    Raises
    ------
    UsageError
        If there is no such file, key or element; with the closest names.
    PlanError
        If the plan was run before: its columns were released then.
    """
    if file is None and key is None:
        raise UsageError("name a file of the target or the key of a tensor")
    if element is not None and key is None:
        raise UsageError("an element belongs to a tensor; give its key too")
    origins = Origins(plan)
    if file is not None:
        _check_file(file, origins)
    if file is not None and key is None:
        stretches: tuple[Stretch, ...] = tuple(origins.stretches(file))
    else:
        chosen = _boxes(origins, file, str(key), element)
        stretches = tuple(of_values([origin]) for origin in chosen)
    moved = {(origin.key, origin.state) for stretch in stretches for origin in stretch.origins}
    return Explanation(
        plan.store.location,
        source_in_words(plan.source),
        "; ".join(target.spec.in_words() for target in plan.targets),
        file,
        None if file is None else origins.sizes()[file],
        stretches,
        tuple(_tensors(plan, key, moved, file is None)),
    )


def _check_file(file: str, origins: Origins) -> None:
    """Refuse a file that the target has not."""
    names = [*origins.sizes()]
    if file not in names:
        more = f", … ({len(names)})" if len(names) > SHOWN_NAMES else ""
        listed = ", ".join(names[:SHOWN_NAMES]) + more
        near = did_you_mean(file, names)
        raise UsageError(f"the target has no file {file}; its files are {listed}{near}")


def _boxes(origins: Origins, file: str | None, key: str, element: Sequence[int] | None) -> Sequence[Origin]:
    """The boxes of a tensor, or those of one element of it."""
    numbers = _numbers_of(origins.conversion, key)
    boxes = list(origins.boxes(file, numbers))
    if file is not None and not boxes:
        held = sorted({origin.target_file for origin in origins.boxes(None, numbers)})
        listed = ", ".join(held[:SHOWN_NAMES]) or "no file of the target"
        raise UsageError(f"{file} holds no values of {key}; they go to {listed}")
    return boxes if element is None else _at(boxes, element, key)


def _numbers_of(conversion: ConversionPlan, key: str) -> list[int]:
    """The tensors of the plan with this key, or tied to it."""
    plan, source = conversion.plan, conversion.source.catalog
    moved = len(plan.tensors) - plan.compared_only
    numbers = [n for n, t in enumerate(plan.tensors[:moved]) if key == t.key or key in t.aliases]
    if not numbers and not any(key == t.key for t in source.tensors):
        known = sorted({t.key for t in source.tensors})
        near = did_you_mean(key, known) or f"; keys are such as {', '.join(known[:3])}"
        raise UsageError(f"the source has no tensor {key}{near}")
    return numbers


def _at(origins: Sequence[Origin], element: Sequence[int], key: str) -> list[Origin]:
    fitting = [origin for origin in origins if len(origin.offset) == len(element)]
    single = [box for origin in fitting if (box := origin.at(element)) is not None]
    if not single:
        ends = [[o + e for o, e in zip(origin.offset, origin.extents, strict=True)] for origin in origins]
        largest = max(ends, key=prod, default=[])
        raise UsageError(
            f"element {list(element)} of {key} lies in none of its boxes, which end at {largest}"
        )
    return single


# ------------------------------------------------------------------------------------------------- tensors


def _tensors(
    conversion: ConversionPlan, key: str | None, moved: set[tuple[str, str]], everywhere: bool
) -> Iterator[ExplainedTensor]:
    """The tensors whose values were found; of a key also those that no target has."""
    source = conversion.source
    catalog, models = source.catalog, {tensor.key: tensor for tensor in source.model.tensors}
    for number, tensor in enumerate(catalog.tensors):
        named = everywhere and key is not None and (key == tensor.key or key in tensor.aliases)
        is_moved = (tensor.key, tensor.state) in moved
        is_stored = named and np.any(catalog.fragments["tensor"] == number)
        if not is_moved and not is_stored:
            continue
        why = "" if is_moved else next(reasons_left_out(conversion, tensor.key, tensor.state), "")
        rules = (
            *_rules_of_model(source, models.get(tensor.key)),
            *source.history.statements.get(tensor.key, ()),
            *_rules_of_values(catalog, number),
        )
        yield ExplainedTensor(tensor.key, tensor.state, tensor.dtype.name, tensor.global_shape, rules, why)


def _rules_of_model(source: Checkpoint, tensor: ModelTensor | None) -> Iterator[str]:
    """How a parameter is cut, distributed and named."""
    if tensor is None:
        return
    table, rule = source.model.table, tensor.rule
    yield f"{table.family} of {table.convention}: {rule.key}: {_cut_in_words(tensor)}"
    if rule.of_expert and source.job.expert_axis is not None:
        yield f"whole experts are distributed over {source.job.expert_axis}"
    if rule.huggingface is not None:
        turned = ", transposed" if rule.huggingface.transposed else ""
        yield f"{rule.key} is {', '.join(rule.huggingface.keys)} in transformers{turned}"


def _cut_in_words(tensor: ModelTensor) -> str:
    rule = tensor.rule
    if rule.split is None:
        return "every tp rank holds the whole"
    fused = f", in each of {rule.fused_parts} fused parts" if rule.fused_parts > 1 else ""
    return f"tp cuts dim {rule.split}{fused}"


def _rules_of_values(catalog: Catalog, number: int) -> Iterator[str]:
    """What defines values that no file stores as they are."""
    if number in catalog.implied:
        other = catalog.tensors[catalog.implied[number]].state
        yield f"no file stores this {catalog.tensors[number].state}: the format defines it by the {other}"
    if number in catalog.mixtures:
        mixture = catalog.mixtures[number]
        divided = f", divided by {mixture.divide_by}" if mixture.divide_by != 1 else ""
        yield f"mixed in {len(mixture.terms)} steps in float32{divided}"
