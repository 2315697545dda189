"""Lay out targets of any format, and join several targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing, TargetFiles, add_literal_files
from paddle_reshard.pipeline.checkpoint.format import Format, JobTarget, Outline, Target
from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import DROPPABLE, Cast
from paddle_reshard.pipeline.formats.registry import FORMATS, average_target, formats_for_average, names_of
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.optimizers import refuse_optimizer, special_optimizer


def lay_out(source: Checkpoint, wanted: Checkpoint, target: Target, listing: SourceListing) -> LaidOut:
    """Lay out all files of a target, without states that its format cannot hold.

    ``wanted`` is the source with all requested changes applied, such as another size of the vocabulary; ``listing`` is
    of the source. A ``PlanError`` says why the source cannot become this target.
    """
    source, wanted, omitted = _to_lay_out(source, wanted, target)
    laid_out = target.lay_out(source.without(omitted), wanted.without(omitted), listing)
    files = add_literal_files(laid_out.files, laid_out.sidecars.written)
    return replace(
        laid_out,
        files=replace(files, casts=files.casts | _defined_casts(source.catalog)),
        states_not_carried=tuple(sorted({*laid_out.states_not_carried, *omitted})),
    )


def outline(source: Checkpoint, wanted: Checkpoint, target: JobTarget, listing: SourceListing) -> Outline:
    """What :func:`lay_out` would make, without the files; arguments and errors are the same."""
    source, wanted, omitted = _to_lay_out(source, wanted, target)
    target_outline = target.outline(source.without(omitted), wanted.without(omitted), listing)
    return replace(
        target_outline, states_not_carried=tuple(sorted({*target_outline.states_not_carried, *omitted}))
    )


def _to_lay_out(
    source: Checkpoint, wanted: Checkpoint, target: Target
) -> tuple[Checkpoint, Checkpoint, frozenset[str]]:
    """Source and wanted, as the target takes them, and the states that its format cannot hold."""
    format = FORMATS[target.format]
    if wanted.model.has_lora:
        _check_lora(wanted.model, target)
    _check_optimizer(wanted.model, format)
    if wanted.history.masters_made and not format.starts_with_masters:
        starting = names_of([other for other in FORMATS.values() if other.starts_with_masters], "or")
        raise PlanError(
            "--master-weights from-parameters: no job starts from master weights without other optimizer states in "
            f"the format {format.name}; use --format {starting}"
        )
    if starts_anew(source, target):
        source, wanted = replace(source, has_optimizer=False), replace(wanted, has_optimizer=False)
    cannot_hold = {state for name in format.cannot_hold for state in DROPPABLE[name]}
    return source, wanted, source.catalog.tensors.states & cannot_hold


def starts_anew(source: Checkpoint, target: Target) -> bool:
    """Whether a job starts from the target with a new optimizer, because the source holds parameters only.

    Empty optimizer files of a hybrid checkpoint are an optimizer without states, which is carried.
    """
    if not FORMATS[target.format].starts_with:
        return False
    has_files = FORMATS[source.format].starts_with and source.has_optimizer
    return not (has_files or any(tensor.trained for tensor in source.model.tensors))


def _check_lora(model: Model, target: Target) -> None:
    format = FORMATS[target.format]
    holding = [other for other in FORMATS.values() if other.holds_lora]
    if not format.holds_lora:
        raise UnsupportedError(
            f"the format {format.name} cannot hold LoRA; use --format {names_of(holding, 'or')}"
        )
    if (reason := target.cannot_hold_lora(model)) is not None:
        # Formats that one function reads, such as hybrid and hybrid-plain, hold LoRA under the same conditions.
        others = [other for other in holding if other.index is not format.index]
        raise PlanError(f"{reason}; or use --format {names_of(others, 'or')}")


def _check_optimizer(model: Model, format: Format) -> None:
    optimizer = special_optimizer(model)
    if optimizer is None or format.model_only or optimizer in format.special_optimizers:
        return
    saving = names_of([other for other in FORMATS.values() if optimizer in other.special_optimizers], "or")
    for_models = names_of([other for other in FORMATS.values() if other.model_only], "or")
    refuse_optimizer(model, format.name, saving, for_models)


def check_nothing_lost(targets: Sequence[Target], laid_out: Sequence[LaidOut]) -> None:
    """Refuse targets if a state would be lost: its format cannot hold it, and no other target does.

    Formats that hold only a model omit everything else intentionally.
    """
    for number, (target, layout) in enumerate(zip(targets, laid_out, strict=True)):
        others = (other for index, other in enumerate(laid_out) if index != number)
        held = {state for other in others for state in other.catalog.tensors.states}
        if FORMATS[target.format].model_only or not set(layout.states_not_carried) - held:
            continue
        lost = ", ".join(sorted(set(layout.states_not_carried) - held))
        beside, model = formats_for_average()
        raise PlanError(
            f"the format {target.format} cannot hold the exponential moving average of the source ({lost}): omit it "
            f"with --drop ema, convert to {beside}, or write it to a second target: "
            f"--target DST:{average_target(model)}"
        )


def _defined_casts(source: Catalog) -> frozenset[Cast]:
    """Casts that are part of the source: tensors defined as casts by its format, or made by an AOA program."""
    dtype = source.tensors.dtype
    return source.casts() | {(dtype(of).name, dtype(tensor).name) for tensor, of in source.implied.items()}


def join(source: Catalog, laid_out: Sequence[LaidOut], prefixes: Sequence[str]) -> LaidOut:
    """Join several targets into one, so that the source is read once; paths get the prefix of their target."""
    if len(laid_out) == 1:
        return laid_out[0]
    catalog = _needed(source, [layout.catalog for layout in laid_out])
    index = catalog.index()
    files: list[File] = []
    first_files: list[int] = []
    literals = Literals()
    fills: list[tuple[int, int, int]] = []
    fragments: list[Fragments] = []
    omitted: set[int] = set()
    for prefix, layout in zip(prefixes, laid_out, strict=True):
        first = len(files)
        first_files.append(first)
        files += [replace(file, path=prefix + file.path) for file in layout.files.files]
        for file, start, content in layout.files.literals:
            literals.add(first + file, start, content)
        fills += [(first + file, start, nbytes) for file, start, nbytes in layout.files.fills]
        rows = layout.files.fragments.copy()
        rows["file"] = rows["file"] + first
        new_index = np.array([index[identity] for identity in layout.catalog.index()], dtype=np.int32)
        rows["tensor"] = new_index[rows["tensor"]]
        fragments.append(rows)
        omitted.update(new_index[_omitted(layout)].tolist())
    casts = frozenset(cast for layout in laid_out for cast in layout.files.casts)
    joined = TargetFiles(
        tuple(files),
        literals,
        tuple(fills),
        Fragments.joined(fragments),
        casts=casts,
        omitted=frozenset(omitted),
        first_files=tuple(first_files),
    )
    return LaidOut(catalog, joined)


def _needed(source: Catalog, catalogs: Sequence[Catalog]) -> Catalog:
    """The tensors of the source that are in some of the ``catalogs``."""
    chosen = [catalog.index() for catalog in catalogs]
    index = source.index()
    return source.only(
        [number for identity, number in index.items() if any(identity in target for target in chosen)]
    )


def _omitted(target: LaidOut) -> list[int]:
    """Tensors of the source that this target does not use."""
    catalog = target.catalog
    fed: set[int] = set()
    for tensor in np.unique(target.files.fragments["tensor"]).tolist():
        mixture = catalog.mixtures.get(tensor)
        fed |= {catalog.implied.get(tensor, tensor)} if mixture is None else {t.tensor for t in mixture.terms}
    return sorted({*np.unique(catalog.fragments["tensor"]).tolist()} - fed)
