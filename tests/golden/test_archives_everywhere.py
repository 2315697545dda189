"""Recipes, frozen and earlier models, LoRA, ranks' own files: every case in every format and two further topologies.

All that is written equals the truth, or is refused with the words of one table. Files are read by the laboratory's own
readers (NumPy and pickle alone), which compared the trainers' files with the truth when the corpus was made. ``make
test`` converts those that differ most, ``make full`` a sample of the others, and ``make exhaustive`` all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.deepseek_names import SAME_THERE, named
from tests.lab import reader
from tests.sampling import exhaustive

V1, V2 = {"sharding_strategy": "stage1v1"}, {"sharding_strategy": "stage1v2"}
TOPOLOGIES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("dsv3_*", {"to": "pp=4,sharding=2,ep=2"}, {"to": "pp=2,sharding=4,ep=4"}),
    ("ernie_dense_*", {"to": "tp=2,sharding=2", **V2}, {"to": "pp=2,sharding=2", **V1}),
    ("ernie_*single", {"to": "tp=1"}, {"to": "pp=2"}),
    ("ernie_*", {"to": "sharding=4,ep=4", **V2}, {"to": "pp=2,sharding=2,ep=2", **V2}),
    ("*paddleocr_vl*", {"to": "tp=1"}, {"to": "sharding=3", **V2}),
    ("*_vl*", {"to": "tp=2"}, {"to": "sharding=3", **V1}),
    ("*ernie4_5*", {"to": "tp=2"}, {"to": "sharding=3", **V2}),
    ("*", {"to": "tp=2,sharding=2", **V2}, {"to": "pp=2,sharding=3", **V1}),
)
"""Cases (patterns, the first that fits) → two topologies that the family can have."""
IN_RANKS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "plain": {"format": "hybrid-plain"},
    "flex by rank": {"format": "flex"},
}
WHOLE: dict[str, dict[str, Any]] = {
    "flex": {"format": "flex"},
    "unified": {"format": "unified"},
    "model": {"format": "huggingface"},
}
STATES = re.compile(r"\.(w_0|moment[12]_0|beta[12]_pow_acc_0|ema|ema_w_0)$")
GROUPS = ("recipes", "small-frozen", "small-lora", "small-ranks", "small-versions")
CASES = [case for group in GROUPS for case in case_names(group)]
CASE_OF = {case.partition("/")[2]: case for case in CASES}
CONFIGS = {
    "rk*": "frozen_llama_single",
    "frozen_llama*": "frozen_llama_single",
    "pf*_llama*": "pf041_llama_single",
}
"""FlexCheckpoints come without a config; a case of the same model."""
BASES = {"frozen_llama*_meta*": "frozen_llama_single", "frozen_qwen*_meta": "frozen_qwen2_5_vl_single"}
"""Sharded saving leaves out what is frozen; what holds it, for ``--fill``."""
OF_STAGES = "only jobs with pipeline stages have it as a tensor of its own"
OLDER = r"the names are those of paddleformers 0\.4"
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("ernie_*_mtp_magic*", "flex*", OF_STAGES),
    ("ernie_*_tie*", "flex*", OF_STAGES),
    ("ernie_dense_*_tie*", "unified", OF_STAGES),
    ("ernie_ep2*_mtp2_moe0", "flex*", "are one parameter in the source, with one set of states"),
    ("ernie_*_fusedexperts", "flex*", "holds the experts of one rank; the format flex is not supported"),
    ("ernie_ep2*", "unified", "load those of the first rank; the format unified is not supported"),
    ("ernie_single", "unified", "load those of the first rank; the format unified is not supported"),
    ("ernie_mtp_moe0_single", "unified", "load those of the first rank; the format unified is not supported"),
    ("ernie_*_mtp_tie_empty", "* A", "one of the two would be lost unless they are equal"),
    ("lora_*", "unified", "the format unified cannot hold LoRA"),
    ("lora_qwen*", "hybrid A", r"no model of PaddleFormers 1\.2 implements"),
    ("lora_qwen*", "plain A", r"no model of PaddleFormers 1\.2 implements"),
    ("pf041_llama_fc_mp2*", "*", "the pieces of the other ranks are in no file"),
    ("pf041_*", "flex by rank*", OLDER),
    ("pf100_ernie4_5*", "flex by rank*", OLDER),
    ("pf041_llama*", "hybrid B", r"paddleformers 0\.4 has no pipeline class of llama"),
    ("pf041_llama*", "plain B", r"paddleformers 0\.4 has no pipeline class of llama"),
    ("pf111_*", "*", "an average under parameter names, without metadata"),
)
"""Cases and targets (patterns) → what the error says. All else equals the truth."""


def targets_of(name: str) -> dict[str, dict[str, Any]]:
    first, second = next((a, b) for pattern, a, b in TOPOLOGIES if fnmatchcase(name, pattern))
    found = {
        f"{kind} {letter}": {**topology, **options}
        for letter, topology in (("A", first), ("B", second))
        for kind, options in IN_RANKS.items()
    }
    return found | WHOLE


def truth_of(folder: Path, file: str = "truth") -> oracle.Tensors:
    """In float32, which holds every bfloat16."""
    return {
        key: reader.f32(array) for key, array in oracle.read_truth(folder / f"{file}.safetensors").items()
    }


def family_of(name: str) -> str:
    return next(family for family in ("paddleocr_vl", "qwen2_5_vl", "qwen3_vl") if family in name)


class Case:
    """A case, and what its conversion needs beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.checkpoint = next(folder.glob("checkpoint-*"))
        self.truth = truth_of(folder)
        self.recipe = self.name.startswith(("ernie_", "dsv3_"))

    def beside(self, named: Mapping[str, str]) -> Path | None:
        """The folder of another case, by a table of patterns."""
        other = next((case for pattern, case in named.items() if fnmatchcase(self.name, pattern)), None)
        return None if other is None else case_directory(CASE_OF[other])

    def config(self) -> Path | None:
        """The config of a FlexCheckpoint; the library writes it beside the folder, or when the job ends."""
        if (self.checkpoint / "config.json").exists():
            return None
        own = [self.folder / "config.json", self.folder / "final/config.json"]
        found = self.beside(CONFIGS)
        own += [] if found is None else [found / "checkpoint-3/config.json"]
        return next(path for path in own if path.exists())

    def options(self, target: str) -> dict[str, Any]:
        options = {**targets_of(self.name)[target]}
        if (config := self.config()) is not None:
            options["config"] = config
        if (base := self.beside(BASES)) is not None:
            options["fill"] = base / "checkpoint-3"
        if "lora" in self.name and "flex" in target and "_fc_" not in self.name:
            options["fill"] = self.of_lora() / "base"
        if "lora" in self.name and target == "model" and "_fc_" in self.name:
            options["lora_config"] = self.folder / "final/lora_config.json"
        if target == "unified" and any(STATES.search(key) and ".ema" in key for key in self.truth):
            options["drop"] = ["ema"]
        return options

    def of_lora(self) -> Path:
        return case_directory(f"small-lora/lora_{family_of(self.name)}_single")

    def wanted(self, target: str) -> oracle.Tensors:
        """What a target is to hold."""
        found = dict(self.truth)
        if "lora" in self.name and "flex" in target:
            found = {**truth_of(self.of_lora(), "truth_base"), **found}
        if target == "unified":
            found = {key: array for key, array in found.items() if not key.endswith((".ema", ".ema_w_0"))}
        return found


# ------------------------------------------------------------------------------------------- reading


def read(case: Case, made: Path, truth: oracle.Tensors, tp: int) -> oracle.Tensors:
    """Every tensor in float32, called as in the truth."""
    if list(made.glob("*model_state*.pdparams")):
        return _of_ranks(case, made, truth)
    found = reader.read(made, truth)
    if (made / "model_state").is_dir() and case.name.startswith("ernie_dense") and tp > 1:
        found = {
            key: _joined_heads(array, tp) if "qkv_proj" in key else array for key, array in found.items()
        }
    return found


def _joined_heads(array: np.ndarray, tp: int) -> np.ndarray:
    """A projection of which each rank's ``[q | k | v]`` lies in a row: 4 query and 2 key-value heads."""
    if array.size == 1:
        return array
    ranks = [
        np.split(piece, [piece.shape[-1] // 2, piece.shape[-1] * 3 // 4], -1)
        for piece in np.split(array, tp, -1)
    ]
    return np.concatenate([rank[part] for part in range(3) for rank in ranks], axis=-1)


def _of_ranks(case: Case, made: Path, truth: oracle.Tensors) -> oracle.Tensors:
    if case.recipe:
        config = json.loads((case.config() or case.checkpoint / "config.json").read_bytes())
        return reader.read(made, truth, config, case.name.startswith("ernie"))
    saved = {_as_saved(case.name, key): key for key in truth}
    wrapped = {f"model.{key}": key for key in truth} if "lora" in case.name else {}
    spelled = {name: truth[key] for name, key in {**saved, **wrapped}.items()} | dict(truth)
    found = reader.read(made, spelled)
    known = {**saved, **wrapped} if (made / "model_meta.json").exists() else saved
    return {known.get(key, key): array for key, array in found.items()}


def _as_saved(name: str, key: str) -> str:
    """The class of qwen2_5_vl renames keys in files without ``model_meta.json``."""
    if "qwen2_5_vl" in name:
        key = re.sub(r"^model\.visual\.", "visual.", key)
        key = re.sub(r"^model\.language_model\.", "model.", key)
    return key


def _published(case: Case, made: Path) -> tuple[oracle.Tensors, oracle.Tensors]:
    """What a Hugging Face checkpoint holds, and what it is to hold."""
    parameters = {key: array for key, array in case.truth.items() if not STATES.search(key)}
    held = {
        key: reader.f32(array)
        for path in sorted(made.glob("*.safetensors"))
        for key, array in oracle.read_truth(path).items()
    }
    if case.name.startswith("dsv3"):
        return held, named(parameters, rf"^(?!.*({SAME_THERE}))")
    if case.recipe:
        return held, dict(_of_ernie(parameters, case))
    if case.name.startswith("pf0") or case.name.startswith("pf100"):
        of_paddlenlp = any(key.startswith("llama.") for key in parameters)
        return held, {
            key.replace("llama.", "model."): array.T
            if "_proj." in key or (of_paddlenlp and "lm_head" in key)
            else array
            for key, array in parameters.items()
        }
    paddle_reshard.convert(made, made.parent / "back", to="tp=1", format="hybrid-plain")
    return _of_ranks(case, made.parent / "back", parameters), parameters


def _of_ernie(parameters: oracle.Tensors, case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Names and layouts that the recipe publishes; 4 query and 2 key-value heads."""
    stages = "_pp2" in case.name
    for key, array in parameters.items():
        if key.startswith("embed_share.") or (key == "lm_head.weight" and "_tie" in case.name and not stages):
            continue  # the embedding again
        name = key.replace("ernie.embed.", "ernie.").replace("ernie.", "model.", 1)
        name = name.replace("self_attn.fused_rms_norm_linear.rms_norm_weight", "input_layernorm.weight")
        name = name.replace("self_attn.fused_rms_norm_linear.linear_weight", "self_attn.qkv_proj.weight")
        name = name.replace("fused_linear_add_norm.rms_norm_weight", "post_attention_layernorm.weight")
        name = name.replace("fused_linear_add_norm.linear_weight", "self_attn.o_proj.weight")
        tied = "_tie" in case.name and "lm_head" in name
        if ("_proj." in name or ".gate." in name or "lm_head" in name) and not tied and array.ndim > 1:
            array = np.swapaxes(array, -1, -2)
        if ".experts.up_gate_proj" in name or ".experts.down_proj" in name:
            whole = ((name.replace(".experts.", f".experts.{n}."), one) for n, one in enumerate(array))
        else:
            whole = iter([(name, array)])
        for one, tensor in whole:
            yield from _unfused(one, tensor)


def _unfused(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    fused = {"up_gate_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
    for together, parts in fused.items():
        if f".{together}." in name:
            rows = array.shape[0]
            cuts = [rows // 2] if len(parts) == 2 else [rows // 2, rows * 3 // 4]
            for part, piece in zip(parts, np.split(array, cuts), strict=True):
                yield name.replace(together, part), piece
            return
    yield name, array


# ----------------------------------------------------------------------------------------- comparing


def outcome(case: Case, target: str, folder: Path) -> str:
    """``equal``, the words of the refusal, or what differs."""
    options = case.options(target)
    try:
        paddle_reshard.convert(case.checkpoint, folder / "made", **options)
    except ReshardError as error:
        return " ".join(str(error).split())
    if target == "model" and "lora" in case.name:
        return "equal"  # an adapter for peft, which has tests of its own
    if target == "model":
        found, wanted = _published(case, folder / "made")
    else:
        wanted = case.wanted(target)
        tp = int((re.search(r"tp=(\d+)", options.get("to", "")) or [0, 1])[1])
        found = _under_all_keys(case, read(case, folder / "made", wanted, tp), wanted)
    if target == "unified":  # the trainer stores a master weight of float32 parameters too
        found = {
            k: a for k, a in found.items() if k in wanted or not np.array_equal(a, found.get(k[:-4], ()))
        }
    return _differences(case, found, wanted)


def _under_all_keys(case: Case, found: oracle.Tensors, wanted: oracle.Tensors) -> oracle.Tensors:
    """With the further keys of parameters that have several, as the job itself tells."""
    report = json.loads((case.folder / "truth_report.json").read_bytes()) if case.recipe else {}
    groups: dict[tuple[str, str], list[str]] = {}
    for key, (name, *_) in report.get("names", {}).items():
        if ".experts." not in key:
            groups.setdefault((name, str(report["holders"][key])), []).append(key)
    more = {}
    if "_magic" in case.name:  # one tensor of a job without stages
        one = "ernie.embed_tokens.weight"
        for key in [key for key in found if key.startswith(one)]:
            for other in ("ernie.embed.embed_tokens.weight", "embed_share.embed_tokens.weight"):
                more[key.replace(one, other)] = found[key]
        found = {key: array for key, array in found.items() if not key.startswith(one)}
    for keys in groups.values():
        for key, other in ((a, b) for a in keys for b in keys if a != b):
            for name in wanted:
                rest = name.removeprefix(key)
                if (
                    name.startswith(key)
                    and (not rest or STATES.fullmatch(rest))
                    and f"{other}{rest}" in found
                ):
                    more.setdefault(name, found[f"{other}{rest}"])
    return {**more, **found}


def _differences(case: Case, found: oracle.Tensors, wanted: oracle.Tensors) -> str:
    copies: dict[str, list[np.ndarray]] = {}
    if (case.folder / "truth_alt.safetensors").exists():
        for key, array in truth_of(case.folder, "truth_alt").items():
            copies.setdefault(key.partition("@")[0], []).append(array)
    lacking, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = [
        key
        for key in wanted.keys() & found.keys()
        if not any(_same(found[key], array) for array in (wanted[key], *copies.get(key, ())))
    ]
    if not (lacking or surplus or other):
        return "equal"
    return f"lacking {lacking[:3]}, surplus {surplus[:3]}, different {sorted(other)[:3]}"


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    """Bit for bit; all are in float32."""
    return one.shape == two.shape and np.float32(one).tobytes() == np.float32(two).tobytes()


def words_of(name: str, target: str) -> list[str]:
    """What the error says, if there is to be one."""
    return [
        words
        for cases, targets, words in REFUSED
        if fnmatchcase(name, cases) and fnmatchcase(target, targets)
    ]


PAIRS = [(case, target) for case in CASES for target in targets_of(case.partition("/")[2])]
QUICK = (
    ("dsv3_ep2_fc_pp2sh2_s1v2", "hybrid B"),
    ("dsv3_ep2_pp2sh2_s1v2_meta_mtp_ema", "model"),
    ("ernie_ep2_pp2sh2_s1v2_meta_mtp_magic_rms_tail", "hybrid A"),
    ("ernie_ep2_pp2sh2_s1v2_meta_mtp_magic_rms_tail", "plain B"),
    ("ernie_ep2_pp2sh2_s1v2_meta_mtp_tie_empty", "flex"),
    ("ernie_ep2_sh2_s1v2_meta", "unified"),
    ("ernie_ep2_sh2_s1v2_meta_fusedexperts", "model"),
    ("ernie_ep2_sh2_s1v2_meta_mtp2_moe0", "flex by rank A"),
    ("ernie_mtp_moe0_single", "flex"),
    ("frozen_llama_sh2_s1v2_meta_ema", "model"),
    ("lora_paddleocr_vl_sh2_s1v2_meta", "flex"),
    ("lora_qwen2_5_vl_single", "hybrid B"),
    ("pf041_llama_single", "model"),
    ("pf100_ernie4_5_mp2sh2_s1v2_meta", "plain B"),
)
"""Cases of ``make test``, and their targets: models with a layout, names or a refusal of their own."""


def pairs() -> list[Any]:
    """Every case to every target; ``make full`` takes every eleventh."""
    found: list[Any] = []
    for number, (case, target) in enumerate(PAIRS):
        if (case.partition("/")[2], target) in QUICK:
            found.append((case, target))
        elif number % 11 == 0:
            found.append(pytest.param(case, target, marks=pytest.mark.full))
        else:
            found.append(exhaustive(case, target))
    return found


@pytest.mark.parametrize(("case", "target"), pairs())
def test_it_equals_the_truth_or_is_refused(case: str, target: str, tmp_path: Path) -> None:
    found = Case(case_directory(case))
    result, words = outcome(found, target, tmp_path), words_of(found.name, target)
    if not words:
        assert result == "equal"
    else:
        assert any(re.search(one, result) for one in words), result
        assert not (tmp_path / "made").exists()


def test_every_refusal_of_the_table_is_one_of_a_case() -> None:
    names = [case.partition("/")[2] for case in CASES]
    for cases, targets, _ in REFUSED:
        assert any(fnmatchcase(n, cases) and fnmatchcase(t, targets) for n in names for t in targets_of(n)), (
            cases
        )
