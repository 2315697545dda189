"""Distribute layers over pipeline stages.

The rules are those of Paddle's ``SegmentLayers`` (``parallel_layers/pp_layers.py``). They apply to the list of pipeline
items of a model: embedding, decoder layers, norm, head. With 4 decoder layers and ``pp=2``::

    item     embedding  0  1  2  3  norm  head
    stage            0  0  0  1  1     1     1
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.model.rules.items import Item
from paddle_reshard.pipeline.model.rules.stages import BY_LAYERS, DECODER_LAYERS, Segmentation, Stages


def segment(
    items: Sequence[Item],
    pp: int,
    vpp: int,
    segmentation: Segmentation | None,
    by_default: Stages = BY_LAYERS,
) -> list[tuple[int, int]]:
    """The ``(stage, chunk)`` of every item; without a ``segmentation``, as the trainers' model classes do.

    What the trainer refuses is refused with its own reason.
    """
    if pp > len(items):
        raise PlanError(f"pp={pp} exceeds the {len(items)} pipeline items of this model")
    if vpp > 1 and pp <= 2:
        raise PlanError(f"vpp={vpp} with pp={pp}: Paddle's interleaved pipeline asserts pp > 2")
    if segmentation is None and pp * vpp == 1:
        return [(0, 0)] * len(items)
    if segmentation is None and by_default.ways:
        starts, segmentation = _starts_of_ways(items, pp, vpp, by_default.ways)
    elif segmentation is None:
        layers = sum(item.repeated for item in items)
        segmentation = "uniform" if layers % pp and by_default.or_uniform else by_default.segmentation
        starts = _starts_by_default(items, pp, vpp, segmentation, by_default.entry)
    else:
        starts = _starts(items, pp, vpp, segmentation)
    part_of = [max(p for p, start in enumerate(starts) if start <= i) for i in range(len(items))]
    if len(set(part_of)) < pp * vpp:
        raise PlanError(f"segmentation {segmentation!r} leaves a pipeline part without any layer")
    return [(part % pp, part // pp) for part in part_of]


def _starts_by_default(
    items: Sequence[Item], pp: int, vpp: int, segmentation: Segmentation, entry: str
) -> list[int]:
    """As :func:`_starts`; where the trainer could not start, with what would let it."""
    try:
        return _starts(items, pp, vpp, segmentation)
    except PlanError as error:
        if not entry:
            raise
        raise PlanError(
            f"pp={pp}: the trainer cannot start it: {error}. That is the model's {entry}, by its config.json or the "
            f"library's default. For a job whose config.json has another, give the same with "
            f'--layout \'{{"segmentation": "{DECODER_LAYERS}"}}\''
        ) from error


def _starts_of_ways(
    items: Sequence[Item], pp: int, vpp: int, ways: Sequence[str]
) -> tuple[list[int], Segmentation]:
    """As :func:`_starts` of each of the ways, which have to agree, and one of them.

    A class that counts layers may distribute all items evenly where stages do not divide the decoder layers.
    """
    even = vpp == 1 and sum(item.repeated for item in items) % pp > 0
    found: dict[tuple[int, ...], str] = {}
    fault: PlanError | None = None
    for way in (*ways, *(["uniform"] if even else [])):
        try:
            found.setdefault(tuple(_starts(items, pp, vpp, way)), way)
        except PlanError as error:
            fault = fault or error
    if len(found) > 1:
        said = ", ".join(f"{list(starts)} with {way!r}" for starts, way in found.items())
        raise PlanError(
            f"pp={pp}: how the model's class distributes its {len(items)} pipeline items over stages was described in "
            f"jobs that several ways fit, and here they begin stages at other items: {said}. Call "
            "paddle_reshard.describe(model, to=FILE) once in such a job, with the same FILE, or give that of the class "
            f'with --layout \'{{"segmentation": "{ways[0]}"}}\''
        )
    if fault is not None and not found:
        raise fault
    [(starts, way)] = found.items()
    return list(starts), way


def _starts(items: Sequence[Item], pp: int, vpp: int, segmentation: Segmentation) -> list[int]:
    if vpp > 1 and not (isinstance(segmentation, str) and segmentation.startswith("layer:")):
        raise PlanError(
            f"vpp={vpp} with segmentation {segmentation!r}: Paddle's PipelineLayer asserts a segmentation "
            "'layer:Regex' for virtual stages"
        )
    if isinstance(segmentation, tuple):
        ascending = segmentation[:1] == (0,) and list(segmentation) == sorted(set(segmentation))
        if len(segmentation) != pp or not ascending or segmentation[-1] >= len(items):
            raise PlanError(
                f"segmentation {list(segmentation)} must be {pp} ascending item numbers from 0, "
                f"below {len(items)}"
            )
        return list(segmentation)
    if segmentation.startswith("layer:"):
        return _by_layers(items, pp * vpp, segmentation)
    if segmentation != "uniform":
        raise PlanError(f"segmentation {segmentation!r} is not 'uniform', 'layer:Regex' or a list of numbers")
    return _uniform(len(items), pp)


def _by_layers(items: Sequence[Item], parts: int, segmentation: str) -> list[int]:
    try:
        pattern = re.compile(segmentation.split(":")[1], re.IGNORECASE)
    except re.error as error:
        raise PlanError(f"segmentation {segmentation!r} is not a regular expression: {error}") from error
    counts = [pattern.search(item.layer_class) is not None for item in items]
    total = sum(counts)
    if total == 0:
        classes = sorted({item.layer_class for item in items})
        raise PlanError(f"segmentation {segmentation!r} matches none of {', '.join(classes)}")
    if total % parts:
        raise PlanError(
            f"{total} layers do not divide into {parts} pipeline parts (pp × vpp): Paddle's segmentation "
            f"{segmentation!r} asserts that they do"
        )
    starts, seen = [0], 0
    for i, counted in enumerate(counts):
        seen += counted
        if counted and seen % (total // parts) == 0 and len(starts) < parts:
            starts.append(i + 1)
    return starts


def _uniform(items: int, parts: int) -> list[int]:
    size, extra = divmod(items, parts)
    starts = [0]
    for part in range(1, parts):
        starts.append(starts[-1] + size + (1 if part > parts - extra else 0))
    return starts
