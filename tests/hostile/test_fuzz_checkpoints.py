"""A checkpoint that somebody else wrote may say anything: it is understood or refused, never a traceback.

``make fuzz`` runs the same with many more examples.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import case_directory
from tests.sampling import examples

DEMO = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
SETTINGS = examples(40)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([0, -1, 1, 2**31, 2**63, "tp00_pp00", "linear_0.w_0", "../../etc/passwd", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def plan_with(name: str, content: bytes, to: str) -> None:
    """Plan a conversion of the demo checkpoint with one file replaced; only refusals may be raised."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for path in DEMO.iterdir():
            if path.name != name:
                shutil.copy(path, source)
        (source / name).write_bytes(content)
        try:
            paddle_reshard.plan(source, Path(folder) / "target", to=to)
        except ReshardError as refusal:
            assert str(refusal)


@st.composite
def damaged(draw: st.DrawFn, content: Any) -> Any:
    """One entry somewhere replaced or removed."""
    node = content
    while node:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        place = draw(st.sampled_from(places))
        if not (isinstance(node[place], dict | list) and node[place] and draw(st.booleans())):
            if draw(st.booleans()):
                node[place] = draw(json_values)
            else:
                del node[place]
            break
        node = node[place]
    return content


@st.composite
def damaged_json(draw: st.DrawFn, name: str) -> bytes:
    """The real file with one to three entries replaced or removed."""
    data = json.loads((DEMO / name).read_text())
    for _ in range(draw(st.integers(1, 3))):
        data = draw(damaged(data))
    return json.dumps(data).encode()


@SETTINGS
@given(damaged_json("model_meta.json"), st.sampled_from(["tp=1", "tp=2,pp=2,sharding=2", "pp=4,sharding=3"]))
def test_any_model_meta_is_understood_or_refused(content: bytes, to: str) -> None:
    plan_with("model_meta.json", content, to)


@SETTINGS
@given(damaged_json("config.json"), st.sampled_from(["tp=1", "tp=2,pp=2,sharding=2", "tp=4"]))
def test_any_config_is_understood_or_refused(content: bytes, to: str) -> None:
    plan_with("config.json", content, to)


@SETTINGS
@given(
    st.sampled_from(["optimizer.tp00_pp00_shard01.pdopt", "ema.tp01_pp01_shard00.pdopt"]),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_damaged_tensor_files_are_understood_or_refused(name: str, changes: list[tuple[int, int]]) -> None:
    content = bytearray((DEMO / name).read_bytes())
    headers = [
        i for i in range(len(content)) if content[i] in b"\x8c\x94h("
    ]  # near the opcodes between payloads
    for place, value in changes:
        content[headers[place % len(headers)]] = value
    plan_with(name, bytes(content), "tp=1")


rules_text = (
    Path(paddle_reshard.__file__).parent / "pipeline/model/rules/llama.paddleformers.json"
).read_text()


@SETTINGS
@given(st.data())
def test_any_rule_table_is_understood_or_refused(data: st.DataObject) -> None:
    table = json.loads(rules_text)
    row = data.draw(st.sampled_from(table["rules"] + table["items"] + [table]))
    row[data.draw(st.sampled_from([*row, "new"]))] = data.draw(json_values)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.json"
        path.write_text(json.dumps(table))
        try:
            paddle_reshard.plan(DEMO, Path(folder) / "target", to="tp=2,pp=2", rules=path)
        except ReshardError as refusal:
            assert str(refusal)
