"""Checkpoints of sharded jobs, by model family, from which exports for serving are made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory
from tests.golden.unified_cases import write_safetensors

LOGITS = Path(__file__).parent / "logits"


@dataclass(frozen=True)
class ServedCase:
    """A case of the corpus, and how it is exported."""

    name: str
    replicas_drift: bool = False
    """Whether the trainer let copies drift apart."""
    lost: str = ""
    """Pattern of the buffers that the trainer has lost; they are filled from the truth."""
    first: str = ""
    """The topology to which it is converted before it is exported, if no job of its family in the corpus is sharded."""
    remark: str = ""
    """What the export says, if ``transformers`` computes the model differently."""
    only_read: tuple[str, ...] = ()
    """Patterns of the keys that ``transformers`` reads in this form and writes in another one, or not at all."""
    square: str = ""
    """Pattern of the keys whose last two dims ``transformers`` lets change places, which it tells by their shape: here
    they are equal, so that a test has to do it."""
    mtp_layer: str = ""
    """Beginning of the keys that ``transformers`` does not expect: layers of multi-token prediction."""

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        (found,) = case_directory(self.name).glob("checkpoint-*")
        return found

    @property
    def logits(self) -> Path:
        """Input and answers of the Paddle model in float32, with the parameters of the truth."""
        of_corpus = case_directory(self.name) / "logits.npz"
        own = LOGITS / f"{self.name.replace('/', '-')}.npz"
        return of_corpus if of_corpus.exists() and not own.exists() else own

    @property
    def config(self) -> dict[str, Any]:
        """The trainer's ``config.json``."""
        return json.loads((self.folder / "config.json").read_text())

    @property
    def convention(self) -> str:
        """The library that trained it."""
        return "paddlenlp" if "paddlenlp_version" in self.config else "paddleformers"

    def is_only_read(self, key: str) -> bool:
        """Whether ``transformers`` writes a key in another form, or not at all."""
        return any(fnmatchcase(key, pattern) for pattern in self.only_read)

    def is_mtp(self, key: str) -> bool:
        """Whether ``transformers`` has no place for a key, as it belongs to multi-token prediction."""
        return bool(self.mtp_layer) and key.startswith(self.mtp_layer)

    def export(self, target: Path) -> paddle_reshard.ConversionReport:
        """The Hugging Face checkpoint of the case."""
        target.parent.mkdir(exist_ok=True)
        options: dict[str, Any] = {"replicas": "report" if self.replicas_drift else "compare"}
        if self.lost:
            truth = oracle.read_truth(case_directory(self.name) / "truth.safetensors")
            found = {key: array for key, array in truth.items() if fnmatchcase(key, self.lost)}
            options["fill"] = target.with_name("lost.safetensors")
            write_safetensors(
                options["fill"], {key: ("F32", a.shape, a.tobytes()) for key, a in found.items()}
            )
        source = self.folder
        if self.first:
            paddle_reshard.convert(source, target.with_name("sharded"), to=self.first)
            source = target.with_name("sharded")
        return paddle_reshard.convert(source, target, format="huggingface", **options)


THETA = "layers with a sliding window with rope_theta"
FACTOR = "transformers with the factor 2 of rope_scaling; their results differ"
BIAS = "*.e_score_correction_bias"
EPS = "PaddleFormers computes decoder layers with it"
SHARDING = "sharding=2"
EVERY_AXIS = "tp=2,pp=2,sharding=2"

CASES = (
    ServedCase("mp2pp2sh2_s1v2_meta_ema"),
    ServedCase("mp2_tied"),
    ServedCase("small-families/qwen2_mp2pp2sh2_s1v2_meta"),
    ServedCase("small-families/qwen3_pp2sh2_s1v2_meta"),
    ServedCase("families/ernie4_5_single", first="tp=2,sharding=2"),
    ServedCase("moe/moe_mp2pp2sh2_s1v2_meta_ema", replicas_drift=True),
    ServedCase("moe/ep2_pp2sh2_s1v2_meta"),
    ServedCase("moe/moe_fused_sh2_s1v2_meta"),
    ServedCase("moe/qwen2moe_single", first=EVERY_AXIS),
    ServedCase("moe/glm4moe_ep2_sh2_s1v2_meta_ema", lost=BIAS),
    ServedCase("moe/ernie45moe_mpmoe_mp2"),
    ServedCase("moe/dsv3_ep2_sh2_s1v2_meta_ema", lost=BIAS, remark=FACTOR),
    ServedCase("states/dsv3_mtp_sh2_s1v2_meta_ema", lost=BIAS, remark=FACTOR, mtp_layer="model.layers.3."),
    ServedCase("moe/gptoss_single", first="tp=2,sharding=2"),
    ServedCase("families/phi3_pp2"),
    ServedCase("families/phi3_sh2_s1v2_meta"),
    ServedCase("families/gemma3_text_sh2_s1v2_meta", remark=THETA),
    ServedCase("families/qwen3_next_sh2_s1v2_meta"),
    ServedCase("families/qwen2_5_vl_single", first=SHARDING),
    ServedCase("families/qwen3_vl_single", first=SHARDING),
    ServedCase(
        "families/qwen3_vl_moe_single",
        first=SHARDING,
        only_read=("*.experts.down_proj",),
        square="*.experts.gate_up_proj",
    ),
    ServedCase("families/glm4v_moe_single", first=SHARDING),
    ServedCase("families/glm_ocr_single", first=SHARDING, remark=EPS, only_read=("lm_head.weight",)),
    ServedCase(
        "families/paddleocr_vl_single",
        only_read=("lm_head.weight", "*.packing_position_embedding.weight"),
    ),
    ServedCase("moe/nlp_qwen2moe_single", first=EVERY_AXIS),
    ServedCase("nlp_sp_mp2pp2"),
    ServedCase("small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta"),
    ServedCase("moe/nlp_dsv2_ep_dp2sh2_s1v2_meta"),
)
