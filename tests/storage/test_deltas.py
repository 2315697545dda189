"""Deltas from, to and of checkpoints on S3, where every file is an upload that appears when all are whole."""

import paddle_reshard
from paddle_reshard.pipeline.core.file_names import MANIFEST
from tests.storage.contents import SMALL, in_bucket, in_folder, middle
from tests.storage.servers import Store


def test_a_delta_on_s3_makes_the_new_checkpoint_there(store: Store, bucket: str, small_source: str) -> None:
    there: paddle_reshard.DeltaOptions = {"storage_options": store.options}
    report = paddle_reshard.delta(small_source, middle(), f"s3://{bucket}/delta", **there)
    made = in_bucket(store, bucket, "delta/")
    assert made.keys() == {"delta.bin", "delta.json", MANIFEST}
    assert report.delta_bytes == len(made["delta.bin"]) + len(made["delta.json"])
    paddle_reshard.apply_delta(small_source, f"s3://{bucket}/delta", f"s3://{bucket}/new", **there)
    found = in_bucket(store, bucket, "new/")
    assert {**found, **in_folder(middle())} == found
    assert paddle_reshard.check(f"s3://{bucket}/new", storage_options=store.options).intact
    back = paddle_reshard.delta(f"s3://{bucket}/new", SMALL, f"s3://{bucket}/delta", overwrite=True, **there)
    assert in_bucket(store, bucket, "delta/").keys() == made.keys()
    assert back.new_bytes == sum(map(len, in_folder(SMALL).values()))
