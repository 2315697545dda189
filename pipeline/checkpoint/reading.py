"""Read the metadata of a checkpoint's files with ranged reads; payloads are not read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paddle_reshard.pipeline.checkpoint.checkpoint import checked_schedule
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError, ReshardError, UsageError
from paddle_reshard.pipeline.core.file_names import CONFIG, LORA_CONFIG, MODEL_META, SCHEDULER, WEIGHT_INDEX
from paddle_reshard.pipeline.core.limits import MAX_CONFIG_BYTES, MAX_META_BYTES, too_large
from paddle_reshard.pipeline.core.trainer_files import kind_of
from paddle_reshard.pipeline.model.lora_config import Adapter, parse_adapter
from paddle_reshard.pipeline.model.transformers_config import DTYPE_ENTRIES, OF_PADDLE, OF_TENSOR_PARALLEL
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.files.mistaken import BEGIN_BYTES, in_place_of
from paddle_reshard.storage.files.paddle_pickle import parse_pickle

if TYPE_CHECKING:
    from paddle_reshard.storage.files.safetensors import Index, SafetensorsPayload
    from paddle_reshard.storage.store import Source

TENSOR_SUFFIXES = (".pdparams", ".pdopt", ".distcp", ".pdmodel")
PLAIN_STATES = (SCHEDULER, "scaler.pdparams")
"""Small states of the trainer that are not tensors of the model; carried byte for byte."""
SAFETENSORS = re.compile(r".+\.safetensors(?:_shard_\d{4})?")
"""Unified checkpoints can have several files per rank, with a number after the suffix."""
_OF_JOB = ("optimizer.safetensors", "master_weights.safetensors", "peft_model.safetensors")
"""Kinds of files that a job saves beside its model (:func:`kind_of`)."""

T = TypeVar("T")


class Readable(Protocol):
    """Ranged reads that return bytes."""

    def read(self, path: str, byte_offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a file."""


class IndexFiles(Protocol):
    """Indexes files: in this process, in parallel or on Ray."""

    def __call__(
        self, index: Callable[[Readable, str, int], T], store: Readable, sizes: Mapping[str, int]
    ) -> dict[str, T]:
        """Path → ``index(store, path, size_bytes)``; ``index`` is a module's function, so that workers can run it."""


def index_tensor_file(store: Readable, path: str, size_bytes: int) -> dict[str, Any]:
    """The contents of a tensor file, with arrays as references."""
    root = parse_pickle(lambda offset, nbytes: store.read(path, offset, nbytes), size_bytes, path).root
    if not isinstance(root, dict):
        raise FormatError(
            "not_a_dict", path, None, f"holds a {type(root).__name__}, a state dict is expected"
        )
    return root


def index_safetensors(store: Readable, path: str, size_bytes: int) -> SafetensorsPayload:
    """The header of a safetensors file."""
    from paddle_reshard.storage.files.safetensors import parse_safetensors

    return parse_safetensors(partial(store.read, path), size_bytes, path)


def read_lr_scheduler(store: Readable, sizes: Mapping[str, int]) -> Any:
    """Contents of ``scheduler.pdparams``, as in ``LR_Scheduler`` of hybrid optimizer files; ``None`` if missing."""
    if SCHEDULER not in sizes:
        return None
    return checked_schedule(index_tensor_file(store, SCHEDULER, sizes[SCHEDULER]), SCHEDULER)


def read_json(store: Readable, path: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    if path not in sizes:
        raise CheckpointError(f"{path} is missing")
    most = MAX_META_BYTES if path == MODEL_META or path.endswith(".index.json") else MAX_CONFIG_BYTES
    if sizes[path] > most:
        raise FormatError("too_large", path, None, too_large(sizes[path], most))
    data = store.read(path, 0, sizes[path])
    try:
        value = parse_json(data)
    except JsonError as error:
        if mistaken := in_place_of(data[:BEGIN_BYTES], len(data)):
            raise FormatError("another_file", path, None, mistaken) from None
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(
            "not_an_object", path, None, f"holds a {type(value).__name__}, an object is expected"
        )
    return value


@dataclass(frozen=True)
class SourceFiles:
    """The files of a folder as formats see them: paths, sizes and metadata.

    Formats neither open files nor decide where indexing runs; both are passed in.
    """

    store: Source
    given_config: Mapping[str, Any] | None
    """The ``config.json`` that the user passes, for a checkpoint without one."""
    index_here: IndexFiles
    """For files with a header, which take one or two requests."""
    index_anywhere: IndexFiles
    """For files that must be parsed from start to end."""

    def without(self, paths: Collection[str]) -> SourceFiles:
        """The same folder as if some of its files were not there."""
        from paddle_reshard.storage.views import PartialSource

        return replace(self, store=PartialSource(self.store, frozenset(paths)))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Path of every file → size in bytes."""
        return self.store.sizes()

    @cached_property
    def pickles(self) -> tuple[str, ...]:
        """Paths that could be Paddle's own tensor files, sorted."""
        return tuple(p for p in sorted(self.sizes) if p.endswith(TENSOR_SUFFIXES) and p not in PLAIN_STATES)

    @cached_property
    def safetensors(self) -> Mapping[str, int]:
        """Path of every safetensors file → size in bytes; without :attr:`unindexed`."""
        return {
            path: size
            for path, size in self.sizes.items()
            if SAFETENSORS.fullmatch(path) and path not in self.unindexed
        }

    @cached_property
    def unindexed(self) -> tuple[str, ...]:
        """Safetensors files beside those that the index of a model names: copies, other precisions, stale shards.

        None where files of a training job lie, whose folders are as a trainer writes them; nor where the index names no
        file that is there.
        """
        held = sorted(path for path in self.sizes if SAFETENSORS.fullmatch(path))
        if self.pickles or any(kind_of(path) in _OF_JOB or "/" in path for path in held):
            return ()
        index = self.weight_index(WEIGHT_INDEX)
        named = set() if index is None else {*index.weight_map.values()}
        return () if named.isdisjoint(held) else tuple(path for path in held if path not in named)

    @cached_property
    def headers(self) -> Mapping[str, SafetensorsPayload]:
        """Path of every safetensors file → its header."""
        return self.index_here(index_safetensors, self.store, self.safetensors)

    def json(self, path: str) -> dict[str, Any]:
        """Contents of a JSON file that holds an object."""
        return read_json(self.store, path, self.sizes)

    def weight_index(self, path: str) -> Index | None:
        """Contents of an index of safetensors files; ``None`` if the file does not exist."""
        from paddle_reshard.storage.files.safetensors import parse_index

        if path not in self.sizes:
            return None
        index = parse_index(self.store.read(path, 0, self.sizes[path]), path)
        if "delta_encoding" in index.metadata:  # as slime and SGLang exchange them
            raise CheckpointError(
                f"{self.store.location}: a delta: its tensors are changes since another version, not a "
                "checkpoint; give the folder to which it was applied"
            )
        return index

    def config(self, error: type[ReshardError] = CheckpointError, else_: str = "") -> Mapping[str, Any]:
        """The checkpoint's own ``config.json``, or the one that the user passes; an ``error`` without both.

        ``else_`` is what the error says to those whose model has no config.
        """
        if CONFIG in self.sizes:
            return self.json(CONFIG)
        if self.given_config is None:
            raise error(
                f"{self.store.location}: {CONFIG} is missing; pass the model's with --config FILE{else_}"
            )
        return self.given_config

    def config_if_any(self) -> Mapping[str, Any]:
        """As :meth:`config`, but empty if there is neither."""
        return self.config() if CONFIG in self.sizes else self.given_config or {}

    def adapter(self) -> Adapter | None:
        """Contents of ``lora_config.json``; ``None`` if the file does not exist."""
        return parse_adapter(self.json(LORA_CONFIG)) if LORA_CONFIG in self.sizes else None

    def lr_scheduler(self) -> Any:
        """The result of :func:`read_lr_scheduler`."""
        return read_lr_scheduler(self.store, self.sizes)


OF_TOPOLOGY = (
    *OF_TENSOR_PARALLEL,
    *("sequence_parallel", "use_expert_parallel", "expert_model_parallel_size"),
    *("moe_rank", "moe_world_size", "moe_group_origin"),
    *("pipeline_model_parallel_size", "pipeline_parallel_degree", "virtual_pipeline_model_parallel_size"),
    *("virtual_pp_degree", "pp_seg_method"),
)
"""Entries of ``config.json`` that say the topology of the job that saved a model."""
_OF_A_RUN = frozenset(
    (*OF_PADDLE, *OF_TOPOLOGY, *DTYPE_ENTRIES, "use_cache", "_name_or_path", "transformers_version")
)
"""Entries of ``config.json`` that say how a model was saved, and nothing of what it is."""


def check_given_config(store: Source, given: Mapping[str, Any] | None) -> None:
    """Refuse the config that a user passes for a checkpoint whose own says something else of the model.

    An entry that only the checkpoint has is no contradiction: libraries add theirs as they save. Of libraries the name
    counts, which is that of the entry (``paddleformers_version``), and not the version.

    Raises
    ------
    UsageError
        Names the first entry in which they differ.
    """
    sizes = store.sizes()
    if given is None or CONFIG not in sizes:
        return
    own = read_json(store, CONFIG, sizes)
    differing = sorted(
        entry
        for entry in given.keys() - _OF_A_RUN
        if own.get(entry) != given[entry] and not (entry.endswith("_version") and entry in own)
    )
    if differing:
        entry, more = differing[0], len(differing) - 1
        raise UsageError(
            f"{store.location}: its own {CONFIG} has {own.get(entry)!r} for {entry}, that of --config "
            f"{given[entry]!r}{f', and {more} more differ' if more else ''}. The checkpoint's own says what its "
            f"files hold: leave --config out, or correct {CONFIG} in the checkpoint"
        )
