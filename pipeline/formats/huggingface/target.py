"""Lay out the files of a Hugging Face checkpoint, byte for byte.

A single ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with an index. Names, the order of tensors and
their distribution over files are those of ``huggingface_hub`` and of the safetensors library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, Sidecars, SourceListing
from paddle_reshard.pipeline.checkpoint.format import Staged
from paddle_reshard.pipeline.checkpoint.lora import without_base
from paddle_reshard.pipeline.checkpoint.sidecars import classify_sidecars, lacking_files
from paddle_reshard.pipeline.checkpoint.stages import configured_apart
from paddle_reshard.pipeline.core.catalog import Catalog, fragment_rows
from paddle_reshard.pipeline.core.choices import Dtype
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import CONFIG, LORA_CONFIG, WEIGHT_INDEX
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, MASTER_WEIGHT, PARAM, DType
from paddle_reshard.pipeline.core.trainer_files import is_of_adapter, is_training_state
from paddle_reshard.pipeline.formats.huggingface import EMA, HUGGINGFACE, peft
from paddle_reshard.pipeline.formats.huggingface.parts import Part, model_parts
from paddle_reshard.pipeline.formats.huggingface.peft import adapter_config, adapter_parts
from paddle_reshard.pipeline.formats.huggingface.source import read_huggingface, stored_tensors
from paddle_reshard.pipeline.formats.writing import NewFiles, SettledTarget, check_number, lacking
from paddle_reshard.pipeline.model.forms import UNUSED
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.transformers_config import about_code, exported_config, without_code
from paddle_reshard.pipeline.model.weights import TAGS
from paddle_reshard.storage.files.safetensors import Index, TensorSlot, encode_safetensors, format_index

METADATA = {"format": "pt"}
"""Entry without which ``transformers`` does not open a file."""


@dataclass(frozen=True, slots=True)
class HuggingFaceTarget(SettledTarget):
    """A Hugging Face checkpoint."""

    format: ClassVar[str] = HUGGINGFACE

    state: str = PARAM
    """``param``: the parameters. ``ema``: their exponential moving average."""
    dtype: DType | None = None
    """Dtype of floating-point tensors, except those that the model keeps in float32; ``None``: as trained."""
    max_shard_bytes: int = 5 * 10**9
    """Maximum size of the tensors in a file; a larger tensor gets a file of its own."""

    @property
    def of_average(self) -> bool:
        """Whether it exports the moving average."""
        return self.state == EMA

    @property
    def of_stored_parameters(self) -> bool:
        """Whether no value of it is made of a master weight or an average."""
        return self.state == PARAM and self.dtype is None

    def in_words(self) -> str:
        """The target in a line, for people."""
        dtype = "dtypes as trained" if self.dtype is None else self.dtype.name
        return f"Hugging Face, {self.state}, {dtype}"

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        dtype = "as trained" if self.dtype is None else self.dtype.name
        return {"layout": self.format, "state": self.state, "dtype": dtype}

    def data(self) -> dict[str, Any]:
        """What is asked of it."""
        return {
            "format": self.format,
            "state": self.state,
            "dtype": None if self.dtype is None else self.dtype.name,
            "max_shard_bytes": self.max_shard_bytes,
        }

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """The tensor files of the model, or of an adapter, and what becomes of small ones."""
        if wanted.model.has_lora:
            return self._lay_out_adapter(without_base(source), without_base(wanted), listing)
        wanted = configured_apart(wanted)
        exported = list(_exported(wanted, self, model_parts(wanted.model)))
        laid_out = layout_huggingface(source.catalog, exported, self)
        sidecars = _sidecars(listing, wanted, self)
        unused = ((t.key, UNUSED) for t in wanted.model.tensors if t.rule.unused and not t.missing)
        return replace(
            laid_out,
            sidecars=replace(sidecars, not_carried=(*sidecars.not_carried, *unused)),
            remarks=(*sidecars.remarks, *_unknown_to_readers(wanted.model)),
        )

    def _lay_out_adapter(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        if self.of_average:
            raise UnsupportedError("--state ema is not supported for LoRA")
        exported = list(_exported(wanted, self, adapter_parts(wanted)))
        config = adapter_config(wanted, [e.part for e in exported])
        laid_out = _files_of(source.catalog, [exported], [peft.WEIGHTS])

        def reason(path: str) -> str | None:
            return f"replaced by {peft.CONFIG}" if path == LORA_CONFIG else _of_training(path)

        # config.json describes the base model; adapters do not have one
        sidecars = _naming_no_code(classify_sidecars(listing, wanted.own_files, reason, {}, {}), listing)
        of_base = [(CONFIG, "it describes the base model")] if CONFIG in listing.paths else []
        sidecars = replace(sidecars, not_carried=(*sidecars.not_carried, *of_base))
        sidecars = sidecars.with_written([(peft.CONFIG, config)])
        return replace(laid_out, sidecars=sidecars, remarks=(*laid_out.remarks, *sidecars.remarks))

    def _check_adapter(self, staged: Staged) -> None:
        """Check the keys, shapes and dtypes of a staged adapter."""
        payload = staged.files.headers[peft.WEIGHTS]
        stored = {key: (payload.tags[key], array.shape) for key, array in payload.tensors.items()}
        planned = {
            part.key: (TAGS[self.dtype_of(tensor, part).name], part.shape)
            for tensor, parts in adapter_parts(without_base(staged.wanted))
            for part in parts
        }
        if differing := sorted(stored.items() ^ planned.items()):
            raise CheckpointError(f"{peft.WEIGHTS}: {differing[0][0]}: not as planned")

    def check_staged(self, staged: Staged) -> None:
        """Read the parameters of the model, and check that each has the planned dtype."""
        if staged.wanted.model.has_lora:
            self._check_adapter(staged)
            return
        files = staged.files
        stored = stored_tensors(files.headers, files.weight_index(WEIGHT_INDEX))
        read_huggingface(staged.wanted.model, files.safetensors, stored, self.dtype_of)

    def dtype_of(self, tensor: ModelTensor, part: Part) -> DType:
        """The dtype of a tensor of the target."""
        kept = part.keep_float32 and tensor.dtype.name == "float32"
        if self.dtype is None or kept or tensor.dtype.name not in get_args(Dtype):
            return tensor.dtype
        return self.dtype


@dataclass(frozen=True, slots=True)
class _Exported:
    """A tensor of the target: a part of a tensor of the source."""

    part: Part
    tensor: int
    """Index into the tensors of the source's catalog."""
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.part.elements * self.dtype.itemsize


def layout_huggingface(source: Catalog, exported: Sequence[_Exported], target: HuggingFaceTarget) -> LaidOut:
    """Lay out all tensor files of the target, and its index."""
    shards = _shards(exported, target.max_shard_bytes)
    check_number(len(shards), target.max_shard_bytes)
    return _files_of(source, shards, _names(len(shards)))


def _unknown_to_readers(model: Model) -> tuple[str, ...]:
    """Whether the config names a model that only a pre-training recipe has, as a sentence."""
    if not model.table.library_types:
        return ()
    return (
        f"{CONFIG} says model_type {model.config.get('model_type')!r}, by which only the recipe {model.table.recipe} "
        f"knows this model; for {' or '.join(model.table.library_types)} give its {CONFIG} with --config FILE, and "
        f"--convention {model.table.convention}",
    )


def _files_of(source: Catalog, shards: Sequence[Sequence[_Exported]], names: Sequence[str]) -> LaidOut:
    """Files of these tensors, and an index if there are several files."""
    new = NewFiles()
    rows: list[tuple[int, _Exported, int]] = []
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        slots = [TensorSlot(i, e.part.key, TAGS[e.dtype.name], e.part.shape) for i, e in enumerate(shard)]
        encoded = encode_safetensors(slots, METADATA)
        rows += [(number, shard[slot], byte_offset) for slot, byte_offset, _ in encoded.slots]
        new.add_encoded(name, replace(encoded, slots=()), ())
    catalog, numbers = _chosen(source, [e.tensor for _, e, _ in rows])
    if len(names) > 1:
        new.add_literal(WEIGHT_INDEX, _index(names, shards))
    casts = {(source.tensors[e.tensor].dtype.name, e.dtype.name) for _, e, _ in rows}
    files = replace(
        new.target_files(),
        fragments=fragment_rows(
            [row for file, e, at in rows for row in e.part.rows(numbers[e.tensor], file, e.dtype, at)]
        ),
        casts=frozenset(cast for cast in casts if {*cast} <= {*get_args(Dtype)}),
    )
    lost = tuple(sorted(source.tensors.states - catalog.tensors.states))
    return LaidOut(catalog, files, states_not_carried=lost)


def _exported(
    wanted: Checkpoint, target: HuggingFaceTarget, of_model: Iterable[tuple[ModelTensor, tuple[Part, ...]]]
) -> Iterator[_Exported]:
    if target.state == EMA and not wanted.has_ema:
        raise PlanError("the checkpoint has no EMA state, so --state ema has nothing to export")
    index = wanted.catalog.index()
    for tensor, parts in of_model:
        for part in parts:
            dtype = target.dtype_of(tensor, part)
            state = _state(tensor, dtype, target.state, index)
            yield _Exported(part, index[tensor.tied_to or tensor.key, state], dtype)


def _state(tensor: ModelTensor, dtype: DType, state: str, index: Mapping[tuple[str, str], int]) -> str:
    """The state that is exported: values are rounded once, from the most precise state in the checkpoint.

    Tensors that are not trained have no average and are exported unchanged.
    """
    if state == EMA:
        choice = (EMA_MASTER_WEIGHT, EMA_PARAM) if tensor.trained else (PARAM,)
    else:
        choice = (PARAM,) if dtype == tensor.dtype else (MASTER_WEIGHT, PARAM)
    for candidate in choice:
        if (tensor.tied_to or tensor.key, candidate) in index:
            return candidate
    raise lacking(tensor.key, choice[0])


def _shards(exported: Sequence[_Exported], max_shard_bytes: int) -> list[list[_Exported]]:
    """Tensors of each file: filled in model order until the next tensor would exceed the maximum.

    As ``split_state_dict_into_shards_factory`` of huggingface_hub 1.33.0 does (``serialization/_base.py``).
    """
    shards: list[list[_Exported]] = []
    current: list[_Exported] = []
    filled_bytes = 0
    for entry in exported:
        if entry.nbytes > max_shard_bytes:
            shards.append([entry])
            continue
        if filled_bytes + entry.nbytes > max_shard_bytes:
            shards.append(current)
            current, filled_bytes = [], 0
        current.append(entry)
        filled_bytes += entry.nbytes
    return [*shards, current] if current else shards


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(names: Sequence[str], shards: Sequence[Sequence[_Exported]]) -> bytes:
    total_bytes = sum(e.nbytes for shard in shards for e in shard)
    weight_map = {e.part.key: name for name, shard in zip(names, shards, strict=True) for e in shard}
    return format_index(Index(dict(sorted(weight_map.items())), {"total_size": total_bytes}, {}))


def _chosen(source: Catalog, wanted: Sequence[int]) -> tuple[Catalog, dict[int, int]]:
    """The catalog of the ``wanted`` tensors in their order, with borrowed tensors last, and their new numbers.

    It also contains the terms of mixtures, master weights from which parameters are cast, and stored parameters that
    the planner compares with an exported master weight.
    """
    index = source.index()
    chosen: dict[int, None] = {}
    for tensor in wanted:
        related = [tensor, source.implied.get(tensor, tensor)]
        if source.tensors.identity(tensor)[1] == MASTER_WEIGHT:
            related.append(index[source.tensors[tensor].key, PARAM])
        if tensor in source.mixtures:
            related += [term.tensor for term in source.mixtures[tensor].terms]
        chosen |= dict.fromkeys(related)
    first_borrowed = len(source.tensors) - source.borrowed
    order = sorted(chosen, key=lambda tensor: tensor >= first_borrowed)
    return source.only(order), {tensor: number for number, tensor in enumerate(order)}


_UNREAD = "no JSON object that can be read, so nobody knows whether it names code, which is never carried"


def _sidecars(listing: SourceListing, wanted: Checkpoint, target: HuggingFaceTarget) -> Sidecars:
    """Carry what belongs to the model (tokenizer, generation config, …); name what belongs to training.

    ``wanted`` is the source as the target holds it.
    """
    config, remarks = exported_config(wanted.model.config, target.dtype)
    completion = wanted.history.completion
    if completion is not None:
        config |= completion.config
    named_by, config = config, without_code(config)
    if config != named_by:
        remarks = (about_code(CONFIG), *remarks)
    sidecars = classify_sidecars(listing, wanted.own_files, _of_training, wanted.source_config, config)
    files = {} if completion is None else completion.files
    donated = tuple((path, name) for name, path in files.items() if name not in sidecars.carried)
    lacking = lacking_files(wanted.model.config, {*sidecars.carried, *(name for _, name in donated)})
    if lacking:
        needed = f"{' and '.join(lacking)} beside the weights, which an inference engine may need; --like DIR takes "
        remarks = (*remarks, f"{needed}them from the model that training began from")
    return _naming_no_code(replace(sidecars, donated=donated, remarks=remarks), listing)


def _naming_no_code(sidecars: Sidecars, listing: SourceListing) -> Sidecars:
    """The same files, written anew without the entries that name code; what cannot be read is not carried."""
    wanted = dict(zip(sidecars.carried, sidecars.carried, strict=True)) | dict(sidecars.donated)
    naming = {path: content for path, content in listing.naming_code.items() if path in wanted}
    written = [(wanted[path], content) for path, content in naming.items() if content is not None]
    unread = [(wanted[path], _UNREAD) for path, content in naming.items() if content is None]
    return replace(
        sidecars,
        carried=tuple(path for path in sidecars.carried if path not in naming),
        donated=tuple((path, name) for path, name in sidecars.donated if path not in naming),
        not_carried=(*sidecars.not_carried, *unread),
        remarks=(*sidecars.remarks, *(about_code(name) for name, _ in written)),
    ).with_written(written)


def _of_training(path: str) -> str | None:
    """Why an export does not carry a file, if it belongs to the training job."""
    if is_of_adapter(path):
        return "an adapter as only the trainers read it"
    return "state of the training job, not of the model" if is_training_state(path) else None
