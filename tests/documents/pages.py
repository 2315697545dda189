"""What each document starts from: the real checkpoints behind its names, and what of it no test runs, with the reason.

A document that is not listed starts with ``checkpoint-1000``. Every line of its ``bash`` blocks is run, in order, in a
folder of its own; its ``python`` blocks share their names; a ``text`` block is what the commands before it print.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.conftest import REPO
from tests.storage.servers import Store

LLAMA = "dense/mp2pp2sh2_s1v2_meta_ema"
"""Eight ranks, with averages; it has two key-value heads, so tp is at most 2."""
SMALL = "dense/single"
"""The fewest files."""
QWEN3_MOE = "moe/moe_single"
DEEPSEEK = "moe/dsv3_single"


@dataclass(frozen=True)
class Page:
    """How a document is run."""

    holds: Mapping[str, str] = field(default_factory=lambda: {"checkpoint-1000": LLAMA})
    """Folders or URLs that exist before its first command → the case whose checkpoint is copied there."""
    before: tuple[str, ...] = ()
    """Commands that make what else it starts from."""
    fp8: tuple[str, ...] = ()
    """Models among these whose matrices are then stored as FP8."""
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """Text of its blocks → what is run instead. ``{url}``, ``{key}`` and ``{secret}`` are those of the S3 server."""
    saved: Mapping[str, str] = field(default_factory=dict)
    """The beginning of a ``json`` or ``text`` block → the file in which its reader saves it."""
    drawings: str = ""
    """Why none of its ``text`` blocks is the output of a command."""
    after: tuple[str, ...] = ()
    """Commands that must succeed when all is run."""
    shows: Mapping[str, str] = field(default_factory=dict)
    """The first line of a block that no command prints → what checks it, or why there is nothing to check."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """The beginning of a line or of a ``python`` block → why it is only parsed."""

    def at(self, store: Store) -> Page:
        """The same with the address and the keys of a store in place."""
        facts = {"{url}": store.url, "{key}": store.key, "{secret}": store.secret}
        meant = {}
        for shown, text in self.stands_for.items():
            for name, value in facts.items():
                text = text.replace(name, value)
            meant[shown] = text
        return replace(self, stands_for=meant)


RUN = {"run-7/checkpoint-10": LLAMA, "run-7/checkpoint-20": LLAMA}
SERIES = {f"checkpoint-{step}": LLAMA for step in (800, 900, 1000)}
IN_THE_STORE = {"s3://training/run-7/checkpoint-1000": SMALL}
NEEDS_A_TRAINER = "needs PaddleFormers and its Trainer; make parity runs it (tests/parity)"

PAGES: dict[str, Page] = {
    "CONTRIBUTING.md": Page(
        stands_for={"tests/golden/": f"{REPO}/tests/golden/", "/tmp/one": "one"},
        shows={
            "imports point one way": "what lint-imports prints for an import that nobody makes",
            "A copied part is one value": "first lines of commits",
        },
    ),
    "README.md": Page(
        holds={"checkpoint-1000": LLAMA} | RUN | IN_THE_STORE,
        shows={"equal; 273 tensors": "tests/unit/test_readme.py runs make demo and compares"},
        not_run={
            "paddle-reshard resume run-7": "becomes a trainer; tests/jobs/test_resume_point.py runs such lines",
            "trainer.add_callback(": NEEDS_A_TRAINER,
        },
    ),
    "docs/adding.md": Page(
        shows={"allow_missing: Annotated[": "tests/unit/test_adding.py compares it with the declaration"},
        not_run={"trainer.add_callback(": NEEDS_A_TRAINER},
    ),
    "docs/aoa.md": Page(
        holds={"checkpoint-1000": "dense/single", "checkpoint-300": "families/ernie4_5_moe_vl_saved:checkpoint-0"},
        saved={'{"aoa_statements"': "norm.json", "model.layers.$LAYER_ID": "fused.txt"},
        not_run={
            "import json": "needs PaddleFormers; tests/golden/ernie4_5_moe_vl.json has what it makes: map.json"
        },
    ),
    "docs/architecture.md": Page(
        drawings="drawings; tests/unit/test_document_paths.py compares the layers with the import contract"
    ),
    "docs/ema.md": Page(
        holds=SERIES,
        stands_for={'f"checkpoint-{step}", ': '"saved", ', "tp=2, tp_rank=1": "tp=1, tp_rank=0"},
        not_run={"from paddle_reshard import ema_callback": NEEDS_A_TRAINER},
    ),
    "docs/families.md": Page(
        holds={
            "ernie-300": "recipes/ernie_ep2_pp2sh2_s1v2_meta",
            "deepseek-300": "recipes/dsv3_ep2_pp2sh2_s1v2_meta",
        },
        stands_for={"ernie4_5_moe.json": "ernie-300/config.json"},
        not_run={
            "paddle-reshard convert ernie-300 ernie-tuning": "needs the config of the published model; "
            "tests/golden/test_pretraining_recipes.py converts with one",
        },
    ),
    "docs/glossary.md": Page(
        drawings="drawings; tests/unit/test_glossary.py compares their byte offsets with those of the tour"
    ),
    "docs/guides/average.md": Page(
        holds={"checkpoint-1000": LLAMA, "run-7/checkpoint-1": LLAMA, "run-7/checkpoint-2": LLAMA},
        not_run={"trainer.add_callback(": NEEDS_A_TRAINER},
    ),
    "docs/guides/clusters.md": Page(holds={"checkpoint-1000": LLAMA, "s3://bucket/run-7/checkpoint-1000": SMALL}),
    "docs/guides/export.md": Page(before=("convert checkpoint-1000 Qwen3-30B-A3B --format huggingface",)),
    "docs/guides/fewer-cards.md": Page(holds={"checkpoint-1000": LLAMA, "run-7/checkpoint-1000": LLAMA}),
    "docs/guides/files-by-rank.md": Page(
        holds={"checkpoint-1000": LLAMA, "s3://bucket/checkpoint-1000": SMALL},
        before=("convert checkpoint-1000 flex-1000 --format flex",),
        stands_for={"/local/": "local/"},
    ),
    "docs/guides/jobs-that-go-on.md": Page(
        holds={},
        not_run={
            "paddle-reshard resume run-7": "becomes a trainer; tests/jobs/test_resume_point.py runs such lines",
            "path = paddle_reshard.resume(": NEEDS_A_TRAINER,
        },
    ),
    "docs/guides/object-stores.md": Page(
        holds=IN_THE_STORE,
        stands_for={
            "http://minio.example:9000": "{url}", "https://s3.bj.bcebos.com": "{url}",
            '"key": "…"': '"key": "{key}"', '"secret": "…"': '"secret": "{secret}"',
        },
        saved={'{"key": "…"': "store.json"},
    ),
    "docs/guides/paddleocr-vl.md": Page(
        holds={
            "checkpoint-1000": "families/paddleocr_vl_sh2_s1v2_meta",
            "lora-300": "small-lora/lora_paddleocr_vl_sh2_s1v2_meta",
            "trained-base": "families/paddleocr_vl_single",
        },
        before=("convert trained-base PaddleOCR-VL --format huggingface",),
    ),
    "docs/guides/troubleshooting.md": Page(drawings="messages; test_messages.py makes each of them appear"),
    "docs/guides/watch.md": Page(holds={"run-7/checkpoint-1000": LLAMA}),
    "docs/jobs.md": Page(
        holds={"checkpoint-1000": LLAMA, "source": DEEPSEEK},
        before=("convert source DeepSeek-V3 --format huggingface",),
        fp8=("DeepSeek-V3",),
        not_run={"trainer.add_callback(": NEEDS_A_TRAINER},
        shows={
            "weight · weight_scale_inv": "a formula; tests/golden/test_fp8.py compares results",
            "integer · weight_scale": "a formula; tests/golden/test_integers.py compares results",
        },
    ),
    "docs/live.md": Page(holds={"checkpoint-1000": LLAMA} | IN_THE_STORE),
    "docs/lora.md": Page(
        holds={"checkpoint-300": "states/lora_pp2"},
        shows={"weight + (lora_A": "a formula; tests/golden/test_lora_merge.py compares results"},
    ),
    "docs/proof.md": Page(
        holds={"checkpoint-1000": LLAMA, "checkpoint-1010": LLAMA},
        before=(
            "convert checkpoint-1000 converted --to pp=4", "convert checkpoint-1000 one-card --to tp=1",
            "convert checkpoint-1000 two-cards --to tp=2",
            "convert checkpoint-1000 four-stages --to pp=4",
            "convert checkpoint-1000 model --format huggingface",
        ),
    ),
    "docs/reference/files.md": Page(drawings="names in files of tests/corpus, abbreviated"),
    "docs/report.md": Page(holds=SERIES),
    "docs/serving.md": Page(
        holds={"checkpoint-300": QWEN3_MOE},
        before=(
            "convert checkpoint-300 BASE --format huggingface",
            "convert checkpoint-300 DeepSeek-V3-bf16 --format huggingface",
        ),
    ),
    "docs/tour.md": Page(
        drawings="tests/unit/test_tour.py compares them with a conversion",
        stands_for={"tests/golden/": f"{REPO}/tests/golden/"},
    ),
    "docs/unattended.md": Page(
        holds={"data/run-7/checkpoint-10": LLAMA} | RUN | IN_THE_STORE, stands_for={"/data/": "data/"}
    ),
    "docs/versions.md": Page(
        holds={"checkpoint-300": QWEN3_MOE, "checkpoint-of-0.4": "small-versions/pf041_llama_single"}
    ),
    "pipeline/model/rules/README.md": Page(shows={"{": "a rule table; tests/unit/test_rule_tables.py reads it"}),
    "tests/lab/README.md": Page(
        not_run={
            "make again": "needs the trainer",
            "python3 tests/lab/upstream.py": "tests/unit/test_upstream.py compares the installed Paddle",
            "python3 -m tests.lab.pack": "packs what they wrote",
        },
    ),
}  # fmt: skip
