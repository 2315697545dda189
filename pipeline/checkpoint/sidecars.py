"""Small files next to the tensors, in any format.

Each is carried byte for byte, rewritten, or not carried; the report gives the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import Sidecars, SourceListing
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import AVERAGE, CONFIG, LORA_CONFIG, MANIFEST, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.trainer_files import is_marker, is_random_state, is_stray, without_role
from paddle_reshard.pipeline.model.rules.table import RuleTable

_TP_FIELD = {
    "paddleformers": "tensor_model_parallel_size",
    "paddlefleet": "tensor_model_parallel_size",
    "paddlenlp": "tensor_parallel_degree",
}
_EP_FIELD = "use_expert_parallel"

_NEEDED = {
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    "generation_config.json": ("generation_config.json",),
}
"""What an inference engine reads beside the weights and ``config.json`` → names of files that are it."""
_NEEDED_FOR_IMAGES = {
    "image processor": ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")
}
"""The same of models that see images."""

_FOLDER: Final = "a folder, not part of the checkpoint's own files"
STRAY: Final = "left there by an operating system, a network file system or a notebook; no trainer writes it"


def plan_sidecars(listing: SourceListing, checkpoint: Checkpoint, topology: Topology) -> Sidecars:
    """Decide about the small files of a target from which a job continues: carry what its topology can use.

    Completion markers of the target are written with its tensor files, so those of the source are not reported.
    """
    rng_files = [path for path in listing.paths if is_random_state(path)]
    same_ranks = _same_ranks(checkpoint, topology, rng_files)

    def reason(path: str) -> str | None:
        if path in rng_files and not same_ranks:
            return "random state belongs to one rank of the source's topology"
        if path == AVERAGE and not checkpoint.has_ema:
            return "it describes a moving average, which this target does not hold"
        return None

    own_files = {*checkpoint.own_files, *(path for path in listing.paths if path.startswith(SIGNAL_PREFIX))}
    own_files |= checkpoint.history.rewritten.keys()
    config = _config(checkpoint.model.config, checkpoint.model.table, topology)
    # The trainer writes this when it merges what tp has cut, even if tp is 1.
    if checkpoint.model.has_lora and topology.pp == 1 and topology.tp * topology.sharding > 1:
        config[_TP_FIELD["paddleformers"]] = -1
    rewritten = dict(checkpoint.history.rewritten.values())
    if checkpoint.adapter is not None and not checkpoint.adapter.fits(topology):
        own_files.add(LORA_CONFIG)
        rewritten[LORA_CONFIG] = checkpoint.adapter.for_topology(topology)
    sidecars = classify_sidecars(listing, own_files, reason, checkpoint.source_config, config)
    return sidecars.with_written(rewritten.items())


def classify_sidecars(
    listing: SourceListing,
    own_files: Collection[str],
    reason_not_carried: Callable[[str], str | None],
    source_config: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Sidecars:
    """Decide about every file that does not hold tensors of the model.

    A target is a closed world: of a file that no reader is known to take, nothing says what it would do there.

    Parameters
    ----------
    own_files
        Files that are rewritten or not reported: files of tensors and their metadata.
    reason_not_carried
        Returns why the format cannot hold a file; ``None``: it is carried.
    source_config, config
        ``config.json`` of the source and of the target. It is rewritten, as ``transformers`` writes it, only if an
        entry changes.
    """
    carried = []
    not_carried = [(name, STRAY if is_stray(name) else _FOLDER) for name in listing.folders]
    for path in sorted(listing.paths):
        if path in own_files or path in (MANIFEST, CONFIG):
            continue
        if is_marker(path):
            not_carried.append((path, "a completion marker of the source's own job"))
        elif "/" in path:
            not_carried.append((path, "in a folder of tensors, but not a file of tensors"))
        elif reason := reason_not_carried(path) or without_role(path):
            not_carried.append((path, reason))
        else:
            carried.append(path)
    if not config:  # a FlexCheckpoint need not have any
        return Sidecars(tuple(carried), (), tuple(not_carried))
    if config == source_config and CONFIG in listing.paths:
        return Sidecars((*carried, CONFIG), (), tuple(not_carried))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return Sidecars(tuple(carried), ((CONFIG, text.encode()),), tuple(not_carried))


def _same_ranks(checkpoint: Checkpoint, topology: Topology, rng_files: list[str]) -> bool:
    """Whether source and target have the same ranks.

    The source's files do not give its dp degree, but the number of its random states does: one per rank.
    """
    source = checkpoint.job.topology
    same = source is not None and replace(source, dp=1) == replace(topology, dp=1)
    per_rank = {f"rng_state_{rank}.pth" for rank in range(topology.world_size)}
    one_file = {f"rng_state_{topology.world_size}.pth" if topology.world_size > 1 else "rng_state.pth"}
    return same and set(rng_files) in (per_rank, one_file)


def _config(config: Mapping[str, Any], table: RuleTable, topology: Topology) -> dict[str, Any]:
    """``config.json`` with the entries that follow the topology."""
    field = _TP_FIELD.get(table.convention)
    changed = {k: v for k, v in config.items() if k != field}
    new_field = topology.ep > 1 and not table.recipe  # no recipe writes it, whatever its ep
    if table.convention == "paddleformers" and (_EP_FIELD in config or new_field):
        changed[_EP_FIELD] = topology.ep > 1
    if field is not None and topology.tp > 1:
        changed[field] = topology.tp
    return changed


def average_divisor(facts: Mapping[str, Any], path: str) -> float:
    """Divisor of the values of an average; ``facts`` are the contents of the ``ema.json`` next to it.

    It is below 1 if the average started at zero, otherwise 1. Anything else is a ``CheckpointError``.
    """
    divide_by = facts.get("divide_by")
    if not isinstance(divide_by, int | float) or isinstance(divide_by, bool) or not 0 < divide_by <= 1:
        raise CheckpointError(f"{path}: divide_by is {divide_by!r}; a number above 0 and up to 1 is expected")
    return float(divide_by)


def lacking_files(config: Mapping[str, Any], there: Collection[str]) -> list[str]:
    """The small files that an inference engine reads and a folder lacks, in words.

    >>> lacking_files({"vision_config": {}}, ["tokenizer.json", "generation_config.json"])
    ['no image processor']
    """
    needed = _NEEDED | (_NEEDED_FOR_IMAGES if "vision_config" in config else {})
    return [f"no {what}" for what, names in needed.items() if set(names).isdisjoint(there)]
