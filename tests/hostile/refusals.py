"""Checkpoints that lie, contradict themselves or are not whole: what is done to a sound one, and what the refusal says.

In the tables: the case, the name of a row, the change, and what the refusal tells: the class of the error where it is
not any, and facts that the message states (" … ": and). `test_refused_checkpoints.py` converts each, and
`test_ways_out.py` reads every message.
"""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    ReshardError,
    RuleError,
    UnsupportedError,
)
from tests.hostile.damage import (
    Change,
    added,
    config,
    copy,
    drop,
    edit_arrays,
    edit_json,
    edit_pickle,
    every,
    holder,
    in_array,
    in_arrays,
    in_cell,
    in_index,
    in_pickle,
    in_weight_map,
    meta,
    put,
    remove,
    rename,
    rename_entry,
    sound,
    truncate,
)


class Damage(NamedTuple):
    """A sound checkpoint, what is done to it, how it is converted, and what the refusal tells."""

    name: str
    case: str
    change: Change
    request: dict[str, Any]
    told: Sequence[Any]

    @property
    def error(self) -> type[ReshardError]:
        """The class of the refusal."""
        return next((told for told in self.told if not isinstance(told, str)), ReshardError)

    @property
    def facts(self) -> list[str]:
        """What its message states."""
        return [fact for told in self.told if isinstance(told, str) for fact in told.split(" … ")]


DEMO = "mp2pp2sh2_s1v2_meta_ema"
V1 = "sh2_s1v1_meta_fp32"
PLAIN = "mp2_tied"


def drop_slices(data: dict) -> None:
    """Remove every entry of one parameter from one rank's optimizer file."""
    for key in [k for k in data if k.startswith("linear_7.w_0_")]:
        del data[key]
    del data["master_weights"]["linear_7.w_0"]


def shorten(data: dict) -> None:
    name, array = data["linear_7.w_0_fp32_master_0_moment1_0"]
    data["linear_7.w_0_fp32_master_0_moment1_0"] = (name, array[:-8])


def add_parameter(data: dict) -> None:
    data["model.layers.0.self_attn.gate.weight"] = np.zeros((64,), np.uint16)
    data["StructuredToParameterName@@"]["model.layers.0.self_attn.gate.weight"] = "linear_99.w_0"


def powers(after: int, of: str = "") -> Callable[[dict], None]:
    """Powers of the betas as they are after so many steps, of all parameters or those of one."""

    def change(data: dict) -> None:
        for key in data:
            if key.startswith(of) and "_pow_acc" in key:
                beta = np.float32(0.9 if "beta1" in key else 0.95)
                data[key] = np.full_like(data[key], np.multiply.accumulate(np.full(after + 1, beta))[-1])

    return change


def stolen(folder: Path) -> dict:
    """A tensor that another rank owns too."""
    with (folder / "optimizer.shard01.pdopt").open("rb") as file:
        other = pickle.load(file)
    return {"linear_2.w_0_moment1_0": other["linear_2.w_0_moment1_0"]}


OPT = "optimizer.tp00_pp00_shard01.pdopt"
HYBRID = {
    DEMO: {
        "missing shard": (remove(OPT), OPT, "missing"),
        "missing ema shard": (remove("ema.tp01_pp01_shard00.pdopt"), "ema.tp01_pp01_shard00.pdopt"),
        "missing model_state": (remove("model_state.tp00_pp01_shard00.pdparams"), "model_state.tp00_pp01_shard00"),
        "missing config": (remove("config.json"), "config.json is missing"),
        "truncated shard": (truncate(OPT, 100), OPT),
        "empty file": (put(OPT), OPT),
        "duplicated shard": (copy(OPT, "optimizer.tp00_pp00_shard001.pdopt"), "shard001 … same rank"),
        "extra shard": (copy(OPT, "optimizer.tp00_pp00_shard02.pdopt"), "sharding_degree=2 … 3"),
        "extra tensor file": (copy(OPT, "optimizer.old.pdopt"), "optimizer.old.pdopt"),
        "unknown tensor file": (copy(OPT, "momentum.pdparams"), "momentum.pdparams"),
        "unfinished save": (remove("saved_signal_3"), "7 saved_signal_* … 8 ranks"),
        "degrees contradict": (meta(lambda data: data["parallel_config"].update(mp_degree=4)), "mp_degree=4 … 2"),
        "expert parallel": (meta(lambda data: data["parallel_config"].update(ep_degree=2)),
            "moe_sharding_degree=0 … ep=2"),
        "unknown strategy": (meta(lambda data: [m.update(sharding_strategy="MuonSharding")
            for m in data["sharding_metas"].values()]), "MuonSharding"),
        "strategy of another kind": (in_cell("tp00_pp00", lambda cell: cell.update(sharding_strategy=[])),
            "tp00_pp00 … []"),
        "overlap of another kind": (in_cell("tp00_pp00", lambda cell: cell.update(enable_overlap="yes")),
            "tp00_pp00 … 'yes'"),
        "an absurd shape": (in_cell("tp00_pp00", lambda cell: cell["param_meta"][
            "model.embed_tokens.weight"].__setitem__(0, [2**63, 64])),
            "model.embed_tokens.weight … 9223372036854775808"),
        "strategies contradict": (in_cell("tp00_pp01", lambda cell: cell.update(sharding_strategy="ShardingV1")),
            "stage1v2 … stage1v1"),
        "wrong strategy": (meta(lambda data: [m.update(sharding_strategy="ShardingV1")
            for m in data["sharding_metas"].values()]), "stage1v1"),
        "one cell too many": (meta(lambda data: data["sharding_metas"].update(
            tp02_pp00=data["sharding_metas"]["tp01_pp00"])), "tp02_pp00"),
        "no such cell": (meta(lambda data: data["sharding_metas"].pop("tp01_pp01")), "tp01_pp01"),
        "no param_meta under v2": (in_cell("tp00_pp00", lambda cell: cell.pop("param_meta")),
            "model.embed_tokens.weight … param_meta … stage1v2"),
        "tp ranks hold different tensors": (in_cell("tp01_pp00",
            lambda cell: cell["structure_name_mapping"].update({"model.extra": "extra_0.w_0"})), "model.extra"),
        "is_distributed contradicts the rule": (meta(
            lambda data: [m["param_meta"]["model.layers.0.self_attn.q_proj.weight"].__setitem__(2, False)
            for c, m in data["sharding_metas"].items() if c.endswith("pp00")]),
            "model.layers.0.self_attn.q_proj.weight … is_distributed=False … dim 1"),
        "shape contradicts the config": (config(intermediate_size=100),
            "model.layers.0.mlp.gate_proj.weight … (64, 100) … (64, 96)"),
        "layer count contradicts": (config(num_hidden_layers=5), "5 decoder layers … layer 4"),
        "unknown model": (config(model_type="mystery"), "'mystery' … --rules"),
        "slice missing in one rank": (in_pickle(OPT, drop_slices), "q_proj"),
        "slice too short": (in_pickle(OPT, shorten), "2040 … 2048"),
        "unknown accumulator": (in_pickle(OPT, rename_entry("linear_7.w_0_fp32_master_0_moment1_0",
            "linear_7.w_0_fp32_master_0_moment9_0")),
            "linear_7.w_0_fp32_master_0_moment9_0 … not a known accumulator"),
        "accumulator of an unknown parameter": (in_pickle(OPT,
            rename_entry("linear_7.w_0_fp32_master_0_moment1_0", "linear_77.w_0_fp32_master_0_moment1_0")),
            "linear_77.w_0_fp32_master_0_moment1_0"),
        "learning rates contradict": (in_pickle(OPT, lambda data: data["LR_Scheduler"].update(last_epoch=4)),
            "LR_Scheduler"),
        "offloaded optimizer": (in_pickle(OPT, lambda data: data.update(
            offload_buffer=("offload_buffer", np.zeros(4, np.float32)))), "offload_buffer"),
        "not a pickle": (put(OPT, b"\x80\x04not a pickle."), OPT),
        "not json": (put("model_meta.json", b"{"), "model_meta.json"),
        "config that says one thing twice": (added("config.json", '"model_type": "llama"'), "config.json … model_type"),
        "config with NaN": (added("config.json", '"added": NaN'), "config.json … NaN"),
        "meta that says one thing twice": (added("model_meta.json", '"parallel_config": {}'),
            "model_meta.json … parallel_config"),
        "meta with NaN": (added("model_meta.json", '"added": NaN'), "model_meta.json … NaN"),
        "dtype that is not known": (in_cell("tp00_pp00",
            lambda cell: cell["param_meta"]["model.embed_tokens.weight"].__setitem__(1, 99)),
            "model.embed_tokens.weight … 99"),
    },
    V1: {
        "owner contradicts": (meta(lambda data: data["sharding_metas"]["tp00_pp00"]["param2rank"].update(
            {"linear_2.w_0": 0})),
            "model.layers.0.self_attn.v_proj.weight … param2rank says rank 0 … optimizer.shard01.pdopt"),
        "several ranks hold a whole tensor": (lambda folder: edit_pickle(folder, "optimizer.shard00.pdopt",
            lambda data: data.update(stolen(folder))), "several ranks"),
    },
    PLAIN: {
        "tensor without a rule": (every(*(in_pickle(f"model_state.{tp}.pdparams", add_parameter)
            for tp in ("tp00", "tp01"))), "model.layers.0.self_attn.gate.weight … no row"),
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------- unified

FOUR, SLICES, OWN = (
    f"small-unified/{name}" for name in ("nlp_uc_mp2pp2", "uc_sh2_s1v2", "nlp_uc_mp2sh2_ignoremerge")
)
NORM = "llama.layers.1.input_layernorm.weight"
FIRST = "00001-of-00004.safetensors"
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")


def of_another_file(kind: str, key: str, to: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """A second file holds a tensor too, and not as the first does."""

    def damage(folder: Path) -> None:
        values = safetensors.numpy.load_file(holder(folder, kind, key))[key]
        edit_arrays(folder / to, lambda arrays: arrays.update({key: change(values)}))

    return damage


def first_rank_in_half_precision(folder: Path) -> None:
    """The second rank's own slice of a moment, in the first rank's file, in float16."""
    paths = sorted(folder.glob("optimizer-*"))
    key = next(k for k in safetensors.numpy.load_file(paths[-1]) if k.endswith("moment1_0"))
    edit_arrays(paths[0], lambda arrays: arrays.update({key: np.zeros(256, np.float16)}))


def without_a_slice(folder: Path) -> None:
    """Nothing in the index tells that there were two."""
    first, second = (
        safetensors.numpy.load_file(folder / f"master_weights-0000{n}-of-00002.safetensors") for n in (1, 2)
    )
    [key] = first.keys() & second.keys()
    key = f"{key}/moment1_0"
    [other] = {*folder.glob("optimizer-*")} - {holder(folder, "optimizer", key)}
    edit_arrays(other, lambda arrays: arrays.pop(key))


def masters_alone(folder: Path) -> None:
    """Routers are float32 themselves, and nothing tells them from master weights."""
    name = "model-00001-of-00001.safetensors"
    remove("model*")(folder)
    rename("master_weights-00001-of-00001.safetensors", name)(folder)
    rename("master_weights.safetensors.index.json", "model.safetensors.index.json")(folder)
    in_index("model", lambda index: index.update(weight_map=dict.fromkeys(index["weight_map"], name)))(folder)


def as_format(entry: bytes) -> Change:
    """What the header says of the layout of weights."""
    path = "model-00001-of-00001.safetensors"
    return lambda folder: (folder / path).write_bytes(
        (folder / path).read_bytes().replace(b'"format":"pt"', entry, 1)
    )


UNIFIED = {
    FOUR: {
        **{f"missing file of {kind}": (remove(f"{kind}-00003-*"), CheckpointError,
            f"1 of 4 {kind} files are missing: {kind}-00003-of-00004")
            for kind in ("model", "optimizer", "master_weights")},
        **{f"missing index of {kind}": (remove(f"{kind}.safetensors.index.json"), CheckpointError,
            f"{kind}.safetensors.index.json is missing") for kind in ("model", "optimizer", "master_weights")},
        "index that says one thing twice": (added("model.safetensors.index.json", '"weight_map": {}'), CheckpointError,
            "model.safetensors.index.json … weight_map"),
        "missing kind that its index names": (remove("master_weights-*"), CoverageError,
            "index.json says that master_weights-0000 … does not"),
        "index names another file": (in_weight_map("optimizer",
            lambda names: names.update({f"{NORM}/moment1_0": f"optimizer-{FIRST}"})), CoverageError,
            f"{NORM}/moment1_0: ", f"says that optimizer-{FIRST} holds it"),
        "index without a key": (in_weight_map("model", lambda names: names.pop(NORM)), CoverageError,
            f"{NORM}: model.safetensors.index.json does not list it"),
        **{f"too many: {path}": (copy(f"model-{FIRST}", path), said, path) for path,
            said in (("model-00001-of-00002.safetensors", "cannot belong to the same checkpoint"),
            ("model-00005-of-00004.safetensors", "must be numbered from 1 to 4"),
            ("optimizer.tp00.safetensors", "the files belong to two checkpoints"),
            ("weights.safetensors", "has no meaning in a unified checkpoint"),
            ("optimizer.pdopt", "has no meaning in a unified checkpoint"),
            ("peft_model-00001-of-00001.safetensors", "in one folder with peft_model-00001-of-00001"),
            ("optimizer.shard00.safetensors_shard_0001", "the files belong to two checkpoints"))},
        "copies of two shapes": (of_another_file("optimizer", f"{NORM}/moment2_0", f"optimizer-{FIRST}",
            lambda values: values[:8]), CoverageError, f"{NORM} (moment2): stored with shape (8,), (16,)"),
        "integer moment": (in_array("optimizer", f"{NORM}/moment1_0", lambda values: values.astype(np.int8)), NORM,
            "stored as int8, a floating dtype is expected"),
        "master weight in half precision": (in_array("master_weights", NORM,
            lambda values: values.astype(np.float16)), NORM, "stored as float16, float32 is expected"),
        "trained integers": (in_array("model", NORM, lambda values: values.astype(np.uint8)), NORM,
            "trained, but stored as uint8"),
        "missing moment of one tensor": (drop("optimizer", f"{NORM}/moment2_0"), CoverageError,
            f"{NORM} (moment2): no file holds it, but other parameters have it"),
        "missing master weight": (drop("master_weights", NORM), CoverageError,
            f"{NORM} (master_weight): no file holds it"),
        **{f"missing everywhere: {key}": (every(drop("model", key), drop("master_weights", key),
            drop("optimizer", *(f"{key}/{state}" for state in STATES))), CoverageError,
            f"{key}: no file holds it, and every model")
            for key in (NORM, "llama.norm.weight", "llama.layers.0.mlp.up_proj.weight")},
        "missing layer": (config(num_hidden_layers=3), CheckpointError,
            "config.json says 3 decoder layers; layer 2 is in only one"),
        "unknown state in a file": (every(in_arrays(f"optimizer-{FIRST}",
            lambda arrays: arrays.update({f"{NORM}/velvet_0": np.zeros(16, np.float32)})),
            in_weight_map("optimizer", lambda names: names.update({f"{NORM}/velvet_0": f"optimizer-{FIRST}"}))),
            CheckpointError, "velvet_0 is not a known accumulator"),
    },
    OWN: {
        "missing rank": (remove("optimizer.tp01_shard00.*"), CheckpointError,
            "optimizer: the file of the rank tp=1 pp=0 shard=0 is missing"),
    },
    SLICES: {
        "two dtypes of one tensor": (first_rank_in_half_precision, CoverageError,
            "stored as float16 and as float32 … 00001 … 00002"),
        "missing slice": (without_a_slice, CoverageError, "(moment1): its slices have … elements in total, but"),
        "whole tensor among slices": (in_array("master_weights", "model.layers.0.mlp.down_proj.weight",
            lambda values: values[: 24 * 16].reshape(24, 16)), CoverageError,
            "model.layers.0.mlp.down_proj.weight (master_weight): stored with shape (24, 16), but other tens"),
    },
    "small-unified/uc_sh2_s1v1_quant": {
        "quantised states": (every(), UnsupportedError,
            "ckpt_quant_stage is O1: quantised … save with ckpt_quant_stage O0"),
        "quantised states whose index does not say so": (
            in_index("optimizer", lambda index: index.pop("ckpt_quant_stage")), "moment"),
    },
    "small-unified/moe_uc_single_tohf": {
        "master weights of a mixture without its weights": (masters_alone, UnsupportedError,
            "skip_save_model_weight … cannot be derived"),
    },
    "small-unified/uc_sh2_s1v1_skip": {
        "float32 weights of an unknown training": (lambda folder: edit_json(folder, "config.json",
            lambda data: data.pop("dtype")), UnsupportedError, "dtype=None … skip_save_model_weight"),
    },
    "small-unified/uc_sh2_s1v1_tohf": {
        "weights without a layout": (as_format(b'"fabric":"pt"'), CheckpointError,
            "model-00001-of-00001 … format=None; np, pd or pt is expected"),
        "weights of another layout": (as_format(b'"format":"np"'), RuleError,
            "expect the shape (24, 16), the files hold (16, 24)"),
    },
    "small-unified/mp2pp2_tohf": {
        "weights of a rank under another name": (rename("model.tp00_pp00.safetensors",
            "weights.tp00_pp00.safetensors"), CheckpointError,
            "weights.tp00_pp00.safetensors: not the weights of a rank"),
    },
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------- flex

FLEX = "dense/fc_single"


def take(case: str, name: str, to: str = "") -> Change:
    """A file or folder of another real checkpoint."""

    def change(folder: Path) -> None:
        source, target = sound(case) / name, folder / (to or name)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)

    return change


DIST = {
    FLEX: {
        "metadata twice": (copy("model_state/0.metadata", "model_state/1.metadata"),
            "1.metadata: model_state/0.metadata describes the same folder; one of them is stale"),
        "metadata of an earlier save in more files": (take("dense/fc_sh2_s1v2", "model_state/0.metadata"),
            "model_state/0.metadata: names 1_0.distcp, which is missing"),
        "missing metadata": (remove("master_weight/0.metadata"),
            "master_weight/ is missing or has no .metadata file"),
        "missing states": (remove("optimizer_state"), "optimizer_state/ is missing or has no .metadata file"),
        "missing data": (remove("master_weight/0_0.distcp"),
            "master_weight/0.metadata: names 0_0.distcp, which is missing"),
        "data that no metadata name": (copy("model_state/0_0.distcp", "model_state/5_0.distcp"),
            "model_state/5_0.distcp: holds … and model_state/0.metadata does not name it"),
        "data of two kinds": (put("model_state/1_0.safetensors", (2).to_bytes(8, "little") + b"{}"),
            "model_state: data files of several kinds, distcp, safetensors"),
        "cut data": (truncate("model_state/0_0.distcp", 1000), "model_state/0_0.distcp"),
        "beside hybrid": (put("optimizer.pdopt"), "optimizer.pdopt: lies beside a FlexCheckpoint"),
        "beside weights": (put("model.safetensors"), "model.safetensors: lies beside a FlexCheckpoint"),
        "beside auto-parallel": (take("dense/auto_dp2mp2", "dist_ckpt"),
            "dist_ckpt/0.metadata to one of auto-parallel training"),
        "no config": (every(),
            "config.json is missing, and the other files do not tell the order of parameters, and their names"),
    },
}  # fmt: skip

# ---------------------------------------------------------------------------------- files without a role

EXPORT, MODEL = "exports/llama", {"format": "huggingface"}
UNKNOWN_JOB = remove("training_args.bin")


def average_of_step(step: int) -> Change:
    return put("ema.json", b'{"divide_by": 0.5, "step": %d}' % step)


SCALER = (take("states/fp16_single", "scaler.pdparams"), CheckpointError, "scaler.pdparams", " fp16 is False")
ROLES = {
    FLEX: {"scaler of another job, flex": SCALER},
    "dense/single": {
        "scaler of another job": SCALER,
        "weights of another save": (take("dense/single_tohf", "model.safetensors"), CheckpointError,
            "model.safetensors and model_state.pdparams"),
        "index of another save": (take(EXPORT, "model.safetensors.index.json"), CheckpointError,
            "model.safetensors.index.json"),
        "scaler beside bfloat16": (every(UNKNOWN_JOB, take("states/fp16_single", "scaler.pdparams")), CheckpointError,
            "scaler.pdparams … the parameters are bfloat16"),
        "adapter's config": (take("states/lora_single", "lora_config.json"), CheckpointError,
            "lora_config.json … adapter"),
        "average of nothing": (average_of_step(3), CheckpointError, "ema.json: describes a moving average"),
    },
    EXPORT: {
        "meta of another save": (take("dense/sh2_s1v1_meta", "model_meta.json"), CheckpointError, "model_meta.json"),
        "schedule without an optimizer": (take("dense/single", "scheduler.pdparams"), CheckpointError,
            "scheduler.pdparams … no optimizer states"),
    },
    DEMO: {
        "average that the trainer kept": (average_of_step(3), CheckpointError, "ema.json … the trainer kept the one"),
        "averages that the trainer kept none of": (take("dense/single", "training_args.bin"), CheckpointError,
            "ema.tp00_pp00_shard00.pdopt … the trainer kept none"),
    },
}  # fmt: skip

# --------------------------------------------------------------------------------- steps that do not agree

NLP, SECOND = "nlp_fused_mp2", "optimizer.shard01.pdopt"
STEPS = {
    NLP: {
        "schedule of another step": (in_pickle("scheduler.pdparams", lambda data: data.update(last_epoch=6)),
            CheckpointError, "scheduler.pdparams: last_epoch is 6, LR_Scheduler in optimizer.tp00.pdopt says 3"),
        "schedule with another rate": (in_pickle("scheduler.pdparams",
            lambda data: data.update(last_lr=math.nextafter(data["last_lr"], 1))), CheckpointError,
            "scheduler.pdparams: last_lr is 0.00194"),
        **{f"trainer state of step {step}": (lambda folder,
            step=step: edit_json(folder, "trainer_state.json", lambda data: data.update(global_step=step)),
            CheckpointError, f"trainer_state.json: global_step is {step}, last_epoch in scheduler.pdparams is 3")
            for step in (2, 6, 3000)},
    },
    V1: {
        "one power of another step": (in_pickle(SECOND, powers(2, "linear_9.w_0_beta1")), CheckpointError,
            "beta1_pow_acc, beta2_pow_acc): 0.7289 … and 0.8145 … optimizer.shard0"),
        "optimizers of two steps": (in_pickle(SECOND, powers(2)), CheckpointError,
            "the files are of different checkpoints … shard00.pdopt are after 3 steps … shard01.pdopt after 2"),
        "optimizer of another step than its schedule": (every(*(in_pickle(f"optimizer.shard0{rank}.pdopt", powers(6))
            for rank in (0, 1))), CheckpointError, "after 6 steps, but the learning-rate schedule is at step 3"),
    },
}  # fmt: skip

DAMAGES = (
    *(
        Damage(name, case, change, request, told)
        for table, request in (
            *((table, {"to": "tp=1"}) for table in (HYBRID, UNIFIED, DIST, STEPS)),
            (ROLES, MODEL),
        )
        for case, changes in table.items()
        for name, (change, *told) in changes.items()
    ),
    Damage(
        "average of a later step",
        DEMO,
        every(UNKNOWN_JOB, average_of_step(4)),
        {**MODEL, "state": "ema"},
        [CheckpointError, "ema.json … step 4 … step 3"],
    ),
)
