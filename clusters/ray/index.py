"""Index the rank files of a large checkpoint on Ray.

A rank file is a pickle whose arrays are stored between its opcodes, so it takes a small read for every large array:
hundreds of thousands for a job of thousands of ranks, each a third of a millisecond of CPU time. Files are indexed in
batches by Ray tasks, which have no side effects: Ray retries those of a lost worker. A ``ReshardError`` arrives
unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.calls import PATIENCE_SECONDS, cause_of
from paddle_reshard.clusters.ray.environment import worker_variables
from paddle_reshard.clusters.ray.join import head_of_cluster, joined_ray, lost_cluster
from paddle_reshard.pipeline.checkpoint.reading import Readable
from paddle_reshard.pipeline.core.errors import ClusterError, ReshardError
from paddle_reshard.pipeline.core.events import FilesRead, Observer, Waiting, ignore_events
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.remote.retry_counts import count_retries, note_retry
from paddle_reshard.tasks.index import index_here

log = logging.getLogger(__name__)

T = TypeVar("T")

FEWEST_FILES = 128
"""Fewer files are read faster in this process than workers start."""
FEWEST_FILES_FOR_OUR_OWN = 512
"""Fewer files are read faster in this process than a private Ray starts, for indexing and once more for moving."""
BATCH_FILES = 32
"""Files that a task reads concurrently."""
TASKS_AT_A_TIME = 2
"""Tasks per CPU: a task waits for the store half of the time, and for the largest of its files."""
MEMORY_BYTES = 256 << 20
"""Memory that a task reserves."""


@dataclass(frozen=True)
class RayIndexing:
    """Indexes files on a Ray cluster; few files, or files on a disk, in this process."""

    address: str | None
    """The existing cluster to join; ``None`` if there is none."""
    workers: int | None
    """Number of nodes to index on, as an engine has workers. Default: all."""
    observe: Observer = ignore_events

    def __call__(
        self, index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
    ) -> dict[str, T]:
        """``index(store, path, size_bytes)`` of every file.

        Raises
        ------
        ClusterError
            If Ray lost the workers of a batch at every attempt.
        """
        is_there = ray.is_initialized() or self.address is not None
        fewest = FEWEST_FILES if is_there else FEWEST_FILES_FOR_OUR_OWN
        if len(sizes) < fewest or isinstance(store, LocalSource):
            return index_here(index, store, sizes, self.observe)
        self.observe(Waiting("Ray"))
        indexed: dict[str, T] = {}
        with joined_ray(self.address, self.workers):
            for batch in self._batches(index, store, sizes):
                indexed |= batch
                self.observe(FilesRead(len(indexed), len(sizes)))
        return {path: indexed[path] for path in sizes}

    def _batches(
        self, index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
    ) -> Iterator[dict[str, T]]:
        """The contents of the files of each batch, as it arrives."""
        task: Any = ray.remote(_index_batch).options(
            num_cpus=1 / TASKS_AT_A_TIME,
            memory=MEMORY_BYTES,
            max_retries=ATTEMPTS - 1,
            scheduling_strategy="SPREAD",
        )
        shared, environment = ray.put(store), worker_variables()
        paths = list(sizes)
        waiting = [
            {path: sizes[path] for path in paths[start : start + BATCH_FILES]}
            for start in range(0, len(paths), BATCH_FILES)
        ]
        at_a_time = TASKS_AT_A_TIME * (self.workers or len(waiting))
        running: list[Any] = []
        head = head_of_cluster()
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    running.append(task.remote(index, shared, waiting.pop(0), environment))
                done, running = ray.wait(running, timeout=PATIENCE_SECONDS)
                if not done:
                    if lost := lost_cluster(head, idle=True):
                        raise ClusterError(
                            f"Ray was lost while files were being indexed ({lost}); run the command again"
                        )
                    log.info(
                        "%d batches of files are still being indexed, or wait for a worker", len(running)
                    )
                for ref in done:
                    yield _settle(ref)
        finally:
            with contextlib.suppress(RayError):
                for ref in running:
                    ray.cancel(ref, force=True)


def _settle(ref: Any) -> dict[str, Any]:
    try:
        answer, retries = ray.get(ref)
    except RayError as failure:
        raise ClusterError(f"files could not be indexed on Ray: {cause_of(failure)}") from failure
    for code, times in retries.items():
        for _ in range(times):
            note_retry(code)
    if isinstance(answer, ReshardError):
        raise answer
    return answer


def _index_batch(
    index: Callable[[Readable, str, int], T],
    store: Readable,
    sizes: Mapping[str, int],
    environment: Mapping[str, str],
) -> tuple[dict[str, T] | ReshardError, dict[str, int]]:
    """Index files in this worker. Returns the result and the retried requests by failure.

    A ``ReshardError`` is returned, not raised, so that it arrives unchanged. ``environment`` holds variables with which
    the drivers of stores find credentials.
    """
    os.environ.update(environment)
    before = count_retries()
    try:
        entries: dict[str, T] | ReshardError = index_here(index, store, sizes)
    except ReshardError as error:
        entries = error.with_traceback(None)
    return entries, dict(count_retries() - before)
