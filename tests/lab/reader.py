"""Reads checkpoints with NumPy and pickle alone, by the rules of the trainers and not by our code: all in float32."""

import collections
import glob
import json
import os
import pickle
import re
import struct

import numpy as np

FUSED = ("gate_up_fused_proj", "up_gate_proj", "gate_up_proj")
QKV = ("qkv_proj", "fused_rms_norm_linear.linear_weight")
"""Of the recipes, whose tp ranks have ``[q | k | v]`` of their own."""
NAMES = "StructuredToParameterName@@"
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def load(path):
    """The tensors of a safetensors file, bfloat16 as float32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        content = file.read()
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        raw = content[slice(*entry["data_offsets"])]
        if entry["dtype"] in ("BF16", "U16"):  # PaddleNLP calls it U16
            array = f32(np.frombuffer(raw, "uint16"))
        else:
            kind = {"F32": "float32", "F16": "float16", "I64": "int64"}[entry["dtype"]]
            array = np.frombuffer(raw, kind)
        tensors[key] = array.reshape(entry["shape"])
    return tensors


class Stub:
    """In the place of a class of Paddle."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state)

    def __hash__(self):
        return hash(str(self.__dict__))

    def __eq__(self, other):
        return self.__dict__ == other.__dict__


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return type(name, (Stub,), {}) if module.startswith("paddle") else super().find_class(module, name)


def unpickled(path):
    with open(path, "rb") as file:
        return Unpickler(file).load()


def f32(array):
    return (
        (array.astype("uint32") << 16).view("float32")
        if array.dtype == np.uint16
        else np.asarray(array, "float32")
    )


def value(entry):
    return np.asarray(entry[1] if isinstance(entry, tuple) else entry)


def read(folder, like, config=None, local_ids=False):
    """Every tensor, called as in the truth, of a checkpoint in any format."""
    folder = str(folder)
    if glob.glob(folder + "/*model_state*.pdparams"):
        return of_ranks(folder, like, config or {}, local_ids)
    if not os.path.isdir(folder + "/model_state"):
        return unified(folder, like)
    found = {}
    for name in ("model_state", "optimizer_state", "master_weight"):
        if os.path.isdir(f"{folder}/{name}"):
            found |= flex(f"{folder}/{name}")
    if os.path.isdir(folder + "/ema_state"):
        for key, array in flex(folder + "/ema_state").items():
            found[f"{key[:-4]}.ema_w_0" if key.endswith(".w_0") else f"{key}.ema"] = array
    return found


# ---- files of ranks


class Files:
    """Those of a checkpoint, by cell (tp, pp, ep): names of parameters and shapes.

    ep is in a file's name ("moe_shardingNN", "moeNN") or follows from the others: with ``each`` = sharding /
    moe_sharding, ep = (shard mod each) * tp degree + tp.
    """

    def __init__(self, folder, local_ids):
        models = glob.glob(folder + "/model_state*.pdparams") + glob.glob(
            folder + "/lora_model_state*.pdparams"
        )
        self.models, self.optimizers = sorted(models), sorted(glob.glob(folder + "/optimizer*.pdopt"))
        self.averages, self.local_ids = sorted(glob.glob(folder + "/ema*.pdopt")), local_ids
        self.opened = {path: unpickled(path) for path in (*self.models, *self.optimizers, *self.averages)}
        self.tp, meta = degree("tp", self.optimizers), None
        if os.path.exists(folder + "/model_meta.json"):
            with open(folder + "/model_meta.json") as file:
                meta = json.load(file)
        self.ep = meta["parallel_config"].get("ep_degree", 1) if meta else degree("moe_sharding", self.models)
        self.each = max(self.ep // self.tp, 1)
        if self.ep > 1 and meta:
            over = max(meta["parallel_config"]["moe_sharding_degree"], 1)
            assert degree("shard", self.optimizers) // over == self.each, meta["parallel_config"]
        self.names, self.shapes = collections.defaultdict(dict), collections.defaultdict(dict)
        for path in self.models:
            cell, _ = self.place(path)
            self.names[cell].update(self.opened[path].pop(NAMES, {}))
            self.shapes[cell].update({key: value(one).shape for key, one in self.opened[path].items()})
        for name, of_cell in (meta or {"sharding_metas": {}})["sharding_metas"].items():
            cell = tuple([int(digits) for digits in re.findall(r"\d+", name)] + [0])[:3]
            self.names[cell] = of_cell["structure_name_mapping"]
            self.shapes[cell] = {key: tuple(one[0]) for key, one in of_cell["param_meta"].items()}
        # PaddleNLP, save_sharded_model, experts over dp: model_meta.json describes dp rank 0 only, model_state files
        # are empty. No file has the names of other ranks' experts: they are those of rank 0 with later numbers.
        for path in self.optimizers:
            cell, first = self.place(path)[0], (*self.place(path)[0][:2], 0)
            if number("moe", path) and not self.names.get(cell) and self.names.get(first):
                count = experts_in(self.names[first])
                for of in (self.names, self.shapes):
                    of[cell] = {later(key, cell[2] * count): one for key, one in of[first].items()}
        self.experts = experts_in(key for of_cell in self.names.values() for key in of_cell)

    def place(self, path):
        """Cell and rank of sharding."""
        tp, pp, shard = (number(axis, path) or 0 for axis in ("tp", "pp", "shard"))
        ep = number("moe_sharding", path)
        if ep is None:
            ep = number("moe", path)  # use_expert_parallel over dp
        if ep is None:
            ep = (shard % self.each) * self.tp + tp if self.ep > 1 else 0
        return (tp, pp, ep), shard

    def key(self, key, cell):
        """In the whole model: ranks of ERNIE number their experts from 0 on; fused ones are marked with the rank."""
        if not self.local_ids:
            return key
        if self.ep > 1 and re.search(r"\.experts\.(up_gate_proj|down_proj)\.", key):
            return f"{key}@ep{cell[2]}"
        return later(key, cell[2] * self.experts)


def number(axis, path):
    """A rank in a file's name."""
    found = re.search(rf"[._]{axis}(\d+)", os.path.basename(path))
    return int(found[1]) if found else None


def degree(axis, paths):
    """As many ranks as the names of files have."""
    return max((number(axis, path) or 0 for path in paths), default=0) + 1


def experts_in(keys):
    return max(
        (int(found[1]) + 1 for key in keys if (found := re.search(r"\.experts\.(\d+)\.", key))), default=0
    )


def later(key, first):
    """The key of an expert with a number that much higher."""
    return re.sub(r"(\.experts\.)(\d+)(?=\.)", lambda found: f"{found[1]}{int(found[2]) + first}", key)


def of_ranks(folder, like, config, local_ids):
    files = Files(folder, local_ids)
    found = collections.defaultdict(dict)
    """Key of the truth → tp rank → its tensor."""
    for path in files.models:
        cell, _ = files.place(path)
        for key, one in files.opened[path].items():
            found[files.key(key, cell)].setdefault(cell[0], f32(value(one)))
    for (key, kind, tp, _), slices in {
        **_slices(files, files.optimizers, {"w_0": "w_0"} | dict.fromkeys(STATES)),
        **_slices(files, files.averages, {"w_0": "ema_w_0"}),
    }.items():
        found[f"{key}.{kind}"].setdefault(tp, _whole(kind, slices))
    for path in files.averages:
        cell, _ = files.place(path)
        for key, one in files.opened[path].items():
            if key not in ("master_weights", NAMES):
                found[files.key(key, cell) + ".ema"].setdefault(cell[0], f32(value(one)))
    for key in [key for key in found if "@ep0" in key]:  # fused experts of every expert rank
        of_ep = [found.pop(key.replace("@ep0", f"@ep{rank}")) for rank in range(files.ep)]
        found[key.replace("@ep0", "")] = {
            tp: one if "pow" in key else np.concatenate([other[tp] for other in of_ep], axis=0)
            for tp, one in of_ep[0].items()
        }
    whole = {}
    for key, of_tp in found.items():
        parts = [of_tp[tp] for tp in sorted(of_tp)]
        whole[key] = _joined(parts, key, like[key].shape, config) if key in like else parts[0]
    for key in [key.removesuffix(".w_0") for key in whole if key.endswith(".w_0")]:
        if key not in whole:  # sharded saving leaves out parameters that have a master weight
            bits = whole[key + ".w_0"].view("uint32")
            whole[key] = f32(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16"))
    return whole


def _slices(files, paths, kinds):
    """Key, state, tp and pp → what ranks of sharding hold, each with the shape on a tp rank.

    Names are resolved in the cell of each file: an expert is absent from the cells of other expert ranks.
    """
    found = collections.defaultdict(list)
    for path in sorted(paths, key=lambda path: files.place(path)[1]):
        (cell, _), content = files.place(path), files.opened[path]
        masters = content.get("master_weights", {})
        for key, name in files.names.get(cell, {}).items():
            for kind, said in kinds.items():
                if kind == "w_0":
                    one = masters.get(name, masters.get("slice@" + name))  # of stage 3
                else:
                    one = content.get(f"{name}_fp32_master_0_{kind}", content.get(f"{name}_{kind}"))
                if one is not None:
                    place = files.key(key, cell), said or kind, *cell[:2]
                    found[place].append((f32(value(one)), tuple(files.shapes[cell][key])))
    return found


def _whole(kind, slices):
    """Of copies the first, of slices, which may be padded, all."""
    (first, shape), size = slices[0], int(np.prod(slices[0][1]))
    if "pow" in kind:
        assert all(np.array_equal(first, other) for other, _ in slices)
        return first
    if first.shape == shape and sum(one.size for one, _ in slices) != size:
        return first
    flat = np.concatenate([one.reshape(-1) for one, _ in slices])
    assert flat.size >= size
    assert not flat[size:].any(), "padding"
    return flat[:size].reshape(shape)


def _joined(parts, key, shape, config):
    if len(parts) == 1 or parts[0].shape == tuple(shape):
        return parts[0]
    axis = next(i for i, n in enumerate(shape) if parts[0].shape[i] != n)
    width, places = parts[0].shape[axis], []
    heads, kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if any(name in key for name in QKV) and kv and kv != heads:
        each = width // (heads + 2 * kv)
        places = [each * heads, each * (heads + kv)]
    elif any(name in key for name in FUSED):
        places = [width // 2]
    of_parts = zip(*(np.split(part, places, axis=axis) for part in parts), strict=True)
    return np.concatenate([one for same in of_parts for one in same], axis=axis)


# ---- other formats


def flex(folder):
    """A folder of a FlexCheckpoint."""
    metadata = unpickled(glob.glob(folder + "/*.metadata")[0])
    opened, places, found = {}, collections.defaultdict(list), {}
    for index, name in metadata.storage_metadata.items():
        places[index.tensor_key].append((tuple(int(n) for n in index.global_offset), index, name))
    for key, pieces in metadata.state_dict_metadata.items():
        shapes = {tuple(int(n) for n in one.global_offset): tuple(one.local_shape) for one in pieces}
        shape = tuple(pieces[0].__dict__.get("global_shape") or ())
        if not shape:
            ends = [[o + n for o, n in zip(*place, strict=True)] for place in shapes.items()]
            shape = tuple(max(of_axis) for of_axis in zip(*ends, strict=True))
        blocks = {offset: np.full(int(np.prod(of)), np.nan, "float32") for offset, of in shapes.items()}
        for offset, index, name in places[key]:
            if name not in opened:
                opened[name] = unpickled(f"{folder}/{name}")
            array = f32(value(opened[name][key])).reshape(-1)
            whole = 0, blocks[offset].size
            start, stop = index.flattened_range if index.__dict__.get("is_flattened") else whole
            blocks[offset][int(start) : int(stop)] = array[: int(stop) - int(start)]
        full = np.full(shape, np.nan, "float32")
        for offset, block in blocks.items():
            of = shapes[offset]
            full[tuple(slice(o, o + n) for o, n in zip(offset, of, strict=True))] = block.reshape(of)
        ranks = len({offset[-1] for offset in blocks if offset})
        if ranks > 1 and any(name in key for name in FUSED):  # [gate 0 | up 0 | gate 1 | up 1 …]
            full = _joined(np.split(full, ranks, axis=-1), key, full.shape, {})
        found[key] = full
    return found


def unified(folder, like):
    found = collections.defaultdict(list)
    for path in sorted(glob.glob(folder + "/*.safetensors")):
        for key, array in load(path).items():
            file = os.path.basename(path)
            if file.startswith("master"):
                key += ".w_0"
            elif not file.startswith("model"):
                key = ".".join(key.rsplit("/", 1))
            found[key].append(array)
    # PaddleFormers 1.2.0 with split_param: every rank's file holds its own flat padded slice under the same key (the
    # index names only one of the files); their order is that of the ranks.
    return {
        key: np.concatenate(parts)[: like[key].size].reshape(like[key].shape)
        if key in like and parts[0].shape != like[key].shape and parts[0].ndim == 1
        else parts[0]
        for key, parts in found.items()
    }
