"""The ``config.json`` with which ``transformers`` computes what the trainer computed.

The entries of a library's own job and layout leave; class names become those that ``transformers`` knows. Some models
are computed differently there with the same weights: where an entry can make both agree it is written, and elsewhere
the export says that they differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.model.rules.entries import TEXT, TIED, Config, config_entry, ties_words

DTYPE_ENTRIES = _DTYPE, _OTHER_DTYPE = "torch_dtype", "dtype"
"""If ``config.json`` has ``dtype``, FastDeploy reads weights as ``[in, out]``, as Paddle has them, and it refuses both
entries together (``fastdeploy/config.py`` at 0009064, ``read_model_config``). ``transformers`` reads either."""
OF_TENSOR_PARALLEL = ("tensor_model_parallel_size", "tensor_parallel_degree", "tensor_parallel_rank")
"""Entries of ``config.json`` that say how a job cut the weights."""
OF_PADDLE = ("source", *OF_TENSOR_PARALLEL)
"""Entries of ``config.json`` about Paddle's layout of the weights, or about the job that wrote them."""
OWN_CODE = frozenset({"auto_map", "custom_pipelines", "custom_generate"})
"""Entries that name code, beside the weights or in another repository, in ``config.json`` and in small files of a
tokenizer or processor, at any depth (``transformers`` 5.3 ``dynamic_module_utils.py``, ``pipelines/__init__.py``)."""
_OWN_CLASS = re.compile(r"(Deprecated)?(Pipe)?(Deprecated)?$")


class ExportedConfig(NamedTuple):
    """``config.json`` of an export, and what a user has to know about it."""

    entries: dict[str, Any]
    remarks: tuple[str, ...]


class _Agreement(NamedTuple):
    """Changed entries with which both libraries compute the same, and a remark; empty if no change is needed."""

    entries: Mapping[str, Any] = {}
    remark: str = ""


_Agree = Callable[[Config], _Agreement]


def exported_config(config: Config, dtype: DType | None) -> ExportedConfig:
    """``config.json`` of an export: model, dtype and entries for ``transformers``; ``dtype`` is the requested one."""
    exported = _with_one_dtype({key: value for key, value in config.items() if key not in OF_PADDLE}, dtype)
    exported |= {
        section: _with_one_dtype(entries, dtype)
        for section, entries in exported.items()
        if section.endswith("_config") and isinstance(entries, dict)
    }
    if dtype is not None:
        exported[_DTYPE] = dtype.name
    if "architectures" in exported:
        exported["architectures"] = without_own_classes(exported["architectures"])
    remarks = tuple(agreement.remark for agreement in _agreements(exported) if agreement.remark)
    return ExportedConfig(agreed_config(exported), remarks)


def without_code(value: Any) -> Any:
    """Parsed JSON without the entries that name code.

    >>> without_code({"tokenizer_class": "A", "image_processor": {"auto_map": {"AutoImageProcessor": "me/b--c.D"}}})
    {'tokenizer_class': 'A', 'image_processor': {}}
    """
    if isinstance(value, dict):
        return {key: without_code(entry) for key, entry in value.items() if key not in OWN_CODE}
    return [without_code(entry) for entry in value] if isinstance(value, list) else value


def about_code(path: str) -> str:
    """The sentence about a small file from which entries were taken that name code."""
    return (
        f"{path} without the entries that name code ({', '.join(sorted(OWN_CODE))}), which is never carried; what "
        "transformers does not know needs them, and the code, from where they came"
    )


def without_own_classes(classes: Any) -> Any:
    """The entry ``architectures`` with a library's ``…Pipe`` and ``…Deprecated`` classes under their plain names.

    >>> without_own_classes(["Qwen2ForCausalLMPipe"])
    ['Qwen2ForCausalLM']
    """
    if not isinstance(classes, list):
        return classes
    return [_OWN_CLASS.sub("", name) if isinstance(name, str) else name for name in classes]


def _with_one_dtype(entries: Config, dtype: DType | None) -> dict[str, Any]:
    """Give the dtype a single name, and the requested value if any; without an entry for it, none is added."""
    dtypes = [entries[name] for name in DTYPE_ENTRIES if name in entries]
    kept = {key: value for key, value in entries.items() if key not in DTYPE_ENTRIES}
    return kept | ({_DTYPE: dtypes[0] if dtype is None else dtype.name} if dtypes else {})


def agreed_config(config: Config) -> dict[str, Any]:
    """Adjust entries of the configuration so that both libraries compute the same, if possible."""
    agreed = dict(config)
    for agreement in _agreements(config):
        agreed |= agreement.entries
    return agreed


def _agreements(config: Config) -> list[_Agreement]:
    """What has to be changed in a configuration, from each point of view."""
    model_type = str(config.get("model_type"))
    agreeing: list[_Agree] = [_no_window, _classes, _published_entries, _published_names, _tied, _vision]
    if model_type == "qwen3_next":
        agreeing.append(_full_attention_interval)
    if "paddleformers_version" in config and model_type in _OF_PADDLEFORMERS:
        agreeing.append(_OF_PADDLEFORMERS[model_type])
    return [agree(config) for agree in agreeing]


def _no_window(config: Config) -> _Agreement:
    """PaddleNLP 3.0 writes ``false`` where no window is used; ``transformers`` 5 opens a number or ``null`` only."""
    return _Agreement({"sliding_window": None} if config.get("sliding_window") is False else {})


def _gemma3_theta(config: Config) -> _Agreement:
    """PaddleFormers 1.2 has one rotary embedding for all layers (``transformers/gemma3_text/modeling.py:113-155``)."""
    layers = config.get("layer_types")
    if isinstance(layers, list) and "sliding_attention" not in layers:
        return _Agreement()
    kind = _rope_type(_rope(config))
    theta, local = config.get("rope_theta", 1_000_000.0), config.get("rope_local_base_freq", 10_000.0)
    if kind != "default":
        return _Agreement(
            remark=f"PaddleFormers computes layers with a sliding window with {kind} rope too, transformers without; "
            "their results differ"
        )
    if theta == local:
        return _Agreement()
    return _Agreement(
        {"rope_local_base_freq": theta},
        f"rope_local_base_freq is {theta} instead of {local}: PaddleFormers computes layers with a sliding window with "
        "rope_theta",
    )


def _deepseek_yarn(config: Config) -> _Agreement:
    """PaddleFormers 1.2 takes the ratio of lengths as factor (``transformers/modeling_rope_utils.py:391-397``).

    The scale of softmax follows ``factor`` there too (``deepseek_v3/modeling.py:659-664``), so that writing the ratio
    as ``factor`` makes both agree only where that scale does not depend on it.
    """
    rope = _rope(config)
    original, factor = _number(rope, "original_max_position_embeddings"), _number(rope, "factor")
    longest = _number(config, "max_position_embeddings")
    if _rope_type(rope) != "yarn" or not (original and factor and longest):
        return _Agreement()
    ratio = longest / original
    if ratio == factor:
        return _Agreement()
    different = (
        f"PaddleFormers computes rope with {longest:g} / {original:g} = {ratio:g} (max_position_embeddings / "
        "original_max_position_embeddings)"
    )
    if rope.get("mscale_all_dim"):
        return _Agreement(
            remark=f"{different}, transformers with the factor {factor:g} of rope_scaling; their results differ"
        )
    entries = [entry for entry in _ROPE_ENTRIES if isinstance(config.get(entry), dict)]
    return _Agreement(
        {entry: {**config[entry], "factor": ratio} for entry in entries},
        f"factor of rope_scaling is {ratio:g} instead of {factor:g}: {different}",
    )


def _glm_ocr(config: Config) -> _Agreement:
    """PaddleFormers 1.2 has 1e-6 in the norms of decoder layers (``transformers/glm_ocr/modeling.py:203-212``).

    Without ``partial_rotary_factor`` it rotates whole heads (line 813), as ``transformers`` does, but vLLM 0.33 half of
    each (``vllm/model_executor/models/glm4.py:88``). Without ``attention_bias`` SGLang 0.5 expects biases of attention
    (``sglang/srt/models/glm4.py:227``), and takes what memory holds for them.
    """
    text = config.get(TEXT)
    if not isinstance(text, dict):
        return _Agreement()
    rope, configured = text.get("rope_parameters"), text.get("rms_norm_eps", 1e-5)
    entries: dict[str, Any] = {} if "attention_bias" in text else {"attention_bias": False}
    remark = ""
    if isinstance(rope, dict) and "partial_rotary_factor" not in rope:
        entries["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
    if configured != 1e-6:
        entries["rms_norm_eps"] = 1e-6
        remark = (
            f"rms_norm_eps of text_config is 1e-06 instead of {configured}: PaddleFormers computes decoder layers with "
            "it, and only the last norm with the latter"
        )
    return _Agreement({TEXT: {**text, **entries}} if entries else {}, remark)


_CLASSES = {
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""Model type → class, of the families whose ``config.json`` PaddleFormers 1.2 writes without one."""


def _classes(config: Config) -> _Agreement:
    """vLLM and SGLang choose the model by ``architectures``; without it vLLM takes the class without a head.

    ERNIE's own repositories for Paddle spell the class of ernie4_5 in another way than ``transformers`` and vLLM.
    """
    known = _CLASSES.get(str(config.get("model_type")))
    if config.get("architectures") == ["Ernie4_5_ForCausalLM"]:
        return _Agreement({"architectures": ["Ernie4_5ForCausalLM"]})
    if config.get("architectures") or known is None:
        return _Agreement()
    return _Agreement({"architectures": [known]})


_OF_TEXT = {"glm4v_moe": ("use_qk_norm", False), "qwen3_vl_moe": ("norm_topk_prob", True)}
"""Model type → entry of ``text_config`` that vLLM 0.33 requires, and the value with which both libraries compute: they
have no such entry."""


def _published_entries(config: Config) -> _Agreement:
    """Entries of published models that both libraries take for granted."""
    text, known = config.get(TEXT), _OF_TEXT.get(str(config.get("model_type")))
    if known is None or not isinstance(text, dict) or known[0] in text:
        return _Agreement()
    return _Agreement({TEXT: {**text, known[0]: known[1]}})


_PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_local_experts": "num_experts"},
    "minimax_m2": {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
}
"""Model type → what its models are published with → what PaddleFormers 1.2 calls it (``minimax_m2/configuration.py``).
``transformers`` 5 knows both names of the number of experts; 4.57, on which vLLM and SGLang build, only that."""


def _published_names(config: Config) -> _Agreement:
    """PaddleFormers 1.2 writes other names of the number and the size of experts than models are published with."""
    names = _PUBLISHED.get(str(config.get("model_type")), {})
    return _Agreement(
        {
            published: config[own]
            for published, own in names.items()
            if own in config and published not in config
        }
    )


def _tied(config: Config) -> _Agreement:
    """``transformers`` reads false where PaddleFormers 1.2 leaves the entry of glm4v_moe out, and means true."""
    unsaid = TIED not in config and config_entry(config, TIED) is None
    return _Agreement({TIED: True}) if unsaid and ties_words(config) else _Agreement()


def _vision(config: Config) -> _Agreement:
    """PaddleFormers 1.2 calls ``gelu_tanh`` what ``transformers`` knows as ``gelu_pytorch_tanh``.

    FastDeploy requires ``in_chans``, with which Qwen2.5-VL is published; both libraries write ``in_channels``.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return _Agreement()
    entries: dict[str, Any] = {}
    if vision.get("hidden_act") == "gelu_tanh":
        entries["hidden_act"] = "gelu_pytorch_tanh"
    if config.get("model_type") == "qwen2_5_vl" and "in_channels" in vision:
        entries["in_chans"] = vision["in_channels"]
    return _Agreement({"vision_config": {**vision, **entries}} if entries else {})


def _ernie_routing(config: Config) -> _Agreement:
    """PaddleFormers 1.2 routes with ``e_score_correction_bias`` by default, and leaves the entry out of ``config.json``
    (``ernie4_5_moe/configuration.py:255``). FastDeploy ignores the bias without it; other engines always use it."""
    return _Agreement({} if "moe_use_aux_free" in config else {"moe_use_aux_free": True})


def _full_attention_interval(config: Config) -> _Agreement:
    """SGLang 0.5 requires the entry, with which Qwen3-Next is published; both libraries write ``layer_types`` only."""
    layers = config.get("layer_types")
    if "full_attention_interval" in config or not isinstance(layers, list) or "full_attention" not in layers:
        return _Agreement()
    interval = layers.index("full_attention") + 1
    regular = all((kind == "full_attention") == (n % interval == 0) for n, kind in enumerate(layers, 1))
    return _Agreement({"full_attention_interval": interval} if regular else {})


_ROPE_ENTRIES = ("rope_scaling", "rope_parameters")
"""Older and newer spelling; PaddleFormers writes both, and reads the first that is not empty."""


def _rope(config: Config) -> Config:
    rope = next((config[entry] for entry in _ROPE_ENTRIES if config.get(entry)), None)
    return rope if isinstance(rope, dict) else {}


def _rope_type(rope: Config) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _number(entries: Config, name: str) -> float | None:
    """An entry that is a number above zero; ``None`` for anything else."""
    value = entries.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


_OF_PADDLEFORMERS: Mapping[str, _Agree] = {
    "gemma3_text": _gemma3_theta,
    "deepseek_v3": _deepseek_yarn,
    "glm_ocr": _glm_ocr,
    "ernie4_5_moe": _ernie_routing,
}
"""Model type → what PaddleFormers alone computes in another way, or takes for granted."""
