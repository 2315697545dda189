"""The moves of a target that only one store has: parts that S3 was told of, files that are staged for fsspec."""

from pathlib import Path

import fsspec
import pytest

from paddle_reshard.pipeline.core.errors import TargetError, UnsupportedError
from paddle_reshard.storage.locate import Access, open_source, open_target
from tests.storage.contents import in_bucket, uploads
from tests.storage.servers import Store
from tests.storage.test_stores import CONTENTS, LARGE, MANIFEST, PART, SAID, begin, write


def test_a_bucket_can_be_the_whole_location(store: Store, bucket: str) -> None:
    with open_target(f"s3://{bucket}", Access(store.options)) as target:
        target.finish(write(begin(target)))
        target.publish(MANIFEST, SAID)
    assert in_bucket(store, bucket) == {**CONTENTS, MANIFEST: SAID}
    large = store.client.head_object(Bucket=bucket, Key=LARGE)
    assert large["ETag"].endswith('-3"')  # of three parts
    assert open_source(f"s3://{bucket}/", store.options).read("config.json", 0, 2) == b"{}"


def test_parts_that_were_not_announced_are_refused(store: Store, bucket: str) -> None:
    with open_target(f"s3://{bucket}/c", Access(store.options)) as target:
        writer = begin(target)
        with pytest.raises(TargetError, match="no part starts at byte 1"):
            writer.write_part(LARGE, 1, memoryview(b"1"))
        with pytest.raises(TargetError, match="has 7 bytes, not 8"):
            writer.write_part(LARGE, 2 * PART, memoryview(b"12345678"))
    assert uploads(store, bucket) == []


def test_staged_parts_can_only_be_written_where_they_are_staged() -> None:
    with open_target("memory://room/c", Access({})) as target:
        writer = begin(target)
    with pytest.raises(UnsupportedError, match="this worker runs on a different one"):
        writer.write_part("config.json", 0, memoryview(b"{}"))


def test_a_short_upload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type(fsspec.filesystem("memory"))
    put = memory.put_file

    def put_short(self: object, local: str, remote: str) -> None:
        Path(local).write_bytes(Path(local).read_bytes()[:-1])
        put(self, local, remote)

    with open_target("memory://room/c", Access({})) as target:
        receipts = write(begin(target))
        monkeypatch.setattr(memory, "put_file", put_short)
        with pytest.raises(TargetError, match="10485766 bytes in the store, 10485767 were written"):
            target.finish(receipts)
    assert fsspec.filesystem("memory").find("/") == []
