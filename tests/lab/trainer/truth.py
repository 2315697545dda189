"""What a job has in memory, in whole tensors: taken from live objects, never from files.

Every rank writes down what it holds (parameters, the optimizer's states, master weights, averages) and where each
piece lies; the first rank joins them, compares all copies bit for bit, and writes ``truth.safetensors``:
``<key>`` in the dtype of training, ``<key>.w_0`` the master weight, ``<key>.moment1_0`` and so on its states,
``<key>.ema_w_0`` its average. Copies that had drifted apart are in ``truth_alt.safetensors``, after ``@``.
"""

import collections
import json
import os
import pickle
import re
import struct
import time

import numpy as np
import paddle
import paddle.distributed as dist

KIND = {
    "moment1": "moment1_0",
    "moment2": "moment2_0",
    "moment2_max": "moment2_max_0",
    "velocity": "velocity_0",
    "beta1_pow_acc": "beta1_pow_acc_0",
    "beta2_pow_acc": "beta2_pow_acc_0",
}
"""The optimizer's word for a state → its name in files."""
STATES = tuple(f".{kind}" for kind in ("w_0", *KIND.values()))
FUSED = ("gate_up_fused_proj", "up_gate_proj", "gate_up_proj", ".w1", "keys_and_values")
"""Keys of which a tp rank holds ``[gate | up]`` of its own."""
QKV = ("qkv_proj", "fused_rms_norm_linear.linear_weight")
"""Keys of recipes of which a tp rank holds ``[q | k | v]`` of its own."""
RECIPE = {"rank": 0, "world": 1, "local_ids": False, "heads": None, "kv": None}
"""What the recipe of a job says of itself: its expert rank and their number, whether ranks number their experts from
0 on, and its heads where q, k and v are fused in parts of unequal width."""
BY_KEY = "by key"
"""Of a job whose values to begin with are a function of the key."""
DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "int64": "I64"}


def tpdeg(args):
    return max(getattr(args, "tensor_model_parallel_size", None) or 1, 1)


def is_ep(parameter, args):
    """A whole expert on one expert rank: the library marks it as distributed too, which tp does not cut."""
    ranks = max(getattr(args, "expert_model_parallel_size", 1), RECIPE["world"])
    return bool(getattr(parameter, "no_sync", False)) and ranks > 1


def tp_axis(key, parameter):
    # The library cuts the sinks of gpt_oss and does not mark them.
    return 0 if key.endswith(".self_attn.sinks") else getattr(parameter, "split_axis", None)


def is_tp(key, parameter, args):
    """``is_distributed`` alone says nothing (experts, correction biases); a split axis does."""
    if tpdeg(args) == 1 or is_ep(parameter, args) or tp_axis(key, parameter) is None:
        return False
    return key.endswith(".self_attn.sinks") or bool(getattr(parameter, "is_distributed", False))


def global_key(key, experts_of_a_rank):
    """The key in the whole model; fused experts, one parameter for all of a rank, are marked with the rank."""
    if not RECIPE["local_ids"]:
        return key
    if RECIPE["world"] > 1 and re.search(r"\.experts\.(up_gate_proj\.|down_proj\.|up$|down$)", key):
        return f"{key}@ep{RECIPE['rank']}"
    first = RECIPE["rank"] * experts_of_a_rank
    return re.sub(r"(\.experts\.)(\d+)(?=\.)", lambda m: f"{m[1]}{int(m[2]) + first}", key)


def local_experts(state):
    ids = [int(m[1]) for key in state if (m := re.search(r"\.mlp\.experts\.(\d+)\.", key))]
    return max(ids) + 1 if ids else 0


def cut_parts(array, key, axis):
    """The parts of a fused tensor, whole or of one tp rank."""
    width, heads, kv = array.shape[axis], RECIPE["heads"], RECIPE["kv"]
    places = []
    if any(name in key for name in QKV) and kv and kv != heads:
        unit = width // (heads + 2 * kv)
        places = [unit * heads, unit * (heads + kv)]
    elif any(name in key for name in FUSED) and "shared_layers" not in key:
        places = [width // 2]
    return np.split(array, places, axis=axis)


def cut(array, key, axis, degree, rank):
    """What a tp rank has of a whole tensor."""
    parts = [np.split(part, degree, axis=axis)[rank] for part in cut_parts(array, key, axis)]
    return np.concatenate(parts, axis=axis)


def cut_by_key(array, key, axis, config, args):
    """What this tp rank has of a whole tensor, also of phi3's ``[q | k | v]``."""
    degree, rank = tpdeg(args), args.tensor_parallel_rank
    if config.model_type != "phi3" or "qkv_proj" not in key:
        return cut(array, key, axis, degree, rank)
    each = config.hidden_size // config.num_attention_heads
    query, key_or_value = config.num_attention_heads * each, config.num_key_value_heads * each
    parts = np.split(array, [query, query + key_or_value], axis=axis)
    return np.concatenate([np.split(part, degree, axis=axis)[rank] for part in parts], axis=axis)


def _joined(parts, key, axis):
    """The inverse of :func:`cut` over all ranks."""
    of_ranks = [cut_parts(part, key, axis) for part in parts]
    return np.concatenate([part for parts in zip(*of_ranks, strict=True) for part in parts], axis=axis)


def _np(tensor):
    with paddle.no_grad():
        return tensor.detach().astype("float32").cpu().numpy().copy()


def dump_init(model, path):
    np.savez(path, **{key: _np(tensor) for key, tensor in model.state_dict().items()})


def load_init(model, path, args):
    """Give the model the values that a job on one card began with."""
    whole = np.load(path)
    with paddle.no_grad():
        for key, tensor in model.state_dict().items():
            if key in whole:
                value = whole[key]
            else:  # a rank of experts has gate and up where a single card has both as one
                fused = re.sub(r"\.(gate|up)_proj\.", ".up_gate_proj.", key)
                value = np.split(whole[fused], 2, axis=-1)[".up_proj." in key]
            if is_tp(key, tensor, args) and list(value.shape) != list(tensor.shape):
                value = cut(value, key, tp_axis(key, tensor), tpdeg(args), args.tensor_parallel_rank)
            paddle.assign(paddle.to_tensor(value).astype(tensor.dtype), tensor)


def _chain(optimizer):
    """The optimizer and what it wraps, the innermost last."""
    found = []
    while optimizer is not None and optimizer not in found:
        found.append(optimizer)
        entries = optimizer.__dict__
        optimizer = entries.get("_inner_opt") or entries.get("_optim") or entries.get("_inner_optimizer")
    return found


def _show(trainer, model):
    """Bring what a job that has just loaded keeps elsewhere to where it is while it trains; nothing is changed.

    Parameters that stage 3 cuts are slices until the model asks for them; with overlapped communication the buffers
    are still the pipeline's; states without a master weight wait in the optimizer's ``_accumulators_holder``.
    """
    chain = _chain(trainer.optimizer)
    of_pipeline = getattr(trainer.model_wrapped, "_chunk_2_comm_buffers", None) or {}
    for optimizer in chain:
        if getattr(optimizer, "pp_overlap", False) and not optimizer._comm_buffer_list:
            optimizer._comm_buffer_list = [buffer for buffers in of_pipeline.values() for buffer in buffers]
    inner = chain[-1]
    if not inner._master_weights:
        for parameter in model.parameters():
            for accumulator in KIND:
                waiting = inner._accumulators_holder.get(f"{parameter.name}_{accumulator}_0")
                if waiting is not None:
                    inner._accumulators[accumulator].setdefault(parameter.name, waiting)
    if hasattr(trainer.model_wrapped, "get_all_parameters"):
        trainer.model_wrapped.get_all_parameters(convert2cpu=True)


def gather(trainer, asked, args):
    """Write the truth of a job into ``asked.out``; of LoRA under the keys of the model below the adapters."""
    model = trainer.model.model if getattr(asked, "lora", "") else trainer.model
    _show(trainer, model)
    if "unfuse" in getattr(asked, "patch", ""):
        import patches

        patches.unfuse(trainer.optimizer, model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    os.makedirs(asked.out, exist_ok=True)
    mine, *others = (os.path.join(asked.out, f"_pieces_{(rank + n) % ranks}.pkl") for n in range(ranks))
    with open(mine + ".new", "wb") as file:
        pickle.dump(_held(trainer, model, args, rank, ranks), file, 4)
    os.replace(mine + ".new", mine)
    if rank == 0:  # the trainer can have called barriers that not all ranks were in
        while not all(map(os.path.exists, others)):
            time.sleep(0.02)
        merge(asked.out, ranks)
        if getattr(asked, "lora", ""):
            _split_lora(asked.out)


def _held(trainer, model, args, rank, ranks):
    """What this rank holds, and where."""
    chain = _chain(trainer.optimizer)
    inner, hybrid = chain[-1], args.use_hybrid_parallel
    place = {
        "tp": args.tensor_parallel_rank if hybrid else 0,
        "pp": args.pipeline_parallel_rank if hybrid else 0,
        "sh": args.sharding_parallel_rank if hybrid else 0,
        "dp": args.data_parallel_rank if ranks > 1 else 0,
        "rank": rank,
        "ep": RECIPE["rank"]
        if RECIPE["world"] > 1
        else getattr(args, "expert_parallel_rank", 0)
        if hybrid
        else 0,
        "msh": getattr(args, "moe_sharding_parallel_rank", 0) if hybrid else 0,
    }
    views = {
        name: [view._param_begin - view._index, view._param_end - view._index]
        for one in chain
        for buffer in one.__dict__.get("_comm_buffer_list") or []
        for name, view in buffer._sharding_param_grad_view.items()
    }
    of_stage3 = {}
    if "GroupShardedStage3" in type(trainer.model_wrapped).__name__:
        for name, ranges in trainer.model_wrapped._param2buffer.items():
            of_stage3[name] = [int(at) for at in ranges[place["sh"]]]
    masters, averages, of_parameters = inner._master_weights or {}, {}, {}
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "NonZCCEMACallback":
            averages, of_parameters = dict(callback.buffer.master_weights), dict(callback.buffer.model_params)
    state = model.state_dict()
    experts, pieces = local_experts(state), []
    for key, parameter in state.items():
        if str(parameter.dtype).endswith("int64"):
            continue
        name, cut_by_tp = parameter.name, hybrid and is_tp(key, parameter, args)
        base = {
            "struct": global_key(key, experts),
            "local": key,
            "name": name,
            "dtype": str(parameter.dtype).split(".")[-1],
            "tpd": cut_by_tp,
            "isd": bool(getattr(parameter, "is_distributed", False)),
            "nosync": bool(getattr(parameter, "no_sync", False)),
            "sg": bool(parameter.stop_gradient),
            "axis": tp_axis(key, parameter) if cut_by_tp else None,
            "shape": [int(size) for size in parameter.shape],
        }
        pieces.append({**base, "kind": "param", "arr": _np(parameter), "flat": None})
        master = masters.get(name, masters.get("slice@" + name))  # stage 3
        held = {} if master is None else {"w_0": master}
        held |= _states(inner, name, master)
        if name in averages:
            held["ema_w_0"] = averages[name]
        for kind, tensor in held.items():
            array, flat = _np(tensor), None
            if "pow_acc" not in kind:
                flat = views.get(name)
                if flat is None and list(array.shape) != base["shape"]:
                    flat = of_stage3.get(name)
            if flat is not None:
                if flat[0] >= flat[1] and name in views:
                    continue
                assert array.size == flat[1] - flat[0], (key, kind, array.shape, flat)
            pieces.append({**base, "kind": kind, "arr": array, "flat": flat})
        # The average of a parameter without a master weight is of itself, and whole; of others it is not saved.
        if key in of_parameters and parameter.dtype == paddle.float32:
            pieces.append({**base, "kind": "ema", "arr": _np(of_parameters[key]), "flat": None})
    return {
        "coord": place,
        "pieces": pieces,
        "chain": [type(one).__name__ for one in chain],
        "lr": float(trainer.optimizer.get_lr()),
    }


def _states(inner, name, master):
    """The states of a parameter; right after loading they wait in a holder, until the first step."""
    names = ([] if master is None else [master.name]) + [name, "slice@" + name]  # the last of stage 3
    found = {}
    for word, tensors in inner._accumulators.items():
        tensor = next((tensors[one] for one in names if one in tensors), None)
        if tensor is not None:
            found[KIND.get(word, word)] = tensor
    if not found:
        waiting = getattr(inner, "_accumulators_holder", {})
        for word, kind in KIND.items():
            keys = [f"{one}_{word}_0" for one in names]
            if (key := next((key for key in keys if key in waiting), None)) is not None:
                found[kind] = waiting[key]
    return found


def merge(out, ranks):
    """Join the pieces of all ranks, and report what is no tensor."""
    found, report = collections.defaultdict(list), {}
    for rank in range(ranks):
        path = os.path.join(out, f"_pieces_{rank}.pkl")
        with open(path, "rb") as file:
            of_rank = pickle.load(file)
        os.unlink(path)
        report = report or {"chain": of_rank["chain"], "lr": of_rank["lr"]}
        for piece in of_rank["pieces"]:
            found[piece["struct"], piece["kind"]].append({**piece, "coord": of_rank["coord"]})
    report |= {
        "world": ranks,
        "replicas_checked": 0,
        "replica_mismatch": [],
        "names": {},
        "padding_nonzero": [],
    }
    report |= {"holders_columns": "rank,tp,pp,sh,ep,msh", "holders": {}}
    report |= {"slices_columns": "rank,tp,sh,ep,msh,begin,end", "slices": {}}
    whole, drifted = {}, {}
    for (key, kind), pieces in sorted(found.items()):
        report["names"].setdefault(key, sorted({piece["name"] for piece in pieces}))
        at = [[piece["coord"][axis] for axis in ("rank", "tp", "pp", "sh", "ep", "msh")] for piece in pieces]
        if kind == "param":
            report["holders"][key] = at
        if kind == "moment1_0" and pieces[0]["flat"] is not None:
            without_stage = [[*place[:2], *place[3:]] for place in at]
            report["slices"][key] = [
                [*place, *piece["flat"]] for place, piece in zip(without_stage, pieces, strict=True)
            ]
        name, dtype = (key, pieces[0]["dtype"]) if kind == "param" else (f"{key}.{kind}", "float32")
        value, others = _of_all_ranks(key, kind, pieces, report)
        whole[name] = paddle.to_tensor(value).astype(dtype)
        drifted |= {f"{name}@tp{tp}": paddle.to_tensor(one).astype(dtype) for tp, one in others.items()}
    _join_experts(whole)
    write_safetensors(whole, os.path.join(out, "truth.safetensors"))
    if drifted:
        write_safetensors(drifted, os.path.join(out, "truth_alt.safetensors"))
    with open(os.path.join(out, "truth_report.json"), "w") as file:
        json.dump(report, file, indent=0, default=lambda number: number.item())


def _of_all_ranks(key, kind, pieces, report):
    """The whole tensor, and of one that tp does not cut the copies of other tp ranks that had drifted, by rank."""
    of_tp = collections.defaultdict(list)
    for piece in pieces:
        of_tp[piece["coord"]["tp"]].append(piece)
    is_cut = pieces[0]["tpd"] and "pow_acc" not in kind
    parts, drifted = [], {}
    for tp, group in sorted(of_tp.items()):
        part = _of_tp_rank(key, kind, group, report)
        if is_cut or not parts:
            parts.append(part)
        elif not _same(key, kind, group[0], parts[0], part, report):
            drifted[tp] = part
    return (_joined(parts, key, pieces[0]["axis"]) if is_cut else parts[0]), drifted


def _of_tp_rank(key, kind, pieces, report):
    """A tp rank's tensor of its copies, or of its slices, of which the lowest rank's counts."""
    first = pieces[0]
    if first["flat"] is None:
        for piece in pieces[1:]:
            _same(key, kind, piece, first["arr"], piece["arr"], report)
        return first["arr"]
    count = int(np.prod(first["shape"]))
    flat = np.full(max(count, *(piece["flat"][1] for piece in pieces)), np.nan, "float32")
    for piece in pieces:
        place = flat[slice(*piece["flat"])]
        known = ~np.isnan(place)
        array = piece["arr"].reshape(-1)
        if known.any():
            _same(key, kind, piece, place[known], array[known], report)
        place[~known] = array[~known]
    assert not np.isnan(flat[:count]).any(), ("hole", key, kind)
    if flat.size > count and np.nanmax(np.abs(flat[count:])) != 0:
        report["padding_nonzero"].append([key, kind])
    return flat[:count].reshape(first["shape"])


def _same(key, kind, piece, first, other, report):
    """Compare two copies, and report what differs."""
    report["replicas_checked"] += 1
    if np.array_equal(first, other):
        return True
    report["replica_mismatch"].append([key, kind, piece["coord"], float(np.abs(first - other).max())])
    return False


def _join_experts(whole):
    """Fused experts of every expert rank, ``[experts / ep, …]``, make those of the model."""
    for first in [name for name in whole if "@ep0" in name]:
        names = [name for name in whole if re.sub(r"@ep\d+", "@ep0", name) == first]
        parts = [whole.pop(first.replace("@ep0", f"@ep{rank}")) for rank in range(len(names))]
        whole[first.replace("@ep0", "")] = parts[0] if "pow_acc" in first else paddle.concat(parts, axis=0)


def _split_lora(out):
    """Move the base's parameters, of which the checkpoint has none but those trained, to ``truth_base.safetensors``."""
    path = os.path.join(out, "truth.safetensors")
    tensors = _read_safetensors(path)

    def is_trained(key):
        of = key.rpartition(".")[0] if key.endswith(STATES) else key
        return "lora_" in of or any(of + state in tensors for state in STATES)

    base = {k: one for k, one in tensors.items() if "lora_" not in k and not k.endswith(STATES)}
    _write(path, {key: one for key, one in tensors.items() if is_trained(key)})
    _write(os.path.join(out, "truth_base.safetensors"), base)


def _read_safetensors(path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        content = file.read()
    return {
        key: (entry["dtype"], entry["shape"], content[slice(*entry["data_offsets"])])
        for key, entry in header.items()
    }


def write_safetensors(tensors, path):
    """Write tensors of Paddle as they are: bfloat16 as BF16."""
    arrays = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    entries = {
        key: (DTYPES[str(one.dtype).split(".")[-1]], [int(size) for size in one.shape], one.numpy().tobytes())
        for key, one in arrays.items()
    }
    _write(path, entries)


def _write(path, tensors):
    header, place = {}, 0
    for key, (dtype, shape, content) in sorted(tensors.items()):
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(content)]}
        place += len(content)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, (_, _, content) in sorted(tensors.items()):
            file.write(content)
