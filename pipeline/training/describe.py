"""Describe the model of a running job: its rule table, from the live parameters.

Works on Paddle's own objects without importing Paddle: what is not initialised yet is not used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.changes.aoa.forms import READS, WRITES, shares_said, with_forms
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.file_names import RULES
from paddle_reshard.pipeline.core.limits import most_bytes
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.model.described import (
    Entry,
    Fused,
    RankFacts,
    described_table,
    facts_of_job,
    joined_tables,
)
from paddle_reshard.pipeline.model.rules.table import Described
from paddle_reshard.pipeline.training.names_callback import library_of
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.listing import LocalRoot
from paddle_reshard.storage.plain import read_small

_LIBRARIES = ("paddleformers", "paddlenlp")


def describe(
    model: Any,
    *,
    to: PathLike | None = None,
    fused: Fused | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The rule table of a model, from its live parameters, as ``--rules FILE`` takes it.

    Every rank of the job calls it, and gets the same table. It tells keys, shapes, the dims that tp cuts, ties,
    experts, pipeline items and parameter names, all as they are in this job; what a job of another kind would have is
    not in it, and a conversion that needs it is refused.

    Parameters
    ----------
    model
        The model, wrapped or not, of any class.
    to
        A file for the table, which the first rank writes. One that describes the same model in another job is joined
        with what this one shows. Beside a checkpoint, under the name
        ``paddle_reshard_rules.json``, it is used by itself.
    fused
        What is fused in tensors that tp cuts, where the class has no AOA statements that say it: key of the row →
        number of equal parts, or the extent of each. All others are one part each: ``{}`` says that of every tensor.
    config
        The entries of ``config.json``, for a model without a ``config``.

    Raises
    ------
    UsageError
        If what the ranks hold contradicts itself or cannot be said in a table.
    """
    facts = [facts_of(model, config)]
    distributed = sys.modules.get("paddle.distributed")
    first = True
    if distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1:
        gathered: list[RankFacts] = []
        distributed.all_gather_object(gathered, facts[0])
        facts, first = gathered, distributed.get_rank() == 0
    facts = facts_of_job(facts)
    table = with_forms(described_table(facts, fused, shares_said(facts[0])), facts)
    if to is not None and first:
        path = Path(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = _joined(path, table)
        LocalRoot(path.parent).replace(path.name, written(table))
    return table


def _joined(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """A table joined with what other jobs have shown of the model in a file, if there is one."""
    if not path.exists():
        return table
    try:
        return joined_tables(parse_json(read_small(path, most_bytes(RULES), UsageError)), table)
    except JsonError as error:
        raise UsageError(f"{path} is no rule table: {error}; give another file, or remove it") from None


def written(table: Mapping[str, Any]) -> bytes:
    """The text of a table: a line for each row."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name != "rules"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["rules"])
    return ("{\n" + ",\n".join([*lines, f' "rules": [\n{rows}\n ]']) + "\n}\n").encode()


def describe_callback(trainer: Any, *, to: PathLike | None = None, fused: Fused | None = None) -> Any:
    """A callback that writes the rule table of the model into every checkpoint that the trainer saves.

    ``trainer.add_callback(describe_callback(trainer))``. The model is described once, before the first step; a class
    that cannot be described stops the job there. What other jobs have shown of it, in ``to`` or in the checkpoint from
    which this one resumes, stays in the table.

    Parameters
    ----------
    trainer
        A ``Trainer`` of PaddleFormers or PaddleNLP.
    to, fused
        As in :func:`describe`.
    """
    base = import_module(f"{library_of(trainer)}.trainer").TrainerCallback
    return type("DescribeCallback", (_DescribeCallback, base), {})(trainer, to, fused)


class _DescribeCallback:
    """Describes once, and writes with every save; combined with the trainer's callback base class at creation."""

    def __init__(self, trainer: Any, to: PathLike | None, fused: Fused | None) -> None:
        self.trainer, self.to, self.fused = trainer, to, fused
        self.text = b""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        table = describe(self.trainer.model, to=self.to, fused=self.fused)
        if not state.is_world_process_zero:
            return
        for place in (args.resume_from_checkpoint and Path(args.resume_from_checkpoint) / RULES, self.to):
            if place:
                table = _joined(Path(place), table)
        self.text = written(table)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            LocalRoot(folder).replace(RULES, self.text)


def facts_of(model: Any, config: Mapping[str, Any] | None = None) -> RankFacts:
    """What this rank holds of a model."""
    model = _unwrapped(model)
    entries = config if config is not None else _config(model)
    degrees, ranks = _place()
    in_sequence = degrees[0] > 1 and bool(entries.get("sequence_parallel") or _in_sequence(model))
    state = model.state_dict()
    places, shared = _places(model), _shared(model)
    said = getattr(type(model), "transpose_weight_keys", None)
    transposed = said if isinstance(said, list) else ()  # of a tuple the library takes none
    return RankFacts(
        Described(*degrees, sequence_parallel=in_sequence),
        *ranks,
        type(model).__name__,
        _library_of(model),
        entries,
        tuple(_entries(model, state)),
        tuple(_item_class(item) for item in getattr(model, "_layers_desc", ())),
        {key: places[id(tensor)] for key, tensor in state.items() if id(tensor) in places},
        tuple(int(first) for first in getattr(model, "segment_parts", ())),
        dict(_maps(model)),
        tuple(map(str, transposed)),
        {key: shared[id(tensor)] for key, tensor in state.items() if id(tensor) in shared},
    )


def _library_of(model: Any) -> str:
    """The library of a model's class; of a class of the user's own, the one that the job has imported.

    In a job of Paddle alone there is neither: files are then read and written as PaddleFormers' trainer does.
    """
    packages = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    return next((name for name in (*packages, *sys.modules) if name in _LIBRARIES), _LIBRARIES[0])


def _unwrapped(model: Any) -> Any:
    """The model inside Paddle's own wrappers for distributed training."""
    while type(model).__module__.startswith("paddle.") and not hasattr(model, "_layers_desc"):
        inner = next(
            (model._sub_layers[name] for name in ("_layers", "_layer") if name in model._sub_layers), None
        )
        if inner is None:
            break
        model = inner
    return model


def _config(model: Any) -> dict[str, Any]:
    """The entries of the model's config that JSON can say."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise UsageError(
            f"{type(model).__name__} has no config; pass the entries of its config.json as config="
        )
    entries = {}
    for name, value in config.to_dict().items():
        try:
            entries[name] = parse_json(json.dumps(value))
        except (TypeError, ValueError, JsonError):
            continue
    return entries


def _place() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The degrees of tp, pp and ep, and this rank in them."""
    fleet = sys.modules.get("paddle.distributed.fleet")
    group = None
    if fleet is not None:
        topology = import_module("paddle.distributed.fleet.base.topology")
        group = topology._HYBRID_PARALLEL_GROUP
    if group is None:
        return (1, 1, 1), (0, 0, 0)
    ep, ep_rank = 1, 0
    if getattr(group, "_ep_degree", None):
        ep, ep_rank = group.get_expert_parallel_world_size(), group.get_expert_parallel_rank()
    degrees = (int(group.get_model_parallel_world_size()), int(group.get_pipe_parallel_world_size()), int(ep))
    return degrees, (int(group.get_model_parallel_rank()), int(group.get_stage_id()), int(ep_rank))


def _in_sequence(model: Any) -> bool:
    return any("SequenceParallelLinear" in type(layer).__name__ for layer in model.sublayers())


def _entries(model: Any, state: Mapping[str, Any]) -> Iterator[Entry]:
    parameters = {id(parameter) for parameter in model.parameters()}
    whole = _global_shapes(model)
    first: dict[int, str] = {}
    for key, tensor in state.items():
        same = first.setdefault(id(tensor), key)
        split = getattr(tensor, "split_axis", None)
        if split is None:
            split = getattr(tensor, "split_dim", None)
        yield Entry(
            key,
            tensor.name if id(tensor) in parameters else None,
            tuple(int(extent) for extent in tensor.shape),
            bool(getattr(tensor, "is_distributed", False)),
            None if split is None else int(split),
            whole.get(key),
            bool(getattr(tensor, "no_sync", False) or getattr(tensor, "expert", False)),
            None if same == key else same,
            color=_color(key, tensor),
        )


def _color(key: str, tensor: Any) -> str | None:
    """The communication buffers of sharding that a parameter asks for: a name, or a name and a group of ranks."""
    color = getattr(tensor, "color", None)
    if not isinstance(color, dict):
        return None if color in (None, -1) else str(color)
    name, group = color.get("color", -1), color.get("group")
    expert = getattr(tensor, "no_sync", False) or getattr(tensor, "expert", False)
    if group is not None and not expert and group.nranks != _sharding_ranks():
        raise UsageError(
            f"{key}: its color is for {group.nranks} ranks, and sharding has {_sharding_ranks()}; such communication "
            "buffers cannot be described"
        )
    return None if name == -1 else str(name)


def _sharding_ranks() -> int:
    group = import_module("paddle.distributed.fleet.base.topology")._HYBRID_PARALLEL_GROUP
    return 1 if group is None else int(group.get_sharding_parallel_world_size())


def _global_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Key → global shape, as ``sharded_state_dict()`` says it; empty where it does not run."""
    try:
        sharded = model.sharded_state_dict()
        return {key: tuple(int(extent) for extent in weight.global_shape) for key, weight in sharded.items()}
    except Exception:  # noqa: BLE001 - of a class that nobody has tried; split_axis tells the cuts as well
        return {}


def _maps(model: Any) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    """The AOA statements of the class, by the method that gives them, or why it gives none."""
    for name in (READS, WRITES):
        if (make := getattr(type(model), name, None)) is not None:
            try:
                yield name, tuple(map(str, make(model.config)["aoa_statements"]))
            except Exception as error:  # noqa: BLE001 - of a class that nobody has tried
                yield name, f"{type(error).__name__}: {error}"


def _item_class(item: Any) -> str:
    """The class of an item of a pipeline, as a segmentation ``layer:Regex`` matches it."""
    made = getattr(item, "layer_func", None)
    return str(getattr(made, "__name__", None) or type(item).__name__)


def _places(model: Any) -> dict[int, int]:
    """Parameter or buffer → number of its item in the pipeline; empty without one."""
    places: dict[int, int] = {}
    for number, layer in _items_here(model):
        for tensor in (*layer.parameters(), *layer.buffers()):
            places.setdefault(id(tensor), number)
    return places


def _items_here(model: Any) -> Iterator[tuple[int, Any]]:
    """Number of an item of the pipeline → the layer that this rank has of it.

    With virtual stages the pipeline has chunks, each with its layers from 0 on, under the numbers of their first items.
    """
    chunks = getattr(model, "_model_chunks", ())
    held = list(zip(model._start_poss, chunks, strict=True)) if chunks else [(0, model)]
    own = {
        start + int(name): layer
        for start, part in held
        for name, layer in part._sub_layers.items()
        if name.isdigit()
    }
    for number, item in enumerate(getattr(model, "_layers_desc", ())):
        shared = getattr(item, "layer_name", None)
        if shared is None and number in own:
            yield number, own[number]
        elif shared in model.shared_layers and model.get_stage_from_index(number) == model._stage_id:
            yield number, model.shared_layers[shared]


def _shared(model: Any) -> dict[int, str]:
    """Parameter → what the items of the pipeline that share it over stages call it (``SharedLayerDesc``)."""
    items = getattr(model, "_layers_desc", ())
    return {
        id(getattr(layer, attribute)): f"{items[number].layer_name}.{attribute}"
        for number, layer in _items_here(model)
        for attribute in getattr(items[number], "shared_weight_attr", ())
    }
