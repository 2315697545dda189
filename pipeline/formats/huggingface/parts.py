"""Map tensors of the model to tensors of a Hugging Face checkpoint.

A linear layer is ``[in, out]`` in Paddle and ``[out, in]`` in Hugging Face: the same elements with other strides.
Tensors that Paddle fuses (``qkv_proj``, ``up_gate_proj``) are separate in Hugging Face. Every Hugging Face tensor is
therefore one or several boxes of a Paddle tensor, each with its own strides, and nothing needs to be transposed or
split before it is moved::

    Paddle  qkv_proj [8, 16], 2 groups of q q k v, heads of 2 columns
    HF      q_proj.weight [8, 8]: columns 0:4 and 8:12 of qkv_proj, k_proj.weight [4, 8]: columns 4:6 and 12:14
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from paddle_reshard.pipeline.core.catalog import FragmentRow, fragment_row
from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.model.forms import Span, form_of, spans_of
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, evaluate_sizes


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

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def rows(
        self, tensor: int, file: int, dtype: DType, byte_offset: int, replica: int = 0
    ) -> Iterator[FragmentRow]:
        """Its boxes as fragments, where the array lies at this offset of a file."""
        for box in self.boxes:
            strides = [stride * dtype.itemsize for stride in box.strides]
            base = byte_offset + box.first_element * dtype.itemsize
            yield fragment_row(tensor, file, dtype, replica, base, box.offset, box.extents, strides)


def model_parts(model: Model) -> Iterator[tuple[ModelTensor, tuple[Part, ...]]]:
    """Every tensor of the model in order, with its parts; without missing and unused tensors, and tied tensors once.

    A ``RuleError`` names a tensor for which the rule table has no form, or one for another shape.
    """
    owners: dict[str, str] = {}
    for tensor in model.tensors:
        if tensor.is_alias or tensor.missing or tensor.rule.unused:
            continue
        parts = tensor_parts(tensor, model)
        for part in parts:
            owner = owners.setdefault(part.key, tensor.key)
            if owner != tensor.key:
                raise RuleError(tensor.key, f"has the same Hugging Face key as {owner}: {part.key}")
        yield tensor, parts


def tensor_parts(tensor: ModelTensor, model: Model) -> tuple[Part, ...]:
    """The parts of a tensor in a Hugging Face checkpoint."""
    return parts_by_form(tensor, form_of(tensor, model), model)


def parts_by_form(tensor: ModelTensor, form: HuggingFaceForm, model: Model) -> tuple[Part, ...]:
    """The parts of a tensor with the given form."""
    # Whether the first dim counts experts and nothing else.
    own_dim = int(form.stacked is not None and len(tensor.rule.shape or ()) == 3)
    dims = len(tensor.global_shape) - own_dim
    if dims == 0 or (form.transposed and dims not in (2, 3 - own_dim)):
        raise RuleError(tensor.key, f"a tensor of shape {tensor.global_shape} cannot become {form.keys[0]}")
    spans = spans_of(form, model.config, tensor.key, tensor.global_shape[-1])
    return tuple(
        _part(form, key, rows, own_dim, of_part)
        for rows in _experts(form, model.config, tensor, own_dim)
        for key, of_part in zip(rows.keys, spans, strict=True)
    )


class _ExpertRows(NamedTuple):
    """Where an expert is in a tensor of several: its first index along the first dim, and its extents but the last."""

    first: int
    leading: Shape
    keys: list[str]
    """Of its parts."""


def _experts(form: HuggingFaceForm, config: Config, tensor: ModelTensor, own_dim: int) -> list[_ExpertRows]:
    """Every expert if several are stacked, else the whole as one."""
    shape, rule = tensor.global_shape, tensor.rule
    if form.stacked is None:
        keys = [rule.fill_in(spelled, tensor.key) for spelled in form.tensors]
        return [_ExpertRows(0, shape[:-1], keys)]
    (experts,) = evaluate_sizes([form.stacked], config, tensor.key)
    rows, rest = divmod(shape[0], experts) if experts > 0 else (0, 1)
    if rest or len(shape) != 2 + own_dim or (own_dim and rows != 1):
        raise RuleError(
            tensor.key,
            f"its shape {shape} is not that of {experts} experts ({form.stacked}), one after the other",
        )
    parts = range(len(form.tensors))
    return [
        _ExpertRows(
            expert * rows,
            (rows, *shape[1:-1]),
            [rule.fill_in(form.key_of(part, expert), tensor.key) for part in parts],
        )
        for expert in range(experts)
    ]


def _part(form: HuggingFaceForm, key: str, rows: _ExpertRows, own_dims: int, spans: Sequence[Span]) -> Part:
    first, leading, _ = rows
    shape = (*leading[own_dims:], sum(span.extent for span in spans))
    strides = row_major_strides(shape, 1)
    if form.transposed:
        shape = swapped(shape)
        strides = swapped(row_major_strides(shape, 1))
    origin = (first, *(0,) * (len(leading) - 1))[: len(leading)]
    boxes = tuple(
        PartBox(
            offset=(*origin, span.here),
            extents=(*leading, span.extent),
            first_element=span.there * strides[-1],
            strides=(*(0,) * own_dims, *strides),
        )
        for span in spans
    )
    return Part(key, shape, boxes, form.keep_float32)


def swapped(shape: Shape) -> Shape:
    """A shape, or strides, with the last two dims swapped."""
    return (*shape[:-2], *reversed(shape[-2:]))
