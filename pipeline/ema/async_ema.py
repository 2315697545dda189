"""An exponential moving average of a rank's weights, computed beside its training.

A training rank hands its float32 weights over by one copy into shared memory and goes on; a process beside it
averages them (:mod:`paddle_reshard.tasks.ema_worker`). The files it writes are the ones of the trainers' own
callback, ``ema.tp00_pp00_shard00.pdopt``, so that everything that reads those reads ours, and conversions carry
them to any topology.

Needs Paddle's tensors or NumPy arrays, and neither pyarrow nor ray.
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
from paddle_reshard.pipeline.convert.inputs import as_file, load_config, load_tables
from paddle_reshard.pipeline.convert.options import check_names, takes
from paddle_reshard.pipeline.convert.read_options import ReadOptions
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.pipeline.ema.decisions import Due, Recovery, Rule, Standing, progress_of, recovery
from paddle_reshard.pipeline.ema.flex import METADATA_PATH, FlexRank
from paddle_reshard.pipeline.ema.resume import RankPieces, read_average
from paddle_reshard.pipeline.ema.stretches import (
    Stretches,
    Weights,
    check_same,
    count_elements,
    find_arrays,
    flex_file,
    rank_file,
    stretches_of,
    wanted_of,
)
from paddle_reshard.pipeline.layouts.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.layouts.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.pipeline.layouts.reading import index_tensor_file, read_json
from paddle_reshard.storage.formats.paddle_pickle_writer import encode_pickle
from paddle_reshard.storage.locate import open_source, source_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks import ema_worker
from paddle_reshard.tasks.ema import AverageProgress, Averaging, Floats
from paddle_reshard.tasks.ema_worker import Shared, shared_bytes

PathLike = str | os.PathLike[str]
BEHIND = ("wait", "skip")
ON_LOSS = ("report", "raise")
WORKERS = ("process", "ray")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EmaCounts:
    """What became of the updates of one rank."""

    handed_over: int = 0
    not_due: int = 0
    """Steps between two updates."""
    loss_too_high: int = 0
    skipped: int = 0
    """Updates for which the worker was not ready; the next one makes up for their decay."""
    lost_workers: int = 0
    waited_seconds: float = 0.0
    handed_over_seconds: float = 0.0


class AsyncEma:
    """The average of one rank's weights, kept by a process beside it.

    Parameters
    ----------
    weights
        Called at every update: what of the rank is averaged. An optimizer of Paddle stands for its master weights.
    decay, warm_up, start
        See :class:`~paddle_reshard.tasks.ema.Averaging`.
    interval
        Update at the steps that it divides.
    loss_threshold
        Update only while the loss is below it.
    when_behind
        The worker still averages the update before: ``"wait"`` for it; or ``"skip"`` this one, and let the next
        one count for both: its decay is the product of theirs.
    when_lost
        The worker has crashed: ``"report"`` it once in the log, start another one, and begin anew if the average was
        spoilt; or ``"raise"``.
    worker
        ``"process"``: a process of our own averages. ``"ray"``: an actor on this node, of the Ray that this process is
        connected to, or else that ``RAY_ADDRESS`` names.
    """

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
        worker: str = "process",
    ) -> None:
        self.rule = Rule(interval, loss_threshold)
        choices = (
            (when_behind, BEHIND, "when_behind"),
            (when_lost, ON_LOSS, "when_lost"),
            (worker, WORKERS, "worker"),
        )
        for value, known, what in choices:
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}; known are {', '.join(known)}")
        self.weights = weights if callable(weights) else lambda: _weights_of(weights)
        self.averaging = Averaging(decay, warm_up, start)
        self.when_behind, self.when_lost, self.worker = when_behind, when_lost, worker
        self.standing = Standing()
        self.counts = EmaCounts()
        self.last_request: Mapping[str, Any] = {}
        self.companion: Companion | None = None
        self.stretches: Stretches = {}

    @property
    def progress(self) -> AverageProgress:
        """How far the average has come."""
        return self.standing.progress

    # -------------------------------------------------------------------------------------------- updates

    def update(self, step: int, loss: float | None = None) -> bool:
        """Hand the weights of ``step`` over, if it is time to; whether they were.

        Returns as soon as they are copied.

        Raises
        ------
        UsageError
            If there is a loss threshold and no loss, or the tensors are not those of the update before.
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
            self._start_again(error)
            return self._hand_over(step)

    def _hand_over(self, step: int) -> bool:
        began = time.perf_counter()
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
        companion.ask(self.last_request)
        self.standing = self.standing.handed_over(step, decays)
        self.counts.handed_over += 1
        self.counts.waited_seconds += ready - began
        self.counts.handed_over_seconds += time.perf_counter() - ready
        return True

    def _companion(self, weights: Weights) -> Companion:
        """The process beside this one, started at the first update, when the tensors are known."""
        stretches = stretches_of(weights)
        if self.companion is None:
            self.stretches = stretches
            self.companion = self._start_companion(shared_bytes(count_elements(stretches)))
            self.shared = Shared(self.companion.memory, self.companion.nbytes)
        else:
            check_same(stretches, self.stretches)
        return self.companion

    def _start_companion(self, nbytes: int) -> Companion:
        if self.worker == "ray":
            from paddle_reshard.clusters.ray.ema_actor import ActorCompanion

            return ActorCompanion(ema_worker.__name__, nbytes)
        return Companion(ema_worker.__name__, nbytes)

    def _start_again(self, error: CompanionLost) -> None:
        """Start another worker in place of a lost one, unless that is to be raised."""
        if self.when_lost == "raise" or self.companion is None:
            raise error
        self.counts.lost_workers += 1
        self.companion.end()
        self.companion.start()
        begun, done = (int(count) for count in self.shared.counts)
        kept = "its average is whole and goes on"
        what = recovery(begun, done, self.standing.asked)
        if what is Recovery.REPEAT:
            self.companion.ask(self.last_request)
        elif what is Recovery.BEGIN_ANEW:
            kept = "its average was spoilt and begins anew"
            self._forget()
            self.shared.average[:] = 0
        logger.warning("the average of the weights: %s; %s", error, kept)

    def _forget(self) -> None:
        """No update was made or asked for."""
        self.standing = Standing()
        self.shared.counts[:] = 0

    # --------------------------------------------------------------------------------------- save and load

    def state(self) -> Weights:
        """The average as it is when all updates so far are made: views that the next update changes.

        With ``start="zero"`` the values are still to be divided by ``progress.correction(averaging)``.
        """
        self._drain()
        found: dict[str, dict[str, Floats]] = {MASTER_WEIGHTS: {}, "": {}}
        for (group, key), stretch in self.stretches.items():
            found[group][key] = self.shared.average[stretch.start : stretch.stop].reshape(stretch.shape)
        return Weights(found[MASTER_WEIGHTS], found[""])

    def save(self, directory: PathLike, rank: str | FlexRank) -> None:
        """Write the average of this rank, and beside it what it is (``ema.json``); both appear whole.

        Parameters
        ----------
        rank
            The name of the rank's file in its topology, ``ema.tp00_pp01_shard00.pdopt``. Or, for the files of a
            FlexCheckpoint, the rank among all others: then the first one writes the metadata of all.

        Raises
        ------
        UsageError
            If there is no average yet, the name is not one of a rank's average, or the boxes are not its tensors.
        ReshardError
            If the file cannot be written.
        """
        if isinstance(rank, str):
            _check_name(rank)
        companion = self._drain()
        made = rank_file(self.stretches) if isinstance(rank, str) else flex_file(self.stretches, rank)
        root, written = made
        encoded = encode_pickle(root)
        folder = Path(directory)
        path = folder / (rank if isinstance(rank, str) else rank.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        companion.ask(
            {
                "do": "save",
                "path": str(path),
                "literals": [(at, base64.b64encode(text).decode()) for at, text in encoded.literals],
                "slots": [(at, *written[slot]) for slot, at, _ in encoded.slots],
            }
        )
        companion.wait()
        if isinstance(rank, FlexRank) and rank.number == 0:
            _write_whole(folder / METADATA_PATH, rank.metadata())
        _write_whole(folder / AVERAGE, json.dumps(self.describe(), indent=1).encode())

    def describe(self) -> dict[str, Any]:
        """What no tensor file says of an average: the same on every rank."""
        return {
            "format": "paddle-reshard ema",
            **asdict(self.averaging),
            "interval": self.rule.interval,
            "loss_threshold": self.rule.loss_threshold,
            **asdict(self.progress),
            "divide_by": self.progress.correction(self.averaging),
        }

    @takes(ReadOptions)
    def load(
        self,
        directory: PathLike,
        rank: str | RankPieces,
        *,
        config: PathLike | Mapping[str, Any] | None = None,
        **options: Unpack[ReadOptions],
    ) -> None:
        """Go on from the average that a checkpoint holds.

        Without ``ema.json`` (a trainer's own files) the average counts as whole: as one that began with weights.

        Parameters
        ----------
        directory
            A folder, or a URL that fsspec knows.
        rank
            What this rank's tensors are: then the checkpoint may be one of any topology, sharding strategy, size of
            communication buffers and format, and only what the rank needs is read. Or the name of its file, of a job
            that is exactly like this one; that the tensors' names and shapes are the same is all that is checked.
        config
            The model's ``config.json``, or what is in it, for a checkpoint that has none.
        options
            :class:`ReadOptions`.

        Raises
        ------
        CheckpointError, PlanError
            Naming the tensor and both shapes, if the checkpoint's average is not one of this rank's tensors.
        """
        check_names(options, ReadOptions)
        store = open_source(os.fspath(directory), *source_access(options))
        companion = self._companion(self.weights())
        companion.wait()
        sizes = store.sizes()
        progress = progress_of(read_json(store, AVERAGE, sizes) if AVERAGE in sizes else None, self.averaging)
        self._forget()
        try:
            if isinstance(rank, str):
                self._read_file(store, rank)
            else:
                tables = load_tables(as_file(options.get("rules")))
                given = config if isinstance(config, Mapping) or config is None else load_config(Path(config))
                wanted = wanted_of(self.stretches, rank)
                read_average(store, tables, given, wanted, rank, self.shared.average.view(np.uint8))
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
        found = find_arrays(self.stretches, root, file_name)
        for entry, stretch in self.stretches.items():
            target = self.shared.average[stretch.start : stretch.stop]
            store.read_into(file_name, found[entry].byte_offset, target.view(np.uint8).data)

    def _drain(self) -> Companion:
        if self.companion is None or not self.progress.updates:
            raise UsageError("no average yet: no update was made and nothing was loaded")
        try:
            self.companion.wait()
        except CompanionLost as error:
            self._start_again(error)
            self.companion.wait()
            if not self.progress.updates:
                raise UsageError("the average was lost with its worker") from error
        return self.companion

    def close(self) -> None:
        """End the process beside this one."""
        if self.companion is not None:
            del self.shared
            self.companion.close()
            self.companion = None

    def __enter__(self) -> AsyncEma:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weights_of(optimizer: Any) -> Weights:
    """The master weights that an optimizer of Paddle holds, whatever it is wrapped in."""
    masters = optimizer.state_dict().get(MASTER_WEIGHTS)
    if not masters:
        raise UsageError("the optimizer holds no master weights; pass a function that returns Weights")
    return Weights(masters)


def _check_name(file_name: str) -> None:
    """Refuse what is not the name of a rank's average."""
    named = parse_rank_file(file_name)
    if named is None or named.kind != "ema":
        raise UsageError(f"{file_name}: not the name of a rank's average, ema[.tpNN][_ppNN][_shardNN].pdopt")


def _copy(weights: Weights, stretches: Stretches, values: Floats) -> None:
    for entry, tensor in weights.entries().items():
        stretch = stretches[entry]
        np.copyto(values[stretch.start : stretch.stop].reshape(stretch.shape), _array(tensor))


def _array(tensor: Any) -> Floats:
    """A tensor as an array, without a copy where it lies in host memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if not tensor.place.is_cpu_place():
        tensor = tensor.cpu()
    return np.asarray(np.from_dlpack(tensor.detach()), dtype=np.float32)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that every rank writes alike; the last one stands."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
