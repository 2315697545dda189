"""Index a folder: detect its format and make a checkpoint from its files.

Only metadata are read: pickle opcodes, headers, JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.parameter_names import in_words, misnamed
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, SourceFiles
from paddle_reshard.pipeline.core.catalog import check_dtypes
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    FormatError,
    PlanError,
    ReshardError,
    RuleError,
    UnsafePickleError,
    UsageError,
    of_optimizer,
)
from paddle_reshard.pipeline.core.file_names import CONFIG, MANIFEST, MODEL_META, RULES, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.limits import most_bytes, too_large
from paddle_reshard.pipeline.core.trainer_files import is_of_optimizer
from paddle_reshard.pipeline.formats.registry import format_of
from paddle_reshard.pipeline.indexing.roles import check_roles
from paddle_reshard.pipeline.indexing.small_files import check_steps
from paddle_reshard.pipeline.model.optimizers import check_known
from paddle_reshard.pipeline.model.rules.choose import candidates_for, says_the_same
from paddle_reshard.pipeline.model.rules.entries import with_entry
from paddle_reshard.pipeline.model.rules.items import mtp_entry
from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here


def index_checkpoint(
    store: Source,
    tables: RuleTables,
    config: Mapping[str, Any] | None = None,
    missing: MissingPolicy | None = None,
    index_files: IndexFiles = index_here,
    pieces: bool = False,
) -> Checkpoint:
    """Index a checkpoint from its metadata; no payload is read.

    Parameters
    ----------
    tables
        Rule tables to choose from.
    config
        The model's ``config.json``, for a checkpoint without one.
    missing
        How to treat missing tensors; by default they are refused.
    index_files
        Indexes rank files. Files with a header take a request or two and are always indexed in this process.
    pieces
        Without a rule table: accept that only the pieces of each tp rank are known, not the whole tensors.

    Raises
    ------
    CheckpointError, PlanError
        If it is not a single, complete, consistent checkpoint that the rules cover.
    """
    checkpoint = index_source(SourceFiles(store, config, index_here, index_files), tables, missing, pieces)
    check_names(store.location, checkpoint)
    if not pieces:
        check_parts(checkpoint, None)
    return checkpoint


def check_parts(checkpoint: Checkpoint, tp: int | None) -> None:
    """Refuse other pieces of tensors of which nobody has said what is fused in them.

    ``tp``: the degree of the job that is to hold them, ``None`` for whole tensors.
    """
    held = checkpoint.job.topology.tp if checkpoint.job.topology is not None else None
    if held == tp or {held, tp} <= {1, None}:
        return
    if unknown := next((t for t in checkpoint.model.tensors if t.rule.parts_unknown), None):
        raise RuleError(
            unknown.key,
            f"tp cuts its dim {unknown.rule.split}, and live parameters do not tell what is fused along it; its class "
            "has no AOA statement that does. Describe the model with fused={KEY: PARTS}, {} if nothing is fused, or "
            f'write "parts" in place of "parts_unknown" into the row of {unknown.rule.key}',
        )


def check_names(location: str, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint in which parameters have each other's names: its states may be those of others."""
    if exchanged := misnamed(checkpoint.job.names):
        raise CheckpointError(
            f"{in_words(exchanged)}. Nothing tells whether only the names were exchanged or the states with them, so "
            f"{location} is not used; take another checkpoint of the run, or describe the class that builds such "
            "names with --rules FILE",
        )


def index_source(
    files: SourceFiles,
    tables: RuleTables,
    missing: MissingPolicy | None = None,
    pieces: bool = False,
) -> Checkpoint:
    """:func:`index_checkpoint` for files that are already open."""
    try:
        return _index(files, tables, missing, pieces)
    except (CheckpointError, PlanError) as error:
        if isinstance(error, CheckpointError) and error.unannounced_mtp and missing and missing.drops_mtp:
            return _index(_announcing(files, error.unannounced_mtp), tables, missing, pieces)
        alone = _parameters_alone(files, tables, missing, pieces, error)
        if alone is not None:
            return alone
        if isinstance(error, CheckpointError):
            _refuse_portion(files)
        raise


def _announcing(files: SourceFiles, layers: int) -> SourceFiles:
    """The same files with a config that counts their layers of multi-token prediction, which are dropped."""
    config = files.config()
    return replace(files.without({CONFIG}), given_config=with_entry(config, mtp_entry(config), layers))


def _parameters_alone(
    files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None, pieces: bool, error: ReshardError
) -> Checkpoint | None:
    """The parameters alone, where nothing else is wanted and nothing but the optimizer's files is wrong; else ``None``.

    Signals and ``model_meta.json`` are about the job with its optimizer, and nothing of a model.
    """
    in_file = isinstance(error, FormatError) and is_of_optimizer(error.path)
    if (
        isinstance(error, UnsafePickleError)
        or missing is None
        or not missing.parameters_only
        or not (error.of_optimizer or in_file)
    ):
        return None
    left = frozenset(
        path
        for path in files.sizes
        if is_of_optimizer(path) or path == MODEL_META or path.startswith(SIGNAL_PREFIX)
    )
    try:
        alone = _index(files.without(left), tables, missing, pieces)
    except (CheckpointError, PlanError):
        return None
    why = f"not read, and parameters do not need it: {error}"
    named = tuple((path, why) for path in sorted(left) if is_of_optimizer(path))
    return replace(
        alone,
        own_files=alone.own_files | left,
        not_carried=(*alone.not_carried, *(named or (("optimizer states", why),))),
    )


def _refuse_portion(files: SourceFiles) -> None:
    """Refuse the portion that a node of a job made for its ranks: the others' files are elsewhere."""
    if MANIFEST not in files.sizes:
        return
    store = files.store
    portion = (own_manifest(store.read(MANIFEST, 0, files.sizes[MANIFEST])) or {}).get("portion")
    if isinstance(portion, dict):
        raise CheckpointError(
            f"{store.location}: holds only the files that ranks {portion.get('ranks')} of {portion.get('world_size')} "
            "read; give the checkpoint that it was made from"
        )


def _index(files: SourceFiles, tables: RuleTables, missing: MissingPolicy | None, pieces: bool) -> Checkpoint:
    _refuse_folder_of_checkpoints(files)
    tables = tables_beside(files, tables)
    format = format_of(files)
    missing = missing or MissingPolicy()
    checkpoint = format.index(files, tables, missing)
    if files.safetensors:
        from paddle_reshard.tasks.dequantise import DequantisedSource

        if isinstance(files.store, DequantisedSource):
            checkpoint = replace(
                checkpoint, history=replace(checkpoint.history, dequantised=files.store.summary)
            )
    if not pieces:
        checkpoint.model.table.check_whole(checkpoint.model.config)
    try:
        check_known(checkpoint.model, missing.lets_lack_states)
    except CoverageError as error:
        raise of_optimizer(error) from None
    check_dtypes(checkpoint.catalog.tensors)
    check_roles(files.store, checkpoint)
    ahead = checkpoint.model.table.scheduler_ahead if checkpoint.model.config else None
    check_steps(files.store, checkpoint.job.lr_scheduler, ahead)
    held = sorted(file.path for file in checkpoint.catalog.files)
    apart = far_apart(held, files.store.modified(), files.sizes)
    return replace(checkpoint, unproven="; ".join(filter(None, (checkpoint.unproven, apart))))


def tables_beside(files: SourceFiles, tables: RuleTables) -> RuleTables:
    """The table that the job has described beside the checkpoint, unless one is given or a shipped one says the same.

    Raises
    ------
    FormatError
        If the file is no rule table.
    """
    if tables.for_any_family or RULES not in files.sizes:
        return tables
    size = files.sizes[RULES]
    if size > (most := most_bytes(RULES)):
        raise FormatError("too_large", RULES, None, too_large(size, most))
    try:
        table = parse_rule_table(files.store.read(RULES, 0, size).decode(), RULES)
    except (UsageError, UnicodeDecodeError) as error:
        raise FormatError(
            "bad_rules", RULES, None, f"{error}; give another table with --rules FILE"
        ) from error
    config = files.config_if_any()
    if any(says_the_same(table, known, config) for known in candidates_for(tables, config)):
        return tables
    return RuleTables([table])


_NODE: Final = re.compile(r"(?:node|host|worker|machine|server|trainer|rank|pod)[-_]?\d{1,5}")


def _refuse_folder_of_checkpoints(files: SourceFiles) -> None:
    """Refuse the folder of a run, which is easily confused with one of its checkpoints."""
    nodes = [name for name in sorted(files.store.folders) if _NODE.fullmatch(name)]
    if len(nodes) > 1 and not files.pickles and not files.safetensors:
        each = nodes[0].rstrip("0123456789")
        raise CheckpointError(
            f"{files.store.location}: holds folders of machines, {nodes[0]} to {nodes[-1]}, and no tensors: each "
            "machine of a job seems to have kept the files of its own ranks. Bring them together and give the folder "
            f"`whole`: mkdir whole && cp -rnp {each}*/* whole/. It keeps the first of several files of one name: first "
            "compare those (cmp), which must be copies"
        )
    inside = [name for name in sorted(files.store.folders) if name.startswith("checkpoint-")]
    if inside and not any(path.endswith((".pdparams", ".pdopt")) for path in files.pickles):
        raise CheckpointError(
            f"{files.store.location}: this folder contains checkpoints; give a single checkpoint, such as {inside[-1]}"
        )


MINUTE_NS = 60 * 10**9
COPIED_BYTES_PER_S = 20_000_000
"""Slowest copy that is assumed when files of one save have later times, one after the other."""
FARTHER = 10
"""A file is named if its time is this many times farther from the others than they are from each other."""


def far_apart(paths: Iterable[str], times: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """The files that were written long before or after the others of their kind, in words; empty if there are none.

    All ranks write their files of one kind side by side, whatever else a job does meanwhile. Files are far apart if the
    gap is above a minute, ten times that between any others, and longer than it takes to copy the file after it.

    Parameters
    ----------
    times
        Path → when the file was last written, in nanoseconds since the epoch; empty if that is not known.
    sizes
        Path → size in bytes.
    """
    kinds: dict[str, list[str]] = {}
    for path in paths:
        if path in times:
            kinds.setdefault(re.sub(r"\d+", "0", path), []).append(path)
    return "; ".join(filter(None, (_apart(members, times, sizes) for members in kinds.values())))


def _apart(members: list[str], times: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """The smaller of the two sides of the longest gap."""
    ordered = sorted(members, key=lambda path: (times[path], path))
    gaps = [times[late] - times[early] for early, late in pairwise(ordered)]
    gap = max(gaps, default=0)
    number = gaps.index(gap) + 1 if gaps else 0
    sides = ordered[:number], ordered[number:]
    spread = max(times[side[-1]] - times[side[0]] for side in sides) if gaps else 0
    copying = sizes[ordered[number]] * 10**9 // COPIED_BYTES_PER_S
    if gap <= max(MINUTE_NS + copying, FARTHER * spread):
        return ""
    few, when = (sides[0], "before") if len(sides[0]) < len(sides[1]) else (sides[1], "after")
    named = few[0] if len(few) == 1 else f"{few[0]} … {few[-1]} ({len(few)} files)"
    others = "the other" if len(members) == 2 else "the others"
    return f"that {named} and {others} of the kind are of one save: last written {gap / 1e9:,.0f} s {when} {others}"
