"""A signature outlives stores and conversions."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

import paddle_reshard
from tests.golden.test_signing import library, new_keys
from tests.storage.contents import SMALL
from tests.storage.servers import Store


def test_a_signed_checkpoint_moves_through_s3_and_two_conversions(
    store: Store, bucket: str, tmp_path: Path
) -> None:
    private, public = new_keys(tmp_path / "keys", ec.SECP256R1())
    there, access = f"s3://{bucket}/run", {"storage_options": store.options}
    paddle_reshard.convert(SMALL, f"{there}/first", to="tp=1", fingerprint="full", **access)
    report = paddle_reshard.sign(f"{there}/first", key=private, **access)
    assert report.signature == f"{there}/first/paddle_reshard.json.sig"
    checked = paddle_reshard.check(f"{there}/first", public_key=public, **access)
    assert (checked.intact, checked.signed_by) == (True, report.signed_by)

    paddle_reshard.convert(f"{there}/first", tmp_path / "second", format="flex", **access)
    paddle_reshard.convert(tmp_path / "second", tmp_path / "third", to="tp=2")
    for name in ("paddle_reshard.json", "paddle_reshard.json.sig"):
        store.client.download_file(bucket, f"run/first/{name}", str(tmp_path / name))
    signed = tmp_path / "paddle_reshard.json"
    told = library("verify", "key", signed, "--signature", f"{signed}.sig", "--public_key", public)
    assert told == (0, "Verification succeeded\n")
    found = paddle_reshard.verify(tmp_path / "third", against=signed, public_key=public)
    assert (found.equal, found.signed_by) == (True, report.signed_by)

    paddle_reshard.convert(SMALL, f"{there}/first", to="tp=2", overwrite=True, **access)
    assert paddle_reshard.check(f"{there}/first", **access)
