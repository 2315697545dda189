"""A class that no rule table of the package knows, as users write them: attention, head and experts of its own.

One layer is dense and the others have experts, whole on a rank of ep; keys and values are one fused tensor; every
head has a temperature, cut by tp by hand. ``expert_kind`` is what a rank calls its experts: ``listed`` under their
numbers in the model, ``local`` under its own from 0 on, ``stacked`` in one tensor. ``mtp_num_hidden_layers`` further
layers, of another class, follow the decoder layers under their numbers; ``norm_before_mtp`` has a pipeline compute the
last norm before them, and stages build it there.
"""

import dataclasses
import itertools
import json
from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight, build_sharded_state_dict
from paddleformers.nn.pp_model import GeneralModelForCausalLMPipe
from paddleformers.transformers import PretrainedConfig, PretrainedModel
from paddleformers.transformers.model_utils import PipelinePretrainedModel

SIZES = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_experts": 4, "use_cache": False, "dtype": "bfloat16",
}  # fmt: skip
KINDS = {"expert_kind": "listed", "mtp_num_hidden_layers": 0, "norm_before_mtp": False}
LAYER = "model.layers.$LAYER_ID"
SAME = (
    *(f"{LAYER}.{norm}.{part}" for norm in ("before", "after") for part in ("weight", "bias")),
    f"{LAYER}.attention.temperature",
    f"{LAYER}.attention.query.bias",
    f"{LAYER}.attention.out.bias",
)
"""What a Hugging Face checkpoint has as the trainer has it, under the same key."""
EXPERT, EXPERT_THERE = f"{LAYER}.mlp.experts.$EXPERT_ID", f"{LAYER}.moe.$EXPERT_ID"


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, **entries):
        for name, value in {**SIZES, **KINDS}.items():
            setattr(self, name, entries.pop(name, value))
        super().__init__(**entries)


def column(config, i, o, bias=False, whole=False):
    if config.tensor_model_parallel_size > 1:
        return ColumnParallelLinear(i, o, has_bias=bias, gather_output=whole)
    return nn.Linear(i, o, bias_attr=None if bias else False)


def row(config, i, o, bias=False):
    if config.tensor_model_parallel_size > 1:
        return RowParallelLinear(i, o, has_bias=bias, input_is_parallel=True)
    return nn.Linear(i, o, bias_attr=None if bias else False)


class OwnAttention(nn.Layer):
    def __init__(self, config):
        super().__init__()
        hidden, tp = config.hidden_size, config.tensor_model_parallel_size
        self.heads = config.num_attention_heads // tp
        self.query = column(config, hidden, hidden, bias=True)
        self.keys_and_values = column(config, hidden, 2 * hidden)
        self.temperature = self.create_parameter(
            [self.heads], default_initializer=nn.initializer.Constant(1.0)
        )
        self.temperature.is_distributed = tp > 1
        if tp > 1:
            self.temperature.split_axis = 0
        self.out = row(config, hidden, hidden, bias=True)
        for parameter in self.query.parameters():
            parameter.color = "queries"  # buffers of their own under stage 1 v2

    def sharded_state_dict(self, structured_name_prefix=""):
        held = super().sharded_state_dict(structured_name_prefix)
        if self.temperature.is_distributed:
            state, cut = {"temperature": self.temperature}, {"temperature": 0}
            held |= build_sharded_state_dict(state, cut, structured_name_prefix)
        return held

    def forward(self, x):
        shape = [*x.shape[:2], self.heads, -1]
        both = self.keys_and_values(x).chunk(2, -1)
        query, keys, values = (y.reshape(shape).transpose([0, 2, 1, 3]) for y in (self.query(x), *both))
        scores = query.matmul(keys, transpose_y=True).astype("float32")
        scores = scores * self.temperature.astype("float32").reshape([1, -1, 1, 1])
        later = paddle.triu(paddle.full(scores.shape[-2:], -1e9), 1)
        mixed = F.softmax(scores + later, -1).astype(x.dtype).matmul(values)
        return self.out(mixed.transpose([0, 2, 1, 3]).reshape([*x.shape[:2], -1]))


class OwnDense(nn.Layer):
    def __init__(self, config):
        super().__init__()
        self.up = column(config, config.hidden_size, config.intermediate_size)
        self.down = row(config, config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class OwnExpert(nn.Layer):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias_attr=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class OwnStacked(nn.Layer):
    """The experts of a rank in one tensor, as the library's ``fd_fallback`` has them: saved with two dims."""

    def __init__(self, config, mine):
        super().__init__()
        self.mine, self.of = mine, config.num_experts
        self.up = self.create_parameter([len(mine), config.hidden_size, config.intermediate_size])
        self.down = self.create_parameter([len(mine), config.intermediate_size, config.hidden_size])

    def __iter__(self):
        for up, down in zip(self.up, self.down, strict=True):
            yield lambda x, up=up, down=down: F.gelu(x.matmul(up)).matmul(down)

    def sharded_state_dict(self, structured_name_prefix=""):
        held = {}
        for name, tensor in (("up", self.up), ("down", self.down)):
            count, rows, columns = tensor.shape
            flat = tensor.reshape([count * rows, columns])
            whole, start = (self.of * rows, columns), (self.mine.start * rows, 0)
            key = f"{structured_name_prefix}{name}"
            held[key] = ShardedWeight(key, flat, tuple(flat.shape), whole, start)
        return held


class OwnExperts(nn.Layer):
    """Every token to every expert, weighted; a rank of ep has its share of the experts, under their own numbers."""

    def __init__(self, config):
        super().__init__()
        over = config.expert_model_parallel_size > 1
        self.group = fleet.get_hybrid_communicate_group().get_expert_parallel_group() if over else None
        count = config.num_experts // (self.group.nranks if over else 1)
        first = count * (self.group.rank if over else 0)
        self.mine = range(first, first + count)
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias_attr=False)
        if config.expert_kind == "stacked":
            self.experts = OwnStacked(config, self.mine)
        elif config.expert_kind == "local":
            self.experts = nn.LayerList([OwnExpert(config) for _ in self.mine])
        else:
            self.experts = nn.LayerDict({str(n): OwnExpert(config) for n in self.mine})
        if over and config.expert_kind != "listed":
            import truth

            truth.RECIPE |= {"rank": self.group.rank, "world": self.group.nranks, "local_ids": True}
        self.replicated = config.tensor_model_parallel_size > 1
        for parameter in self.experts.parameters() if over else ():
            parameter.is_distributed = parameter.no_sync = parameter.expert = True
            grad_group = fleet.get_hybrid_communicate_group().get_moe_sharding_parallel_group()
            parameter.color = {"color": "moe_expert", "group": grad_group}

    def forward(self, x):
        import models

        shares = F.softmax(self.router(x).astype("float32"), -1)
        tokens = x.astype("float32")
        if self.group is not None:
            gather = models.CopyToRanks if self.replicated else models.GatherTokens
            tokens, shares = (gather.apply(y, self.group) for y in (tokens, shares))
        experts = self.experts.values() if isinstance(self.experts, nn.LayerDict) else self.experts
        out = sum(
            expert(tokens.astype(x.dtype)).astype("float32") * shares[..., number].unsqueeze(-1)
            for number, expert in zip(self.mine, experts, strict=True)
        )
        if self.group is not None:
            out = (models.SumOfRanks if self.replicated else models.ScatterTokens).apply(out, self.group)
        return out.astype(x.dtype)


class OwnBlock(nn.Layer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.before = nn.LayerNorm(config.hidden_size)
        self.attention = OwnAttention(config)
        self.after = nn.LayerNorm(config.hidden_size)
        self.mlp = OwnExperts(config) if layer_idx else OwnDense(config)

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class OwnNext(OwnBlock):
    """A layer of multi-token prediction, as far as a checkpoint tells: one more, with a projection of its own."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return x + super().forward(self.mix(x))


def blocks(config):
    """The class of every layer, in order."""
    return [OwnBlock] * config.num_hidden_layers + [OwnNext] * config.mtp_num_hidden_layers


class OwnWords(nn.Layer):
    def __init__(self, config):
        super().__init__()
        make = VocabParallelEmbedding if config.tensor_model_parallel_size > 1 else nn.Embedding
        self.words = make(config.vocab_size, config.hidden_size)

    @property
    def shared(self):
        return self.words.weight

    def forward(self, ids):
        return self.words(ids[0] if isinstance(ids, tuple) else ids)


class OwnAnswer(nn.Layer):
    """The head: a projection of its own with a bias, or, tied, the words."""

    def __init__(self, config, words=None):
        super().__init__()
        self.norm = nn.Identity() if config.norm_before_mtp else nn.LayerNorm(config.hidden_size)
        if config.tie_word_embeddings:
            self.words = words or OwnWords(config).words
        else:
            self.proj = column(config, config.hidden_size, config.vocab_size, bias=True, whole=True)

    @property
    def shared(self):
        return self.words.weight

    def forward(self, x):
        x = self.norm(x)
        if not hasattr(self, "words"):
            return self.proj(x)
        if not self.words.weight.is_distributed:
            return x.matmul(self.words.weight, transpose_y=True)
        group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        logits = mp_ops._c_identity(x, group=group).matmul(self.words.weight, transpose_y=True)
        return mp_ops._c_concat(logits, group=group)


def loss_of(logits, labels):
    logits = logits.astype("float32").reshape([-1, logits.shape[-1]])
    return F.cross_entropy(logits, labels.reshape([-1]))


class OwnPretrained(PretrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def _init_weights(self, layer):
        pass


class OwnBody(nn.Layer):
    def __init__(self, config):
        super().__init__()
        self.embed = OwnWords(config)
        self.layers = nn.LayerList([kind(config, n) for n, kind in enumerate(blocks(config))])
        self.norm = nn.LayerNorm(config.hidden_size) if config.norm_before_mtp else nn.Identity()
        self.decoders = config.num_hidden_layers

    def forward(self, ids):
        x, layers = self.embed(ids), list(self.layers)
        for layer in (*layers[: self.decoders], self.norm, *layers[self.decoders :]):
            x = layer(x)
        return x


class OwnMaps:
    """Maps of Hugging Face checkpoints, which say what is fused: a rank of tp has its keys beside its values."""

    transpose_weight_keys: ClassVar = ["query", "out", r"mlp\.up", r"experts\.\d+\.up", "down", "proj"]

    @classmethod
    def of_experts(cls, config):
        if config.expert_kind == "stacked":
            for layer, name in itertools.product(range(1, len(blocks(config))), ("up", "down")):
                one = f"model.layers.{layer}.moe.$.{name}.weight"
                keys = [one.replace("$", str(n)) for n in range(config.num_experts)]
                yield from (f"{key}^T -> {key}" for key in keys)
                yield f"{','.join(keys)} -> model.layers.{layer}.mlp.experts.{name}, axis=0"
            return
        yield from (f"{EXPERT_THERE}.{name}.weight^T -> {EXPERT}.{name}.weight" for name in ("up", "down"))
        yield f"{EXPERT_THERE}.up.bias -> {EXPERT}.up.bias"

    @classmethod
    def _gen_aoa_config(cls, config):
        made = f"{LAYER}.attention.keys_and_values.weight"
        return {
            "aoa_statements": [
                "embed_tokens.weight -> model.embed.words.weight",
                *(f"{key} -> {key}" for key in SAME),
                *(
                    f"{LAYER}.attention.{name}.weight^T -> {LAYER}.attention.{name}.weight"
                    for name in ("query", "out")
                ),
                f"{LAYER}.attention.k.weight^T, {LAYER}.attention.v.weight^T -> {made}, fused_ffn",
                *(f"{LAYER}.dense.{name}.weight^T -> {LAYER}.mlp.{name}.weight" for name in ("up", "down")),
                *cls.of_experts(config),
                *(f"{LAYER}.mix.{part} -> {LAYER}.mix.{part}" for part in ("weight", "bias")),
                f"{LAYER}.moe.router.weight^T -> {LAYER}.mlp.router.weight",
                *(
                    ["embed_tokens.weight -> answer.words.weight"]
                    if config.tie_word_embeddings
                    else ["lm_head.weight^T -> answer.proj.weight", "lm_head.bias -> answer.proj.bias"]
                ),
            ]
        }


class OwnForCausalLM(OwnMaps, OwnPretrained):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnBody(config)
        self.answer = OwnAnswer(config, self.model.embed.words)

    def forward(self, input_ids, labels=None, **_):
        logits = self.answer(self.model(input_ids))
        return (loss_of(logits, labels), logits) if labels is not None else logits


class OwnForCausalLMPipe(OwnMaps, PipelinePretrainedModel, PipelineLayer):
    config_class = OwnConfig
    base_model_prefix = "model"
    _init_weights = OwnPretrained._init_weights
    _prepare_pipeline_inputs_func = GeneralModelForCausalLMPipe._prepare_pipeline_inputs_func

    def __init__(self, config):
        self.config = config

        def end(made):
            if config.tie_word_embeddings:
                return SharedLayerDesc("words", made, shared_weight_attr="shared", config=config)
            return LayerDesc(made, config=config)

        self.add_sequential_layer(end(OwnWords), "model.embed")
        layers = [
            (LayerDesc(kind, config=config, layer_idx=n), f"model.layers.{n}")
            for n, kind in enumerate(blocks(config))
        ]
        if config.norm_before_mtp:
            layers.insert(
                config.num_hidden_layers, (LayerDesc(nn.LayerNorm, config.hidden_size), "model.norm")
            )
        for layer, prefix in layers:
            self.add_sequential_layer(layer, prefix)
        self.add_sequential_layer(end(OwnAnswer), "answer")
        PipelineLayer.__init__(
            self,
            layers=self.get_sequential_layers(),
            loss_fn=loss_of,
            topology=fleet.get_hybrid_communicate_group().topology(),
            seg_method="layer:OwnBlock",
            num_virtual_pipeline_stages=config.virtual_pipeline_model_parallel_size,
        )


def describe(trainer, out):
    """Have the job describe itself in every checkpoint, and write down what its ranks hold."""
    import paddle_reshard
    from paddle_reshard.pipeline.training.describe import facts_of

    beside = out.parents[1] / "rules.json"
    trainer.add_callback(paddle_reshard.describe_callback(trainer, to=beside))
    facts = json.dumps(dataclasses.asdict(facts_of(trainer.model)))
    (out / f"facts_{paddle.distributed.get_rank()}.json").write_text(facts)
