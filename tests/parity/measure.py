"""How far two states of a job are apart: in units in the last place, and relative to the largest value."""

from collections.abc import Mapping

import numpy as np

from tests.parity.tensors import Tensor

KINDS = {
    "w_0": "master weight",
    "moment1_0": "moment1",
    "moment2_0": "moment2",
    "beta1_pow_acc_0": "beta power",
    "beta2_pow_acc_0": "beta power",
    "ema_w_0": "average",
    "ema": "average",
}


def kind_of(key: str) -> str:
    """Say what a tensor of the laboratory's truth is."""
    return KINDS.get(key.rsplit(".", 1)[-1], "parameter")


def values(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor as float32, exactly."""
    if tensor.dtype == "BF16":
        flat = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        flat = np.frombuffer(tensor.data, {"F32": "<f4", "F16": "<f2"}[tensor.dtype]).astype("<f4")
    return flat.reshape(tensor.shape)


def ulps(one: Tensor, other: Tensor) -> int:
    """Return the largest distance of two elements, counted in representable values between them."""
    places = []
    for tensor in (one, other):
        bits = np.frombuffer(tensor.data, "<i4" if tensor.dtype == "F32" else "<i2").astype(np.int64)
        sign = np.int64(2**31 if tensor.dtype == "F32" else 2**15)
        places.append(np.where(bits < 0, -(bits + sign), bits))
    return int(np.abs(places[0] - places[1]).max(initial=0))


def largest_ulps(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, of the tensors of both sides that differ, how far each is apart."""
    return {
        key: ulps(one[key], other[key])
        for key in sorted(one.keys() & other.keys())
        if one[key].data != other[key].data
    }


def drift(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Return per kind of state the largest difference, relative to the largest value of its tensor."""
    found: dict[str, float] = {}
    for key in one.keys() & other.keys():
        left, right = values(one[key]), values(other[key])
        largest = float(np.abs(left).max(initial=0)) or 1.0
        apart = float(np.abs(left - right).max(initial=0)) / largest
        found[kind_of(key)] = max(found.get(kind_of(key), 0.0), apart)
    return found
