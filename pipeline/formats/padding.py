"""The room that sharding gives a parameter, padding included (Paddle 3.3.1, as in :mod:`.sharding`)."""

from __future__ import annotations

from paddle_reshard.pipeline.core.tensors import DType

ALIGNMENT_BYTES = 256  # of gpu, xpu and npu alike: tensor_fusion_helper.alignment


def stage3_slice_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements of every rank's slice of a parameter that stage 3 cuts, padding included."""
    unit = ALIGNMENT_BYTES // dtype.itemsize
    aligned = -(-elements // unit) * unit
    return -(-aligned // degree)


def padded_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements that a parameter occupies in a v2 buffer."""
    unit = ALIGNMENT_BYTES // dtype.itemsize * degree
    return -(-elements // unit) * unit
