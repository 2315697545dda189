"""A model whose tensors depend on whether its job has pipeline stages.

A tensor that only jobs with stages have is a copy of another; a model has it in no other place. A head that is the word
embedding in jobs of one kind is a tensor of its own in the others, which starts as a copy and is trained apart: in jobs
with stages (ERNIE's recipe), or in those without (Qwen3-MoE of PaddleFormers, whose class ties only as a pipeline).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import HEAD
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import TIED, ties_words, with_entry

DROPPED_HEAD: Final = "it is the word embedding in jobs of the target's kind; it was asked to be dropped"
"""Why a head that is a tensor of its own in the source goes into no target."""
EQUAL_HEAD: Final = (
    "it is the word embedding in jobs of the target's kind; the two are compared, and must be equal"
)
"""The same, if nothing is lost."""


def without_copies(model: Model) -> Model:
    """The model without the tensors that only jobs with stages have."""
    return replace(model, tensors=tuple(t for t in model.tensors if not t.rule.of_stages))


def for_stages(checkpoint: Checkpoint, pp: int) -> Checkpoint:
    """The checkpoint with the tensors of a job with ``pp`` stages; a ``PlanError`` if one of two would be lost."""
    model = checkpoint.model
    for tensor in model.tensors if ties_words(model.config) else ():
        if is_apart(tensor, model) and not tensor.rule.is_own(pp):
            raise PlanError(_would_be_lost(tensor))
    if pp > 1 and (copies := tuple(_copies(model))):
        return replace(checkpoint, model=replace(model, tensors=(*model.tensors, *copies)))
    return checkpoint


def _would_be_lost(head: ModelTensor) -> str:
    """Why a head of its own cannot go into a job that ties it."""
    kind, other, choice = "with pipeline stages", "without", "pp > 1"
    if head.rule.own_without_stages:
        kind, other, choice = "without pipeline stages", "with them", "pp=1"
    return (
        f"{head.key}: in a job {kind} it is a tensor of its own, and {head.rule.tied_to} in one {other} "
        f"(tie_word_embeddings), so that one of the two would be lost unless they are equal. Choose {choice}, or drop "
        f"the head with --drop {HEAD}"
    )


def is_apart(tensor: ModelTensor, model: Model) -> bool:
    """Whether the source's job has trained a tensor of its own that jobs with or without stages tie to another."""
    own = tensor.rule.own_in_stages or tensor.rule.own_without_stages
    return own and tensor.tied_to is None and ties_words(model.config)


def parted(model: Model, cells: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """A sentence for each tensor that starts as a copy of another and is trained apart from it.

    ``cells``: structured key → parameter name of the tensors in each cell of a target.
    """
    together = [dict(names) for names in cells]
    return tuple(
        f"{tensor.key} starts as a copy of {tensor.tied_to}, with its optimizer states: in this job each is a tensor "
        "of its own"
        for tensor in model.tensors
        if tensor.tied_to is not None
        and (tensor.rule.own_in_stages or tensor.rule.own_without_stages or tensor.rule.tied_to is None)
        and not any(
            tensor.key in names and names[tensor.key] == names.get(tensor.tied_to) for names in together
        )
    )


def untied_for(checkpoint: Checkpoint, of_target: Model) -> Checkpoint:
    """The checkpoint with a tensor for each key that it ties to another and the model of a target does not."""
    own = {t.key for t in of_target.tensors if t.tied_to is None}
    apart = {t.key: t.tied_to for t in checkpoint.model.tensors if t.tied_to is not None and t.key in own}
    catalog = checkpoint.catalog
    copies = [replace(t, key=key) for key, twin in apart.items() for t in catalog.tensors if t.key == twin]
    alone = (replace(t, aliases=tuple(key for key in t.aliases if key not in apart)) for t in catalog.tensors)
    return replace(
        checkpoint,
        catalog=replace(catalog, tensors=Tensors([*alone, *(replace(t, aliases=()) for t in copies)])),
    )


def check_apart(model: Model) -> None:
    """Refuse a model of which two tensors are one parameter, for a format that tells parameters by their keys.

    Refused too is a head of its own that some jobs tie: the format does not tell of which job its files are.
    """
    for tensor in model.tensors:
        if is_apart(tensor, model):
            raise PlanError(_would_be_lost(tensor))
        if tensor.tied_to is not None and tensor.rule.tied_to is None:
            raise PlanError(
                f"{tensor.key} and {tensor.tied_to} are one parameter in the source, with one set of states, because "
                "its jobs give both the same parameter name; how files of this format hold them has not been seen. "
                "Choose a format with files of ranks, which tell parameters by their names"
            )


def configured_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a config that does not tie words, if its head is a tensor of its own all the same."""
    model = checkpoint.model
    if not _apart(model):
        return checkpoint
    return replace(checkpoint, model=replace(model, config=with_entry(model.config, TIED, False)))


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the word embedding for its head, which the source's job must have trained apart."""
    if not _apart(checkpoint.model):
        raise PlanError(
            f"--drop {HEAD}: it is for a head that is a tensor of its own in the source, and the word embedding in "
            "jobs with other pipeline stages"
        )
    return _tied(checkpoint, DROPPED_HEAD)


def with_equal_head(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a head that the source's job has apart as another copy of the word embedding.

    Copies are compared while they are read. A head with other states or dtypes than the embedding stays apart.
    """
    catalog, apart = checkpoint.catalog, _apart(checkpoint.model)
    twins = {
        number: catalog.tensors.find(apart[tensor.key], tensor.state)
        for number, tensor in enumerate(catalog.tensors)
        if tensor.key in apart
    }
    if not twins or not all(_alike(catalog, head, words) for head, words in twins.items()):
        return checkpoint
    fragments = catalog.fragments.copy()
    copies = int(fragments["replica"].max()) + 1
    of_head = np.isin(fragments["tensor"], list(twins))
    words_of = np.arange(len(catalog.tensors), dtype=fragments["tensor"].dtype)
    words_of[list(twins)] = list(twins.values())
    fragments["replica"] = fragments["replica"] + of_head.astype(fragments["replica"].dtype) * copies
    fragments["tensor"] = words_of[fragments["tensor"]]
    return _tied(replace(checkpoint, catalog=replace(catalog, fragments=fragments)), EQUAL_HEAD)


def about_head(checkpoint: Checkpoint, differing: str) -> str | None:
    """What it means that copies of a tensor differ if one of them is a head; ``None`` if none is."""
    heads = {key for key, why in checkpoint.not_carried if why == EQUAL_HEAD}
    for tensor in checkpoint.model.tensors:
        if tensor.key in heads and tensor.tied_to is not None and differing.startswith(f"{tensor.tied_to} "):
            return _would_be_lost(tensor)
    return None


def _alike(catalog: Catalog, head: int, words: int | None) -> bool:
    """Whether the head can be a copy of the words: of the same dtype and shape, and stored if they are."""
    if words is None or (head in catalog.implied) != (words in catalog.implied):
        return False
    copy, original = catalog.tensors[head], catalog.tensors[words]
    return (copy.dtype, copy.global_shape) == (original.dtype, original.global_shape)


def _apart(model: Model) -> dict[str, str]:
    """The heads that are tensors of their own, and another tensor in other jobs: key → its key."""
    return {t.key: t.rule.tied_to or "" for t in model.tensors if is_apart(t, model)}


def _tied(checkpoint: Checkpoint, why: str) -> Checkpoint:
    """The checkpoint with the word embedding for its head, and the reason."""
    apart = _apart(checkpoint.model)
    kept = [number for number, tensor in enumerate(checkpoint.catalog.tensors) if tensor.key not in apart]
    tensors = (replace(t, tied_to=apart.get(t.key, t.tied_to)) for t in checkpoint.model.tensors)
    return replace(
        checkpoint,
        model=replace(checkpoint.model, tensors=tuple(tensors)),
        catalog=checkpoint.catalog.only(kept),
        not_carried=(*checkpoint.not_carried, *((key, why) for key in sorted(apart))),
    )


def _copies(model: Model) -> Iterator[ModelTensor]:
    """The tensors that only jobs with stages have, where the model lacks them."""
    rules = [rule for rule in model.table.rules if rule.of_stages]
    by_key = {tensor.key: tensor for tensor in model.tensors} if rules else {}
    for rule in rules:
        twin = by_key.get(rule.tied_to or "")
        if rule.key not in by_key and twin is not None and rule.applies(model.config):
            yield replace(twin, key=rule.key, rule=rule, layer=None, tied_to=twin.key)
