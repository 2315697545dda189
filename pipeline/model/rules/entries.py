"""The entries of a ``config.json``, in whichever section they are.

A model of several parts has a section for each: ``text_config``, ``vision_config``. The entries of ``text_config`` are
read as those of the whole, so that rows of a language model need not know whether it is a part; the entries of any
section have its name before theirs, too: ``vision_config.depth``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_reshard.pipeline.core.errors import RuleError

Config = Mapping[str, Any]

TEXT = "text_config"
TIED = "tie_word_embeddings"
LABELS = "num_labels"
"""How many classes a classifier tells apart, which configs say by the list of their names, ``id2label``."""
_LABELS_UNSAID = 2
SHARED = "shared_expert_intermediate_size"
"""Width of the shared expert of qwen2_moe and qwen3_next: where it is null, as wide as a dense layer."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of one number, see :func:`derived_sizes`."""


def config_entry(config: Config, name: str, default: Any = None) -> Any:
    """An entry by its name, which may begin with that of its section.

    >>> config_entry({"hidden_size": 1, "text_config": {"hidden_size": 2}}, "hidden_size")
    2
    >>> config_entry({"vision_config": {"depth": 3}}, "vision_config.depth")
    3
    """
    section, _, entry = name.rpartition(".")
    entries = config.get(section or TEXT)
    if isinstance(entries, Mapping) and entry in entries:
        return entries[entry]
    return default if section else config.get(name, default)


def count_entry(config: Config, name: str) -> int:
    """A number of layers, which a list gives by its length; 0 where there is none.

    >>> count_entry({"vision_config": {"deepstack_visual_indexes": [5, 11]}}, "vision_config.deepstack_visual_indexes")
    2
    """
    value = config_entry(config, name)
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def with_entry(config: Config, name: str, value: Any) -> dict[str, Any]:
    """The same config with another value of an entry, wherever it says it.

    >>> with_entry({"text_config": {"vocab_size": 8}}, "vocab_size", 16)
    {'text_config': {'vocab_size': 16}}
    """
    text = config.get(TEXT)
    if not isinstance(text, Mapping) or name not in text:
        return {**config, name: value}
    own = {name: value} if name in config else {}
    return {**config, **own, TEXT: {**text, name: value}}


def ties_words(config: Config) -> bool:
    """Whether the head has the values of the word embedding, by the entry of the whole or else of ``text_config``.

    PaddleFormers 1.2 leaves it out of the config of glm4v_moe where it is true, the default of all configs, and writes
    false (``glm4v_moe/configuration.py:411``, ``configuration_utils.py``, ``to_diff_dict``).

    >>> ties_words({"text_config": {"tie_word_embeddings": True}}), ties_words({"model_type": "glm4v_moe"})
    (True, False)
    >>> ties_words({"model_type": "glm4v_moe", "paddleformers_version": "1.2.0", "text_config": {}})
    True
    """
    said = config[TIED] if TIED in config else config_entry(config, TIED)
    unsaid = config.get("model_type") == "glm4v_moe" and "paddleformers_version" in config
    return unsaid if said is None else bool(said)


def derived_sizes(config: Config) -> dict[str, int]:
    """The integers of a config, with those that the libraries derive when they are not written.

    ``num_experts`` and ``num_local_experts`` are two names of one number: ``transformers`` writes the former of
    qwen3_moe and the latter of gpt_oss, PaddleFormers 1.2 the reverse (``qwen3_moe/configuration.py:150``,
    ``gpt_oss/configuration.py:59``); ``in_chans``, as the Qwen2.5-VL models are published with, of ``in_channels``.
    MiniMax-M2 is published with ``num_local_experts`` of the width ``intermediate_size``, which PaddleFormers 1.2 calls
    ``n_routed_experts`` and ``moe_intermediate_size`` (``minimax_m2/configuration.py``). Both libraries count labels by
    ``id2label``, and write neither that nor ``num_labels`` where there are two.
    """
    values = _sizes(config)
    labels = config.get("id2label")
    values[LABELS] = len(labels) if isinstance(labels, Mapping) else values.get(LABELS, _LABELS_UNSAID)
    sections = {name: entries for name, entries in config.items() if isinstance(entries, Mapping)}
    if TEXT in sections:
        values |= _sizes(sections[TEXT])
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        if "hidden_size" in values and values["num_attention_heads"] > 0:
            values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    if config_entry(config, SHARED, 0) is None and "intermediate_size" in values:
        values[SHARED] = values["intermediate_size"]
    if "num_experts" in values:
        values.setdefault("num_local_experts", values["num_experts"])
    if "num_local_experts" in values:
        values.setdefault("num_experts", values["num_local_experts"])
        values.setdefault("n_routed_experts", values["num_local_experts"])
        if "intermediate_size" in values:
            values.setdefault("moe_intermediate_size", values["intermediate_size"])
    for name, section in sections.items():
        values |= {f"{name}.{entry}": size for entry, size in _sizes(section).items()}
    if "vision_config.in_chans" in values:
        values.setdefault("vision_config.in_channels", values["vision_config.in_chans"])
    return values


def _sizes(config: Config) -> dict[str, int]:
    """The integers, and those of lists by their number: ``moe_num_experts.0``."""
    lists = {k: v for k, v in config.items() if isinstance(v, list)}
    entries = {**config, **{f"{k}.{n}": v for k, values in lists.items() for n, v in enumerate(values)}}
    return {k: v for k, v in entries.items() if isinstance(v, int) and not isinstance(v, bool)}


def size_of(values: Mapping[str, int], name: str, key: str) -> int:
    """One of :func:`derived_sizes`, which the rule of ``key`` needs."""
    if name not in values:
        raise RuleError(key, f"its rule needs {name} from config.json, which is not there")
    return values[name]
