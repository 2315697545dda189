"""A class of our own, built and trained by Paddle, describes itself; its checkpoint is converted with nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.file_names import RULES
from paddle_reshard.pipeline.core.limits import most_bytes
from paddle_reshard.pipeline.training.describe import _joined
from tests.oracle import load_with_paddle

TRAIN = """
import sys
from pathlib import Path
import paddle
from paddle import nn
import paddle_reshard
from paddle_reshard.pipeline.training.describe import facts_of

class Attention(nn.Layer):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(8, 24, bias_attr=False)
        self.out = nn.Linear(8, 8)
        self.scale = self.create_parameter([1])

    def forward(self, x):
        q, k, v = self.wqkv(x).chunk(3, -1)
        return self.out(q * k * self.scale + v)

class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(x + self.attention(self.norm(x)))

class Own(nn.Layer):
    transpose_weight_keys = ("out",)

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.blocks = nn.LayerList([Block() for _ in range(2)])
        self.score = nn.Linear(8, 1)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.score(x)

paddle.set_device("cpu")
model = Own()
folder = Path(sys.argv[1])
paddle_reshard.describe(
    model, to=folder / "paddle_reshard_rules.json", config={"model_type": "own", "num_hidden_layers": 2}
)
assert facts_of(model, {}).transposed == (), "save_to_hf takes a list, and ignores all else"
optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), learning_rate=0.1)
model(paddle.arange(6)).sum().backward()
optimizer.step()
paddle.save(model.state_dict(), str(folder / "model_state.pdparams"))
paddle.save(optimizer.state_dict(), str(folder / "optimizer.pdopt"))
"""


def test_a_class_of_ones_own_is_converted_by_what_it_says_of_itself(tmp_path: Path) -> None:
    source = tmp_path / "own"
    source.mkdir()
    subprocess.run([sys.executable, "-c", TRAIN, str(source)], check=True, capture_output=True, timeout=300)
    config = {"model_type": "own", "num_hidden_layers": 2, "paddleformers_version": "1.2.0"}
    (source / "config.json").write_text(json.dumps(config))

    assert "as described in a job with one card" in str(paddle_reshard.inspect(source).facts())
    paddle_reshard.convert(source, tmp_path / "two", to="sharding=2")
    paddle_reshard.convert(tmp_path / "two", tmp_path / "one", to="tp=1")

    for file in ("model_state.pdparams", "optimizer.pdopt"):
        before, after = (load_with_paddle(folder / file) for folder in (source, tmp_path / "one"))
        arrays = {name: value for name, value in before.items() if isinstance(value, np.ndarray)}
        assert len(arrays) > 20
        for name, value in arrays.items():
            assert value.tobytes() == after[name].tobytes(), name


VIRTUAL_STAGES = """
import sys
from paddle import nn
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
import paddle_reshard

paddle.set_device("cpu")
dist.ParallelEnv.device_id = 0  # a CPU has none
fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
words = {"num_embeddings": 8, "embedding_dim": 4, "shared_weight_attr": "weight"}
layers = [SharedLayerDesc("words", nn.Embedding, **words), *(LayerDesc(nn.Linear, 4, 4) for _ in range(4))]

class Own(PipelineLayer):
    def state_dict(self):
        keys = {"3.0": "layers.2", "3.1": "layers.3", "3.2": "norm", "0.1": "layers.0", "0.2": "layers.1"}
        held = {key.rpartition("."): of for key, of in super().state_dict().items() if key != "0.0.weight"}
        return {f"{keys.get(module, 'words')}.{part}": of for (module, _, part), of in held.items()}

model = Own(
    layers=[*layers, LayerDesc(nn.LayerNorm, 4)], topology=fleet.get_hybrid_communicate_group().topology(),
    num_virtual_pipeline_stages=2, seg_method="layer:Linear", loss_fn=nn.MSELoss(),
)
assert model.segment_parts == [0, 3, 6]
paddle_reshard.describe(model, to=sys.argv[1], config={"model_type": "own", "num_hidden_layers": 4})
"""


def test_layers_of_virtual_stages_are_the_items_that_the_pipeline_built(tmp_path: Path) -> None:
    """Each chunk of a pipeline numbers its layers from 0 on."""
    rules = tmp_path / "rules.json"
    subprocess.run(
        [sys.executable, "-c", VIRTUAL_STAGES, rules], check=True, capture_output=True, timeout=300
    )
    table = json.loads(rules.read_text())
    classes = {item["name"]: item["layer_class"] for item in table["items"]}
    assert {row["key"]: classes[row["item"]] for row in table["rules"]} == {
        "words.weight": "Embedding",
        **{f"layers.{{layer}}.{part}": "Linear" for part in ("weight", "bias")},
        **{f"norm.{part}": "LayerNorm" for part in ("weight", "bias")},
    }
    assert table["segmentations"] == ["layer:Linear"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"family": ', "is no rule table"),
        (b"[" * 100_000, "is no rule table"),
        (b" " * (most_bytes(RULES) + 1), "bytes"),
    ],
    ids=["cut", "deep", "long"],
)
def test_what_lies_in_place_of_an_earlier_table_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rules.json").write_bytes(content)
    with pytest.raises(UsageError, match=rf"rules\.json.*{said}"):
        _joined(tmp_path / "rules.json", {})
