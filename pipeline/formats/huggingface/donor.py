"""Complete an export with the Hugging Face model from which training started, the donor (``--like``).

The donor defines the complete model: it must have every tensor of the export, in the same shape, and tensors that only
the donor has are copied unchanged. Tensors that the trained model has itself are never copied, so a checkpoint that
lacks some of its layers is refused. Small files of the model that the checkpoint lacks are copied too, except code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import DONOR, Checkpoint, Completion
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.catalog import (
    Catalog,
    File,
    FragmentRow,
    Fragments,
    check_catalog,
    fragment_row,
    fragment_rows,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import CONFIG, WEIGHT_INDEX
from paddle_reshard.pipeline.core.geometry import row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor
from paddle_reshard.pipeline.core.trainer_files import is_model_file
from paddle_reshard.pipeline.formats.huggingface.parts import model_parts, tensor_parts
from paddle_reshard.pipeline.formats.huggingface.source import BUFFERS, StoredTensor, stored_tensors
from paddle_reshard.pipeline.model.forms import matches_of
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import TEXT, config_entry, count_entry
from paddle_reshard.pipeline.model.rules.items import mtp_entry
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, Rule
from paddle_reshard.pipeline.model.transformers_config import OWN_CODE

SHOWN = 3
"""Number of keys that an error names."""
SAME = ("model_type", "num_hidden_layers")
"""Entries of ``config.json`` that must be equal in checkpoint and donor."""
NOT_TAKEN = (
    *OWN_CODE,
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
    "_name_or_path",
)
"""Entries of the donor's ``config.json`` that are not copied: they name its code, or say how its tensors are stored."""


@dataclass(frozen=True)
class HuggingFaceDonor:
    """A Hugging Face model, by its metadata."""

    location: str
    sizes: Mapping[str, int]
    """Path in its folder → size in bytes."""
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]

    def complete(self, source: Checkpoint, wanted: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
        """Both with the donor's tensors, small files and config entries that they lack."""
        _check_config(wanted.model.config, self)
        taken = _taken(wanted, self)
        completion = Completion(
            self.location,
            tuple(taken),
            {path: DONOR + path for path in sorted(self.sizes) if path != CONFIG and is_model_file(path)},
            _entries(wanted, self, taken),
        )
        completed = _with_tensors(source, self, completion)
        check_catalog(completed.catalog)
        return completed, completed if wanted is source else _with_tensors(wanted, self, completion)


def read_donor(files: SourceFiles) -> HuggingFaceDonor:
    """Read a donor from the headers of its files; one with quantised tensors is refused."""
    location, config = files.store.location, files.config()
    if not files.safetensors or files.pickles:
        raise CheckpointError(f"{location}: --like needs the safetensors files of a Hugging Face model")
    if config.get("quantization_config"):
        raise UnsupportedError(
            f"{location}: its tensors are quantised (quantization_config in {CONFIG}), which is not supported; pass "
            "the model in bfloat16 with --like"
        )
    tensors = stored_tensors(files.headers, files.weight_index(WEIGHT_INDEX), BUFFERS)
    return HuggingFaceDonor(location, files.sizes, tensors, config)


def _with_tensors(checkpoint: Checkpoint, donor: HuggingFaceDonor, completion: Completion) -> Checkpoint:
    """Add the donor's tensors to a checkpoint; they may replace tensors that its model lists as missing."""
    model, taken = checkpoint.model, set(completion.tensors)
    kept = [t for t in model.tensors if not (_is_missing(t) and _keys(t, model) <= taken)]
    added = [_model_tensor(key, donor.tensors[key]) for key in completion.tensors]
    return replace(
        checkpoint,
        catalog=_joined(checkpoint.catalog, added, donor),
        model=replace(model, tensors=(*kept, *added)),
        own_files=checkpoint.own_files | {DONOR + path for path in donor.sizes},
        history=replace(checkpoint.history, completion=completion),
    )


def _model_tensor(key: str, stored: StoredTensor) -> ModelTensor:
    """A tensor that is exported unchanged, under its own key."""
    rule = Rule(key, "", "", "the donor", huggingface=HuggingFaceForm((key,)))
    return ModelTensor(key, rule, None, stored.shape, stored.dtype, (), False)


def _joined(catalog: Catalog, added: Sequence[ModelTensor], donor: HuggingFaceDonor) -> Catalog:
    """Add tensors in the donor's files to a catalog."""
    if not added:
        return catalog
    index = catalog.index()
    paths = sorted({donor.tensors[tensor.key].path for tensor in added})
    numbers = {path: number for number, path in enumerate(paths, len(catalog.files))}
    rows: list[FragmentRow] = []
    for number, tensor in enumerate(added, len(catalog.tensors)):
        if (tensor.key, PARAM) in index or "{" in tensor.key or "}" in tensor.key:
            raise CheckpointError(
                f"{tensor.key}: a tensor of {donor.location} with a key that cannot be copied; it is another model"
            )
        shape, dtype, path, base = donor.tensors[tensor.key]
        strides = row_major_strides(shape, dtype.itemsize)
        rows.append(fragment_row(number, numbers[path], dtype, 0, base, (0,) * len(shape), shape, strides))
    return replace(
        catalog,
        tensors=Tensors([*catalog.tensors, *(Tensor(t.key, PARAM, t.dtype, t.global_shape) for t in added)]),
        files=(*catalog.files, *(File(DONOR + path, donor.sizes[path]) for path in paths)),
        fragments=Fragments.joined([catalog.fragments, fragment_rows(rows)]),
    )


def _entries(wanted: Checkpoint, donor: HuggingFaceDonor, taken: Sequence[str]) -> dict[str, Any]:
    """Entries of the donor's ``config.json`` that the checkpoint's own lacks."""
    ours = wanted.model.config
    entries = {k: v for k, v in donor.config.items() if k not in ours and k not in NOT_TAKEN}
    entry = mtp_entry(donor.config)
    layers = config_entry(donor.config, entry)
    if layers and not config_entry(ours, entry) and any(_by_row(taken, wanted.model).values()):
        in_text = entry in (donor.config.get(TEXT) or {}) and TEXT in ours
        entries |= {TEXT: {**ours[TEXT], entry: layers}} if in_text else {entry: layers}
    return entries


def _by_row(keys: Iterable[str], model: Model) -> dict[str, bool]:
    """Key that a row of the model's table matches → whether it belongs to multi-token prediction."""
    layers, mtp = count_entry(model.config, "num_hidden_layers"), model.table.mtp_items
    mtp_by_key = {}
    for key, match in matches_of(keys, model.table, model.config).items():
        if match is not None:
            spelled = match.rule.pattern().fullmatch(match.key)
            layer = spelled.groupdict().get("layer") if spelled else None
            mtp_by_key[key] = match.rule.item in mtp or (layer is not None and int(layer) >= layers)
    return mtp_by_key


def _is_missing(tensor: ModelTensor) -> bool:
    return tensor.missing and tensor.tied_to is None and tensor.rule.huggingface is not None


def _keys(tensor: ModelTensor, model: Model) -> set[str]:
    return {part.key for part in tensor_parts(tensor, model)}


def _check_config(config: Mapping[str, Any], donor: HuggingFaceDonor) -> None:
    for entry in SAME:
        ours, theirs = config_entry(config, entry), config_entry(donor.config, entry)
        if ours != theirs:
            raise CheckpointError(
                f"{entry} is {ours!r} in the checkpoint and {theirs!r} in {donor.location}; pass the model from which "
                "training started with --like"
            )


def _taken(wanted: Checkpoint, donor: HuggingFaceDonor) -> list[str]:
    """Keys of the tensors that only the donor has, in its order.

    Refuses a donor that lacks a tensor, has it in another shape, or has one that the checkpoint should have.
    """
    ours = {part.key: part.shape for _, parts in model_parts(wanted.model) for part in parts}
    if extra := sorted(ours.keys() - donor.tensors.keys()):
        raise CheckpointError(
            f"{_named(extra)}: in the export, but not in {donor.location}, which is another model"
        )
    if unequal := [key for key in sorted(ours) if ours[key] != donor.tensors[key].shape]:
        key = unequal[0]
        raise CheckpointError(
            f"{_named(unequal)}: shape {ours[key]} in the export and {donor.tensors[key].shape} in {donor.location}; "
            "--vocab-size changes the size of a vocabulary"
        )
    model = wanted.model
    tied = {key for t in model.tensors if t.tied_to and t.rule.huggingface for key in _keys(t, model)}
    missing = {key for t in model.tensors if _is_missing(t) for key in _keys(t, model)}
    taken = [key for key in donor.tensors if key not in ours and key not in tied]
    if absent := sorted(
        key for key, of_mtp in _by_row(taken, model).items() if not of_mtp and key not in missing
    ):
        raise CheckpointError(
            f"{_named(absent)}: in {donor.location}, but missing from the checkpoint; it is not copied, because "
            "training may have changed it"
        )
    return taken


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{', '.join(keys[:SHOWN])}{more}"
