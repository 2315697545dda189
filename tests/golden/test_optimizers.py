"""Optimizers other than AdamW: files written by Paddle's own optimizers, converted there and back.

The state is real: Paddle 3.3.1 makes steps on random parameters that are called as a tiny Llama's are, and
``paddle.save`` writes the files. What the format does not say enough about is refused by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.pipeline.training.resume_point import Start
from tests import oracle

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 8, 12, 16, 2
CONFIG = {
    "model_type": "llama", "paddleformers_version": "1.2.0", "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("embedding", (VOCAB, HIDDEN))}
for layer in range(LAYERS):
    SHAPES |= {
        f"model.layers.{layer}.self_attn.q_proj.weight": ("linear", (HIDDEN, HIDDEN)),
        f"model.layers.{layer}.self_attn.k_proj.weight": ("linear", (HIDDEN, 4)),
        f"model.layers.{layer}.self_attn.v_proj.weight": ("linear", (HIDDEN, 4)),
        f"model.layers.{layer}.self_attn.o_proj.weight": ("linear", (HIDDEN, HIDDEN)),
        f"model.layers.{layer}.mlp.gate_proj.weight": ("linear", (HIDDEN, INTERMEDIATE)),
        f"model.layers.{layer}.mlp.up_proj.weight": ("linear", (HIDDEN, INTERMEDIATE)),
        f"model.layers.{layer}.mlp.down_proj.weight": ("linear", (INTERMEDIATE, HIDDEN)),
        f"model.layers.{layer}.input_layernorm.weight": ("create_parameter", (HIDDEN,)),
        f"model.layers.{layer}.post_attention_layernorm.weight": ("create_parameter", (HIDDEN,)),
    }
SHAPES |= {
    "model.norm.weight": ("create_parameter", (HIDDEN,)),
    "lm_head.weight": ("lm_head", (VOCAB, HIDDEN)),
}


@pytest.fixture(scope="module")
def paddle() -> Any:
    oracle._paddle_load()
    import paddle

    return paddle


def _train(paddle: Any, folder: Path, optimizer: str, **options: Any) -> None:
    """Make two real steps of an optimizer and save what a one-card trainer would."""
    rng = np.random.default_rng(5)
    counters: dict[str, int] = {}
    parameters = {}
    for key, (layer_class, shape) in SHAPES.items():
        value = paddle.to_tensor(rng.standard_normal(shape).astype("float32"))
        parameter = paddle.base.framework.EagerParamBase.from_tensor(value)
        parameter.name = f"{layer_class}_{counters.get(layer_class, 0)}.w_0"
        counters[layer_class] = counters.get(layer_class, 0) + 1
        parameters[key] = parameter
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=1)
    with paddle.utils.unique_name.guard():  # as in a new process: accumulators are counted from 0
        rule = getattr(paddle.optimizer, optimizer)(
            learning_rate=rate, parameters=list(parameters.values()), **options
        )
        for _ in range(2):
            loss = sum((parameter**2).sum() for parameter in parameters.values())
            loss.backward()
            rule.step()
            rate.step()
            rule.clear_grad()
    folder.mkdir()
    paddle.save(parameters, str(folder / "model_state.pdparams"))
    paddle.save(rule.state_dict(), str(folder / "optimizer.pdopt"))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _arrays(folder: Path) -> dict[str, bytes]:
    states = oracle.load_with_paddle(folder / "optimizer.pdopt")
    found = {f"optimizer {k}": v.tobytes() for k, v in states.items() if isinstance(v, np.ndarray)}
    model = oracle.load_with_paddle(folder / "model_state.pdparams")
    return found | {k: v.tobytes() for k, v in model.items() if isinstance(v, np.ndarray)}


@pytest.mark.parametrize(
    ("optimizer", "options", "states"),
    [
        ("AdamW", {}, {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}),
        ("Adam", {"amsgrad": True}, {"moment1", "moment2", "moment2_max", "beta1_pow_acc", "beta2_pow_acc"}),
        ("Lamb", {}, {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}),
        ("Momentum", {}, {"velocity"}),
        ("SGD", {}, set()),
    ],
)
@pytest.mark.parametrize(
    ("to", "strategy"),
    [
        ("tp=2,pp=2,sharding=2", "stage1v2"),
        ("tp=2,sharding=3", "stage1v1"),
        ("sharding=2", "stage3"),
        ("tp=2,pp=2", None),
    ],
)
def test_there_and_back_keeps_every_state(
    paddle: Any,
    optimizer: str,
    options: dict,
    states: set[str],
    to: str,
    strategy: str | None,
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    _train(paddle, source, optimizer, **options)
    found = {s.state for s in paddle_reshard.inspect(source).states}
    assert found == {"param"} | states
    if not states and strategy is not None:
        # SGD in fp32 keeps nothing: which parameters it trains is in no file.
        with pytest.raises(paddle_reshard.ReshardError, match="has no optimizer state"):
            paddle_reshard.convert(source, tmp_path / "there", to=to, sharding_strategy=strategy)
        return
    layout = {"stage3_segment_size": 64} if strategy == "stage3" else None
    paddle_reshard.convert(source, tmp_path / "there", to=to, sharding_strategy=strategy, layout=layout)
    paddle_reshard.convert(tmp_path / "there", tmp_path / "back", to="tp=1")
    assert _arrays(tmp_path / "back") == _arrays(source)
    assert oracle.structure(tmp_path / "back") == oracle.structure(source)


@pytest.mark.parametrize(
    ("optimizer", "options", "state"),
    [("Momentum", {}, "velocity"), ("Adam", {"amsgrad": True}, "moment2_max")],
)
def test_states_that_the_trainer_does_not_load_by_parts_are_named_before_a_job_starts(
    paddle: Any, optimizer: str, options: dict, state: str, tmp_path: Path
) -> None:
    """Run with PaddleFormers 1.2, sharding=2: from parts "cannot find embedding_0.w_0_velocity_0", also from its own;
    from complete files and without sharding all states are there. To a FlexCheckpoint its jobs do not save them."""
    run, local = tmp_path / "run", tmp_path / "local"
    _train(paddle, tmp_path / "source", optimizer, **options)
    says = f"the optimizer keeps {state}, .*--format hybrid-plain"

    def notes(folder: Path, to: str | None = None) -> list[str]:
        found = paddle_reshard.launch(folder, to=to).remarks
        return [note for note in found if re.fullmatch(f"does not start: {says}", note)]

    run.mkdir()
    paddle_reshard.convert(
        tmp_path / "source", run / "checkpoint-2", to="sharding=2", sharding_strategy="stage1v1"
    )
    assert notes(run / "checkpoint-2")
    paddle_reshard.convert(tmp_path / "source", tmp_path / "two", to="tp=2")
    assert not notes(tmp_path / "two")
    paddle_reshard.convert(tmp_path / "source", tmp_path / "flex", format="flex")
    assert notes(tmp_path / "flex", "sharding=2")
    with pytest.raises(paddle_reshard.PlanError, match=says):
        paddle_reshard.plan(tmp_path / "source", format="flex", to="sharding=2")

    of_cards = paddle_reshard.plan(tmp_path / "two", cards=2)
    stops = {str(one.topology) for one in of_cards if re.fullmatch(says, one.not_resumed)}
    assert stops == {"sharding=2"} and str(of_cards.nearest.topology) == "tp=2"
    assert not any(
        one.not_resumed for one in paddle_reshard.plan(tmp_path / "two", cards=2, format="hybrid-plain")
    )

    job = Start(
        str(run), str(local), Node(0, 1), Topology(sharding=2), None, {}, lambda *_: None, lambda *_: None
    )
    resumed = job.make_ready(job.find(), lambda whole: None)
    assert resumed.arguments is not None and "load_sharded_model" not in resumed.arguments
    assert not notes(Path(resumed.path))


@pytest.mark.parametrize("optimizer", ["Adagrad", "RMSProp", "Adadelta", "Adamax", "NAdam", "RAdam"])
def test_optimizers_whose_state_is_not_understood_are_refused(
    paddle: Any, optimizer: str, tmp_path: Path
) -> None:
    _train(paddle, tmp_path / "source", optimizer)
    with pytest.raises(paddle_reshard.ReshardError, match="is not a known accumulator"):
        paddle_reshard.convert(tmp_path / "source", tmp_path / "target", to="tp=2")
