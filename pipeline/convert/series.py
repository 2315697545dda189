"""The average of a series of checkpoints.

Each may have any topology and format. The series is described as a single checkpoint: its last one, plus an average
that is mixed from tensors in the files of all. It is then converted like any checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.changes.read import OpenChanges
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, check_given_config
from paddle_reshard.pipeline.convert.conversion import ConversionReport, run_request
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import AVERAGE
from paddle_reshard.pipeline.core.mixture import Mixture, Term
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import (
    EMA,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    Tensor,
)
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.registry import DEFAULT, FORMATS, formats_for_average
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.finished import check_signals
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.indexing.small_files import check_one_model
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.options import (
    AverageOptions,
    Targets,
    flag_of,
    of_one_source,
    with_options,
)
from paddle_reshard.pipeline.request.parse import (
    ConversionRequest,
    Locations,
    Values,
    locations_of,
    parse_request,
)
from paddle_reshard.pipeline.request.record import record_of_average
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount
from paddle_reshard.tasks.ema import Averaging, factors

AVERAGES = {MASTER_WEIGHT: EMA_MASTER_WEIGHT, PARAM: EMA_PARAM}
SUM_TOLERANCE = 1e-6
"""By how much given weights may miss a sum of 1."""
LARGEST_WEIGHT = float(np.finfo(np.float32).max)
_NUMBERED = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Weighting:
    """The weights of the checkpoints of a series, first to last."""

    steps: tuple[tuple[float, float], ...]
    """``(keep, take)`` of every checkpoint: ``average = keep · average + take · values``, as in
    :class:`~paddle_reshard.pipeline.core.mixture.Term`. The first keeps nothing."""
    facts: Mapping[str, Any]
    """Entries of ``ema.json`` that describe the weighting."""

    @classmethod
    def by_decay(cls, decay: float, count: int) -> Weighting:
        """An exponential moving average from the first checkpoint on, bit for bit as computed during training.

        With decay 0.9 and 3 checkpoints the steps are (0, 1), (0.9, 0.1), (0.9, 0.1), rounded to float32.
        """
        decay = Averaging(decay).decay
        keep, take = (float(factor) for factor in factors(decay))
        return cls(((0.0, 1.0), *[(keep, take)] * (count - 1)), {"decay": decay})

    @classmethod
    def by_weights(cls, weights: Sequence[float]) -> Weighting:
        """The sum of the checkpoints, each multiplied by its weight, rounded to float32.

        Weights that do not add up to 1 are refused.
        """
        if out_of_range := [weight for weight in weights if abs(weight) > LARGEST_WEIGHT]:
            raise UsageError(f"the weight {out_of_range[0]} is out of the range of float32")
        total = math.fsum(weights)
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise UsageError(
                f"the weights {', '.join(map(str, weights))} add up to {total}; they must add up to 1"
            )
        rounded = [float(np.float32(weight)) for weight in weights]
        steps = ((0.0 if number == 0 else 1.0, weight) for number, weight in enumerate(rounded))
        return cls(tuple(steps), {"weights": rounded})


def weigh(
    count: int, decay: float | None = None, weights: Sequence[float] | None = None, uniform: bool = False
) -> Weighting:
    """The weighting of ``count`` checkpoints; exactly one of the three must be given."""
    if (decay is not None) + (weights is not None) + uniform != 1:
        raise UsageError("give exactly one of --decay, --weights and --uniform")
    if count < 2:
        raise UsageError("an average needs at least two checkpoints; for all of a run give RUN/checkpoint-*")
    if decay is not None:
        return Weighting.by_decay(decay, count)
    if weights is not None and len(weights) != count:
        raise UsageError(f"{len(weights)} weights are given for {count} checkpoints")
    return Weighting.by_weights(weights if weights is not None else [1 / count] * count)


# ------------------------------------------------------------------------------- many checkpoints as one


def with_average(
    checkpoints: Sequence[Checkpoint], locations: Sequence[str], weighting: Weighting
) -> Checkpoint:
    """The last checkpoint, with the average of all added; pure. Paths are those of :func:`series_source`.

    Averaged are, as in the trainers, master weights, and float32 parameters without one. Checkpoints of different
    models are refused, and trained parameters without float32 values.
    """
    last = checkpoints[-1]
    for checkpoint, location in zip(checkpoints, locations, strict=True):
        _check_same_model(checkpoint, location, last, locations[-1])
    averaged = list(_averaged(last.model.tensors))
    own = last.catalog.only(
        [i for i, t in enumerate(last.catalog.tensors) if t.state not in AVERAGES.values()]
    )
    index = own.index()
    mixed = [replace(own.tensors[index[entry]], state=AVERAGES[entry[1]]) for entry in averaged]
    parts = [_part(checkpoint.catalog, averaged) for checkpoint in checkpoints[:-1]]
    first, count = len(own.tensors) + len(mixed), len(averaged)
    borrowed = _joined(parts, locations)
    terms = [range(first + number * count, first + (number + 1) * count) for number in range(len(parts))]
    catalog = Catalog(
        Tensors([*own.tensors, *mixed, *borrowed.tensors]),
        (*borrowed.files, *own.files),
        Fragments.joined([_numbered(borrowed, tensor=first), _numbered(own, file=len(borrowed.files))]),
        own.implied,
        _mixtures(len(own.tensors), [*terms, [index[entry] for entry in averaged]], weighting),
        borrowed=len(borrowed.tensors),
    )
    return replace(last, catalog=catalog, has_ema=True)


def _joined(parts: Sequence[Catalog], locations: Sequence[str]) -> Catalog:
    """What an average takes of the earlier checkpoints of a series, with paths as in :func:`series_source`."""
    tensors: list[Tensor] = []
    files: list[File] = []
    fragments = []
    for number, (part, location) in enumerate(zip(parts, locations, strict=False)):
        fragments.append(_numbered(part, len(tensors), len(files)))
        tensors += [replace(t, state=f"{t.state} of {location}") for t in part.tensors]
        files += [File(_prefixed(number, file.path), file.size_bytes) for file in part.files]
    return Catalog(Tensors(tensors), tuple(files), Fragments.joined(fragments), {})


def _numbered(catalog: Catalog, tensor: int = 0, file: int = 0) -> Fragments:
    """The fragments of a catalog whose first tensor and first file have these numbers."""
    rows = catalog.fragments.copy()
    rows["tensor"], rows["file"] = rows["tensor"] + tensor, rows["file"] + file
    return rows


def _mixtures(first: int, terms: Sequence[Sequence[int]], weighting: Weighting) -> dict[int, Mixture]:
    """Number of each average, from ``first`` on → its steps; ``terms`` are the numbers of what each step takes."""
    return {
        first + number: Mixture(
            tuple(
                Term(int(tensor), keep, take)
                for tensor, (keep, take) in zip(series, weighting.steps, strict=True)
            )
        )
        for number, series in enumerate(zip(*terms, strict=True))
    }


def _part(catalog: Catalog, averaged: Sequence[tuple[str, str]]) -> Catalog:
    index = catalog.index()
    return catalog.only([index[entry] for entry in averaged])


def _check_same_model(one: Checkpoint, location: str, last: Checkpoint, last_location: str) -> None:
    def facts(tensor: ModelTensor | None) -> str:
        if tensor is None:
            return "missing"
        master = " with a master weight" if tensor.master else ""
        tied = f", tied to {tensor.tied_to}" if tensor.tied_to else ""
        missing = ", not in any file" if tensor.missing else ""
        return f"{tensor.dtype.name} {tensor.global_shape}{master}{tied}{missing}"

    ours, theirs = ({t.key: t for t in checkpoint.model.tensors} for checkpoint in (one, last))
    for key in ours | theirs:
        if facts(ours.get(key)) != facts(theirs.get(key)):
            raise CheckpointError(
                f"{key}: {facts(ours.get(key))} in {location}, {facts(theirs.get(key))} in {last_location}; only "
                "checkpoints of one model can be averaged"
            )


def _averaged(tensors: Sequence[ModelTensor]) -> list[tuple[str, str]]:
    """Key and state of every tensor to average."""
    found = []
    for tensor in tensors:
        if tensor.tied_to is not None or tensor.missing:
            continue
        if tensor.master:
            found.append((tensor.key, MASTER_WEIGHT))
        elif tensor.dtype.name == "float32":
            found.append((tensor.key, PARAM))
        elif tensor.trained:
            raise UnsupportedError(
                f"{tensor.key}: {tensor.dtype.name} without a master weight; only float32 can be averaged"
            )
    return found


def _prefixed(number: int, path: str) -> str:
    return f"SRC{number}/{path}"


def series_source(stores: Sequence[Source], average: bytes) -> JoinedSource:
    """Several checkpoints as one source: the last one, with ``average`` as its ``ema.json``.

    The files of the earlier checkpoints are below ``SRC0/``, ``SRC1/``, ….
    """
    *earlier, last = stores
    mounts = (Mount(_prefixed(n, ""), store, f"{store.location}: ") for n, store in enumerate(earlier))
    return JoinedSource((Mount("", last), *mounts), {AVERAGE: average})


# --------------------------------------------------------------------------------------------- the API


@with_options(AverageOptions)
def ema(
    sources: Sequence[PathLike],
    target: Targets,
    *,
    decay: float | None = None,
    weights: Sequence[float] | None = None,
    uniform: bool = False,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[AverageOptions],
) -> ConversionReport:
    """Average the weights of a series of checkpoints, each in any topology.

    The result is the last checkpoint with the average as its EMA state, replacing any that it has; with
    ``format="huggingface"`` it is the average as a model. Averaged are master weights, and float32 parameters without
    one, in float32, in the order of ``sources``; each product and each sum is rounded.

    Parameters
    ----------
    sources
        At least two checkpoints, first to last.
    decay
        ``average = decay · average + (1 − decay) · weights``, starting with the weights of the first checkpoint: the
        same bits as :class:`~paddle_reshard.pipeline.training.async_ema.AsyncEma` with the same steps.
    weights
        A weight for each checkpoint; they add up to 1.
    uniform
        Give every checkpoint the weight 1/n, rounded to float32.

    Raises
    ------
    ReshardError
        If the checkpoints are not of one model, or cannot be converted.
    """
    refuse_foreign(options)
    asked = parse_request(options, target)
    locations, request = locations_of(sources, target, asked), of_average(asked)
    weighting = weigh(len(sources), decay, weights, uniform)
    how = {"decay": decay, "weights": weights, "uniform": uniform}
    record = record_of_average(locations.sources, asked, how)
    return run_request(locations, request, record, observe, partial(read_series, weighting))


average = ema
"""The same, by its former name."""


def refuse_foreign(options: Mapping[str, Any]) -> None:
    """Refuse options that do not apply to averages, before a file that they name is read."""
    for name in of_one_source():
        if options.get(name):
            raise UsageError(f"{flag_of(name)} does not apply to averages; use it when converting the result")


def of_average(request: ConversionRequest) -> ConversionRequest:
    """The request for an average; options that do not apply to averages are refused."""
    request = replace(request, target_options=tuple(map(_of_average, request.target_options)))
    request.check()
    return request


def read_series(
    weighting: Weighting, locations: Locations, request: ConversionRequest, index_files: IndexFiles
) -> Altered:
    """Index the sources of an average, and apply what alters their average."""
    access = locations.reading
    stores = [open_checkpoint(source, access) for source in locations.sources]
    missing = MissingPolicy(allowed=request.allow_missing)
    reading = Reading(load_tables(request.rules), load_config(request.config), missing, index_files)
    check_one_model(stores)
    for store in stores:
        check_given_config(store, reading.config)
    checkpoints = [
        index_checkpoint(store, reading.tables, reading.config, missing, index_files, True)
        for store in stores
    ]
    for store in stores:
        check_signals(store)
    series = series_source(stores, _ema_json(weighting, stores))
    checkpoint = with_average(checkpoints, [store.location for store in stores], weighting)
    own_files = checkpoint.own_files | series.sizes().keys() - stores[-1].sizes().keys() - {AVERAGE}
    altered = Altered.of(series, replace(checkpoint, own_files=own_files))
    return OpenChanges.open(request.changes, access).apply(altered, reading)


def _of_average(target: Values) -> Values:
    """The options of a target, adapted so that a format for models holds the average, or refused."""
    format = FORMATS[target.get("format") or DEFAULT]
    if EMA in format.cannot_hold:
        checkpoint, model = formats_for_average()
        raise UsageError(
            f"the format {format.name} cannot hold an average; write it with --format {checkpoint}, or as a model with "
            f"--format {model.name}"
        )
    for name, value in format.average_options.items():
        if target.get(name) not in (None, value):
            raise UsageError(f"--{name} {target[name]}: an average requires --{name} {value}")
    return {**target, **format.average_options}


def _ema_json(weighting: Weighting, stores: Sequence[Source]) -> bytes:
    """``ema.json`` of the average, as if each checkpoint had been an update during training."""
    last = stores[-1].location.rstrip("/").rpartition("/")[2]
    match = _NUMBERED.fullmatch(last)
    facts = {
        "format": "paddle-reshard ema",
        "decay": None,
        **weighting.facts,
        "averaged": [store.location for store in stores],
        "start": "weights",
        "updates": len(stores),
        "step": int(match[1]) if match else 0,
        "start_weight": 0.0,
        "divide_by": 1.0,
    }
    return json.dumps(facts, indent=1).encode()
