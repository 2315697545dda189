"""Tiny models of every family of PaddleFormers that runs without PaddleFleet, built as its command line builds them."""

import copy
import functools
import importlib
import sys
import types

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.autograd import PyLayer

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "dtype": "bfloat16",
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}  # fmt: skip
ROUTED = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_hidden_layers": 3,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
OF_TEXT = {
    "llama": ("Llama", "", {"num_hidden_layers": 4}),
    "qwen2": ("Qwen2", "Deprecated", {}),
    "qwen3": ("Qwen3", "Deprecated", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", "", {"head_dim": 16}),
    "phi3": ("Phi3", "", TOKENS),
    "gemma3_text": ("Gemma3", "", {**TOKENS, "bos_token_id": 2, "eos_token_id": 1, "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2_moe": ("Qwen2Moe", "Deprecated", {**EXPERTS, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("Qwen3Moe", "Deprecated", {**EXPERTS, "head_dim": 16}),
    "qwen3_next": ("Qwen3Next", "", {**EXPERTS, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "partial_rotary_factor": 0.25}),
    "glm4_moe": ("Glm4Moe", "Deprecated", {**ROUTED, "head_dim": 16, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "deepseek_v3": ("DeepseekV3", "", {**ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 2,
        "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0}),
    "gpt_oss": ("GptOss", "", {"head_dim": 16, "intermediate_size": 32, "num_experts": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5_moe": ("Ernie4_5_Moe", "", {"head_dim": 16, "moe_num_experts": 4, "moe_intermediate_size": 32,
        "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "num_hidden_layers": 3,
        "moe_group": "dummy", "moe_use_aux_free": True, "num_nextn_predict_layers": 0}),
}  # fmt: skip
"""Family → the name of its classes, what follows it, and sizes beside the common ones."""
OF_TEXT_IN_IMAGES = {
    **SIZES, **TOKENS, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
    "head_dim": 16,
}  # fmt: skip
OF_EXPERTS_IN_IMAGES = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "in_channels": 3,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
IMAGE = {"image_token_id": 120, "video_token_id": 121}
STARTS = {**IMAGE, "vision_start_token_id": 122, "vision_end_token_id": 123}
STARTS_OF_GLM = {
    **IMAGE, "image_start_token_id": 122, "image_end_token_id": 123, "video_start_token_id": 124,
    "video_end_token_id": 125,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
OF_IMAGES = {
    "qwen2_5_vl": ("Qwen2_5_VL", "", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        {"window_size": 16, "fullatt_block_indexes": [1]}, STARTS),
    "qwen3_vl": ("Qwen3VL", "Deprecated", {"rope_scaling": INTERLEAVED}, DEEPSTACK, STARTS),
    "qwen3_vl_moe": ("Qwen3VLMoe", "Deprecated", {**OF_EXPERTS_IN_IMAGES, "num_experts": 4,
        "decoder_sparse_step": 1, "rope_scaling": INTERLEAVED}, DEEPSTACK, STARTS),
    "glm4v_moe": ("Glm4vMoe", "", {**OF_EXPERTS_IN_IMAGES, "n_routed_experts": 4,
        "first_k_dense_replace": 1, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2]}}, {"image_size": 16, "intermediate_size": 48}, STARTS_OF_GLM),
    "glm_ocr": ("GlmOcr", "", {"mrope_section": [2, 3, 3], "rope_parameters": {**ROPE,
        "mrope_section": [2, 3, 3]}}, {"image_size": 16}, STARTS_OF_GLM),
}  # fmt: skip
"""Family → as above, with sizes of the text, of the vision tower, and the tokens around an image."""
VISION = {*OF_IMAGES, "paddleocr_vl"}
"""Families of images: every sample has one of 4 x 4 patches, which are four tokens after the merge."""
TOWER_OF_OCR = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_channels": 3, "image_size": 16, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "hidden_act": "gelu_pytorch_tanh",  # the library's default is no activation of transformers
}  # fmt: skip
SECTIONS = ("text_config", "vision_config")
"""Of the config of a model of images: of each, a job says what differs."""
KEPT = ("use_unified_moe", "fd_fallback", "num_nextn_predict_layers")
"""Entries that the library's own defaults overwrite."""


def get(family, sequence):
    """The entries of the config, and the classes of the config, of the model, and of its stages."""
    entries, *classes = _known(family, sequence)
    return copy.deepcopy(entries), *classes  # the library changes what it is given


def _known(family, sequence):
    no_deepep()
    if family == "own":
        import own

        return own.SIZES, own.OwnConfig, own.OwnForCausalLM, own.OwnForCausalLMPipe
    if family == "paddleocr_vl":
        _stub_triton()
        text = {**OF_TEXT_IN_IMAGES, **IMAGE, "vision_start_token_id": 122, "vision_config": TOWER_OF_OCR}
        text["rope_scaling"] = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
        return text, *_classes(family, "PaddleOCRVL", "ForConditionalGeneration")
    if family in OF_IMAGES:
        name, ending, text, tower, tokens = OF_IMAGES[family]
        if family == "qwen3_vl_moe":  # its module also imports the class of PaddleFleet
            _stub("paddleformers.transformers.qwen3_vl.modeling_fleet", lambda name: type(name, (), {}))
        entries = {
            **tokens,
            "text_config": {**OF_TEXT_IN_IMAGES, **text},
            "vision_config": {**TOWER, **tower},
        }
        if family == "qwen2_5_vl":
            del entries["text_config"]["head_dim"]
        return entries, *_classes(family, name, f"ForConditionalGeneration{ending}")
    name, ending, sizes = OF_TEXT[family]
    entries = {**SIZES, "max_position_embeddings": sequence, **sizes}
    if family == "phi3":
        entries["original_max_position_embeddings"] = sequence
    if family == "deepseek_v3":
        entries |= {"seq_length": sequence}
        entries["rope_scaling"] = {**YARN, "original_max_position_embeddings": sequence}
    if family == "ernie4_5_moe":
        _plain_experts_of_ernie()
    return entries, *_classes(family, name, f"ForCausalLM{ending}", f"ForCausalLMPipe{ending}")


def _classes(family, name, model, stages=""):
    library = f"paddleformers.transformers.{family}"
    configuration = importlib.import_module(f"{library}.configuration")
    modeling = importlib.import_module(f"{library}.modeling")
    config = f"{name}TextConfig" if family == "gemma3_text" else f"{name}Config"
    pipe = getattr(modeling, name + stages) if stages else None
    return getattr(configuration, config), getattr(modeling, name + model), pipe


def _stub(name, attribute=None):
    module = types.ModuleType(name)
    if attribute:
        module.__getattr__ = attribute
    return sys.modules.setdefault(name, module)


def _stub_triton():
    """A rotary kernel is decorated as its module is imported; the eager path does without."""
    triton, language = _stub("triton"), _stub("triton.language")
    triton.jit = lambda function=None, **_: function if function is not None else (lambda one: one)
    triton.language, triton.__version__, language.constexpr = language, "3.1.0", object
    triton.cdiv = lambda a, b: -(-a // b)


def class_of_head(family, head):
    """The class with a head for labels, or with none for embeddings."""
    modeling = importlib.import_module(f"paddleformers.transformers.{family}.modeling")
    return getattr(modeling, OF_TEXT[family][0] + ("For" if head.endswith("Classification") else "") + head)


def build(family, model, args, sequence, tied, vpp=1, pipe=False, dtype=None, head=""):
    """The entries, the config and the model, whose values are random and the same each time."""
    from paddleformers.transformers.configuration_utils import LlmMetaConfig

    entries, config_class, one_class, pipe_class = get(family, sequence)
    sections = {name: {**entries[name], **model.get(name, {})} for name in SECTIONS if name in entries}
    entries |= {"tie_word_embeddings": tied or family == "gemma3_text", **model, **sections}
    if "text_config" in entries:
        entries["text_config"]["tie_word_embeddings"] = entries["tie_word_embeddings"]
    if head:
        # Without the first the class asks for one sample; the second is an argument of the library's workflow.
        entries |= {"pad_token_id": 0, "embedding_negatives_cross_device": False}
        one_class = class_of_head(family, head)
    config = config_class(**entries)
    dtype = dtype or ("bfloat16" if args.bf16 else "float16" if args.fp16 else "float32")
    for one in (config, getattr(config, "text_config", None)):
        if one is None or isinstance(one, dict):
            continue
        one.dtype = dtype
        LlmMetaConfig.set_llm_config(one, args)
        one.tensor_model_parallel_size = max(args.tensor_model_parallel_size, 1)
        one.tensor_parallel_rank = args.tensor_parallel_rank
        one._attn_implementation = "eager"
        one.use_cache, one.seq_length = False, sequence
        _finish(one, args, entries)
    if (tower := getattr(config, "vision_config", None)) is not None:
        # The library's own workflows tell the tower nothing of tp (cli/train/sft/workflow.py:334-342): it is whole.
        tower.dtype, tower._attn_implementation = dtype, "eager"
    config.virtual_pipeline_model_parallel_size = vpp
    paddle.set_default_dtype("float32")
    paddle.seed(20)
    np.random.seed(20)
    return entries, config, (pipe_class if pipe else one_class).from_config(config, dtype=dtype)


def _finish(config, args, entries):
    for name in KEPT:
        if name in entries:
            setattr(config, name, entries[name])
    # Multi-token prediction takes a sample's last tokens for itself.
    left = config.seq_length - (getattr(config, "num_nextn_predict_layers", 0) or 0)
    config.max_sequence_length = entries.get("max_sequence_length", left)
    config.sequence_parallel = bool(getattr(args, "sequence_parallel", False))
    config.moe_token_dispatcher_type = entries.get("moe_token_dispatcher_type", "alltoall")
    config.use_expert_parallel = bool(getattr(args, "use_expert_parallel", False))
    config.expert_model_parallel_size = max(getattr(args, "expert_model_parallel_size", 1), 1)


def with_image(tokens):
    tokens[2:8] = [122, *[120] * 4, 123]
    return tokens


def images(family, ids):
    """The images of a batch: a function of its tokens."""
    samples, numbers = ids.shape[0], np.random.RandomState(int(ids.sum()) & 0xFFFF)
    # patches, channels, height, width; or all in one, over two frames
    shape = (samples * 16, 3, 4, 4) if family == "paddleocr_vl" else (samples * 16, 3 * 2 * 4 * 4)
    return {
        "pixel_values": paddle.to_tensor(numbers.randn(*shape).astype("float32")),
        "image_grid_thw": paddle.to_tensor(np.array([[1, 4, 4]] * samples, "int64")),
    }


# ---- experts without kernels for CUDA: constructors, names, groups and attributes stay the library's


class GatherTokens(PyLayer):
    """All ranks' tokens; of their gradients the sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, x.shape[0]
        parts = []
        dist.all_gather(parts, x.detach().astype("float32").contiguous(), group=group)
        return paddle.concat(parts, axis=0)

    @staticmethod
    def backward(ctx, gradient):
        return _summed_rows(gradient, ctx.group, ctx.rows)


class ScatterTokens(PyLayer):
    """The inverse of :class:`GatherTokens`."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _summed_rows(x.detach(), group, x.shape[0] // group.nranks)

    @staticmethod
    def backward(ctx, gradient):
        parts = []
        dist.all_gather(parts, gradient.astype("float32").contiguous(), group=ctx.group)
        return paddle.concat(parts, axis=0)


def _summed(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _summed_rows(x, group, rows):
    return _summed(x, group)[group.rank * rows : (group.rank + 1) * rows].clone()


class CopyToRanks(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group)


class SumOfRanks(PyLayer):
    @staticmethod
    def forward(_, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(_, gradient):
        return gradient.clone()


class Dispatcher:
    """What DeepEP does for layers of experts: tokens to the local ones, and their weighted sum back."""

    def __init__(self, group, router_topk, num_experts, num_local_experts):
        self.group, self.experts, self.local = group, num_experts, num_local_experts

    def setup_metadata(self, routing_map, probs):
        self.map, self.probs = routing_map, probs

    def dispatch(self, hidden):
        group, first = self.group, self.group.rank * self.local
        tokens = GatherTokens.apply(hidden.astype("float32"), group)
        self.weights = GatherTokens.apply(self.probs.reshape([-1, self.experts]).astype("float32"), group)
        parts = []
        dist.all_gather(parts, self.map.reshape([-1, self.experts]).astype("int64").contiguous(), group=group)
        routed = paddle.concat(parts, axis=0)
        self.rows = tokens.shape[0]
        self.chosen = [paddle.nonzero(routed[:, first + j]).reshape([-1]) for j in range(self.local)]
        self.counts = [int(one.shape[0]) for one in self.chosen]
        return paddle.concat([tokens[one] for one in self.chosen], axis=0)

    def get_permuted_hidden_states_by_experts(self, hidden):
        return hidden

    get_restored_hidden_states_by_experts = get_permuted_hidden_states_by_experts

    def get_number_of_tokens_per_expert(self):
        return self.counts

    def combine(self, hidden):
        out, start = paddle.zeros([self.rows, hidden.shape[-1]], "float32"), 0
        for j, chosen in enumerate(self.chosen):
            if self.counts[j]:
                weight = self.weights[chosen, self.group.rank * self.local + j].unsqueeze(-1)
                out = paddle.index_add(out, chosen, 0, hidden[start : start + self.counts[j]] * weight)
            start += self.counts[j]
        return ScatterTokens.apply(out, self.group)


@functools.cache
def no_deepep():
    import paddleformers.transformers.token_dispatcher as token_dispatcher
    import paddleformers.utils.moe_hybrid_parallel_optimizer as of_experts

    token_dispatcher._DeepepManager = Dispatcher
    if getattr(of_experts, "MuonShardingOptimizer", 0) is None:  # it asks for instances of it, with clipping
        of_experts.MuonShardingOptimizer = type("NoMuon", (), {})


@functools.cache
def _plain_experts_of_ernie():
    """Ernie's experts, of which each tp rank may have some, in plain operations."""
    import paddleformers.transformers.ernie4_5_moe.modeling as modeling

    def forward(self, input, token_type_ids=None, use_dense_expert=False):
        x = input.reshape([-1, input.shape[-1]]).astype("float32")
        group = self.config.moe_group
        logits = F.linear(x, self.gate.weight)
        probabilities = F.softmax(logits, axis=-1)
        chosen = probabilities.detach()
        if self.moe_statics is not None:
            chosen = chosen + self.moe_statics.e_score_correction_bias.reshape([1, -1])
        mask = F.one_hot(paddle.topk(chosen, self.top_k, axis=-1)[1], self.num_experts).sum(1)
        weights = probabilities * mask
        weights = weights / weights.sum(-1, keepdim=True)
        over_ranks = getattr(group, "nranks", 1) > 1
        if over_ranks:
            x, weights = CopyToRanks.apply(x, group), CopyToRanks.apply(weights, group)
        out = paddle.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if expert is not None:
                out = out + expert(x) * weights[:, number : number + 1]
        if over_ranks:
            out = SumOfRanks.apply(out, group)
        if self.shared_experts is not None:
            out = out + self.shared_experts(input.reshape([-1, input.shape[-1]]))
        loss = 0.01 * (probabilities.mean(0) ** 2).sum().reshape([1])
        return out.reshape(input.shape), None, loss, logits

    modeling.Ernie4_5_MoeSparseMoeBlock.forward = forward
