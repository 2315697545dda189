"""Check the optimizer states of trained parameters.

An optimizer keeps the same states for every parameter, in its shape or as one number, with two exceptions.
**AdamWMini** (PaddleFormers) keeps ``moment2`` as one number. **Muon** (Paddle 3.4) keeps only ``moment1`` for
matrices, and trains everything else with AdamW. The choice of parameters is a setting of the job
(``muon_exclude_patterns`` of its arguments) that no file records: only the absence of the other states shows it. A
checkpoint of AdamW that has lost states looks the same, so the absence is checked against Muon's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from paddle_reshard.pipeline.core.choices import ADAMW_MINI, MUON
from paddle_reshard.pipeline.core.errors import CoverageError, UnsupportedError
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, MEAN_MOMENT2, written_name
from paddle_reshard.pipeline.model.model import AUTOMATIC, Model, ModelTensor

ADAM_STATES = frozenset(("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"))
_KNOWN: Mapping[str, frozenset[str]] = {
    "Adam and its kind": ADAM_STATES,
    "Adam with amsgrad": ADAM_STATES | {"moment2_max"},
    "AdamWMini": ADAM_STATES - {"moment2"} | {MEAN_MOMENT2},
    "Momentum": frozenset(("velocity",)),
}
"""Optimizer → the states that it keeps of every parameter. SGD keeps none; Muon see below."""
_SHOWN = 3
_HALF = ("bfloat16", "float16")
MUON_STATES = ("moment1",)
MUON_DIMS = (2, 3)


def check_states(model: Model) -> None:
    """Refuse a model in which a trained tensor lacks states: all must have the same, or those of Muon.

    Raises
    ------
    CoverageError
        Naming the tensor and the state; if tensors have only ``moment1`` in contradiction to Muon's rule, with the
        reason.
    """
    trained = [tensor for tensor in model.tensors if tensor.trained and tensor.tied_to is None]
    kept = {name for tensor in trained for name in tensor.accumulators}
    by_muon = _by_muon(model.tensors)
    if by_muon:
        _check_muon(model, trained, by_muon)
    for tensor in trained:
        wanted = set(MUON_STATES) if by_muon and is_muon_parameter(tensor, model) else kept
        if lacking := sorted(wanted - set(tensor.accumulators)):
            raise CoverageError(
                f"{tensor.key} ({lacking[0]})", "no file holds it, but other parameters have it"
            )


def check_known(model: Model, allows: Callable[[str], bool]) -> None:
    """Refuse states that are those of no known optimizer, and layers without any: what nobody has is missed as well.

    A parameter may have none, if the job froze it or it never had a gradient, and so may the first layers, if nothing
    before them has any. A layer behind one that is trained has states: gradients pass through it. ``allows`` says of
    which keys states may be missing all the same.

    Raises
    ------
    CoverageError
        Naming a parameter and the state that it lacks.
    """
    trained = [tensor for tensor in model.tensors if tensor.trained and tensor.tied_to is None]
    kept = {name for tensor in trained for name in tensor.accumulators}
    only_muon = kept == set(MUON_STATES) and all(is_muon_parameter(tensor, model) for tensor in trained)
    if kept and not only_muon and kept not in _KNOWN.values():
        name, states = min(_KNOWN.items(), key=lambda known: (len(known[1] ^ kept), known[0]))
        if lacking := [state for state in ACCUMULATORS if state in states - kept]:
            raise CoverageError(
                f"{trained[0].key} ({written_name(lacking[0])})",
                f"no file holds it, nor that of any other parameter; beside {', '.join(sorted(kept))} {name} keeps "
                f"{', '.join(lacking)}. Take the files of one whole save; for the parameters alone, give a folder with "
                "the files of the model only",
            )
        raise CoverageError(
            f"{trained[0].key} ({', '.join(sorted(kept))})", "no known optimizer keeps these states together"
        )
    for tensor in trained if kept else ():
        if not tensor.master and tensor.dtype.name in _HALF:
            raise CoverageError(
                f"{tensor.key} ({MASTER_WEIGHT})",
                f"no file holds it, but optimizer states of this {tensor.dtype.name} parameter: the trainer keeps a "
                "master weight of each. Take the files of one whole save",
            )
    if trained and not model.has_lora:
        _check_layers_trained(model, allows)


def _check_layers_trained(model: Model, allows: Callable[[str], bool]) -> None:
    """Refuse a layer of which no tensor has states behind one that has some."""
    for item in model.table.items:
        trained: dict[int, bool] = {}
        first: dict[int, str] = {}
        before = False
        for tensor in model.tensors:
            if tensor.rule.item == item.name and tensor.layer is not None:
                trained[tensor.layer] = trained.get(tensor.layer, False) or tensor.trained
                if not tensor.rule.untrained and not allows(tensor.key):
                    first.setdefault(tensor.layer, tensor.key)
            elif not trained:
                before = before or (item.repeated and tensor.trained)
        if not any(trained.values()):
            continue
        for layer in sorted(trained):
            if before and not trained[layer] and layer in first:
                pattern = first[layer].partition(f".{layer}.")[0] + f".{layer}.*"
                raise CoverageError(
                    f"{first[layer]} (optimizer states)",
                    f"no file holds optimizer states of layer {layer}, and other parameters before it have theirs, "
                    "whose gradients pass through it; a file of the optimizer lacks its states. If the job froze the "
                    f"layer, say so with --allow-missing '{pattern}'",
                )
            before = before or trained[layer]


def without_states_in_words(tensors: Sequence[ModelTensor]) -> str | None:
    """Which parameters have no optimizer states, where others have some; ``None`` if there are none.

    Buffers are no parameters, nor is the base model of an adapter.
    """
    of_optimizer = [
        tensor
        for tensor in tensors
        if not (tensor.is_alias or tensor.of_base or tensor.rule.untrained)
        and tensor.rule.name_class != AUTOMATIC
        and not tensor.key.endswith(
            "e_score_correction_bias"
        )  # moved by the router's balance, by no gradient
    ]
    without = [tensor.key for tensor in of_optimizer if not tensor.trained]
    if not without or len(without) == len(of_optimizer):
        return None
    shown = ", ".join(without[:_SHOWN]) + _and_more(len(without) - _SHOWN)
    return f"{len(without)} of {len(of_optimizer)} parameters have no optimizer states, as if not trained: {shown}"


def is_muon_parameter(tensor: ModelTensor, model: Model) -> bool:
    """Whether Muon updates a parameter, by its published rule; it leaves the others to AdamW.

    It updates matrices (also several in one tensor) if neither their structured name nor their parameter name contains
    one of the patterns (Paddle 3.4 ``optimizer/muon.py``, ``build_muon_param_info_map`` of the model classes).
    """
    return len(tensor.global_shape) in MUON_DIMS and _excluded_by(tensor, model) is None


def muon_parameters(tensors: Iterable[ModelTensor]) -> list[str]:
    """Keys of the tensors that have only Muon's state; empty for any other optimizer."""
    return [tensor.key for tensor in _by_muon(tensors)]


def _by_muon(tensors: Iterable[ModelTensor]) -> list[ModelTensor]:
    """The tensors that have only Muon's state, where others have more."""
    own = [tensor for tensor in tensors if tensor.tied_to is None]
    kinds = {tensor.accumulators for tensor in own}
    if MUON_STATES not in kinds or kinds <= {(), MUON_STATES}:
        return []
    return [tensor for tensor in own if tensor.accumulators == MUON_STATES]


def special_optimizer(model: Model) -> str | None:
    """The name of the optimizer of a model, if trainers do not save its states in every format."""
    if MUON_STATES in model.kinds_of_states and muon_parameters(model.tensors):
        return MUON
    return ADAMW_MINI if any(MEAN_MOMENT2 in states for states in model.kinds_of_states) else None


def refuse_optimizer(model: Model, format_name: str, alternatives: str, for_models: str) -> None:
    """Refuse states of a special optimizer for a format in which no trainer is known to keep them.

    Parameters
    ----------
    alternatives, for_models
        Names of the formats in which a trainer keeps them, and of those that hold only parameters.
    """
    instead = f"The parameters alone can be written with --format {for_models}"
    if keys := muon_parameters(model.tensors):
        raise UnsupportedError(
            f"{keys[0]}{_and_more(len(keys) - 1)}: the optimizer is Muon, which keeps only {MUON_STATES[0]} for these. "
            f"The trainer does not save or load Muon in the format {format_name}, only as {alternatives}; and AdamW "
            f"cannot continue from it, because moment2 and the beta powers of these parameters never existed. {instead}"
        )
    raise UnsupportedError(
        "the optimizer is AdamWMini, which keeps moment2 as one number per parameter. How the trainer loads that in "
        f"the format {format_name} is not known; convert to {alternatives}. {instead}"
    )


def _excluded_by(tensor: ModelTensor, model: Model) -> str | None:
    names = (tensor.key, tensor.rule.parameter_name or tensor.rule.name_class)
    patterns = model.table.muon_exclude_patterns
    # The library compares both in lower case.
    return next((p for p in patterns if any(p.lower() in name.lower() for name in names)), None)


def _check_muon(model: Model, trained: list[ModelTensor], by_muon: list[ModelTensor]) -> None:
    """Refuse tensors with only ``moment1`` unless they are exactly those that Muon updates by its rule."""
    for tensor, reason in _contradictions(model, trained, by_muon):
        patterns = ", ".join(model.table.muon_exclude_patterns)
        raise CoverageError(
            f"{tensor.key} (moment2)",
            f"no file holds it, but other parameters have it. Muon keeps only {MUON_STATES[0]} for tensors of 2 or 3 "
            f"dims whose name contains none of {patterns}; but {reason}. If the job has other muon_exclude_patterns, "
            "add them to a copy of the rule table and pass it with --rules FILE",
        )


def _contradictions(
    model: Model, trained: list[ModelTensor], by_muon: list[ModelTensor]
) -> Iterator[tuple[ModelTensor, str]]:
    """Tensors with only ``moment1``, and why Muon cannot be the reason."""
    for tensor in by_muon:
        pattern = _excluded_by(tensor, model)
        if pattern is not None:
            yield tensor, f"this name contains {pattern}"
        elif len(tensor.global_shape) not in MUON_DIMS:
            yield tensor, f"its shape is {tensor.global_shape}"
    for tensor in trained:
        if len(tensor.accumulators) > len(MUON_STATES) and is_muon_parameter(tensor, model):
            yield by_muon[0], f"{tensor.key} has {', '.join(tensor.accumulators)}"


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
