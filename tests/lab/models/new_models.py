"""tiny configs of every family of paddleformers 1.2.0 that runs without paddlefleet (see README of the folder)"""

import importlib, os
import moe_models as MM

BASE = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
    dtype="bfloat16",
)
X = "paddleformers.transformers."


def _cls(mod, *names):
    m = importlib.import_module(X + mod)
    for n in names:
        if hasattr(m, n):
            return getattr(m, n)
    return None


def get(family, seq):
    base = dict(BASE, max_position_embeddings=seq)
    if family == "llama":
        base.update(num_hidden_layers=4)
        return (
            base,
            _cls("llama.configuration", "LlamaConfig"),
            _cls("llama.modeling", "LlamaForCausalLM"),
            _cls("llama.modeling", "LlamaForCausalLMPipe"),
        )
    if family in ("qwen2", "qwen3"):
        n = {"qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
        if family == "qwen3":
            base.update(head_dim=16)
        MM._no_deepep()
        return (
            base,
            _cls(family + ".configuration", n + "Config"),
            _cls(family + ".modeling", n + "ForCausalLMDeprecated"),
            _cls(family + ".modeling", n + "ForCausalLMPipeDeprecated"),
        )
    if family == "ernie4_5":
        base.update(head_dim=16)
        return (
            base,
            _cls("ernie4_5.configuration", "Ernie4_5Config"),
            _cls("ernie4_5.modeling", "Ernie4_5ForCausalLM"),
            _cls("ernie4_5.modeling", "Ernie4_5ForCausalLMPipe"),
        )
    if family == "phi3":
        base.update(original_max_position_embeddings=seq, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return (
            base,
            _cls("phi3.configuration", "Phi3Config"),
            _cls("phi3.modeling", "Phi3ForCausalLM"),
            _cls("phi3.modeling", "Phi3ForCausalLMPipe"),
        )
    if family == "gemma3_text":
        base.update(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            layer_types=["sliding_attention", "full_attention"],
        )
        return (
            base,
            _cls("gemma3_text.configuration", "Gemma3TextConfig"),
            _cls("gemma3_text.modeling", "Gemma3ForCausalLM"),
            _cls("gemma3_text.modeling", "Gemma3ForCausalLMPipe"),
        )
    if family == "qwen3_next":
        base.update(
            hidden_size=32,
            intermediate_size=48,
            head_dim=16,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            partial_rotary_factor=0.25,
        )
        MM._no_deepep()
        return (
            base,
            _cls("qwen3_next.configuration", "Qwen3NextConfig"),
            _cls("qwen3_next.modeling", "Qwen3NextForCausalLM"),
            _cls("qwen3_next.modeling", "Qwen3NextForCausalLMPipe"),
        )
    if family in VISION:
        return vision(family, seq)
    return MM.get(family, seq)


# vision-language families: one image of 4 x 4 patches (4 tokens after the 2 x 2 merge) in every sequence
VISION = {
    "qwen2_5_vl": dict(start=122, image=120, end=123, patch=4),
    "qwen3_vl": dict(start=122, image=120, end=123, patch=4),
    "qwen3_vl_moe": dict(start=122, image=120, end=123, patch=4),
    "glm4v_moe": dict(start=122, image=120, end=123, patch=4),
    "glm_ocr": dict(start=122, image=120, end=123, patch=4),
    "paddleocr_vl": dict(start=122, image=120, end=123, patch=4, pixels4d=True),
}


def with_image(x, v):
    x[2:8] = [v["start"]] + [v["image"]] * 4 + [v["end"]]
    return x


def images(v, ids):
    import numpy as np, paddle

    n = ids.shape[0]
    r = np.random.RandomState(int(ids.sum()) & 0xFFFF)
    p = v["patch"]
    if v.get("pixels4d"):  # PaddleOCR-VL: [patches, channels, height, width]
        px = r.randn(n * 16, 3, p, p)
    else:  # channels * temporal patch * patch * patch
        px = r.randn(n * 16, 3 * 2 * p * p)
    return dict(
        pixel_values=paddle.to_tensor(px.astype("float32")),
        image_grid_thw=paddle.to_tensor(np.array([[1, 4, 4]] * n, "int64")),
    )


def vision(family, seq):
    t = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        dtype="bfloat16",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    ve = dict(
        depth=2,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        in_channels=3,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=32,
    )
    tok = dict(image_token_id=120, video_token_id=121)
    if family == "qwen2_5_vl":
        t.update(rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]})
        ve.update(window_size=16, fullatt_block_indexes=[1])
        return (
            dict(text_config=t, vision_config=ve, vision_start_token_id=122, vision_end_token_id=123, **tok),
            _cls("qwen2_5_vl.configuration", "Qwen2_5_VLConfig"),
            _cls("qwen2_5_vl.modeling", "Qwen2_5_VLForConditionalGeneration"),
            None,
        )
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        MM._no_deepep()
        t.update(
            head_dim=16,
            rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        )
        ve.update(num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
        n = "Qwen3VL"
        if family == "qwen3_vl_moe":
            import sys, types  # import stub: the module of the eager class also imports the paddlefleet one

            st = types.ModuleType("paddleformers.transformers.qwen3_vl.modeling_fleet")
            st.__getattr__ = lambda name: type(name, (), {})
            sys.modules.setdefault(st.__name__, st)
            n = "Qwen3VLMoe"
            t.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
        return (
            dict(text_config=t, vision_config=ve, vision_start_token_id=122, vision_end_token_id=123, **tok),
            _cls(family + ".configuration", n + "Config"),
            _cls(family + ".modeling", n + "ForConditionalGenerationDeprecated"),
            None,
        )
    if family == "glm4v_moe":
        MM._no_deepep()
        t.update(
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
        )
        ve.update(image_size=16, intermediate_size=48)
        return (
            dict(
                text_config=t,
                vision_config=ve,
                image_start_token_id=122,
                image_end_token_id=123,
                video_start_token_id=124,
                video_end_token_id=125,
                **tok,
            ),
            _cls("glm4v_moe.configuration", "Glm4vMoeConfig"),
            _cls("glm4v_moe.modeling", "Glm4vMoeForConditionalGeneration"),
            None,
        )
    if family == "glm_ocr":
        t.update(
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            mrope_section=[2, 3, 3],
        )
        ve.update(image_size=16)
        return (
            dict(
                text_config=t,
                vision_config=ve,
                image_start_token_id=122,
                image_end_token_id=123,
                video_start_token_id=124,
                video_end_token_id=125,
                **tok,
            ),
            _cls("glm_ocr.configuration", "GlmOcrConfig"),
            _cls("glm_ocr.modeling", "GlmOcrForConditionalGeneration"),
            None,
        )
    if family == "paddleocr_vl":
        import sys, types  # import stub: the rotary kernel is a Triton one, decorated at import; the eager path is used without it

        tr = types.ModuleType("triton")
        tl = types.ModuleType("triton.language")
        tr.jit = lambda f=None, **k: f if f is not None else (lambda g: g)
        tl.constexpr = object
        tr.__version__ = "3.1.0"
        tr.language = tl
        tr.cdiv = lambda a, b: -(-a // b)
        sys.modules.setdefault("triton", tr)
        sys.modules.setdefault("triton.language", tl)
        t.update(
            head_dim=16,
            rope_scaling={"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            vision_start_token_id=122,
        )
        v2 = dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_channels=3,
            image_size=16,
            patch_size=4,
            spatial_merge_size=2,
            temporal_patch_size=1,
            hidden_act="gelu_pytorch_tanh",
        )  # the library's default "gelu_tanh" is no activation of transformers
        return (
            dict(t, vision_config=v2, **tok),
            _cls("paddleocr_vl.configuration", "PaddleOCRVLConfig"),
            _cls("paddleocr_vl.modeling", "PaddleOCRVLForConditionalGeneration"),
            None,
        )
    raise KeyError(family)


def build(family, model, args, seq, tie, vpp=1, pipe=False, dtype=None):
    """config and model, exactly as train_new.py trains it"""
    import numpy as np, paddle

    _patch()
    from paddleformers.transformers.configuration_utils import LlmMetaConfig

    mcfg, CFG, CLS, PIPE = get(family, seq)
    mcfg.update(tie_word_embeddings=tie or family == "gemma3_text")  # Gemma 3 is always tied
    mcfg.update(model)
    config = CFG(**mcfg)
    dtype = dtype or ("bfloat16" if args.bf16 else "float32")
    config.dtype = dtype
    LlmMetaConfig.set_llm_config(config, args)
    config.tensor_model_parallel_size = max(args.tensor_model_parallel_size, 1)
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config.virtual_pipeline_model_parallel_size = vpp
    config.use_cache = False
    config._attn_implementation = os.environ.get("ATTN", "eager")
    config.seq_length = seq
    MM.finish(config, args, mcfg)
    for sub in ("text_config", "vision_config"):  # as the command line does for text_config
        c = getattr(config, sub, None)
        if c is None or isinstance(c, dict):
            continue
        c.dtype = dtype
        LlmMetaConfig.set_llm_config(c, args)
        c.tensor_model_parallel_size = config.tensor_model_parallel_size
        c.tensor_parallel_rank = config.tensor_parallel_rank
        c._attn_implementation = "eager"
        if sub == "text_config":
            c.use_cache, c.seq_length = False, seq
            MM.finish(c, args, mcfg)
    paddle.set_default_dtype("float32")
    cls = PIPE if pipe else CLS
    paddle.seed(20)
    np.random.seed(20)
    return mcfg, config, cls.from_config(config, dtype=dtype)


def _patch():
    """CPU has no bf16 kernel for in-place random fills (initial values only); same numbers through fp32"""
    import paddle

    if getattr(paddle.Tensor, "_lab_uniform", False):
        return
    paddle.Tensor._lab_uniform = True
    for name in ("uniform_", "normal_"):
        orig = getattr(paddle.Tensor, name)

        def f(self, *a, _o=orig, **k):
            if self.dtype in (paddle.bfloat16, paddle.float16):
                t = self.astype("float32")
                _o(t, *a, **k)
                paddle.assign(t.astype(self.dtype), self)
                return self
            return _o(self, *a, **k)

        setattr(paddle.Tensor, name, f)
    if not hasattr(paddle, "_lab_uniform"):
        paddle._lab_uniform = True
