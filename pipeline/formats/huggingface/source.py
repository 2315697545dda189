"""Read the parameters of a model from the headers of a Hugging Face checkpoint.

A Hugging Face checkpoint does not state which library will train the model, nor which tensors that library fuses. If
the model is known from another checkpoint, its parameters are read (:func:`read_huggingface`). Otherwise rule tables
determine the model (:func:`index_huggingface`): ``config.json`` or ``--rules`` gives the library, and the config
gives the fused tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod
from typing import Final, NamedTuple

from paddle_reshard.pipeline.checkpoint.checkpoint import DROPPED_MTP, Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles, index_safetensors
from paddle_reshard.pipeline.core.catalog import (
    Catalog,
    File,
    FragmentRow,
    check_catalog,
    fragment_row,
    fragment_rows,
)
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MANIFEST, WEIGHT_INDEX
from paddle_reshard.pipeline.core.geometry import Shape, row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import MTP, PARAM, DType, Tensor
from paddle_reshard.pipeline.formats.huggingface import HUGGINGFACE, peft
from paddle_reshard.pipeline.formats.huggingface.parts import Part, model_parts, swapped, tensor_parts
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.ernie import ernie_table, is_ernie_layout
from paddle_reshard.pipeline.model.forms import Match, matches_of, parts_of_tensors
from paddle_reshard.pipeline.model.model import Model, ModelTensor, read_model
from paddle_reshard.pipeline.model.rules.choose import SCORE, of_another_model, tables_to_train_with
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable, renamed_prefix
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.model.weights import dtype_of_tag
from paddle_reshard.storage.files.safetensors import Index, SafetensorsPayload

MAX_MTP_LAYERS: Final = 64
"""Upper limit, because a config may contain any number."""
_NOTHING: Final = re.compile(r"(?!)")
_MAX_EXPERTS: Final = 1 << 16
_STACKED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
BUFFERS: Final = re.compile(r"(?:.+\.)?rotary_emb\.inv_freq\Z")
"""Keys of what no class of ``transformers``, PaddleNLP or PaddleFormers loads, although published files may hold it."""
_BUFFER: Final = "a buffer that every class computes from config.json; none loads it"
_UNINDEXED: Final = f"beside the files that {WEIGHT_INDEX} names, which are the model"
_SINGLE: Final = "model.safetensors"
_WRAPPERS: Final = (
    *("module.", "_layers.", "_orig_mod.", "base_model.model.", "model.", "_layers.module."),
    "language_model.",
)
"""What wrappers of a model put before all keys that they save: data parallelism, ``torch.compile``, a second model, one
for images and text before transformers 4.52 (``language_model.model.layers…``, ``language_model.lm_head``)."""
_LANGUAGE_MODEL: Final = "model.language_model."
"""The same since 4.52, with the head outside; ``transformers`` reads it as ``model.`` (``conversion_mapping.py``:
``qwen3_5_text``)."""


_SWAPPED: Final = ("qwen3_vl_moe",)
"""Families whose stacked experts were published ``[experts, in, out]``, and which ``transformers`` 5 writes as
``[experts, out, in]``; it reads both, by their shape (``conversion_mapping.py``: ``Transpose`` with ``check_dims``)."""


class StoredTensor(NamedTuple):
    """A tensor and where it is stored."""

    shape: Shape
    dtype: DType
    path: str
    byte_offset: int


def read_huggingface(
    model: Model,
    sizes: Mapping[str, int],
    stored: Mapping[str, StoredTensor],
    planned: Callable[[ModelTensor, Part], DType] | None = None,
    copies: Mapping[str, StoredTensor] | None = None,
) -> Catalog:
    """A catalog of the parameters of ``model``; their state is ``param``.

    ``sizes`` are those of all ``.safetensors`` files by path, ``stored`` the result of :func:`stored_tensors`,
    ``planned`` the dtype with which a part of a tensor must be stored; ``None``: any. ``copies`` are where tensors are
    stored once more, with the same keys, shapes and dtypes. A ``CheckpointError`` names the tensor and the file if one
    is missing, has another shape, or does not belong to the model.
    """
    held = dict(stored)
    files = tuple(File(path, sizes[path]) for path in sorted(sizes))
    numbers = {file.path: number for number, file in enumerate(files)}
    twins: dict[str, list[ModelTensor]] = {}
    for twin in (t for t in model.tensors if t.is_alias):
        twins.setdefault(twin.tied_to or "", []).append(twin)
    tensors: list[Tensor] = []
    rows: list[FragmentRow] = []
    for tensor, parts in model_parts(model):
        stored_parts = [_find(part, held, sizes) for part in parts]
        of_tensor = _common_dtype(tensor, parts, [stored.dtype for stored in stored_parts])
        for part, (_, dtype, path, byte_offset) in zip(parts, stored_parts, strict=True):
            if planned is not None and dtype != (wanted := planned(tensor, part)):
                detail = f"stored as {dtype.name}, planned as {wanted.name}"
                raise CoverageError(part.key, detail, (path,))
            rows += part.rows(len(tensors), numbers[path], dtype, byte_offset)
        again = [(part, copies[part.key]) for part in parts if copies]
        for part, (_, dtype, path, byte_offset) in again:
            rows += part.rows(len(tensors), numbers[path], dtype, byte_offset, 1)
        tied = twins.get(tensor.key, [])
        first = 2 if again else 1
        for copy, twin in enumerate((t for t in tied if _stored_twice(t, held)), first):
            (part,) = tensor_parts(twin, model)
            _, dtype, path, byte_offset = _find(part, held, sizes)
            if dtype != of_tensor:
                detail = f"stored as {dtype.name}, but tied to a tensor of another dtype"
                raise CoverageError(part.key, detail, (path,))
            rows += part.rows(len(tensors), numbers[path], dtype, byte_offset, copy)
        aliases = tuple(t.key for t in tied)
        tensors.append(Tensor(tensor.key, PARAM, of_tensor, tensor.global_shape, aliases))
    if held:
        key = min(held)
        raise CheckpointError(f"{key}: in {held[key].path}, but the model has no such tensor")
    catalog = Catalog(Tensors(tensors), files, fragment_rows(rows), {})
    check_catalog(catalog)
    return catalog


def read_as_stored(files: SourceFiles) -> Catalog:
    """A catalog of the tensors that the files hold, under their keys and with their shapes there; all are ``param``."""
    stored = stored_tensors(files.headers, files.weight_index(WEIGHT_INDEX))
    held = tuple(File(path, files.safetensors[path]) for path in sorted(files.safetensors))
    numbers = {file.path: number for number, file in enumerate(held)}
    rows = [
        fragment_row(
            number,
            numbers[of_key.path],
            of_key.dtype,
            0,
            of_key.byte_offset,
            (0,) * len(of_key.shape),
            of_key.shape,
            row_major_strides(of_key.shape, of_key.dtype.itemsize),
        )
        for number, of_key in enumerate(stored.values())
    ]
    tensors = Tensors(Tensor(key, PARAM, of_key.dtype, of_key.shape) for key, of_key in stored.items())
    catalog = Catalog(tensors, held, fragment_rows(rows), {})
    check_catalog(catalog)
    return catalog


def _common_dtype(tensor: ModelTensor, parts: Sequence[Part], dtypes: Sequence[DType]) -> DType:
    """The dtype in which the parts of a tensor are stored, of which there must be one."""
    if len(set(dtypes)) > 1:
        names = ", ".join(sorted({dtype.name for dtype in dtypes}))
        raise CoverageError(tensor.key, f"its parts {', '.join(p.key for p in parts)} are stored as {names}")
    return dtypes[0]


def _stored_twice(twin: ModelTensor, held: Collection[str]) -> bool:
    """Whether a tied tensor is also stored under its own key, as PaddleFormers does."""
    form = twin.rule.huggingface
    return form is not None and len(form.keys) == 1 and twin.rule.fill_in(form.keys[0], twin.key) in held


def index_huggingface(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """A checkpoint of weights only, with a model that rule tables determine.

    If ``missing`` drops them, without layers of multi-token prediction that are numbered after the decoder layers.
    Published checkpoints have tensors in these layers that a library may not have: copies of the embedding and of the
    head, and a norm (DeepSeek-V3: ``embed_tokens``, ``shared_head``).
    """
    if peft.CONFIG in files.sizes and files.safetensors.keys() == {peft.WEIGHTS}:
        raise UnsupportedError(
            f"{files.store.location}: an adapter as PEFT saves it, without its base, which is not read as a source. "
            "Merge it into its base with PEFT (merge_and_unload) and convert the merged model, or give the training "
            "checkpoint"
        )
    headers, index, config = files.headers, files.weight_index(WEIGHT_INDEX), files.config()
    keys = sorted(key for header in headers.values() for key in header.tensors)
    mtp = _mtp_layers(tables_to_train_with(tables, config), config, keys) if missing.drops_mtp else _NOTHING
    held = stored_tensors(headers, index, re.compile(rf"{mtp.pattern}|{BUFFERS.pattern}"))
    held, unstacked = _unstacked(held, tables_to_train_with(tables, config))
    model, stored, reading = _models(held, config, tables)
    counted = not missing.lacks_layers
    model = completed(model, missing.lets_lack, mtp=not missing.drops_mtp, layers_counted=counted)
    held = reading.renamed(held)
    copies = _copies_of(held, reading, files, model.table)
    sizes = {**files.safetensors, **({_SINGLE: files.sizes[_SINGLE]} if copies else {})}
    catalog = read_huggingface(stored, sizes, held, copies=copies)
    if MANIFEST not in files.sizes:
        _check_headers_tell(model)
    own_index = [WEIGHT_INDEX] if index is not None else []
    return Checkpoint(
        format=HUGGINGFACE,
        catalog=catalog,
        own_files=frozenset([*headers, *own_index, *files.unindexed]),
        model=model,
        not_carried=(
            *((key, DROPPED_MTP) for key in keys if mtp.match(key)),
            *((key, _BUFFER) for key in keys if BUFFERS.match(key)),
            *((path, _UNINDEXED) for path in files.unindexed if not copies or path != _SINGLE),
        ),
        keys_read="; ".join(filter(None, (reading.in_words, unstacked))),
    )


def _unstacked(
    held: Mapping[str, StoredTensor], tables: Sequence[RuleTable]
) -> tuple[dict[str, StoredTensor], str]:
    """The experts one by one that the files hold as one tensor, and what is said of it.

    ``transformers`` 5 keeps ``experts.gate_up_proj`` ``[experts, gate + up, in]`` and ``experts.down_proj``
    (``conversion_mapping.py``), reads both layouts, and writes this one with ``save_original_format=False``.
    """
    forms = {
        key for table in tables for rule in table.rules if rule.huggingface for key in rule.huggingface.keys
    }
    by_one = any(key.endswith(".experts.{expert}.gate_proj.weight") for key in forms)
    if not by_one or any(key.endswith(".experts.gate_up_proj") for key in forms):
        return dict(held), ""
    one_by_one: dict[str, StoredTensor] = {}
    for key, stored in held.items():
        experts, rows, columns = stored.shape if len(stored.shape) == 3 else (0, 0, 0)
        match = _STACKED.fullmatch(key)
        parts = ("gate_proj", "up_proj") if match and match[2] == "gate_up_proj" else ("down_proj",)
        if match is None or not 0 < experts <= _MAX_EXPERTS or rows % len(parts):
            one_by_one[key] = stored
            continue
        shape = (rows // len(parts), columns)
        step = prod(shape) * stored.dtype.itemsize
        for number, (expert, part) in enumerate(product(range(experts), parts)):
            name = f"{match[1]}.{expert}.{part}.weight"
            if name in held:
                raise CoverageError(name, f"also in {key}", (held[name].path, stored.path))
            one_by_one[name] = StoredTensor(
                shape, stored.dtype, stored.path, stored.byte_offset + number * step
            )
    return (
        one_by_one,
        "" if one_by_one.keys() == held.keys() else "experts read out of the tensor of all of a layer",
    )


def _copies_of(
    held: Mapping[str, StoredTensor], reading: Reading, files: SourceFiles, table: RuleTable
) -> dict[str, StoredTensor]:
    """The tensors of ``model.safetensors`` beside an index that names other files; empty without such a file.

    ``transformers`` 5.3 loads this file (``modeling_utils.py``), PaddleFormers 1.2 those that the index names
    (``transformers/model_utils.py``): what they load must be the same, which the conversion compares bit by bit.
    """
    if _SINGLE not in files.unindexed:
        return {}
    header = files.index_here(index_safetensors, files.store, {_SINGLE: files.sizes[_SINGLE]})
    beside, _ = _unstacked(stored_tensors(header, None, BUFFERS), [table])
    there = reading.renamed(beside, strict=False)
    kinds, kinds_there = ({k: (t.shape, t.dtype) for k, t in side.items()} for side in (held, there))
    if odd := sorted(key for key in {*kinds, *kinds_there} if kinds.get(key) != kinds_there.get(key)):
        raise CheckpointError(
            f"{_SINGLE}: lies beside {WEIGHT_INDEX}, which names other files: transformers loads the former, "
            f"PaddleFormers the latter, and {odd[0]} is not the same in both; move one of the two elsewhere"
        )
    return there


def _check_headers_tell(model: Model) -> None:
    """Refuse a model of which the library's own exports hold something else than their headers say."""
    for tensor in model.tensors:
        form = tensor.rule.huggingface
        if form is not None and form.exported_as is not None:
            raise RuleError(
                tensor.key,
                f"{form.exported_as}, which nothing in the files tells; convert the training checkpoint with --format "
                f"huggingface (an export of this program is known by its {MANIFEST})",
            )


class Reading(NamedTuple):
    """How the keys in the files become those that a rule table knows."""

    names: Mapping[str, str]
    """Key in the files → key in the table."""
    in_words: str
    """Empty if all are the same."""

    def renamed(self, stored: Mapping[str, StoredTensor], strict: bool = True) -> dict[str, StoredTensor]:
        """Tensors under the keys in the table; not ``strict``: keys that are not known stay as they are."""
        return {self.names[key] if strict else self.names.get(key, key): held for key, held in stored.items()}


def _readings(keys: Collection[str], table: RuleTable, config: Config) -> Iterator[Reading]:
    """Every way to read keys, that of keys which are as the table has them first."""
    same = {key: key for key in keys}
    yield _head_as_words(Reading(same, ""), table, config)
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in keys):
            names = {key: key.removeprefix(prefix) for key in keys}
            yield _head_as_words(
                Reading(names, f"read without {prefix}, with which all begin"), table, config
            )
    if table.peft_prefixes:
        newer = {there: here for here, there in table.peft_prefixes.items()}
        names = {key: renamed_prefix(key, newer) for key in keys}
        listed = ", ".join(f"{there}… as {here}…" for there, here in newer.items())
        yield _head_as_words(Reading(names, f"read {listed} (two layouts of one model)"), table, config)
        if not any(
            key.startswith("model.") for key in keys
        ):  # of the base class alone, as AutoModel saves it
            names = {key: renamed_prefix(_in_model(key), newer) for key in keys}
            yield _head_as_words(Reading(names, f"read with model. before them, and {listed}"), table, config)
    if all(key.startswith((_LANGUAGE_MODEL, "lm_head.")) for key in keys):
        names = {key: key.replace(_LANGUAGE_MODEL, "model.", 1) for key in keys}
        said = f"read {_LANGUAGE_MODEL} as model.: the language model out of files for images and text"
        yield _head_as_words(Reading(names, said), table, config)
    if not any(key.startswith("model.") for key in keys):
        names = {key: _in_model(key) for key in keys}
        yield _head_as_words(Reading(names, "read with model. before them, which none has"), table, config)


def _in_model(key: str) -> str:
    return key if key.startswith("lm_head.") else f"model.{key}"


def _head_as_words(reading: Reading, table: RuleTable, config: Config) -> Reading:
    """The same, with the head as the word embedding where the two are tied and only the head is stored."""
    held = {name: key for key, name in reading.names.items()}
    by_key = {rule.key: rule for rule in table.rules}
    for head in (rule for rule in table.rules if rule.tied_to and rule.twin(config, rule.key)):
        words = by_key.get(head.tied_to or "")
        if words is None or head.huggingface is None or words.huggingface is None:
            continue
        (own, *_), (other, *_) = head.huggingface.keys, words.huggingface.keys
        if own in held and other not in held and "{" not in own + other:
            names = {**reading.names, held[own]: other}
            said = f"{own} read as {other}: the two are tied, and only this one is stored"
            return Reading(names, "; ".join(filter(None, (reading.in_words, said))))
    return reading


def _models(
    stored: Mapping[str, StoredTensor], config: Config, tables: RuleTables
) -> tuple[Model, Model, Reading]:
    """The model whose parameters are stored, with the keys and shapes that its tensors have in Paddle.

    The second model has the forms in which the files hold the tensors, which need not be those of Hugging Face, under
    the keys of the reading. A ``RuleError`` names a key that no rule table has, or several tables that have all keys.
    """
    tables_of_files = [
        (
            table,
            ernie_table(table, config)
            if is_ernie_layout(stored)
            else _score_by_shape(_swapped_experts(table, stored, config), stored, config),
        )
        for table in tables_to_train_with(tables, config)
    ]
    fitting: list[tuple[RuleTable, RuleTable, Reading]] = []
    failures: list[tuple[int, RuleError]] = []
    for table, of_files in tables_of_files:
        reading = next(_readings(stored, table, config))
        matches = matches_of(reading.names.values(), of_files, config)
        if unknown := [key for key, match in matches.items() if match is None]:
            why = of_another_model(unknown, stored, table, config)
            failures.append((len(unknown), why or _no_row(unknown[0], table, config, stored)))
        else:
            fitting.append((table, of_files, reading))
    if not fitting:
        others = ((*both, _other_reading(stored, *both, config)) for both in tables_of_files)
        fitting = [(table, of_files, reading) for table, of_files, reading in others if reading is not None]
    if not fitting:
        raise min(failures, key=lambda failure: failure[0])[1]
    if len(fitting) > 1:
        libraries = tuple(sorted(table.convention for table, *_ in fitting))
        error = RuleError(
            f"model type {config.get('model_type')!r}",
            f"a Hugging Face checkpoint does not say which library is to train it, and several rule tables fit: "
            f"{', '.join(f'{table.family} ({table.convention})' for table, *_ in fitting)}; say which with "
            f"{' or '.join(f'--convention {name}' for name in libraries)}",
        )
        error.fitting = libraries
        raise error
    ((table, of_files, reading),) = fitting
    if of_files is not table and of_files.family in _SWAPPED:
        said = "the two dims of stacked experts read the other way round, as transformers 5 writes them"
        reading = reading._replace(in_words="; ".join(filter(None, (reading.in_words, said))))
    if SCORE in stored and any(row.key == SCORE and row not in table.rules for row in of_files.rules):
        said = f"{SCORE} read as [hidden, labels], as PaddleFormers' own exports have it"
        reading = reading._replace(in_words="; ".join(filter(None, (reading.in_words, said))))
    matches = matches_of(reading.names.values(), of_files, config)
    tensors = _logical(reading.renamed(stored), matches, config)
    return read_model(tensors, table, config), read_model(tensors, of_files, config), reading


def _swapped_experts(table: RuleTable, stored: Mapping[str, StoredTensor], config: Config) -> RuleTable:
    """The table for files in which the last two dims of all stacked experts are the other way round.

    Square ones tell nothing and are as the others, of which one is never square: ``[in, 2 * width]`` and
    ``[width, in]``.
    """
    if table.family not in _SWAPPED:
        return table
    ways, rules = set[bool](), list(table.rules)
    for number, rule in enumerate(table.rules):
        if rule.huggingface is None or len(rule.shape or ()) != 3:
            continue
        rules[number] = replace(rule, huggingface=replace(rule.huggingface, transposed=True))
        expected, ending = expected_shape(rule, config), rule.key.rpartition("}")[2]
        shapes = {held.shape for key, held in stored.items() if key.endswith(ending)}
        if expected is not None and expected != (other := swapped(expected)):
            ways |= {shape == other for shape in shapes}
    return replace(table, rules=tuple(rules)) if ways == {True} else table


def _score_by_shape(table: RuleTable, stored: Mapping[str, StoredTensor], config: Config) -> RuleTable:
    """The table for files whose score is ``[hidden, labels]``: what PaddleFormers exports a classifier as.

    Everything else is there as ``transformers`` has it; of the score its maps say nothing (``tests/facts``).
    """
    rule = next((rule for rule in table.rules if rule.key == SCORE and rule.huggingface), None)
    shape = None if rule is None or SCORE not in stored else expected_shape(rule, config)
    if rule is None or shape is None or stored[SCORE].shape != shape or shape == swapped(shape):
        return table
    as_it_lies = replace(rule, huggingface=HuggingFaceForm((SCORE,)))
    return replace(table, rules=tuple(as_it_lies if row is rule else row for row in table.rules))


def _other_reading(
    stored: Collection[str], table: RuleTable, of_files: RuleTable, config: Config
) -> Reading | None:
    """The first reading with which a table has all keys, of those that change keys; ``None`` if there is none."""
    for reading in islice(_readings(stored, table, config), 1, None):
        matches = matches_of(reading.names.values(), of_files, config)
        if len(matches) == len(stored) and None not in matches.values():
            return reading
    return None


def _no_row(key: str, table: RuleTable, config: Config, keys: Collection[str]) -> RuleError:
    """Why a table does not have a key, which is one of ``keys``."""
    if _mtp_layers([table], config, keys).match(key):
        return RuleError(
            key,
            f"{table.convention}'s {table.family} has no such tensor in its layers of multi-token prediction; "
            f"convert without them with --drop {MTP}",
        )
    why = f" ({table.without_forms})" if table.without_forms else ""
    return RuleError(
        key,
        f"no row of the {table.convention} rule table {table.family!r} has this key in a Hugging Face checkpoint{why}; "
        "add one to a copy of the table and pass it with --rules FILE",
    )


def _mtp_layers(tables: Iterable[RuleTable], config: Config, keys: Collection[str]) -> re.Pattern[str]:
    """Matches the start of every key of an MTP layer that any of the tables numbers after the decoder layers.

    Of layers that the config does not count, those whose ``keys`` only an MTP layer has, as ``eh_proj``.
    """
    patterns: list[str] = []
    for table in tables:
        decoders = {item.continues: item for item in table.items if item.continues}
        starts = {
            (spelled.partition("{layer}")[0], number)
            for rule in table.rules
            if rule.item in decoders and rule.huggingface is not None
            for spelled in rule.huggingface.keys
            for number in islice(table.numbers(decoders[rule.item], config), MAX_MTP_LAYERS)
        }
        for rule in table.rules:
            if (item := table.mtp_items.get(rule.item)) is None or rule.huggingface is None:
                continue
            for start, layer, end in (key.partition("{layer}") for key in rule.huggingface.keys):
                own = re.compile(rf"{re.escape(start)}(\d{{1,4}}){re.escape(end)}")
                found = [int(match[1]) for key in keys if layer and (match := own.fullmatch(key))]
                starts |= {
                    (start, number) for number in found if number >= table.first_mtp_layer(item, config)
                }
        patterns += [rf"{re.escape(start)}{number}\." for start, number in sorted(starts)]
        patterns += [re.escape(item.there) for item in table.items if item.there is not None]
    return re.compile("|".join(patterns)) if patterns else _NOTHING


def _logical(
    stored: Mapping[str, StoredTensor], matches: Mapping[str, Match | None], config: Config
) -> list[Tensor]:
    """The tensors in Paddle: parts joined along their last dim there, and stacked ones along the first."""
    tensors = []
    for whole, of_whole in parts_of_tensors(matches, config).items():
        shapes = [
            swapped(stored[key].shape) if of_whole.form.transposed else stored[key].shape
            for key in of_whole.keys[0]
        ]
        width = sum(shape[-1] for shape in shapes if shape)
        shape = (*shapes[0][:-1], width) if shapes[0] else ()
        if of_whole.form.stacked is not None and len(of_whole.rule.shape or ()) == 3:
            shape = (len(of_whole.keys), *shape)
        elif len(of_whole.keys) > 1:
            shape = (len(of_whole.keys) * shape[0], *shape[1:])
        tensors.append(Tensor(whole, PARAM, stored[of_whole.keys[0][0]].dtype, shape))
    return tensors


def stored_tensors(
    payloads: Mapping[str, SafetensorsPayload], index: Index | None, left_out: re.Pattern[str] = _NOTHING
) -> dict[str, StoredTensor]:
    """Key → what the headers say of the tensor; checked against the index.

    ``payloads`` is the header of every ``.safetensors`` file by its path, ``index`` the contents of
    ``model.safetensors.index.json``, ``left_out`` matches the start of keys that are ignored.
    """
    held: dict[str, StoredTensor] = {}
    for path, payload in payloads.items():
        if payload.metadata.get("format") == "np" and not is_ernie_layout(payload.tensors):
            raise CheckpointError(
                f"{path}: weights in Paddle's own layout, not in that of a Hugging Face checkpoint"
            )
        for key, array in payload.tensors.items():
            if left_out.match(key):
                continue
            if key in held:
                says = (
                    ""
                    if index is None
                    else f"; the index says that {index.weight_map.get(key, 'no file')} does"
                )
                raise CoverageError(key, f"two files hold it{says}", (held[key].path, path))
            dtype = dtype_of_tag(payload.tags[key], f"{path}: {key}")
            held[key] = StoredTensor(array.shape, dtype, path, array.byte_offset)
    path_of_key = {key: stored.path for key, stored in held.items()}
    listed = {} if index is None else {k: p for k, p in index.weight_map.items() if not left_out.match(k)}
    if index is not None and listed != path_of_key:
        key = min(key for key in {*held, *listed} if path_of_key.get(key) != listed.get(key))
        raise CoverageError(
            key,
            f"the index says that {listed.get(key, 'no file')} holds it, but {path_of_key.get(key, 'no file')} does",
        )
    return held


def _find(part: Part, held: dict[str, StoredTensor], files: Iterable[str]) -> StoredTensor:
    """The stored tensor of a part; removes it from ``held``."""
    if part.key not in held:
        raise CoverageError(part.key, "no file holds it", tuple(sorted(files)))
    stored = held.pop(part.key)
    if stored.shape != part.shape:
        detail = f"stored with shape {stored.shape}, but the model expects {part.shape}"
        raise CoverageError(part.key, detail, (stored.path,))
    return stored
