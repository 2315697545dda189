"""Start every model family on every axis that its rule table offers, in the real trainer, from our conversions.

``python -m tests.parity.families [family | family:axis ...]``; the README beside this file says what it proves, and
``--report`` writes the table of ``tests/parity/families.md`` from the results.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests.families import families
from tests.lab.laboratory import Laboratory
from tests.parity.checks import check_all
from tests.parity.lab import PARITY, REPO, LabError, say
from tests.parity.run import Row, check

RESULTS = PARITY / "families"
DOCUMENT = REPO / "tests" / "parity" / "families.md"
MARK = "<!-- started -->"
SOURCES = {
    "deepseek_v3": "moe/dsv3_single",
    "ernie4_5": "families/ernie4_5_single",
    "ernie4_5_moe": "moe/ernie45moe_single",
    "gemma3_text": "families/gemma3_text_single",
    "glm4_moe": "moe/glm4moe_single",
    "glm4v_moe": "families/glm4v_moe_single",
    "glm_ocr": "families/glm_ocr_single",
    "gpt_oss": "moe/gptoss_single",
    "llama": "single",
    "paddleocr_vl": "families/paddleocr_vl_single",
    "phi3": "families/phi3_single",
    "qwen2": "families/qwen2_single",
    "qwen2_5_vl": "families/qwen2_5_vl_single",
    "qwen2_moe": "moe/qwen2moe_single",
    "qwen3": "families/qwen3_single",
    "qwen3_moe": "moe/moe_single",
    "qwen3_next": "families/qwen3_next_single",
    "qwen3_vl": "families/qwen3_vl_single",
    "qwen3_vl_moe": "families/qwen3_vl_moe_single",
}
"""Family of PaddleFormers → a real checkpoint of one card."""
EVENLY = "layer:DecoderLayer"
DIFFERENT: dict[str, dict[str, Any]] = {
    "deepseek_v3:tp": {
        "layout": {"sequence_parallel": True},
        "arguments": {"sequence_parallel": True},
    },
    "ernie4_5:pp": {"layout": {"segmentation": EVENLY}, "model": {"pp_seg_method": EVENLY}},
    "ernie4_5_moe:ep": {"to": "tp=2", "strategy": None, "model": {"moe_group": "mp"}},
    "ernie4_5_moe:tp": {"layout": {"experts_over_tp": False}},
    "glm4_moe:pp": {"to": "pp=3"},
    "gpt_oss:pp": {"layout": {"segmentation": EVENLY}, "model": {"pp_seg_method": EVENLY}},
    "paddleocr_vl:sharding": {
        "source": "families/paddleocr_vl_sh2_s1v2_meta",
        "strategy": "stage1v1",
    },
    "phi3:tp": {"qkv": (32, 16, 16)},
    "qwen2_5_vl:tp": {"format": "flex"},
}
"""Rows whose job needs other arguments, for reasons that the README gives; two that start by these alone."""
SINKS = r"model\.layers\.\d+\.self_attn\.sinks: 2 of 4 elements, the first at 2"
OF_THE_LIBRARY = {"gpt_oss:tp": SINKS}
"""Differences that the trainer makes itself, as a regular expression."""
REMARKS = {
    "deepseek_v3:tp": "with `sequence_parallel`, without which its attention stops",
    "ernie4_5:pp": "only if `config.json` has another `pp_seg_method` (tried: `layer:DecoderLayer`, and the same with "
    "`--layout`); the library's own default matches no layer of its pipeline, and the trainer stops. `convert` "
    "refuses that, and the table does not list the axis",
    "ernie4_5_moe:ep": "its experts are distributed over tp ranks (`moe_group` mp)",
    "ernie4_5_moe:tp": "with `moe_group` dummy: each rank has a part of every expert (`experts_over_tp` false)",
    "gemma3_text:tp": "refused: the trainer's loss stops in the first step",
    "glm4_moe:pp": "pp=3 for 3 layers, which pp must divide: the library's `pp_seg_method` for this family does not "
    "give way to an even distribution, as that of the others does. `convert` refuses pp=2",
    "glm4v_moe:tp": "with text alone: the library's vision tower stops under tp",
    "gpt_oss:pp": "as ernie4_5 with pp",
    "gpt_oss:tp": "apart from the attention sinks of all ranks but the first: as the trainer starts, it gives every "
    "rank the first one's, with any checkpoint, since they are not marked as cut. Master weights and moments are "
    "right, and with them the sinks after the first step",
    "paddleocr_vl:sharding": "from v2 to v1. From one card it is refused, where `packing_position_embedding` has no "
    "optimizer states, which a job with sharding asks for",
    "paddleocr_vl:tp": "refused: the library's vision tower and attention stop under tp",
    "qwen2_5_vl:tp": "as a FlexCheckpoint laid out for the ranks. From plain files the trainer was seen to load all "
    "states and none of the parameters; after the first step they are those of the master weights. Plain files have "
    "other keys than the model (`visual.` for `model.visual.`), which may be why",
}
"""What the table says of a row beside the number of tensors."""
AXES = {
    "sharding": Row("", "sharding=2", "stage1v2"),
    "tp": Row("", "tp=2"),
    "pp": Row("", "pp=2"),
    "ep": Row("", "ep=2,sharding=2", "stage1v2"),
}


def rows() -> dict[str, Row]:
    """``family:axis`` → the conversion and the job, for every axis that ``docs/families.md`` lists, and sharding."""
    offered = [
        (family.name, axis)
        for family in families(shipped_tables())
        if family.library == "paddleformers" and family.name in SOURCES
        for axis in ("sharding", *family.axes)
    ]
    asked = [*offered, *(tuple(name.split(":")) for name in DIFFERENT)]
    return {
        f"{name}:{axis}": replace(
            AXES[axis], **{"source": SOURCES[name], "trains_on": True, **DIFFERENT.get(f"{name}:{axis}", {})}
        )
        for name, axis in sorted(asked)
    }


def table() -> str:
    """The results as Markdown, and what there is to say of some of them."""
    names = sorted({name.partition(":")[0] for name in [*rows(), *REMARKS]})
    lines = [["family", *AXES], ["---"] * (1 + len(AXES)), *([f"{n}", *_cells(n)] for n in names)]
    remarks = [f"- {name.replace(':', ', ')}: {text}." for name, text in sorted(REMARKS.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + "\n".join(remarks)


def _cells(family: str) -> list[str]:
    every = rows()
    return [_cell(f"{family}:{axis}", f"{family}:{axis}" in every) for axis in AXES]


def _cell(name: str, has_row: bool) -> str:
    if not has_row:
        return "no, see below" if name in REMARKS else "–"
    result = json.loads((RESULTS / f"{name.replace(':', '-')}.json").read_bytes())
    if result["found"]:
        raise LabError(f"{name} failed: {result['found'][0]}")
    return f"{result['compared']}{', see below' if name in REMARKS else ''}"


def write_report() -> None:
    """Write the table into ``tests/parity/families.md``."""
    text = DOCUMENT.read_text("utf-8")
    begin, _, rest = text.partition(MARK)
    _, end, after = rest.partition("<!-- end -->")
    DOCUMENT.write_text(f"{begin}{MARK}\n{table()}\n{end}{after}", "utf-8")


def main(wanted: list[str]) -> int:
    """Check the rows asked for, or all; the result is the exit status."""
    if wanted == ["--report"]:
        write_report()
        return 0
    every = rows()
    names = [name for name in every if not wanted or {name, name.partition(":")[0]} & {*wanted}]
    if not names:
        say(f"unknown: {', '.join(wanted)}; the rows are {', '.join(every)}")
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    return check_all(names, lambda lab, name: _checked(lab, name, every[name]))


def _checked(lab: Laboratory, name: str, row: Row) -> tuple[str, list[str]]:
    """Check a row, and keep for the report what came of it."""
    compared, found = 0, ["the check did not end"]
    try:
        compared, found = check(lab, name.replace(":", "-"), row)
    finally:
        known = OF_THE_LIBRARY.get(name)
        found = [line for line in found if known is None or not re.fullmatch(known, line)]
        path = RESULTS / f"{name.replace(':', '-')}.json"
        path.write_text(json.dumps({"compared": compared, "found": found}))
    return f"{compared} tensors", found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
