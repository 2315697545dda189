"""A model whose tensors depend on whether its job has pipeline stages.

A tensor that only jobs with stages have is a copy of another; a model has it in no other place. A head that is the word
embedding without stages is a tensor of its own with them, which starts as a copy and is trained apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import HEAD
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.entries import TIED, ties_words, with_entry

DROPPED_HEAD: Final = "it is the word embedding in a job without pipeline stages; it was asked to be dropped"
"""Why the head of a job with stages goes into no target."""


def without_copies(model: Model) -> Model:
    """The model without the tensors that only jobs with stages have."""
    return replace(model, tensors=tuple(t for t in model.tensors if not t.rule.of_stages))


def for_stages(checkpoint: Checkpoint, pp: int) -> Checkpoint:
    """The checkpoint with the tensors of a job with ``pp`` stages.

    Raises
    ------
    PlanError
        If one of two tensors would be lost.
    """
    model = checkpoint.model
    if pp > 1:
        copies = [t for t in _copies(model) if t.key not in {known.key for known in model.tensors}]
        return replace(checkpoint, model=replace(model, tensors=(*model.tensors, *copies)))
    for tensor in model.tensors:
        if is_apart(tensor, model):
            raise PlanError(
                f"{tensor.key}: in a job with pipeline stages it is a tensor of its own, and {tensor.rule.tied_to} in "
                f"one without (tie_word_embeddings), so that one of the two would be lost. Choose pp > 1, or drop the "
                f"head with --drop {HEAD}"
            )
    return checkpoint


def is_apart(tensor: ModelTensor, model: Model) -> bool:
    """Whether a job with stages has trained a tensor of its own that jobs without stages tie to another."""
    return tensor.rule.own_in_stages and tensor.tied_to is None and ties_words(model.config)


def parted(model: Model, cells: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """A sentence for each tensor that starts as a copy of another and is trained apart from it.

    ``cells``: structured key → parameter name of the tensors in each cell of a target.
    """
    together = [set(names) for names in cells]
    return tuple(
        f"{tensor.key} starts as a copy of {tensor.tied_to}, with its optimizer states: in this job each is a tensor "
        "of its own"
        for tensor in model.tensors
        if tensor.tied_to is not None
        and (tensor.rule.own_in_stages or tensor.rule.tied_to is None)
        and not any({tensor.key, tensor.tied_to} <= keys for keys in together)
    )


def as_read_again(checkpoint: Checkpoint, of_target: Model) -> Checkpoint:
    """The checkpoint with tensors of their own for those that it ties and the model of a target does not."""
    own = {t.key for t in of_target.tensors if t.tied_to is None}
    apart = {t.key: t.tied_to for t in checkpoint.model.tensors if t.tied_to is not None and t.key in own}
    catalog = checkpoint.catalog
    copies = [replace(t, key=key) for key, twin in apart.items() for t in catalog.tensors if t.key == twin]
    alone = (replace(t, aliases=tuple(key for key in t.aliases if key not in apart)) for t in catalog.tensors)
    return replace(
        checkpoint,
        catalog=replace(catalog, tensors=Tensors([*alone, *(replace(t, aliases=()) for t in copies)])),
    )


def configured_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a config that does not tie words, if its head is a tensor of its own all the same."""
    model = checkpoint.model
    if not any(is_apart(tensor, model) for tensor in model.tensors):
        return checkpoint
    return replace(checkpoint, model=replace(model, config=with_entry(model.config, TIED, False)))


def without_head(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the word embedding for a head that a job with stages trained apart from it.

    Raises
    ------
    PlanError
        If it has none.
    """
    model, tensors = checkpoint.model, checkpoint.catalog.tensors
    dropped = {tensor.key: tensor.rule.tied_to for tensor in model.tensors if is_apart(tensor, model)}
    if not dropped:
        raise PlanError(
            f"--drop {HEAD}: it is for a head that is the word embedding in jobs without pipeline stages, and a "
            "tensor of its own in the source"
        )
    kept = [number for number, tensor in enumerate(tensors) if tensor.key not in dropped]
    return replace(
        checkpoint,
        model=replace(
            model, tensors=tuple(replace(t, tied_to=dropped.get(t.key, t.tied_to)) for t in model.tensors)
        ),
        catalog=checkpoint.catalog.only(kept),
        not_carried=(*checkpoint.not_carried, *((key, DROPPED_HEAD) for key in sorted(dropped))),
    )


def _copies(model: Model) -> Iterator[ModelTensor]:
    by_key = {tensor.key: tensor for tensor in model.tensors}
    for rule in model.table.rules:
        twin = by_key.get(rule.tied_to or "")
        if rule.of_stages and twin is not None and rule.applies(model.config):
            yield replace(twin, key=rule.key, rule=rule, layer=None, tied_to=twin.key)
