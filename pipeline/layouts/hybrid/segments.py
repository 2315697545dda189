"""Which pipeline stage holds which layers?

The rules of Paddle's ``SegmentLayers`` (``parallel_layers/pp_layers.py``) over the list of pipeline items
that a model family is made of: embedding, decoder layers, norm, head.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_reshard.pipeline.errors import PlanError

Segmentation = str | tuple[int, ...]
"""``"layer"`` (decoder layers evenly), ``"uniform"`` (all items evenly), or the first item of every part."""


def segment(
    is_layer: Sequence[bool], pp: int, vpp: int, segmentation: Segmentation | None
) -> list[tuple[int, int]]:
    """For every item its ``(stage, chunk)``.

    Without a ``segmentation`` the choice of both trainers' model classes: by decoder layers if their number
    divides, else uniform.

    Raises
    ------
    PlanError
        With the trainer's own reason, where the trainer refuses too.
    """
    layers = sum(is_layer)
    if pp > len(is_layer):
        raise PlanError(f"pp={pp} is more than the {len(is_layer)} pipeline items of this model")
    if vpp > 1 and pp <= 2:
        raise PlanError(
            f"vpp={vpp} with pp={pp}: Paddle's interleaved pipeline asserts pp > 2 (virtual stages need it)"
        )
    if segmentation is None:
        segmentation = "layer" if layers % (pp * vpp) == 0 or vpp > 1 else "uniform"
    starts = _starts(is_layer, pp, vpp, segmentation)
    part_of = [max(p for p, start in enumerate(starts) if start <= item) for item in range(len(is_layer))]
    if len(set(part_of)) < pp * vpp:
        raise PlanError(f"segmentation {segmentation!r} leaves a pipeline part without any layer")
    return [(part % pp, part // pp) for part in part_of]


def _starts(is_layer: Sequence[bool], pp: int, vpp: int, segmentation: Segmentation) -> list[int]:
    if isinstance(segmentation, tuple):
        if len(segmentation) != pp * vpp or segmentation[0] != 0 or list(segmentation) != sorted(segmentation):
            raise PlanError(
                f"segmentation {list(segmentation)} must be {pp * vpp} ascending item numbers beginning with 0"
            )
        return list(segmentation)
    if segmentation == "layer":
        return _by_layers(is_layer, pp * vpp)
    if vpp > 1:
        raise PlanError(f"vpp={vpp} needs a segmentation by layers or an explicit list, not {segmentation!r}")
    return _uniform(len(is_layer), pp)


def _by_layers(is_layer: Sequence[bool], parts: int) -> list[int]:
    layers = sum(is_layer)
    if layers % parts:
        raise PlanError(
            f"{layers} decoder layers do not divide into {parts} pipeline parts (pp × vpp); "
            f"use segmentation 'uniform' or an explicit list"
        )
    starts, seen = [0], 0
    for item, counts in enumerate(is_layer):
        seen += counts
        if counts and seen % (layers // parts) == 0 and len(starts) < parts:
            starts.append(item + 1)
    return starts


def _uniform(items: int, parts: int) -> list[int]:
    size, extra = divmod(items, parts)
    starts = [0]
    for part in range(1, parts):
        starts.append(starts[-1] + size + (1 if part > parts - extra else 0))
    return starts
