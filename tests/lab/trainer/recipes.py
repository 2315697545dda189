"""One rank of a pre-training recipe: its own entry function, with its arguments, model, trainer, optimizer, callbacks
and checkpoint, on a tiny model and random tokens. The truth is taken after training, before the recipe's export."""

import dataclasses
import json
import os
import re
import types
import zlib
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import recipe_shim
import train
import truth
from paddle.distributed import fleet

OF_BOTH = {
    "do_train": True, "per_device_train_batch_size": 1, "bf16": True, "fp16_opt_level": "O2",
    "amp_master_grad": True, "learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "warmup_steps": 0, "min_lr": 1e-5, "save_strategy": "steps", "device": "cpu", "report_to": "none",
    "overwrite_output_dir": True, "skip_memory_metrics": True, "seed": 42, "partial_send_recv": False,
    "disable_tqdm": True, "adam_beta2": 0.95, "skip_profile_timer": True, "save_tokenizer": False,
    "dataloader_shuffle": False, "sharding": "", "stage1_reduce_avg": True,
    "fuse_sequence_parallel_allreduce": False,
}  # fmt: skip
OF_ERNIE = {
    "per_device_eval_batch_size": 1, "lr_scheduler": "wsd:100", "decay_function": "1-sqrt",
    "logging_steps": 1000, "from_scratch": 1, "ignore_data_skip": False, "moe_with_send_router_loss": False,
    "pp_delay_scale_loss": True,
}  # fmt: skip
OF_DEEPSEEK = {
    "lr_scheduler_type": "linear", "decay_steps": 100, "logging_steps": 1, "save_to_hf": False,
    "unified_checkpoint": False, "offload_fp8_expert_master_weight": False,
    "save_checkpoint_format": "sharding_io", "load_checkpoint_format": None,
}  # fmt: skip
ERNIE = {
    "architectures": ["ErnieForCausalLM"], "model_type": "ernie", "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
    "max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "rms_norm_eps": 1e-5, "use_cache": False, "vocab_size": 96, "rope_theta": 10000,
    "use_rmsnorm": True, "fuse_rms_norm": True, "use_bias": False, "use_fast_ln": True,
    "fuse_attn_ffn": True, "fuse_linear": True, "rope_reorder": False, "apply_rope_fusion": False,
    "fuse_swiglu": True, "fuse_gate_detach_matmul": True, "use_flash_attn": False,
    "use_mem_eff_attn": False, "tie_word_embeddings": False, "use_recompute": False, "moe_num_experts": 4,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_group_experts": False,
    "moe_intermediate_size": 24, "moe_capacity": [4, 4, 4], "moe_gate": "top2_fused", "moe_k": 2,
    "router_aux_loss_coef": 1e-5, "moe_orthogonal_loss_lambda": 0.0, "moe_layer_interval": 1,
    "moe_use_aux_free": True, "use_ep_comm_overlap": False, "use_combine_before_a2a": False,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 128,
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 1.0, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "using_flex_token": False,
    "send_mtp_embed": True, "using_post_norm_recompute": True, "router_aux_loss_coef": 0.0,
    "token_drop_steps": 0, "use_cache": False,
}  # fmt: skip
WORDS = 96


def run(recipe, asked):
    """Let the recipe's entry function train; it does not come back."""
    given = OF_BOTH | {"output_dir": asked.out, "max_steps": asked.steps, "save_steps": asked.steps}
    if asked.resume:
        given["resume_from_checkpoint"] = asked.resume
        if asked.names:
            train.check_names()
    (_run_ernie if recipe == "ernie_pretrain" else _run_deepseek)(asked, given)


def _run_ernie(asked, given):
    recipe_shim.ernie()
    import paddleformers.cli.train.ernie_pretrain.src.trainers.pretraining_trainer as trainers
    import paddleformers.cli.train.ernie_pretrain.workflow as workflow
    from paddleformers.trainer.trainer_utils import ShardingOption

    entries = ERNIE | asked.model
    of_yaml = entries.pop("ernie_model_config", {})
    more = entries.get("num_nextn_predict_layers", 0) or of_yaml.get("num_nextn_predict_layers", 0)
    given |= {**OF_ERNIE, "max_seq_len": asked.seq, "base_seq_length": asked.seq, **asked.args}
    shares = max(given.get("sharding_parallel_size", 1), 1) * max(given.get("data_parallel_size", 1), 1)
    given["gradient_accumulation_steps"] = asked.global_batch // shares
    if given["sharding"]:
        given["sharding"] = [ShardingOption(word) for word in given["sharding"].split()]
    place = _saved_config(asked, entries)
    of_model = {"model_name_or_path": place, "tokenizer_name_or_path": place}
    of_model |= {"moe_group": given.pop("moe_group", "dummy"), "ernie_model_config": of_yaml}

    class Tokenizer:
        ignored_index = -100
        bos_token_id, eos_token_id, pad_token_id = 0, 1, 0

    class NoBoard(trainers.LoggingCallback):
        def __init__(self, *_, **__):
            super().__init__()

    trainers.TensorBoardCallback = NoBoard
    workflow.ErnieBotTokenizer.from_pretrained = classmethod(lambda *_, **__: Tokenizer())
    workflow.create_pretrained_dataset = lambda _: (_samples(asked, more), None, None, _batch)
    trainer_class = trainers.PretrainingTrainer
    begin = trainer_class.__init__

    def init(self, args=None, model=None, callbacks=(), **named):
        if "save_checkpoint_format" in asked.args:  # the workflow has one, whatever its arguments say
            args.save_checkpoint_format = asked.args["save_checkpoint_format"]
        start_values(model, args, zero=bool(asked.resume))
        begin(self, args=args, model=model, callbacks=list(callbacks), **named)

    trainer_class.__init__ = init
    _tell_in_the_end(trainer_class, trainer_class, asked)
    if dist.get_world_size() == 1:  # the recipe's trainer asks for a group, which there is none of
        dist.barrier = dist.all_reduce = lambda *_, **__: None
    workflow.run_ernie_pretrain(
        _dataclass(of_model), _dataclass({"input_dir": "none"}), None, _dataclass(given)
    )
    train.leave(asked.case)


def _run_deepseek(asked, given):
    recipe_shim.dsv3()
    import paddleformers.cli.train.deepseek_v3_pretrain.workflow as workflow

    entries = DEEPSEEK | asked.model
    more = entries["num_nextn_predict_layers"]
    given |= {**OF_DEEPSEEK, **asked.args}
    shares = max(given.get("sharding_parallel_size", 1), 1)
    given["gradient_accumulation_steps"] = asked.global_batch // shares
    known = {one.name for one in dataclasses.fields(workflow.PreTrainingArguments)}
    args = workflow.PreTrainingArguments(**{name: value for name, value in given.items() if name in known})
    for name, value in {"pre_alloc_memory": 0, "no_recompute_layers": None, **given}.items():
        if name not in known and (name in given or not hasattr(args, name)):
            setattr(args, name, value)
    if args.use_hybrid_parallel and args.pipeline_model_parallel_size > 1:
        train.accumulate_in_stages(asked.global_batch // shares)

    class Tokenizer:
        pad_token_id, eos_token_id, vocab_size = 0, 2, entries["vocab_size"]

    workflow.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: Tokenizer())
    workflow.get_train_data_file = lambda _: None
    workflow.create_pretrained_dataset = lambda *_, **__: (_samples(asked, more), None, None, _batch)
    begin = workflow.PretrainingTrainer.__init__

    def init(self, *positional, model=None, args=None, **named):
        start_values(model, args, zero=bool(asked.resume))
        begin(self, *positional, model=model, args=args, **named)

    workflow.PretrainingTrainer.__init__ = init
    _tell_in_the_end(workflow.PretrainingTrainer, workflow.Trainer, asked)
    place = _saved_config(asked, entries)
    of_model = types.SimpleNamespace(
        model_name_or_path=place,
        tokenizer_name_or_path=place,
        use_fast_layer_norm=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        continue_training=False,
    )
    of_data = types.SimpleNamespace(
        input_dir="none", split="1,0,0", max_seq_len=asked.seq + more, data_cache=None
    )
    workflow.PreTrainingArguments.print_config = lambda *_, **__: None
    workflow.run_dsv3_pretrain(of_model, of_data, None, args)
    train.leave(asked.case)


def _saved_config(asked, entries):
    place = Path(asked.out + "_model")
    place.mkdir(parents=True, exist_ok=True)
    mine = place / f"config.json.{os.getpid()}"
    mine.write_text(json.dumps(entries))
    mine.replace(place / "config.json")
    return str(place)


def _dataclass(entries):
    fields = [
        (name, object, dataclasses.field(default_factory=lambda value=value: value))
        for name, value in entries.items()
    ]
    return dataclasses.make_dataclass("Arguments", fields)()


def _samples(asked, more):
    """Random tokens, with further ones that multi-token prediction takes for itself."""

    class Samples(paddle.io.Dataset):
        tokens = np.random.RandomState(7).randint(
            3, WORDS, (asked.global_batch * (asked.steps + 1), asked.seq + more + 1)
        )
        tokens = tokens.astype("int64")

        def __len__(self):
            return len(self.tokens)

        def __getitem__(self, i):
            return self.tokens[i]

    return Samples()


def _batch(items):
    tokens = np.stack(items)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _tell_in_the_end(of_recipe, has_train, asked):
    """Tell the truth after training, or after loading."""
    train_of_recipe = has_train.train

    def train_and_tell(trainer, *given, **named):
        if asked.resume:
            train.end_after_loading(trainer, asked)
        found = train_of_recipe(trainer, *given, **named)
        train.tell(trainer, asked)
        if not asked.export:
            train.leave(asked.case)
        if dist.get_world_size() == 1:  # the export asks for the group of experts
            fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
        return found

    of_recipe.train = train_and_tell


def start_values(model, args, zero=False):
    """Values that are a function of the key on a single card: the same in every topology; or zeros."""
    config, known = model.config, truth.RECIPE
    known |= {"heads": config.num_attention_heads, "kv": getattr(config, "num_key_value_heads", None)}
    known["local_ids"] = "deepseek" not in type(model).__module__
    if not known["local_ids"]:
        known["kv"] = None
    if (getattr(config, "moe_world_size", 1) or 1) > 1:
        known |= {"rank": config.moe_rank, "world": config.moe_world_size}
    elif getattr(args, "expert_model_parallel_size", 1) > 1:
        known |= {"rank": args.expert_parallel_rank, "world": args.expert_model_parallel_size}
    state = model.state_dict()
    experts = truth.local_experts(state)
    with paddle.no_grad():
        for key, tensor in state.items():
            if str(tensor.dtype).endswith("int64"):
                continue
            value = np.zeros([int(size) for size in tensor.shape], "float32")
            if not zero:
                value = _value(key, truth.global_key(key, experts), tensor, args)
            paddle.assign(paddle.to_tensor(value).astype(tensor.dtype), tensor)


def _value(key, whole_key, tensor, args):
    named = re.sub(r"^(ernie\.embed|embed_share)\.embed_tokens", "ernie.embed_tokens", whole_key)
    named = re.sub(r"^(deepseek_v2|model)\.", "", named)
    shape, is_cut = [int(size) for size in tensor.shape], truth.is_tp(key, tensor, args)
    axis, degree = truth.tp_axis(key, tensor), truth.tpdeg(args)
    if is_cut:
        shape[axis] *= degree
    value = np.random.RandomState(zlib.crc32(named.encode())).randn(*shape).astype("float32")
    if len(shape) == 1 and ("norm" in key or "ln_weight" in key):
        value = 1 + 0.1 * value
    else:
        value = (0.01 if "e_score_correction_bias" in key else 0.1) * value
    return truth.cut(value, key, axis, degree, args.tensor_parallel_rank) if is_cut else value
