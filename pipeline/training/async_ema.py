"""An exponential moving average of a rank's weights, computed next to its training.

A training rank copies its float32 weights into shared memory and continues; a separate process averages them
(:mod:`paddle_reshard.tasks.ema_worker`). It writes the files of the trainers' own callback,
``ema.tp00_pp00_shard00.pdopt``, which all readers know and conversions carry to any topology.

Works on Paddle tensors or NumPy arrays; requires neither pyarrow nor ray.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from paddle_reshard.clusters.companion import Companion, CompanionLost
from paddle_reshard.pipeline.checkpoint.reading import check_given_config, index_tensor_file, read_json
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.choices import parse_choice
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import ReadOptions
from paddle_reshard.pipeline.training.decisions import (
    Due,
    Recovery,
    Standing,
    UpdateRule,
    progress_of,
    recovery,
)
from paddle_reshard.pipeline.training.flex import METADATA_PATH, FlexRank
from paddle_reshard.pipeline.training.resume import RankPieces, read_average
from paddle_reshard.pipeline.training.stretches import (
    Stretches,
    Weights,
    check_same,
    count_elements,
    find_arrays,
    flex_file,
    rank_file,
    stretches_of,
)
from paddle_reshard.storage.files.paddle_pickle_writer import encode_pickle
from paddle_reshard.storage.listing import LocalRoot
from paddle_reshard.storage.locate import open_source, source_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks import ema_worker
from paddle_reshard.tasks.ema import AverageProgress, Averaging, Floats
from paddle_reshard.tasks.ema_worker import Shared, shared_bytes

BEHIND = ("wait", "skip")
ON_LOSS = ("report", "raise")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EmaCounts:
    """Counts of the updates of one rank."""

    handed_over: int = 0
    not_due: int = 0
    """Steps between two updates."""
    loss_too_high: int = 0
    skipped: int = 0
    """Updates for which the worker was not ready; the next update applies their decay too."""
    lost_workers: int = 0
    waited_seconds: float = 0.0
    handed_over_seconds: float = 0.0


class AsyncEma:
    """The average of one rank's weights, computed by a worker process.

    Parameters
    ----------
    weights
        Called at every update for the tensors to average; or an optimizer of Paddle, whose master weights are averaged.
    decay, warm_up, start
        See :class:`~paddle_reshard.tasks.ema.Averaging`.
    interval
        Update at steps that are multiples of it.
    loss_threshold
        Update only while the loss is below it.
    when_behind
        If the worker is still averaging the previous update: ``"wait"``, or ``"skip"`` this update and let the next one
        count for both, with the product of their decays.
    when_lost
        If the worker crashes: ``"report"`` it in the log and start another worker, which restarts the average if an
        update was interrupted; or ``"raise"``.
    """

    counts: EmaCounts

    def __init__(
        self,
        weights: Callable[[], Weights] | Any,
        *,
        decay: float,
        interval: int = 1,
        loss_threshold: float | None = None,
        warm_up: bool = False,
        start: str = "weights",
        when_behind: str = "wait",
        when_lost: str = "report",
    ) -> None:
        self.rule = UpdateRule(interval, loss_threshold)
        parse_choice(when_behind, BEHIND, "when_behind")
        parse_choice(when_lost, ON_LOSS, "when_lost")
        self.weights = weights if callable(weights) else lambda: _weights_of(weights)
        self.averaging = Averaging(decay, warm_up, start)
        self.when_behind, self.when_lost = when_behind, when_lost
        self.standing = Standing()
        self.counts = EmaCounts()
        self.last_request: Mapping[str, Any] = {}
        self.companion: Companion | None = None
        self.stretches: Stretches = {}

    @property
    def progress(self) -> AverageProgress:
        """The updates that the average contains."""
        return self.standing.progress

    # -------------------------------------------------------------------------------------------- updates

    def update(self, step: int, loss: float | None = None) -> bool:
        """Hand over the weights of ``step`` if an update is due. Returns whether they were, once they are copied.

        Raises
        ------
        UsageError
            If there is a loss threshold and no loss, or the set of tensors has changed since the last update.
        CompanionLost
            Only with ``when_lost="raise"``.
        """
        due = self.rule.due(step, loss)
        self.counts.not_due += due is Due.BETWEEN
        self.counts.loss_too_high += due is Due.LOSS_TOO_HIGH
        if due is not Due.YES:
            return False
        try:
            return self._hand_over(step)
        except CompanionLost as error:
            self._restart_worker(error)
            return self._hand_over(step)

    def _hand_over(self, step: int) -> bool:
        started = time.perf_counter()
        weights = self.weights()
        companion = self._companion(weights)
        decays = self.standing.decays(self.averaging)
        if not companion.wait(0):
            if self.when_behind == "skip":
                self.counts.skipped += 1
                self.standing = self.standing.skipped(decays)
                return False
            companion.wait()
        ready = time.perf_counter()
        _copy(weights, self.stretches, self.shared.values)
        self.last_request = {"do": "blend", "decay": prod(decays)}
        companion.send(self.last_request)
        self.standing = self.standing.handed_over(step, decays)
        self.counts.handed_over += 1
        self.counts.waited_seconds += ready - started
        self.counts.handed_over_seconds += time.perf_counter() - ready
        return True

    def _companion(self, weights: Weights) -> Companion:
        """The worker process, started at the first update, when the tensors are known."""
        stretches = stretches_of(weights)
        if self.companion is None:
            self.stretches = stretches
            self.companion = Companion(ema_worker.__name__, shared_bytes(count_elements(stretches)))
            self.shared = Shared(self.companion.memory, self.companion.nbytes)
        else:
            check_same(stretches, self.stretches)
        return self.companion

    def _restart_worker(self, error: CompanionLost) -> None:
        """Replace a lost worker, or raise with ``when_lost="raise"``."""
        if self.when_lost == "raise" or self.companion is None:
            raise error
        self.counts.lost_workers += 1
        self.companion.end()
        self.companion.start()
        started, done = (int(count) for count in self.shared.counts)
        outcome = "the average is intact and continues"
        action = recovery(started, done, self.standing.requested)
        if action is Recovery.REPEAT:
            self.companion.send(self.last_request)
        elif action is Recovery.RESTART:
            outcome = "an update was interrupted, so the average restarts"
            self._reset()
            self.shared.average[:] = 0
        logger.warning("the average of the weights: %s; %s", error, outcome)

    def _reset(self) -> None:
        """Forget all updates."""
        self.standing = Standing()
        self.shared.counts[:] = 0

    # --------------------------------------------------------------------------------------- save and load

    def state(self) -> Weights:
        """The average after all updates so far, as views that the next update changes.

        With ``start="zero"`` the values must be divided by ``progress.correction(averaging)``.
        """
        self._drain()
        average: dict[str, dict[str, Floats]] = {MASTER_WEIGHTS: {}, "": {}}
        for (group, key), stretch in self.stretches.items():
            average[group][key] = self.shared.average[stretch.start : stretch.stop].reshape(stretch.shape)
        return Weights(average[MASTER_WEIGHTS], average[""])

    def save(self, directory: PathLike, rank: str | FlexRank) -> None:
        """Write the average of this rank, and its description, ``ema.json``. Both files appear complete.

        Parameters
        ----------
        rank
            Name of the rank's file in its topology, ``ema.tp00_pp01_shard00.pdopt``; or, for a FlexCheckpoint, this
            rank among all ranks, of which the first writes the metadata of all.

        Raises
        ------
        UsageError
            If there is no average yet, the name is not that of a rank's average, or the boxes do not fit the tensors.
        ReshardError
            If the file cannot be written.
        """
        if isinstance(rank, str):
            _check_name(rank)
        companion = self._drain()
        if isinstance(rank, str):
            name, (root, written) = rank, rank_file(self.stretches)
        else:
            name, (root, written) = rank.path, flex_file(self.stretches, rank)
        encoded = encode_pickle(root)
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        companion.send(
            {
                "do": "save",
                "path": str(path),
                "literals": [(at, base64.b64encode(text).decode()) for at, text in encoded.literals],
                "slots": [(at, *written[slot]) for slot, at, _ in encoded.slots],
            }
        )
        companion.wait()
        folder = LocalRoot(Path(directory))
        if isinstance(rank, FlexRank) and rank.number == 0:
            folder.replace(METADATA_PATH, rank.metadata())
        folder.replace(
            AVERAGE, json.dumps(self.describe(), indent=1).encode()
        )  # by every rank, with one content

    def describe(self) -> dict[str, Any]:
        """The facts about an average that tensor files do not hold; the same on every rank."""
        return {
            "format": "paddle-reshard ema",
            **asdict(self.averaging),
            "interval": self.rule.interval,
            "loss_threshold": self.rule.loss_threshold,
            **asdict(self.progress),
            "divide_by": self.progress.correction(self.averaging),
        }

    @with_options(ReadOptions)
    def load(
        self,
        directory: PathLike,
        rank: str | RankPieces,
        *,
        config: PathLike | Mapping[str, Any] | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """Continue from the average in a checkpoint.

        Without ``ema.json`` (in a trainer's own files) the average is assumed to have started with weights.

        Parameters
        ----------
        directory
            A folder, or a URL that fsspec knows.
        rank
            The pieces that this rank holds: then the checkpoint may have any topology, sharding strategy, size of
            communication buffers and format, and only the bytes that the rank needs are read. Or the name of this
            rank's file, from a job with the same topology and options; only names and shapes of tensors are checked.
        config
            The model's ``config.json``, or its contents, for a checkpoint without one.

        Raises
        ------
        CheckpointError, PlanError
            If the checkpoint's average does not fit this rank's tensors, naming the tensor and both shapes.
        UsageError
            If ``config`` contradicts the checkpoint's own.
        """
        store = open_source(os.fspath(directory), *source_access(options))
        companion = self._companion(self.weights())
        companion.wait()
        sizes = store.sizes()
        progress = progress_of(read_json(store, AVERAGE, sizes) if AVERAGE in sizes else None, self.averaging)
        self._reset()
        try:
            if isinstance(rank, str):
                self._read_file(store, rank)
            else:
                tables = load_tables(options.get("rules"))
                given = config if isinstance(config, Mapping) or config is None else load_config(config)
                check_given_config(store, given)
                memory = self.shared.average.view(np.uint8)
                read_average(store, tables, given, self.stretches, rank, memory)
        except BaseException:
            self.shared.average[:] = 0
            raise
        self.standing = Standing(progress)

    def _read_file(self, store: Source, file_name: str) -> None:
        """Read the average that the same rank of the same job has written."""
        sizes = store.sizes()
        if file_name not in sizes:
            raise CheckpointError(f"{store.location}: has no {file_name}")
        root = index_tensor_file(store, file_name, sizes[file_name])
        arrays = find_arrays(self.stretches, root, file_name)
        for entry, stretch in self.stretches.items():
            target = self.shared.average[stretch.start : stretch.stop].view(np.uint8)
            done = 0
            for piece in arrays[entry]:
                store.read_into(file_name, piece.byte_offset, target[done : done + piece.nbytes].data)
                done += piece.nbytes

    def _drain(self) -> Companion:
        if self.companion is None or not self.progress.updates:
            raise UsageError("no average yet: no update was made and nothing was loaded")
        try:
            self.companion.wait()
        except CompanionLost as error:
            self._restart_worker(error)
            self.companion.wait()
            if not self.progress.updates:
                raise UsageError("the average was lost with its worker") from error
        return self.companion

    def close(self) -> None:
        """End the worker process."""
        if self.companion is not None:
            del self.shared
            self.companion.close()
            self.companion = None

    def __enter__(self) -> AsyncEma:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weights_of(optimizer: Any) -> Weights:
    """The master weights of an optimizer of Paddle, wrapped or not."""
    masters = optimizer.state_dict().get(MASTER_WEIGHTS)
    if not masters:
        raise UsageError("the optimizer holds no master weights; pass a function that returns Weights")
    return Weights(masters)


def _check_name(file_name: str) -> None:
    """Refuse a name that is not that of a rank's average."""
    parsed = parse_rank_file(file_name)
    if parsed is None or parsed.kind != "ema":
        raise UsageError(f"{file_name}: not the name of a rank's average, ema[.tpNN][_ppNN][_shardNN].pdopt")


def _copy(weights: Weights, stretches: Stretches, values: Floats) -> None:
    for entry, tensor in weights.entries().items():
        stretch = stretches[entry]
        np.copyto(values[stretch.start : stretch.stop].reshape(stretch.shape), _array(tensor))


def _array(tensor: Any) -> Floats:
    """A tensor as an array, without a copy if it is in host memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if not tensor.place.is_cpu_place():
        tensor = tensor.cpu()
    return np.asarray(np.from_dlpack(tensor.detach()), dtype=np.float32)
