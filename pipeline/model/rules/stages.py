"""How the pipeline class of a model divides its items into stages, as its config or its code says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import PlanError

DECODER_LAYERS = "layer:DecoderLayer"
"""The segmentation of most pipeline classes: decoder layers alone are distributed evenly."""
_SPELLINGS = (DECODER_LAYERS, f"{DECODER_LAYERS}|EmptyLayer")
Segmentation = str | tuple[int, ...]
"""``"uniform"`` (distribute all items evenly), ``"layer:Regex"`` (distribute items whose class matches evenly), or the
number of the first item of every part."""


@dataclass(frozen=True, slots=True)
class Stages:
    """How a pipeline class distributes its items if the job says nothing else."""

    segmentation: Segmentation = DECODER_LAYERS
    or_uniform: bool = True
    """Whether it distributes all items evenly where the number of stages does not divide the decoder layers."""
    entry: str = ""
    """The config entry that a job can say it with, if the library has one."""
    ways: tuple[str, ...] = ()
    """Of a described model, in place of all others: what gives the parts of every pipeline that was described."""


BY_LAYERS = Stages()


def stages_said(said: object, entry: str) -> Stages:
    """The stages in a config entry: a segmentation, or item numbers as a list or its text.

    So reads PaddleFormers 1.2.0 (``nn/pp_model.py:646-660``).

    >>> stages_said("[0, 3]", "pp_seg_method").segmentation, stages_said("uniform", "pp_seg_method").or_uniform
    ((0, 3), False)
    """
    numbers = re.fullmatch(r"\s*\[([\d\s,]*)\]\s*", str(said)) if isinstance(said, str | list) else None
    if numbers is not None:
        return Stages(tuple(map(int, re.findall(r"\d+", numbers[1]))), False, entry)
    if not isinstance(said, str):
        raise PlanError(f"{entry} of the config is {said!r}: how a pipeline divides the layers is not known")
    return Stages(said, said in _SPELLINGS, entry)
