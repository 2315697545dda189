"""What chance decides of a job of the two pre-training recipes, which their own entry functions run."""

import random
from dataclasses import replace
from typing import Any

from tests.lab.job import RECIPES, Job, Topology


def job_of_recipe(family: str, chance: random.Random) -> Job:
    """Sizes and options of the model, the same for all jobs of a draw."""
    layers, experts = chance.choice([2, 3, 4, 6]), chance.choice([2, 4, 6, 8])
    model = _ernie(chance, layers, experts) if family == RECIPES[0] else _deepseek(chance, layers, experts)
    tied = bool(model.get("tie_word_embeddings"))
    return Job(family, model, tied, steps=chance.randint(1, 3), ema=chance.random() < 0.25)


def _ernie(chance: random.Random, layers: int, experts: int) -> dict[str, Any]:
    heads, kv = chance.choice([(4, 2), (6, 3), (4, 4), (8, 2)])
    dense = chance.random() < 0.4
    model: dict[str, Any] = {
        "hidden_size": heads * 8,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": 12 * chance.randint(2, 6),
        "num_hidden_layers": layers,
        "moe_intermediate_size": 12 * chance.randint(1, 3),
        "moe_num_experts": 0 if dense else experts,
        "tie_word_embeddings": chance.random() < 0.3,
        "num_nextn_predict_layers": int(chance.random() < 0.3),
    }
    if dense:
        model["fuse_linear"] = chance.random() < 0.5
    else:
        model |= {
            "moe_num_shared_experts": chance.choice([1, 2, 2]),
            "moe_layer_start_index": chance.choice([0, 1, 1, 2]),
            "moe_expert_fusion": chance.random() < 0.2,
        }
    variants: list[dict[str, Any]] = [{}, {}, {"ernie_model_config": {"use_rms_qkv_recompute": True}}]
    variants += [{name: True, "fuse_attn_ffn": False} for name in ("use_bias", "use_qk_norm")]
    return model | chance.choice(variants)


def _deepseek(chance: random.Random, layers: int, experts: int) -> dict[str, Any]:
    more = int(
        layers != 6 and chance.random() < 0.3
    )  # of multi-token prediction, among those that stages share
    return {
        "hidden_size": 12 * chance.randint(2, 5),
        "intermediate_size": 12 * chance.randint(2, 5),
        "moe_intermediate_size": 12 * chance.randint(1, 3),
        "num_hidden_layers": layers - more,
        "n_routed_experts": experts,
        "n_shared_experts": chance.choice([1, 1, 2]),
        "kv_lora_rank": chance.choice([8, 12, 16]),
        "q_lora_rank": chance.choice([12, 16, 24]),
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": chance.choice([0, 1, 1, 2]),
        "num_nextn_predict_layers": more,
        "using_post_norm_recompute": chance.random() < 0.6,
        "qk_nope_head_dim": chance.choice([4, 8]),
        "v_head_dim": chance.choice([4, 8]),
    }


def placed_recipe(job: Job, chance: random.Random) -> Job:
    """The job in a topology that its recipe starts, with the arguments that go with it."""
    at, model = _topology(job, chance), job.model
    strategy = "none"
    if at.sharding > 1:
        strategy = "stage1v2" if at.ep > 1 else chance.choice(["stage1v1", "stage1v2"])
    given: dict[str, Any] = {"sequence_parallel": 1} if at.tp > 1 else {}
    if at.ep > 1 and job.family == RECIPES[0]:
        given |= {"use_moe": True, "moe_group": "ep"}
    if model["num_nextn_predict_layers"] and job.family == RECIPES[1]:
        given["num_nextn_predict_layers"] = 1
    return replace(
        job,
        topology=at,
        strategy=strategy,
        format="hybrid" if at.sharding > 1 else "hybrid-plain",
        arguments=given,
    )


def _topology(job: Job, chance: random.Random) -> Topology:
    ernie, model = job.family == RECIPES[0], job.model
    experts = model["moe_num_experts"] if ernie else model["n_routed_experts"]
    layers = model["num_hidden_layers"] + model["num_nextn_predict_layers"]
    cuts = ernie and not experts and not model["fuse_linear"]
    while True:
        tp = chance.choice([1, 1, 2, 3]) if cuts else 1
        pp, sharding = chance.choice([1, 1, 2, 2, 3]), chance.choice([1, 2, 2, 3, 4])
        if tp * pp * sharding > 8 or layers % pp or model.get("num_key_value_heads", tp) % tp:
            continue
        degrees = [n for n in (2, 3, 4) if experts and experts % n == 0 == sharding % n]
        if not ernie and (
            pp == 1 or not degrees
        ):  # this recipe has classes for stages only, and no job without ep
            continue
        if ernie and experts and not degrees and tp * pp * sharding > 1:
            continue
        return Topology(tp, pp, 1, sharding, chance.choice(degrees) if degrees else 1)
