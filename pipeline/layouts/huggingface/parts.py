"""Map tensors of the model to tensors of a Hugging Face checkpoint.

A linear layer is ``[in, out]`` in Paddle and ``[out, in]`` in Hugging Face: the same elements with other strides.
Tensors that Paddle fuses (``qkv_proj``, ``up_gate_proj``) are separate in Hugging Face. Every Hugging Face tensor is
therefore one or several boxes of a Paddle tensor, each with its own strides, and nothing needs to be transposed or
split before it is moved::

    Paddle  qkv_proj [8, 16], 2 groups of q q k v, heads of 2 columns
    HF      q_proj.weight [8, 8]: columns 0:4 and 8:12 of qkv_proj, k_proj.weight [4, 8]: columns 4:6 and 12:14
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.pipeline.layouts.model import Model, ModelTensor
from paddle_reshard.pipeline.layouts.rules import HuggingFaceForm, evaluate_sizes
from paddle_reshard.pipeline.layouts.rules.entries import Config
from paddle_reshard.pipeline.layouts.rules.literal import StoredTable


@dataclass(frozen=True, slots=True)
class PartBox:
    """A box of the model's tensor, and its position in the Hugging Face array. All numbers are elements."""

    offset: Shape
    extents: Shape
    first_element: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a Hugging Face checkpoint."""

    key: str
    shape: Shape
    boxes: tuple[PartBox, ...]
    keep_float32: bool


def model_parts(model: Model) -> Iterator[tuple[ModelTensor, tuple[Part, ...]]]:
    """Every tensor of the model in order, with its parts; without missing tensors, and tied tensors once.

    Raises
    ------
    RuleError
        If the rule table has no form for a tensor, or a form for another shape; naming the tensor.
    """
    owners: dict[str, str] = {}
    for tensor in model.tensors:
        if tensor.tied_to is not None or tensor.missing:
            continue
        parts = tensor_parts(tensor, model)
        for part in parts:
            owner = owners.setdefault(part.key, tensor.key)
            if owner != tensor.key:
                raise RuleError(tensor.key, f"has the same Hugging Face key as {owner}: {part.key}")
        yield tensor, parts


def tensor_parts(tensor: ModelTensor, model: Model) -> tuple[Part, ...]:
    """The parts of a tensor in a Hugging Face checkpoint."""
    form = tensor.rule.huggingface
    if form is None and isinstance(model.table, StoredTable):
        model.table.refuse(model.config, "what its tensors are in a Hugging Face checkpoint")
    if form is None:
        raise RuleError(
            tensor.key,
            f"the {model.table.convention} rule table {model.table.family!r} does not say what it is in a "
            "Hugging Face checkpoint; add 'huggingface' to its row in a copy of the table, and pass that with "
            "--rules FILE, or say what becomes of every tensor with --aoa FILE",
        )
    return parts_by_form(tensor, form, model)


def parts_by_form(tensor: ModelTensor, form: HuggingFaceForm, model: Model) -> tuple[Part, ...]:
    """The parts of a tensor with the given form."""
    dims = len(tensor.global_shape)
    if dims == 0 or (form.transposed and dims != 2):
        raise RuleError(tensor.key, f"a tensor of shape {tensor.global_shape} cannot become {form.keys[0]}")
    widths, groups = _widths(form, model.config, tensor)
    group_width = sum(widths)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(
        _part(tensor, form, tensor.rule.fill_in(spelled, tensor.key), start, width, group_width, groups)
        for spelled, start, width in zip(form.keys, starts, widths, strict=True)
    )


def _widths(form: HuggingFaceForm, config: Config, tensor: ModelTensor) -> tuple[Shape, int]:
    """Extent of each part within one group, along the last dim, and the number of groups."""
    last = tensor.global_shape[-1]
    if form.widths is None:
        return (last,), 1
    totals = evaluate_sizes(form.widths, config, tensor.key)
    groups = 1 if form.groups is None else evaluate_sizes([form.groups], config, tensor.key)[0]
    if sum(totals) != last or groups < 1 or any(total < 1 or total % groups for total in totals):
        raise RuleError(
            tensor.key,
            f"its last dim of {last} elements is not made of {groups} groups with parts of {list(totals)} elements in "
            "total, as the rule table requires",
        )
    return tuple(total // groups for total in totals), groups


def _part(
    tensor: ModelTensor,
    form: HuggingFaceForm,
    key: str,
    start: int,
    width: int,
    group_width: int,
    groups: int,
) -> Part:
    shape = (*tensor.global_shape[:-1], width * groups)
    strides = row_major_strides(shape, 1)
    if form.transposed:
        shape = (shape[1], shape[0])
        strides = tuple(reversed(row_major_strides(shape, 1)))
    leading = tensor.global_shape[:-1]
    boxes = tuple(
        PartBox(
            offset=(*(0,) * len(leading), group * group_width + start),
            extents=(*leading, width),
            first_element=group * width * strides[-1],
            strides=strides,
        )
        for group in range(groups)
    )
    return Part(key, shape, boxes, form.keep_float32)


def part_elements(part: Part) -> int:
    """Number of elements."""
    return prod(part.shape)
