"""Suggestions for a word that was mistyped, or that another tool uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # formats
    "hf": ("huggingface",),
    "transformers": ("huggingface",),
    "safetensors": ("huggingface", "unified"),
    "flexcheckpoint": ("flex",),
    "distckpt": ("flex", "auto-parallel"),
    "auto": ("auto-parallel",),
    "uc": ("unified",),
    "shardingio": ("hybrid",),
    # axes
    "mp": ("tp",),
    "tensorparallel": ("tp",),
    "modelparallel": ("tp",),
    "pipeline": ("pp",),
    "dataparallel": ("dp",),
    "expert": ("ep",),
    "shard": ("sharding",),
    "zero": ("sharding",),
    "fsdp": ("sharding",),
    # sharding strategies
    "stage1": ("stage1v1", "stage1v2"),
    "splitparam": ("stage1v2",),
    "zero3": ("stage3",),
    # dtypes and states
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "fp32": ("float32",),
    "weights": ("param",),
    "parameters": ("param",),
    "master": ("master_weight",),
    "mw": ("master_weight",),
    "adamm": ("moment1",),
    "adamv": ("moment2",),
}
"""Words of other tools, in small letters without marks → ours."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that refuses ``word``: a question, or nothing where no known word is near.

    >>> did_you_mean("hf", ["hybrid", "huggingface"])
    '; did you mean huggingface?'
    >>> did_you_mean("mp_degree", ["tp", "pp", "dp"])
    '; did you mean tp?'
    >>> did_you_mean("llama", ["llama.paddlenlp", "llama.paddleformers", "lama"])
    '; did you mean llama.paddleformers or llama.paddlenlp?'
    >>> did_you_mean("nonsense", ["tp", "pp", "dp"])
    ''
    """
    words = list(known)
    plain = "".join(letter for letter in word.lower() if letter.isalnum())
    for ending in ("", "degree", "paralleldegree", "parallelsize", "size"):
        near = [synonym for synonym in SYNONYMS.get(plain.removesuffix(ending), ()) if synonym in words]
        if near:
            break
    else:
        from difflib import get_close_matches

        near = [one for one in words if one.startswith(f"{word}.")]
        near = sorted(near or get_close_matches(word.lower(), words, n=2, cutoff=0.6))
    return f"; did you mean {' or '.join(near)}?" if near else ""
