"""The Hugging Face forms of a described model, from the AOA statements of its class.

Nothing is read off the text of a statement: each map is executed on the tensors of the model, and a row gets the form
by which the parts of every one of its tensors lie where the map has put them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any, Final

from paddle_reshard.pipeline.changes.aoa.language import AoaProgram, Cast, Fused, Rename, Statement, parse_aoa
from paddle_reshard.pipeline.changes.aoa.run import Interpreter
from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors
from paddle_reshard.pipeline.changes.aoa.values import Value
from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.errors import ReshardError, RuleError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor
from paddle_reshard.pipeline.model.described import EXPERTS, RankFacts, Shares, whole_tensors
from paddle_reshard.pipeline.model.forms import Span, spans_of
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.rules.entries import Config, count_entry
from paddle_reshard.pipeline.model.rules.parse import typed_table
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, Rule, form_of

READS: Final = "_gen_aoa_config"
WRITES: Final = "_gen_inv_aoa_config"
"""What a class calls the map with which it reads a Hugging Face checkpoint, and the one with which it writes one."""
_ONE_PART: Final[Shares] = (0, (1,))
_NO_PARAMETER: Final = "moment1"
"""The state of the tensors that maps are executed on, which have no dtype then."""


def _programs(facts: RankFacts) -> dict[str, AoaProgram]:
    """The maps of the class by their names, each as what makes a Hugging Face checkpoint of the model.

    Casts are left out: they move nothing, and most could not be turned round.

    Raises
    ------
    UsageError
        If one cannot be parsed, or the class failed to say it.
    """
    programs = {}
    for name, said in facts.maps.items():
        if isinstance(said, str):
            raise UsageError(f"{name} failed: {said}")
        program = parse_aoa(json.dumps({"aoa_statements": list(said)}), name)
        program = replace(program, statements=tuple(map(_without_cast, program.statements)))
        programs[name] = program.reversed() if name == READS else program
    return programs


def _without_cast(statement: Statement) -> Statement:
    return replace(statement, operation=Rename()) if isinstance(statement.operation, Cast) else statement


def shares_said(facts: RankFacts) -> dict[str, Shares]:
    """What the maps fuse in tensors, of which each rank of tp has its piece of each part.

    The form of a key → its parts: ``(1, (1, 1))`` for gate and up, ``(1, (4, 1, 1))`` for four heads of queries and one
    of keys and of values, one after the other. Groups of heads, whole on a rank, are one part.
    """
    try:
        programs = _programs(facts)
    except ReshardError:
        return {}
    names: dict[str, Shares] = {}
    for program in programs.values():
        for statement in program.in_order():
            for name in statement.left:
                shares = _shares(statement) if len(statement.left) == 1 else _ONE_PART
                names[name.text] = max(names.get(name.text, _ONE_PART), shares, key=lambda of: len(of[1]))
    said: dict[str, set[Shares]] = {}
    for text, shares in names.items():
        said.setdefault(_form(text), set()).add(shares)
    return {form: of_form.pop() for form, of_form in said.items() if len(of_form) == 1}


def _shares(statement: Statement) -> Shares:
    fused = statement.operation
    if not isinstance(fused, Fused) or fused.macro == "fused_qkv":
        return _ONE_PART
    return fused.axis, (1, 1) if fused.macro == "fused_ffn" else (fused.heads, fused.groups, fused.groups)


def _form(name: str) -> str:
    """The form of the keys that a name of a statement stands for."""
    for placeholder in ("$LAYER_ID_OFFSET", "$LAYER_ID", "$EXPERT_ID"):
        name = name.replace(placeholder, "0")
    return form_of(name)


def with_forms(table: Mapping[str, Any], ranks: Sequence[RankFacts]) -> dict[str, Any]:
    """A described table with the forms that the maps of the class give its rows.

    A row has one if all maps of the class run on the tensors of the model and give it the same. Otherwise the table
    says why some rows have none: an export or import that needs one is refused with that.
    """
    facts = ranks[0]
    try:
        programs = _programs(facts)
        tensors = whole_tensors(typed_table(dict(table)), ranks)
        shapes = _shapes_saved(tensors, ranks)
        of_maps = [_forms_of_rows(program, tensors, shapes, facts.config) for program in programs.values()]
    except ReshardError as error:
        return _saying(table, f"the maps of {facts.kind} do not fit the model: {error}")
    if not of_maps:
        return _saying(table, f"{facts.kind} has no AOA statements ({READS}, {WRITES})")
    forms, swapped = of_maps[0], _swapped_as_saved(tensors, facts.transposed)
    differing = [key for key in forms if any(of[key] != forms[key] for of in of_maps)]
    twice = _same_keys({key: form for key, form in forms.items() if form and key not in differing})
    lacking = [
        key for key, form in forms.items() if (form is None or len(swapped[key]) > 1) and key not in differing
    ]
    kept = {*forms} - {*differing, *twice, *lacking}
    copies = {tensor.rule.key for tensor in tensors.values() if tensor.tied_to is not None}
    lacking = [key for key in lacking if key not in copies]
    rows = [
        {**row, "huggingface": _json_of(forms[row["key"]], *swapped[row["key"]])}
        if row["key"] in kept
        else row
        for row in table["rules"]
    ]
    why = [
        f"{READS} and {WRITES} of {facts.kind} make different things of {differing[0]}" if differing else "",
        f"two rows have the key of {twice[0]} there" if twice else "",
        f"a row cannot say what the maps of {facts.kind} make of {lacking[0]}" if lacking else "",
    ]
    return _saying({**table, "rules": rows}, "; ".join(filter(None, why)))


def _saying(table: Mapping[str, Any], why: str) -> dict[str, Any]:
    said = {"without_forms": why} if why else {}
    return {**{name: of for name, of in table.items() if name != "rules"}, **said, "rules": table["rules"]}


def _same_keys(forms: Mapping[str, HuggingFaceForm]) -> list[str]:
    """The rows with a key that another row has, too."""
    rows: dict[str, list[tuple[str, list[str]]]] = {}
    for row, form in forms.items():
        for key in form.tensors:
            rows.setdefault(form_of(key), []).append((row, key.split(".")))
    pairs = (pair for of_key in rows.values() for pair in combinations(of_key, 2))
    return [row for a, b in pairs if _may_be_same(a[1], b[1]) for row in (a[0], b[0])]


def _may_be_same(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether two keys, in words, can be one: ``layers.{layer}.w`` and ``layers.0.w``."""
    return all(one == other or "{" in one + other for one, other in zip(a, b, strict=True))


def _swapped_as_saved(tensors: Mapping[str, ModelTensor], endings: Sequence[str]) -> dict[str, set[bool]]:
    """Key of a row → whether ``save_to_hf`` swaps the dims of its tensors.

    By their own keys, whatever a map makes of them (PaddleFormers 1.2 ``transformers/conversion_utils.py:1272``).
    """
    rows: dict[str, set[bool]] = {}
    for key, tensor in tensors.items():
        named = (re.search(rf"\.{of}\.weight$", key) or re.fullmatch(rf"{of}\.weight", key) for of in endings)
        rows.setdefault(tensor.rule.key, set()).add(len(tensor.global_shape) == 2 and any(named))
    return rows


def _json_of(form: HuggingFaceForm | None, swapped: bool) -> dict[str, Any]:
    assert form is not None  # noqa: S101
    entries = {name: value for name, value in asdict(form).items() if value not in (None, False)}
    if swapped != form.transposed_as_saved:
        entries["saved_transposed"] = swapped
    return {**entries, "keys": list(form.keys), **({"widths": list(form.widths)} if form.widths else {})}


# ---- what a map makes of the tensors


def _forms_of_rows(
    program: AoaProgram, tensors: Mapping[str, ModelTensor], shapes: Mapping[str, Shape], config: Config
) -> dict[str, HuggingFaceForm | None]:
    """Key of a row → the form of its tensors; ``None`` if a row cannot say it."""
    of_tensors = _forms_of_tensors(_made(program, tensors, shapes), tensors, shapes, config)
    of_rows: dict[str, list[tuple[str, HuggingFaceForm | None]]] = {}
    for key, tensor in tensors.items():
        of_rows.setdefault(tensor.rule.key, []).append((key, of_tensors.get(key)))
    rules = {tensor.rule.key: tensor.rule for tensor in tensors.values()}
    return {key: _form_of_row(rules[key], found) for key, found in of_rows.items()}


def _made(
    program: AoaProgram, tensors: Mapping[str, ModelTensor], shapes: Mapping[str, Shape]
) -> dict[str, Value]:
    """Key in a Hugging Face checkpoint → the boxes of the model's tensors of which the map makes it."""
    aliases: dict[str, list[str]] = {}
    for key, tensor in tensors.items():
        if tensor.tied_to is not None:
            aliases.setdefault(tensor.tied_to, []).append(key)
    own = [
        Tensor(key, _NO_PARAMETER, tensor.dtype, shapes[key], tuple(aliases.get(key, ())))
        for key, tensor in tensors.items()
        if tensor.tied_to is None
    ]
    run = Interpreter(SourceTensors(Catalog(Tensors(own), (), Fragments.empty(), {})), program)
    run.all()
    return run.outputs()


def _shapes_saved(tensors: Mapping[str, ModelTensor], ranks: Sequence[RankFacts]) -> dict[str, Shape]:
    """The shapes by which maps know tensors: stacked experts may be one below the other there (``fd_fallback``)."""
    flat = {
        entry.key: entry.whole
        for rank in ranks
        for entry in rank.entries
        if entry.whole is not None and len(entry.whole) != len(entry.shape)
    }
    return {key: flat.get(key, tensor.global_shape) for key, tensor in tensors.items()}


def _forms_of_tensors(
    made: Mapping[str, Value],
    tensors: Mapping[str, ModelTensor],
    shapes: Mapping[str, Shape],
    config: Config,
) -> dict[str, HuggingFaceForm]:
    parts: dict[str, dict[str, Value]] = {}
    mixed: set[str] = set()
    for there, value in made.items():
        owner = value.sources[0]
        twin = tensors.get(there)
        if len(value.sources) > 1:
            mixed.update(value.sources)
        elif twin is not None and twin.tied_to == owner:
            parts.setdefault(there, {})[there] = value
        else:
            parts.setdefault(owner, {})[there] = value
    found = {
        key: (tensors[key].global_shape == shapes[key] and _form_of_tensor(key, shapes[key], of_key))
        or _form_of_experts(key, shapes[key], of_key, config)
        for key, of_key in parts.items()
        if key not in mixed
    }
    return {key: form for key, form in found.items() if form is not None}


def _form_of_tensor(key: str, shape: Shape, parts: Mapping[str, Value]) -> HuggingFaceForm | None:
    """The form of a tensor that becomes these parts, which have to lie as the form says, to the last element."""
    dims = len(shape)
    if dims == 0:
        return HuggingFaceForm((*parts,)) if len(parts) == 1 else None
    orders = {segment.order for value in parts.values() for segment in value.segments}
    straight = tuple(range(dims))
    turned = (*straight[:-2], *reversed(straight[-2:]))
    if len(orders) != 1 or (order := orders.pop()) not in (straight, turned):
        return None
    spans: dict[str, tuple[Span, ...]] = {}
    for there, value in parts.items():
        whole = (*(1 if dim == dims - 1 else extent for dim, extent in enumerate(shape)),)
        for segment in value.segments:
            beside = (*segment.extents[:-1], 1)
            if beside != whole or any(segment.start[:-1]) or sum(segment.offset) != segment.offset[order[-1]]:
                return None
        spans[there] = tuple(
            sorted(
                (Span(s.start[-1], s.offset[order[-1]], s.extents[-1]) for s in value.segments),
                key=lambda span: span.there,
            )
        )
    keys = sorted(spans, key=lambda there: min(span.here for span in spans[there]))
    groups = len(spans[keys[0]])
    one = len(keys) == 1
    form = HuggingFaceForm(
        tuple(keys),
        transposed=order != straight,
        widths=None if one else tuple(str(sum(span.extent for span in spans[k])) for k in keys),
        groups=None if one or groups == 1 else str(groups),
    )
    try:
        fits = spans_of(form, {}, key, shape[-1]) == [spans[there] for there in keys]
    except RuleError:
        return None
    return form if fits else None


def _form_of_experts(
    key: str, shape: Shape, parts: Mapping[str, Value], config: Config
) -> HuggingFaceForm | None:
    """The form of a tensor with all experts of a layer one below the other, of which each has parts of its own."""
    for entry in EXPERTS:
        count = count_entry(config, entry)
        if len(shape) != 2 or not count or shape[0] % count:
            continue
        rows = shape[0] // count
        of_experts: list[dict[str, Value]] = [{} for _ in range(count)]
        for there, value in parts.items():
            expert = value.segments[0].start[0] // rows
            moved = (replace(s, start=(s.start[0] - expert * rows, *s.start[1:])) for s in value.segments)
            of_experts[expert][there] = replace(value, segments=tuple(moved))
        forms = [_form_of_tensor(key, (rows, shape[1]), of_expert) for of_expert in of_experts]
        numbers = [{"expert": str(expert)} for expert in range(count)]
        if (form := _form_of_all(numbers, forms)) is not None:
            return replace(form, stacked=entry)
    return None


# ---- from tensors to their row


def _form_of_row(rule: Rule, found: Sequence[tuple[str, HuggingFaceForm | None]]) -> HuggingFaceForm | None:
    """The form of a row, if all of its tensors have it, with the numbers of their keys."""
    return _form_of_all([rule.numbers(key) for key, _ in found], [form for _, form in found])


def _form_of_all(
    numbers: Sequence[Mapping[str, str]], of_each: Sequence[HuggingFaceForm | None]
) -> HuggingFaceForm | None:
    """The form of all, if they have the same, with placeholders for the numbers of each."""
    forms = [form for form in of_each if form is not None]
    if len(forms) < len(of_each) or len({replace(form, keys=()) for form in forms}) > 1:
        return None
    spelled = list(zip(*(form.keys for form in forms), strict=False))
    if len({len(form.keys) for form in forms}) > 1:
        return None
    keys = [_template(numbers, of_part) for of_part in spelled]
    return replace(forms[0], keys=tuple(key for key in keys if key)) if all(keys) else None


def _template(numbers: Sequence[Mapping[str, str]], spelled: Sequence[str]) -> str | None:
    """The key of a part with placeholders, from those of all tensors, each with its numbers."""
    words = [key.split(".") for key in spelled]
    if len({len(of_key) for of_key in words}) > 1:
        return None
    template, open_names = [], list(numbers[0])
    for place in range(len(words[0])):
        at = [of_key[place] for of_key in words]
        name = next((n for n in open_names if at == [of[n] for of in numbers] and at[0].isdigit()), None)
        if name is not None:
            open_names.remove(name)
        elif len(set(at)) > 1:
            return None
        template.append(at[0] if name is None else f"{{{name}}}")
    return None if open_names else ".".join(template)
