"""Every target format: the tensor files byte for byte, and what becomes of the other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import EMA_STATES, Cast
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import LaidOut, TargetFiles, add_literal_files
from paddle_reshard.pipeline.layouts.flex.target import FlexTarget, layout_flex, small_flex_files
from paddle_reshard.pipeline.layouts.huggingface.sidecars import plan_huggingface_sidecars
from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget, layout_huggingface
from paddle_reshard.pipeline.layouts.hybrid.source import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.layouts.sidecars import plan_sidecars
from paddle_reshard.pipeline.layouts.unified.target import UnifiedTarget, layout_unified, small_unified_files

AnyTarget = HybridTarget | HuggingFaceTarget | UnifiedTarget | FlexTarget


def lay_out(
    source: Checkpoint,
    wanted: Checkpoint,
    target: AnyTarget,
    sizes: Mapping[str, int],
    folders: Sequence[str],
) -> LaidOut:
    """Lay out a target, without the states that its format has no place for.

    Parameters
    ----------
    wanted
        The source as the target is to hold it: the same but for a vocabulary of another size.
    sizes, folders
        Path of every file of the source → size in bytes; names of folders in it.

    Raises
    ------
    PlanError
        If the source cannot become this target.
    """
    homeless = {tensor.state for tensor in source.catalog.tensors} & set(_no_place(target))
    laid_out = _laid_out(source.without(homeless), wanted.without(homeless), target, sizes, folders)
    left_states = tuple(sorted({*laid_out.left_states, *homeless}))
    casts = laid_out.files.casts | _defined_casts(source.catalog)
    return replace(laid_out, files=replace(laid_out.files, casts=casts), left_states=left_states)


def _no_place(target: AnyTarget) -> tuple[str, ...]:
    """States that a format for jobs has no place for."""
    auto_parallel = isinstance(target, FlexTarget) and target.auto_parallel
    return EMA_STATES if isinstance(target, UnifiedTarget) or auto_parallel else ()


def check_left(targets: Sequence[AnyTarget], laid_out: Sequence[LaidOut]) -> None:
    """Refuse where a format has no place for a state, and no other of the targets holds it.

    A format for a model alone is for leaving everything else out.

    Raises
    ------
    PlanError
    """
    for number, (target, one) in enumerate(zip(targets, laid_out, strict=True)):
        others = (other for place, other in enumerate(laid_out) if place != number)
        held = {tensor.state for other in others for tensor in other.catalog.tensors}
        if isinstance(target, HuggingFaceTarget) or not set(one.left_states) - held:
            continue
        format = target_facts(target)["layout"]
        lost = ", ".join(sorted(set(one.left_states) - held))
        raise PlanError(
            f"the format {format} has no place for the exponential moving average that the source holds ({lost}): "
            "leave it out with --drop ema, convert to hybrid or flex, or make a second target that holds it, "
            "--target DST:huggingface:state=ema"
        )


def _defined_casts(source: Catalog) -> frozenset[Cast]:
    """Casts by which the source's format defines tensors that it does not hold, or an AOA program makes them."""
    pairs = {(source.tensors[of], source.tensors[tensor]) for tensor, of in source.implied.items()}
    return source.casts() | {(stored.dtype.name, tensor.dtype.name) for stored, tensor in pairs}


def _laid_out(
    source: Checkpoint,
    wanted: Checkpoint,
    target: AnyTarget,
    sizes: Mapping[str, int],
    folders: Sequence[str],
) -> LaidOut:
    config = source.model.config
    if isinstance(target, HuggingFaceTarget):
        laid_out = layout_huggingface(source.catalog, wanted, target)
        sidecars = plan_huggingface_sidecars(sizes, folders, wanted, config, target)
        files = add_literal_files(laid_out.files, sidecars.written)
        return LaidOut(laid_out.catalog, files, sidecars.carried, sidecars.left, laid_out.left_states)
    if isinstance(target, UnifiedTarget):
        unified = layout_unified(wanted, target)
        sidecars = plan_sidecars(sizes, folders, wanted, config, Topology(dp=target.files))
        written = (*sidecars.written, *small_unified_files(sizes, wanted))
        files = add_literal_files(unified, written)
        return LaidOut(source.catalog, files, sidecars.carried, sidecars.left)
    if isinstance(target, FlexTarget):
        sidecars = plan_sidecars(sizes, folders, wanted, config, Topology())
        written = (*sidecars.written, *small_flex_files(sizes, wanted, target))
        files = add_literal_files(layout_flex(wanted, target), written)
        return LaidOut(source.catalog, files, sidecars.carried, sidecars.left)
    # The optimizer files of a hybrid checkpoint tell that there is nothing in them.
    weights_only = source.format not in (HYBRID, HYBRID_PLAIN)
    if weights_only and not any(tensor.trained for tensor in wanted.model.tensors):
        raise PlanError(
            "the source holds parameters only; a hybrid checkpoint is for a job to go on from, which needs their "
            "master weights and optimizer states too. Write the weights with --format huggingface, unified or flex"
        )
    sidecars = plan_sidecars(sizes, folders, wanted, config, target.topology)
    files = add_literal_files(layout_hybrid(wanted, target), sidecars.written)
    return LaidOut(source.catalog, files, sidecars.carried, sidecars.left)


def join(source: Catalog, laid_out: Sequence[LaidOut], prefixes: Sequence[str]) -> LaidOut:
    """Several targets as one, made of one reading: paths begin with the prefix of their target."""
    if len(laid_out) == 1:
        return laid_out[0]
    chosen = {(t.key, t.state) for one in laid_out for t in one.catalog.tensors}
    kept = [i for i, tensor in enumerate(source.tensors) if (tensor.key, tensor.state) in chosen]
    catalog = source.only(kept)
    index = catalog.index()
    files: list[File] = []
    literals = Literals()
    fills: list[tuple[int, int, int]] = []
    fragments: list[Fragments] = []
    left_out: set[int] = set()
    for prefix, one in zip(prefixes, laid_out, strict=True):
        first = len(files)
        files += [replace(file, path=prefix + file.path) for file in one.files.files]
        for file, start, content in one.files.literals:
            literals.add(first + file, start, content)
        fills += [(first + file, start, nbytes) for file, start, nbytes in one.files.fills]
        rows = one.files.fragments.copy()
        rows["file"] += first
        places = np.array([index[t.key, t.state] for t in one.catalog.tensors], dtype=np.int32)
        rows["tensor"] = places[rows["tensor"]]
        fragments.append(rows)
        left_out.update(places[_left_out(one)].tolist())
    casts = frozenset(cast for one in laid_out for cast in one.files.casts)
    joined = TargetFiles(
        tuple(files),
        literals,
        tuple(fills),
        np.concatenate(fragments),
        casts=casts,
        left_out=frozenset(left_out),
    )
    return LaidOut(catalog, joined, (), ())


def _left_out(target: LaidOut) -> list[int]:
    """Tensors that are stored and of which nothing goes into this target."""
    catalog = target.catalog
    fed: set[int] = set()
    for tensor in np.unique(target.files.fragments["tensor"]).tolist():
        mixture = catalog.mixtures.get(tensor)
        fed |= {catalog.implied.get(tensor, tensor)} if mixture is None else {t.tensor for t in mixture.terms}
    return sorted({*np.unique(catalog.fragments["tensor"]).tolist()} - fed)


def target_facts(target: AnyTarget) -> dict[str, str]:
    """What tells a target from others of the same source, in words."""
    if isinstance(target, HuggingFaceTarget):
        dtype = "as trained" if target.dtype is None else target.dtype.name
        return {"layout": "huggingface", "state": target.state, "dtype": dtype}
    if isinstance(target, UnifiedTarget):
        return {"layout": "unified"}
    if isinstance(target, FlexTarget):
        return {"layout": target.format, "metadata": target.generation}
    return {"topology": str(target.topology), "sharding_strategy": target.strategy}


def in_words(target: AnyTarget) -> str:
    """A target in a line, for people."""
    if isinstance(target, HuggingFaceTarget):
        dtype = "dtypes as trained" if target.dtype is None else target.dtype.name
        return f"Hugging Face, {target.state}, {dtype}"
    if isinstance(target, UnifiedTarget):
        return f"unified, {target.files} file{'s' if target.files > 1 else ''} of each kind"
    if isinstance(target, FlexTarget):
        return f"{target.format}, metadata of Paddle {target.generation}"
    format = "hybrid" if target.sharded_saving else "hybrid-plain"
    return f"{format}, {target.topology}, {sharding_in_words(target.strategy)}"


def sharding_in_words(strategy: str | None) -> str:
    """A sharding strategy, for people."""
    return "no sharding" if strategy in (None, "none") else str(strategy)
