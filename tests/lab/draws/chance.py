"""What chance decides of a draw. The same number and families give the same draw."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.lab.draws.check import Draw
from tests.lab.draws.recipes import job_of_recipe, placed_recipe
from tests.lab.job import RECIPES, Job, Topology

HEADS = ((4, 2), (4, 4), (6, 3), (6, 6), (8, 4), (12, 3), (8, 2), (4, 1), (12, 6))
"""Attention heads, and those of keys and values."""


@dataclass(frozen=True)
class Family:
    """What the library can do with a family's classes."""

    axes: str
    """t: tp, p: stages, v: virtual stages, e: experts over ep."""
    ties: bool = False
    bias: str = ""
    """The entry of the config that adds biases."""
    free_head_dim: bool = False


FAMILIES = {
    "llama": Family("tpv", ties=True, bias="attention_bias"),
    "qwen2": Family("tpv", ties=True),
    "qwen3": Family("tpv", ties=True, bias="attention_bias", free_head_dim=True),
    "ernie4_5": Family("tpv", ties=True, bias="use_bias", free_head_dim=True),
    "phi3": Family("tp", ties=True),
    "gemma3_text": Family("p", bias="attention_bias", free_head_dim=True),
    "qwen2_moe": Family("tpve"),
    "qwen3_moe": Family("tpve", bias="attention_bias", free_head_dim=True),
    "deepseek_v3": Family("tpe", bias="attention_bias"),
    "glm4_moe": Family("tpve", bias="attention_bias", free_head_dim=True),
    "ernie4_5_moe": Family("tp", bias="use_bias", free_head_dim=True),
    "gpt_oss": Family("tp", free_head_dim=True),
    "qwen3_next": Family("tpe"),
    "qwen2_5_vl": Family("t"),
    "qwen3_vl": Family("t"),
    "qwen3_vl_moe": Family("t"),
    "glm4v_moe": Family(""),
    "glm_ocr": Family(""),
}
EVERY_FAMILY = (*FAMILIES, *RECIPES)
OF_IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "glm_ocr")
"""Drawn in the sizes of the laboratory's tiny model."""
CLASSES_WITH_HEADS = ("SequenceClassification", "TokenClassification", "SentenceEmbedding")
"""Of qwen2 and qwen3, without stages: that of gemma3_text is empty, and that of deepseek_v3 cannot be built."""
OPTIMIZERS = ("Adam", "Adam amsgrad", "Lamb", "Momentum", "SGD")
"""Of jobs in float32: for two bytes most of them have no kernel on a CPU."""


def draw(number: int, families: Sequence[str], small: bool = False) -> Draw:
    """Two jobs of one model in different topologies, and a third target; ``small``: fit for a case of the tests."""
    chance = random.Random(990_000 + number)
    family = families[number % len(families)]
    if family in RECIPES:
        recipe = job_of_recipe(family, chance)
        jobs = (placed_recipe(recipe, chance) for _ in range(3))
        return Draw(number, *jobs, resumes=number % 5 == 0)
    model = model_of(family, chance)
    if small:
        model = smaller(model)
    precision = chance.choice(["bfloat16"] * 6 + ["float16"] + ["float32"] * 2)
    tied = family == "gemma3_text" or (FAMILIES[family].ties and chance.random() < 0.35)
    special = chance.random()
    common = Job(
        family,
        model,
        tied,
        precision=precision,
        steps=chance.randint(1, 3),
        lora=chance.choice([2, 3, 4, 8]) if special < 0.12 and family not in (*EXPERTS, *OF_IMAGES) else 0,
        frozen=chance.choice(["embed_tokens", r"layers\.0\.", r"\.mlp\.", "norm"]) if special > 0.88 else "",
        optimizer=chance.choice(OPTIMIZERS) if precision == "float32" and 0.12 <= special < 0.7 else "",
    )
    if family in ("qwen2", "qwen3") and chance.random() < 0.25:
        labels = {"num_labels": chance.choice([1, 2, 3, 5])}
        common = replace(
            common, head=chance.choice(CLASSES_WITH_HEADS), model={**model, **labels}, tied=False
        )
    if common.tied and common.frozen == "embed_tokens":  # the last stage would train its copy, the head
        common = replace(common, frozen="norm")
    # The trainer averages master weights, which float32 lacks, and of float16 jobs what the truth does not have.
    with_average = chance.random() < 0.25 and not common.lora and precision == "bfloat16"
    source, target = (placed(common, chance, with_average) for _ in range(2))
    third = placed(replace(common, optimizer=""), chance, with_average)  # in any format: no job saves it
    for _ in range(20):
        if str(target.topology) != str(source.topology):
            break
        target = placed(common, chance, with_average)
    # From its own files without sharding in `hybrid` the trainer does not resume: it asks for a model_meta.json.
    # Nor does it from those of another optimizer, of which this format's loader knows no state but Adam's; and under
    # stage 3 it stops at a unified one.
    resumes = number % 5 == 0
    if target.format == "unified":
        resumes = resumes and target.strategy != "stage3"
    if target.format == "hybrid":
        resumes = resumes and target.topology.sharding > 1 and not common.optimizer
    third = replace(third, arguments={k: v for k, v in third.arguments.items() if k == "sequence_parallel"})
    return Draw(number, source, target, third, resumes)


def model_of(family: str, chance: random.Random) -> dict[str, Any]:
    """Sizes that few degrees divide, and the options that the family's classes have."""
    if family in OF_IMAGES:
        return {}
    of, (heads, kv) = FAMILIES[family], chance.choice(HEADS)
    each = chance.choice([8, 16]) if heads < 8 else 8
    model: dict[str, Any] = {
        "vocab_size": 12 * chance.randint(3, 12),
        "num_hidden_layers": chance.choice([2, 3, 4, 5, 6, 6] if "v" in of.axes else [2, 3, 4]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": 12 * chance.randint(2, 7),
        "hidden_size": heads * each,
    }
    if of.free_head_dim:
        model["head_dim"] = chance.choice([8, 16])
        if chance.random() < 0.5:
            model["hidden_size"] = 12 * chance.randint(3, 7)
    if of.bias and chance.random() < 0.3:
        model[of.bias] = True
    if family == "gemma3_text":
        model["layer_types"] = [
            chance.choice(["sliding_attention", "full_attention"]) for _ in range(model["num_hidden_layers"])
        ]
        model["query_pre_attn_scalar"] = model["head_dim"]
    if family in EXPERTS:
        model |= EXPERTS[family](chance, model["num_hidden_layers"])
    if family == "deepseek_v3":
        model["num_key_value_heads"] = heads
    if family in ("ernie4_5", "gpt_oss"):
        model["pp_seg_method"] = "layer:DecoderLayer"  # the class's own pattern matches no layer
    return model


def smaller(model: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a model with some thousand parameters, the ratios and options left."""
    if not model:
        return model
    heads, kv = model["num_attention_heads"], model["num_key_value_heads"]
    heads, kv = (6, 3) if kv % 3 == 0 and kv != heads else (4, 2) if kv != heads else (4, 4)
    layers = model["num_hidden_layers"]
    layers = layers if layers == 6 else min(layers, 3)  # three stages of two chunks need six
    found = {name: 12 for name in model if name.endswith("intermediate_size")}
    found |= {
        name: min(model[name], 4) for name in model if name.endswith("experts") and "shared" not in name
    }
    found |= {name: model[name][:layers] for name in ("layer_types",) if name in model}
    found |= {"mlp_only_layers": [0]} if "mlp_only_layers" in model else {}
    found |= {"head_dim": 4} if "head_dim" in model else {}
    found |= {"query_pre_attn_scalar": 4} if "query_pre_attn_scalar" in model else {}
    return (
        model
        | found
        | {
            "vocab_size": 24,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "hidden_size": 4 * heads,
        }
    )


def _of_qwen_moe(chance: random.Random, layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_experts": chance.choice([2, 4, 6, 8, 12]),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12 * chance.randint(1, 4),
        "norm_topk_prob": chance.random() < 0.5,
        "decoder_sparse_step": chance.choice([1, 1, 2]),
    }
    return found | ({"mlp_only_layers": [chance.randrange(layers)]} if chance.random() < 0.3 else {})


def _of_qwen2_moe(chance: random.Random, layers: int) -> dict[str, Any]:
    return {
        **_of_qwen_moe(chance, layers),
        "shared_expert_intermediate_size": 12 * chance.randint(1, 5),
        "qkv_bias": chance.random() < 0.7,
    }


def _of_routed(chance: random.Random, layers: int) -> dict[str, Any]:
    return {
        "n_routed_experts": chance.choice([4, 6, 8, 12]),
        "moe_intermediate_size": 12 * chance.randint(1, 4),
        "n_shared_experts": chance.choice([1, 1, 2]),
        "num_experts_per_tok": 2,
        "first_k_dense_replace": chance.choice([0, 1, 1, 2]),
    }


def _of_deepseek_v3(chance: random.Random, layers: int) -> dict[str, Any]:
    return {
        **_of_routed(chance, layers),
        "kv_lora_rank": chance.choice([8, 12, 16, 20]),
        "q_lora_rank": chance.choice([12, 20, 24, None]),
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": chance.choice([8, 16]),
        "v_head_dim": chance.choice([8, 12, 16]),
        "num_nextn_predict_layers": chance.choice([0, 0, 1]),
        "topk_group": chance.choice([1, 2]),
    }


def _of_glm4_moe(chance: random.Random, layers: int) -> dict[str, Any]:
    of_class = {name: chance.random() < 0.6 for name in ("use_qk_norm", "use_unified_moe")}
    return {**_of_routed(chance, layers), **of_class}


def _of_ernie4_5_moe(chance: random.Random, layers: int) -> dict[str, Any]:
    return {
        "moe_num_experts": chance.choice([4, 6, 8, 12]),
        "moe_intermediate_size": 12 * chance.randint(1, 4),
        "moe_num_shared_experts": chance.choice([0, 1, 2]),
        "moe_layer_start_index": chance.choice([0, 1, 1, 2]),
        "moe_use_aux_free": chance.random() < 0.8,
        "moe_group": chance.choice(["dummy", "mp"]),
        "moe_layer_interval": chance.choice([1, 1, 2]),
        "num_nextn_predict_layers": chance.choice([0, 0, 1]),
    }


def _of_gpt_oss(chance: random.Random, layers: int) -> dict[str, Any]:
    experts = chance.choice([2, 4, 6, 8])
    size = 12 * chance.randint(2, 4)
    return {"num_experts": experts, "num_local_experts": experts, "intermediate_size": size}


def _of_qwen3_next(chance: random.Random, layers: int) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"]
    return {
        **_of_qwen_moe(chance, layers),
        "shared_expert_intermediate_size": 12 * chance.randint(1, 4),
        "hidden_size": chance.choice([32, 48]),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": [chance.choice(kinds) for _ in range(layers)],
        "linear_key_head_dim": chance.choice([8, 16]),
        "linear_value_head_dim": chance.choice([8, 16]),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": chance.choice([2, 4]),
    }


EXPERTS = {
    "qwen2_moe": _of_qwen2_moe,
    "qwen3_moe": _of_qwen_moe,
    "deepseek_v3": _of_deepseek_v3,
    "glm4_moe": _of_glm4_moe,
    "ernie4_5_moe": _of_ernie4_5_moe,
    "gpt_oss": _of_gpt_oss,
    "qwen3_next": _of_qwen3_next,
}
"""What a family's experts and layers add to the sizes."""


def placed(job: Job, chance: random.Random, with_average: bool) -> Job:
    """The job in some topology, with a strategy, a format and options that go with it."""
    at = topology_of(job, chance)
    strategy = strategy_of(job, at, chance, with_average)
    kind = chance.choice(formats_of(job, at, strategy, with_average))
    options: dict[str, Any] = {}
    asserts = at.ep > 1 or job.family == "deepseek_v3" or (job.family == "ernie4_5_moe" and at.pp > 1)
    if at.tp > 1 and not job.head and (asserts or chance.random() < 0.35):
        options["sequence_parallel"] = True
    if strategy == "stage1v2" and chance.random() < 0.3:
        options["sharding_comm_buffer_size_MB"] = 1
    if at.pp > 1 and strategy == "stage1v1" and chance.random() < 0.2:
        options["pp_sharding_comm_overlap"] = True
    # Files that say their global rank are for the order that the trainer has by default.
    if at.pp > 1 < at.sharding and at.ep == 1 and kind != "flex by rank" and chance.random() < 0.4:
        options["hybrid_parallel_topo_order"] = "pp_first"
    return replace(
        job,
        topology=at,
        strategy=strategy,
        format=kind.partition(" ")[0],
        by_rank=kind == "flex by rank",
        ema=with_average,
        segment=chance.choice([512, 1024, 0]) if strategy == "stage3" else 0,
        arguments=options,
    )


def strategy_of(job: Job, at: Topology, chance: random.Random, with_average: bool) -> str:
    """One that the trainer starts in this topology."""
    if at.sharding == 1:
        return "none"
    if at.ep > 1:
        return "stage1v2"
    strategies = ["stage1v1"] + ["stage1v2"] * 3 * (job.precision != "float32")
    if not (with_average or job.optimizer) and at.pp == 1:
        # Of an adapter under stage 2 the first rank alone enters a barrier as it saves, and waits forever.
        strategies += ["stage2"] * (not job.lora) + ["stage3"] * (at.tp == 1)
    return chance.choice(strategies)


def formats_of(job: Job, at: Topology, strategy: str, with_average: bool) -> list[str]:
    """Those in which the trainer saves such a job, the usual ones several times."""
    if strategy == "stage2":
        return ["hybrid-plain"]
    if job.optimizer:  # only AdamW can be saved as flex, and others as unified only sometimes
        return ["hybrid", "hybrid-plain"]
    if job.lora and at.tp > 1 and at.pp == 1:
        return ["flex", "flex by rank"]
    if with_average:
        return ["flex", "flex by rank", *(["hybrid"] * 2 if at.sharding > 1 else ())]
    if at.tp > 1 and job.family in OF_IMAGES:
        return ["hybrid", "hybrid-plain", "flex", "flex by rank"]
    of_ranks = ["hybrid"] * 3 if strategy.startswith("stage1") else ["hybrid-plain"]
    return [*of_ranks, "hybrid-plain", "flex", "flex by rank", *(() if job.lora else ("unified",))]


def topology_of(job: Job, chance: random.Random) -> Topology:
    """Degrees that the sizes of the model allow, with 3 among them."""
    axes, model = FAMILIES[job.family].axes, job.model
    if job.head:  # no class with one has stages; what sequence parallelism cuts they do not gather
        axes = "t"
    kv, layers = model.get("num_key_value_heads", 2), model.get("num_hidden_layers", 2)
    while True:
        ranks = chance.choice([1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 6, 8])
        tp = chance.choice([n for n in (1, 2, 3, 4) if kv % n == 0]) if "t" in axes else 1
        threes = [3] * 12 if "v" in axes and layers == 6 else [3]  # fit for two chunks each
        pp = chance.choice([1, 1, 2, 2, *threes, 4]) if "p" in axes else 1
        sharding, rest = divmod(ranks, tp * pp)
        if (
            "pp_seg_method" in model or job.family in EXPERTS
        ) and layers % pp:  # these patterns know no empty layers
            continue
        if pp > layers or rest or sharding not in (1, 2, 3, 4):
            continue
        ep = _ep_of(job, tp, sharding, chance)
        if ep is None:
            continue
        vpp = 2 if "v" in axes and pp > 2 and layers % (2 * pp) == 0 and chance.random() < 0.7 else 1
        return Topology(tp, pp, vpp, sharding, ep)


def _ep_of(job: Job, tp: int, sharding: int, chance: random.Random) -> int | None:
    """A degree that divides the experts and the ranks of sharding and tp; none if there should be one and is not."""
    counts = (job.model.get(name) for name in ("num_experts", "n_routed_experts"))
    experts = next(filter(None, counts), 0)
    wanted = chance.random() < 0.6 and job.precision != "float32" and not job.lora
    if "e" not in FAMILIES[job.family].axes or not wanted:
        return 1
    degrees = [n for n in (2, 3, 4) if experts % n == 0 == sharding * tp % n == n % tp]
    return chance.choice(degrees) if degrees else None
