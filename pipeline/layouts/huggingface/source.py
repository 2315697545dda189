"""From the headers of a Hugging Face checkpoint to the tensors of a model that is known.

Such a checkpoint does not say which library it came from, nor what that fuses. So it is read as the parameters of a
given model: of the checkpoint that it is compared with, or was made from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from paddle_reshard.pipeline.catalog import (
    Catalog,
    File,
    FragmentRow,
    check_catalog,
    fragment_row,
    fragment_rows,
)
from paddle_reshard.pipeline.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.layouts.huggingface.parts import Part, model_parts
from paddle_reshard.pipeline.layouts.huggingface.target import TAGS, HuggingFaceTarget, exported_dtype
from paddle_reshard.pipeline.layouts.model import Model
from paddle_reshard.pipeline.tensors import PARAM, DType, Tensor, dtype_named
from paddle_reshard.storage.formats.safetensors import Index, SafetensorsPayload

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_DTYPES = {tag: dtype_named(name) for name, tag in TAGS.items()} | {"U16": dtype_named("bfloat16")}


def read_huggingface(
    model: Model,
    sizes: Mapping[str, int],
    payloads: Mapping[str, SafetensorsPayload],
    index: Index | None,
    target: HuggingFaceTarget | None,
) -> Catalog:
    """The tensors of ``model``, as the files hold them; state ``param``.

    Parameters
    ----------
    sizes
        Path → size in bytes, of the files in ``payloads``.
    payloads
        Path → header of every ``.safetensors`` file.
    index
        ``model.safetensors.index.json``, where there is one.
    target
        What it must have been made as, where that is known; tells the dtype of every tensor.

    Raises
    ------
    CheckpointError
        If a tensor is missing, has another shape, or is not of the model; naming it and the file.
    """
    held = _keys(payloads, index)
    files = tuple(File(path, sizes[path]) for path in sorted(payloads))
    numbers = {file.path: number for number, file in enumerate(files)}
    tensors: list[Tensor] = []
    rows: list[FragmentRow] = []
    for tensor, parts in model_parts(model):
        found = [_find(part, held, payloads) for part in parts]
        dtypes = {dtype for _, dtype, _ in found}
        if len(dtypes) > 1:
            names = ", ".join(sorted(dtype.name for dtype in dtypes))
            raise CoverageError(
                tensor.key, f"its parts {', '.join(p.key for p in parts)} are stored as {names}"
            )
        for part, (path, dtype, byte_offset) in zip(parts, found, strict=True):
            if target is not None and dtype != (planned := exported_dtype(tensor, part, target)):
                detail = f"stored as {dtype.name}, planned was {planned.name}"
                raise CoverageError(part.key, detail, (path,))
            for box in part.boxes:
                strides = [stride * dtype.itemsize for stride in box.strides]
                base = byte_offset + box.first_element * dtype.itemsize
                rows.append(
                    fragment_row(
                        len(tensors), numbers[path], dtype, 0, base, box.offset, box.extents, strides
                    )
                )
        aliases = tuple(t.key for t in model.tensors if t.tied_to == tensor.key)
        tensors.append(Tensor(tensor.key, PARAM, dtypes.pop(), tensor.global_shape, aliases))
    if held:
        key = min(held)
        raise CheckpointError(f"{key}: in {held[key]}, and the model has no tensor that is called so")
    catalog = Catalog(tuple(tensors), files, fragment_rows(rows), {})
    check_catalog(catalog)
    return catalog


def is_huggingface(paths: Collection[str]) -> bool:
    """Whether a folder of these files holds a model for ``transformers``, and no unified checkpoint."""
    weights = [path for path in paths if path.endswith(".safetensors")]
    return bool(weights) and all(_WEIGHTS.fullmatch(path) for path in weights)


def _keys(payloads: Mapping[str, SafetensorsPayload], index: Index | None) -> dict[str, str]:
    """Key → file that holds it; the index must say the same."""
    held: dict[str, str] = {}
    for path, payload in payloads.items():
        if payload.metadata.get("format") == "np":
            raise CheckpointError(
                f"{path}: weights in Paddle's own layout, not those of a Hugging Face checkpoint"
            )
        for key in payload.tensors:
            if key in held:
                raise CoverageError(key, "two files hold it", (held[key], path))
            held[key] = path
    if index is not None and dict(index.weight_map) != held:
        key = min(key for key in {*held, *index.weight_map} if held.get(key) != index.weight_map.get(key))
        raise CoverageError(
            key,
            f"the index says that {index.weight_map.get(key, 'no file')} holds it, {held.get(key, 'no file')} does",
        )
    return held


def _find(
    part: Part, held: dict[str, str], payloads: Mapping[str, SafetensorsPayload]
) -> tuple[str, DType, int]:
    """File, dtype and byte offset of one tensor; takes it out of ``held``."""
    if part.key not in held:
        raise CoverageError(part.key, "no file holds it", tuple(sorted(payloads)))
    path = held.pop(part.key)
    array, tag = payloads[path].tensors[part.key], payloads[path].tags[part.key]
    if array.shape != part.shape:
        raise CoverageError(
            part.key, f"stored with shape {array.shape}, the model expects {part.shape}", (path,)
        )
    if tag not in _DTYPES:
        raise CheckpointError(f"{path}: {part.key}: dtype {tag} is not supported")
    return path, _DTYPES[tag], array.byte_offset
