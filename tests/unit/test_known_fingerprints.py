"""A fingerprint is that of all values of a tensor, and one on record is believed only where nothing else is known."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_reshard.pipeline.convert.recorded import Known, Moved
from paddle_reshard.pipeline.convert.sums import fingerprints_of
from paddle_reshard.pipeline.core.crc import checksum_of
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES, Tensor, dtype_named
from paddle_reshard.tasks.sums import Sum, added

FLOAT32, BFLOAT16 = dtype_named("float32"), dtype_named("bfloat16")
TENSORS = Tensors([Tensor("w", "param", FLOAT32, (2, 3)), Tensor("w", "moment1", FLOAT32, (2, 3))])
NUMBER = DTYPES.index(FLOAT32)


def test_sums_of_groups_cancel_what_they_have_in_common() -> None:
    groups = [Sum(1, NUMBER, 0b1100, 4), Sum(0, NUMBER, 0b1, 6), Sum(1, NUMBER, 0b1010, 2)]
    assert added(groups) == (Sum(0, NUMBER, 0b1, 6), Sum(1, NUMBER, 0b0110, 6))


def test_a_tensor_without_some_of_its_values_has_no_fingerprint() -> None:
    sums = [Sum(0, NUMBER, 7, 6), Sum(1, NUMBER, 9, 5)]
    with pytest.raises(CheckpointError, match=r"w \(moment1\): 5 of 6 elements were added up"):
        fingerprints_of(TENSORS, sums)
    assert fingerprints_of(TENSORS, sums, [0]).checksums.tolist() == [checksum_of(7, 24)]
    moved = Moved.of(TENSORS, sums)
    assert moved.checksum(TENSORS[0], NUMBER, None) == checksum_of(7, 24)
    assert moved.checksum(TENSORS[1], NUMBER, None) is None


def test_a_fingerprint_on_record_is_that_of_the_same_tensor_in_an_unchanged_source() -> None:
    on_record = Fingerprints.of(TENSORS, np.array([10, 20], dtype=np.uint64))
    known, changed = (Known(on_record, "there", unchanged) for unchanged in (True, False))
    assert [known.checksum(tensor, None) for tensor in TENSORS] == [10, 20]
    assert [changed.checksum(tensor, None) for tensor in TENSORS] == [None, None]
    for other in (
        ("w", "moment1", BFLOAT16, (2, 3)),
        ("w", "moment1", FLOAT32, (3, 2)),
        ("w", "moment2", FLOAT32, (2, 3)),
    ):
        assert known.checksum(Tensor(*other), None) is None
    for source in (known, changed):
        assert source.checksum(TENSORS[1], 20) == (20 if source is known else None)
        with pytest.raises(
            CheckpointError, match=r"w \(moment1\): .* have crc64nvme 0{15}b, .* records 0{14}14"
        ):
            source.checksum(TENSORS[1], 11)
