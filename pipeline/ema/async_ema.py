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
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from paddle_reshard.clusters.companion import Companion, CompanionLost
from paddle_reshard.pipeline.convert.inputs import load_config, load_tables
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.ema.flex import METADATA_PATH, FlexRank
from paddle_reshard.pipeline.ema.resume import Piece, RankPieces, Wanted, read_average
from paddle_reshard.pipeline.layouts.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.layouts.reading import index_tensor_file, read_json
from paddle_reshard.storage.formats.paddle_pickle import STRUCTURED_NAMES, ArraySlot, encode_pickle
from paddle_reshard.storage.locate import StorageOptions, open_source
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks import ema_worker
from paddle_reshard.tasks.ema import Averaging, Floats, Progress
from paddle_reshard.tasks.ema_worker import Shared, shared_bytes

PathLike = str | os.PathLike[str]
MASTER_WEIGHTS = "master_weights"
BEHIND = ("wait", "skip")
ON_LOSS = ("report", "raise")
WORKERS = ("process", "ray")
ALIGNED_ELEMENTS = 16
"""Tensors begin at multiples of 64 bytes in shared memory."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """What of a rank is averaged; arrays or Paddle tensors of float32."""

    master_weights: Mapping[str, Any]
    """Parameter name → master weight, as this rank's optimizer holds it: whole, or its slice."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Structured key → parameter that is float32 itself."""


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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the values and in the average."""

    tensor_name: str = field(compare=False)
    """The framework's name; a temporary tensor has another one every time."""
    start: int
    shape: Shape

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


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
        if interval < 1:
            raise UsageError(f"interval {interval} must be at least 1")
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
        self.interval, self.loss_threshold = interval, loss_threshold
        self.when_behind, self.when_lost, self.worker = when_behind, when_lost, worker
        self.progress = Progress()
        self.counts = EmaCounts()
        self.owed: tuple[float, ...] = ()
        """Decays of skipped updates."""
        self.asked = 0
        """Updates that were asked of the worker since the average began."""
        self.last_request: Mapping[str, Any] = {}
        self.companion: Companion | None = None
        self.places: dict[tuple[str, str], _Place] = {}

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
        if step % self.interval:
            self.counts.not_due += 1
            return False
        if self.loss_threshold is not None:
            if loss is None:
                raise UsageError("a loss_threshold was given, so update needs the loss")
            if not loss < self.loss_threshold:
                self.counts.loss_too_high += 1
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
        decays = (*self.owed, self.averaging.decay_at(self.progress.updates + len(self.owed)))
        if not companion.wait(0):
            if self.when_behind == "skip":
                self.counts.skipped += 1
                self.owed = decays
                return False
            companion.wait()
        ready = time.perf_counter()
        _copy(weights, self.places, self.shared.values)
        self.last_request = {"do": "blend", "decay": prod(decays)}
        companion.ask(self.last_request)
        self.asked += 1
        self.progress = self.progress.after(step, decays)
        self.owed = ()
        self.counts.handed_over += 1
        self.counts.waited_seconds += ready - began
        self.counts.handed_over_seconds += time.perf_counter() - ready
        return True

    def _companion(self, weights: Weights) -> Companion:
        """The process beside this one, started at the first update, when the tensors are known."""
        places = _places(weights)
        if self.companion is None:
            self.places = places
            elements = max((_aligned(place.stop) for place in places.values()), default=0)
            self.companion = self._start_companion(shared_bytes(elements))
            self.shared = Shared(self.companion.memory, self.companion.nbytes)
        elif places != self.places:
            odd = next(
                entry for entry in (*places, *self.places) if places.get(entry) != self.places.get(entry)
            )
            raise UsageError(
                f"{odd[1]}: is {_shape(places, odd)} now and was {_shape(self.places, odd)} at the update before; "
                "an average cannot go on over other tensors"
            )
        return self.companion

    def _start_companion(self, nbytes: int) -> Companion:
        if self.worker == "ray":
            from paddle_reshard.clusters.ray.ema_actor import ActorCompanion

            return ActorCompanion(ema_worker.__name__, nbytes)
        return Companion(ema_worker.__name__, nbytes)

    def _start_again(self, error: CompanionLost) -> None:
        """Start another worker in place of a lost one, unless that is to be raised.

        What was handed over and not begun is still there; an update that was begun and not done has spoilt the
        average.
        """
        if self.when_lost == "raise" or self.companion is None:
            raise error
        self.counts.lost_workers += 1
        self.companion.end()
        self.companion.start()
        begun, done = (int(count) for count in self.shared.counts)
        if begun == done:
            kept = "its average is whole and goes on"
            if done < self.asked:
                self.companion.ask(self.last_request)
        else:
            kept = "its average was spoilt and begins anew"
            self.progress, self.owed, self.asked = Progress(), (), 0
            self.shared.counts[:] = 0
            self.shared.average[:] = 0
        logger.warning("the average of the weights: %s; %s", error, kept)

    # --------------------------------------------------------------------------------------- save and load

    def state(self) -> Weights:
        """The average as it is when all updates so far are made: views that the next update changes.

        With ``start="zero"`` the values are still to be divided by ``progress.correction(averaging)``.
        """
        self._drain()
        found: dict[str, dict[str, Floats]] = {MASTER_WEIGHTS: {}, "": {}}
        for (group, key), place in self.places.items():
            found[group][key] = self.shared.average[place.start : place.stop].reshape(place.shape)
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
            named = parse_rank_file(rank)
            if named is None or named.kind != "ema":
                raise UsageError(
                    f"{rank}: not the name of a rank's average, ema[.tpNN][_ppNN][_shardNN].pdopt"
                )
        companion = self._drain()
        root, stretches = self._rank_file() if isinstance(rank, str) else self._flex_file(rank)
        encoded = encode_pickle(root)
        folder = Path(directory)
        path = folder / (rank if isinstance(rank, str) else rank.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        companion.ask(
            {
                "do": "save",
                "path": str(path),
                "literals": [(at, base64.b64encode(text).decode()) for at, text in encoded.literals],
                "slots": [(at, *stretches[slot]) for slot, at, _ in encoded.slots],
            }
        )
        companion.wait()
        if isinstance(rank, FlexRank) and rank.number == 0:
            _write_whole(folder / METADATA_PATH, rank.metadata())
        _write_whole(folder / AVERAGE, json.dumps(self.describe(), indent=1).encode())

    def _rank_file(self) -> tuple[dict[str, object], list[tuple[int, int]]]:
        """What the trainers' own file of a rank holds, and which stretch of the average each array is."""
        masters: dict[str, object] = {}
        root: dict[str, object] = {}
        for slot, ((group, key), place) in enumerate(self.places.items()):
            (masters if group else root)[key] = ArraySlot(slot, "f4", place.shape, place.tensor_name)
        root[MASTER_WEIGHTS] = masters
        return root, [(place.start, place.stop) for place in self.places.values()]

    def _flex_file(self, rank: FlexRank) -> tuple[dict[str, object], list[tuple[int, int]]]:
        """The same for the file of a FlexCheckpoint."""
        held = {
            (MASTER_WEIGHTS if master else "", name): box
            for master, name, box in rank.boxes[rank.number].entries()
        }
        for entry, place in self.places.items():
            box, elements = held.pop(entry, None), prod(place.shape)
            if box is None and not elements:
                continue
            whole = box is not None and box.flattened_range is None
            if box is None or box.elements > elements or (whole and box.elements < elements):
                raise UsageError(f"{entry[1]}: is {place.shape} in this rank, and {box} is said of it")
        if held:
            raise UsageError(f"{next(iter(held))[1]}: is none of the tensors of this rank")
        root: dict[str, object] = {}
        names: dict[str, str] = {}
        stretches = []
        for master, name, box in rank.written():
            place = self.places[MASTER_WEIGHTS if master else "", name]
            root[box.key] = ArraySlot(len(root), "f4", box.shape, None)
            names[box.key] = place.tensor_name
            stretches.append((place.start, place.start + box.elements))
        return {**root, STRUCTURED_NAMES: names}, stretches

    def describe(self) -> dict[str, Any]:
        """What no tensor file says of an average: the same on every rank."""
        return {
            "format": "paddle-reshard ema",
            **asdict(self.averaging),
            "interval": self.interval,
            "loss_threshold": self.loss_threshold,
            **asdict(self.progress),
            "divide_by": self.progress.correction(self.averaging),
        }

    def load(
        self,
        directory: PathLike,
        rank: str | RankPieces,
        *,
        rules: PathLike | None = None,
        config: PathLike | Mapping[str, Any] | None = None,
        storage_options: StorageOptions | None = None,
        allow_scheme: Collection[str] = (),
        allow_links: bool = False,
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
        rules, config
            A rule table for the model family; the model's ``config.json``, or what is in it, for a checkpoint that has
            none.
        storage_options
            What fsspec needs to reach a store that is not a local folder.
        allow_scheme
            Schemes of URLs that are opened beside the plain ones.
        allow_links
            Follow links in the checkpoint that lead out of it.

        Raises
        ------
        CheckpointError, PlanError
            Naming the tensor and both shapes, if the checkpoint's average is not one of this rank's tensors.
        """
        store = open_source(os.fspath(directory), storage_options or {}, allow_scheme, allow_links)
        companion = self._companion(self.weights())
        companion.wait()
        progress = _read_progress(store, store.sizes(), self.averaging)
        self.progress, self.owed, self.asked = Progress(), (), 0
        self.shared.counts[:] = 0
        try:
            if isinstance(rank, str):
                self._read_file(store, rank)
            else:
                tables = load_tables(None if rules is None else Path(rules))
                given = config if isinstance(config, Mapping) or config is None else load_config(Path(config))
                read_average(
                    store, tables, given, self._wanted(rank), rank, self.shared.average.view(np.uint8)
                )
        except BaseException:
            self.shared.average[:] = 0
            raise
        self.progress = progress

    def _wanted(self, rank: RankPieces) -> list[Wanted]:
        """What every tensor of this rank is."""
        wanted = []
        for (group, key), place in self.places.items():
            piece = rank.master_weights.get(key) if group else Piece(key, place.shape)
            if piece is None:
                raise UsageError(
                    f"{key}: what the rank's pieces are does not say which parameter it belongs to"
                )
            wanted.append(Wanted(key, group == MASTER_WEIGHTS, piece, place.shape, 4 * place.start))
        return wanted

    def _read_file(self, store: Source, file_name: str) -> None:
        """Read the average that the same rank of the same job has written."""
        sizes = store.sizes()
        if file_name not in sizes:
            raise CheckpointError(f"{store.location}: has no {file_name}")
        root = index_tensor_file(store, file_name, sizes[file_name])
        masters = root.pop(MASTER_WEIGHTS, {})
        root.pop(STRUCTURED_NAMES, None)
        found = {(MASTER_WEIGHTS, key): value for key, value in masters.items()}
        found |= {("", key): value for key, value in root.items()}
        for entry in (*self.places, *found):
            array, place = found.get(entry), self.places.get(entry)
            if (
                array is None
                or place is None
                or array.shape != place.shape
                or array.dtype != "f4"
                or array.fortran
            ):
                raise CheckpointError(
                    f"{file_name}: {entry[1]} is {getattr(array, 'shape', 'not there')} in the file and "
                    f"{place.shape if place else 'not there'} in this rank"
                )
        for entry, place in self.places.items():
            target = self.shared.average[place.start : place.stop]
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


def _places(weights: Weights) -> dict[tuple[str, str], _Place]:
    """A place for every tensor, in order."""
    places: dict[tuple[str, str], _Place] = {}
    start = 0
    for group, tensors in ((MASTER_WEIGHTS, weights.master_weights), ("", weights.params)):
        for key, tensor in tensors.items():
            if str(tensor.dtype).rpartition(".")[2] != "float32":
                raise UsageError(f"{key}: is {tensor.dtype}, only float32 can be averaged")
            place = _Place(str(getattr(tensor, "name", key)), start, tuple(int(e) for e in tensor.shape))
            places[group, key] = place
            start = _aligned(place.stop)
    return places


def _aligned(element: int) -> int:
    return -(-element // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def _copy(weights: Weights, places: Mapping[tuple[str, str], _Place], values: Floats) -> None:
    for group, tensors in ((MASTER_WEIGHTS, weights.master_weights), ("", weights.params)):
        for key, tensor in tensors.items():
            place = places[group, key]
            np.copyto(values[place.start : place.stop].reshape(place.shape), _array(tensor))


def _array(tensor: Any) -> Floats:
    """A tensor as an array, without a copy where it lies in host memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if not tensor.place.is_cpu_place():
        tensor = tensor.cpu()
    return np.asarray(np.from_dlpack(tensor.detach()), dtype=np.float32)


def _shape(places: Mapping[tuple[str, str], _Place], entry: tuple[str, str]) -> str:
    return str(places[entry].shape) if entry in places else "not there"


def _read_progress(store: Source, sizes: Mapping[str, int], averaging: Averaging) -> Progress:
    if AVERAGE not in sizes:
        if averaging.start == "zero":
            raise CheckpointError(
                f"{AVERAGE} is missing, so the weight of what the average began with is not known; an average that "
                'starts at zero cannot go on (start="weights" takes it as whole)'
            )
        return Progress(updates=1, start_weight=0.0)
    saved = read_json(store, AVERAGE, sizes)
    if saved.get("start") != averaging.start:
        raise CheckpointError(
            f"{AVERAGE}: the average started from {saved.get('start')!r}, not {averaging.start!r}"
        )
    try:
        return Progress(int(saved["updates"]), int(saved["step"]), float(saved["start_weight"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{AVERAGE}: does not say how far the average has come: {error!r}") from error


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that every rank writes alike; the last one stands."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
