"""Rank files that are indexed by Ray's workers: what is found, and refused, is the same as here."""

import os
import secrets
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.clusters.ray import index as ray_index
from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.engine import RayEngine
from paddle_reshard.clusters.ray.environment import WORKER_ENV
from paddle_reshard.pipeline.checkpoint.reading import Readable, index_tensor_file
from paddle_reshard.pipeline.core.errors import ClusterError, FormatError
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.locate import open_source
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here
from tests.cluster.conftest import CASE
from tests.cluster.faults import first_time
from tests.conftest import case_directory
from tests.storage.contents import fill_bucket, in_folder
from tests.storage.servers import Store, first, running_proxy

pytestmark = pytest.mark.usefixtures("cluster")
BATCH_FILES = 4


@pytest.fixture(scope="module")
def bucket(store: Store) -> str:
    name = f"test-{secrets.token_hex(6)}"
    store.client.create_bucket(Bucket=name)
    fill_bucket(store, name, "hybrid/", case_directory(CASE) / "checkpoint-3")
    return name


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked of Ray; also few files are worth it."""
    answers: list[object] = []
    settle = ray_index._settle

    def counted(ref: object) -> object:
        answers.append(ref)
        return settle(ref)

    monkeypatch.setattr(ray_index, "FEWEST_FILES", 8)
    monkeypatch.setattr(ray_index, "BATCH_FILES", BATCH_FILES)
    monkeypatch.setattr(ray_index, "_settle", counted)
    return answers


@pytest.fixture
def source(store: Store, bucket: str) -> Source:
    return open_source(f"s3://{bucket}/hybrid", store.options)


def ranks(source: Source) -> dict[str, int]:
    return {path: size for path, size in source.sizes().items() if parse_rank_file(path) is not None}


def on_ray(index: Any, source: Source, workers: int = 2) -> dict[str, Any]:
    return RayEngine(workers=workers).indexing()(index, source, ranks(source))


# ----------------------------------------------------------------------- what workers do; they import it


def kill_once(store: Readable, path: str, size_bytes: int) -> dict[str, Any]:
    """Index a file; the first worker that comes to a certain one dies."""
    marker = Path(os.environ["MARKER"])
    if path.endswith("shard01.pdopt") and first_time(marker):
        os.kill(os.getpid(), signal.SIGKILL)
    return index_tensor_file(store, path, size_bytes)


def kill_always(store: Readable, path: str, size_bytes: int) -> dict[str, Any]:
    """Index a file; whoever comes to a certain one dies."""
    if path == "optimizer.tp01_pp01_shard01.pdopt":
        Path(os.environ["MARKER"], secrets.token_hex(8)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return index_tensor_file(store, path, size_bytes)


# ------------------------------------------------------------------------------------------------ tests


def test_the_same_is_found_in_the_same_order(source: Source, batches: list[object]) -> None:
    here, there = index_here(index_tensor_file, source, ranks(source)), on_ray(index_tensor_file, source)
    assert len(batches) == -(-len(here) // BATCH_FILES) > 4
    assert there == here
    assert list(there) == list(here)


@pytest.mark.cluster
def test_a_conversion_is_the_same(store: Store, bucket: str, tmp_path: Path, batches: list[object]) -> None:
    options = {"to": "tp=2", "storage_options": store.options, "memory": "256MiB"}
    paddle_reshard.convert(f"s3://{bucket}/hybrid", tmp_path / "here", **options)
    assert batches == []
    there = tmp_path / "there"
    paddle_reshard.convert(f"s3://{bucket}/hybrid", there, **options, cluster="ray", workers=2)
    assert batches
    assert in_folder(there) == in_folder(tmp_path / "here")


def test_a_dist_checkpoint_is_the_same(
    store: Store, bucket: str, tmp_path: Path, batches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_index, "FEWEST_FILES", 2)
    paddle_reshard.convert(case_directory(CASE) / "checkpoint-3", tmp_path, format="flex", overwrite=True)
    for path in tmp_path.rglob("*.*"):
        store.client.upload_file(str(path), bucket, f"flex/{path.relative_to(tmp_path)}")
    source = open_source(f"s3://{bucket}/flex", store.options)
    here = index_checkpoint(source, shipped_tables())
    there = index_checkpoint(source, shipped_tables(), index_files=RayEngine(workers=2).indexing())
    assert batches
    assert there.catalog.fragments.rows().tobytes() == here.catalog.fragments.rows().tobytes()
    assert replace(there, catalog=here.catalog) == here
    assert (there.catalog.tensors, there.catalog.files) == (here.catalog.tensors, here.catalog.files)


def test_what_is_few_or_on_a_disk_is_indexed_here(
    source: Source, batches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = open_source(str(case_directory(CASE) / "checkpoint-3"), {})
    found = on_ray(index_tensor_file, local)
    monkeypatch.setattr(ray_index, "FEWEST_FILES", 100)
    assert on_ray(index_tensor_file, source) == found
    assert batches == []


def test_a_corrupt_file_is_refused_naming_it(store: Store, batches: list[object]) -> None:
    bucket = f"test-{secrets.token_hex(6)}"
    store.client.create_bucket(Bucket=bucket)
    fill_bucket(store, bucket, "here/", case_directory(CASE) / "checkpoint-3")
    odd = "optimizer.tp01_pp01_shard01.pdopt"
    body = store.client.get_object(Bucket=bucket, Key=f"here/{odd}")["Body"].read()
    store.client.put_object(Bucket=bucket, Key=f"here/{odd}", Body=body[:-1])
    source = open_source(f"s3://{bucket}/here", store.options)
    with pytest.raises(FormatError) as here:
        index_here(index_tensor_file, source, ranks(source))
    with pytest.raises(FormatError) as there:
        on_ray(index_tensor_file, source)
    assert there.value.path == odd
    assert str(there.value) == str(here.value)
    assert batches


def test_retries_of_workers_are_counted(store: Store, bucket: str, batches: list[object]) -> None:
    with running_proxy(store.url) as proxy:
        source = open_source(f"s3://{bucket}/hybrid", {**store.options, "endpoint_url": proxy.url})
        proxy.fault = first(3, "slow_down", lambda method, path: path.endswith(".pdopt"))
        before = count_retries()
        assert on_ray(index_tensor_file, source).keys() == ranks(source).keys()
    assert count_retries() - before == {"SlowDown": 3}
    assert batches


def test_workers_find_credentials_in_the_variables_that_are_named(
    store: Store, bucket: str, batches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret)
    monkeypatch.setenv(WORKER_ENV, "AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY")
    source = open_source(f"s3://{bucket}/hybrid", {"endpoint_url": store.url})
    assert on_ray(index_tensor_file, source).keys() == ranks(source).keys()
    assert batches


@pytest.mark.cluster
def test_a_lost_worker(
    source: Source, batches: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKER", str(tmp_path / "killed"))
    monkeypatch.setenv(WORKER_ENV, "MARKER")
    here = index_here(index_tensor_file, source, ranks(source))
    assert on_ray(kill_once, source) == here
    assert (tmp_path / "killed").exists()


@pytest.mark.cluster
def test_a_file_that_kills_whoever_reads_it(
    source: Source, batches: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARKER", str(tmp_path))
    monkeypatch.setenv(WORKER_ENV, "MARKER")
    with pytest.raises(ClusterError, match="WorkerCrashedError") as found:
        on_ray(kill_always, source)
    assert found.value.retryable
    assert len(list(tmp_path.iterdir())) == ATTEMPTS
