"""What single jobs need beside the shim: flaws of forward passes in the library, LoRA, newer versions of Paddle.

Nothing here names, cuts or writes a tensor. A function ``patch_<name>`` is called before the model is built if the
job's ``patch`` lists the name.
"""

import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import zlib

import numpy as np
import paddle
import paddle.distributed as dist
import truth


def early(names):
    for name in filter(None, names.split(",")):
        patch = globals().get(f"patch_{name}")
        if patch:
            patch()


def patch_dsv3_mtp_pipe():
    """The norm hands a list on to the layer of multi-token prediction, which takes a tensor."""
    import paddleformers.transformers.deepseek_v3.modeling as modeling

    norm, head = modeling.DeepseekV3RMSNormLayerPipe, modeling.DeepseekV3LMHeadPipe
    norm_one, head_one = norm.__mro__[1].forward, head.__mro__[1].forward

    def normed(self, args):
        hidden, rest = (args[0], tuple(args[1:])) if isinstance(args, tuple | list) else (args, ())
        parts = paddle.split(hidden, self.config.num_nextn_predict_layers + 1, axis=-1)
        return (paddle.concat([norm_one(self, part) for part in parts], axis=-1), *rest)

    def heads(self, args):
        hidden = args[0] if isinstance(args, tuple | list) else args
        parts = paddle.split(hidden, self.config.num_nextn_predict_layers + 1, axis=-1)
        return [head_one(self, part) for part in parts]

    norm.forward, head.forward = normed, heads


def patch_dsv3_mtp_sp():
    """Under sequence parallelism the model gathers the hidden state for that layer and never scatters it again."""
    import paddleformers.transformers.deepseek_v3.modeling as modeling

    decode = modeling.DeepseekV3DecoderLayer.forward

    def forward(self, hidden_states, nextn_hidden_state, *given, **named):
        x = self.eh_proj(paddle.concat([self.hnorm(hidden_states), self.enorm(nextn_hidden_state)], axis=-1))
        if self.config.sequence_parallel and x.ndim == 3:
            x = modeling.ScatterOp.apply(x.reshape([-1, x.shape[-1]]))
        out = decode(self, x, *given, **named)
        return out[0] if type(out) is tuple else out

    modeling.DeepseekV3MTPLayer.forward = forward


def patch_nbatch():
    """Ernie's model calls that layer without positions: every later argument lands a place too early."""
    import paddleformers.transformers.ernie4_5_moe.modeling as modeling

    decode, last = modeling.Ernie4_5_MoeDecoderLayer.forward, {}
    of_model = modeling.Ernie4_5_MoeForCausalLM.forward

    def forward(
        self, hidden_states, attention_mask=None, attn_mask_startend_row_indices=None, position_ids=None,
        position_embeddings=None, output_attentions=False, past_key_values=None, use_cache=False, **named,
    ):  # fmt: skip
        if isinstance(position_embeddings, bool):
            output_attentions, past_key_values, use_cache = (
                position_embeddings,
                output_attentions,
                past_key_values,
            )
            position_embeddings = last["positions"]
        last["positions"] = position_embeddings
        return decode(
            self, hidden_states, attention_mask, attn_mask_startend_row_indices, position_ids,
            position_embeddings, output_attentions, past_key_values, use_cache, **named,
        )  # fmt: skip

    modeling.Ernie4_5_MoeDecoderLayer.forward = forward
    # By default the model hands no logits of that layer to the loss.
    modeling.Ernie4_5_MoeForCausalLM.forward = lambda self, *given, **named: of_model(
        self, *given, **{**named, "return_dict": False}
    )


def _read_only_view(tensor):
    array = np.array(tensor.cpu())
    if array.dtype == np.float32:
        array.flags.writeable = False
    return array


def patch_p5():
    """``paddle.save`` of Paddle 3.4, whose default is protocol 5: the installed functions with two numbers changed.

    With ``P5_READONLY`` in the environment pickle gets read-only arrays, which views of tensors may be.
    """
    import paddle.framework.io as io

    for name in ("_build_saved_state_dict", "_pickle_save", "_legacy_save", "save"):
        source = textwrap.dedent(inspect.getsource(getattr(io, name)))
        source = source.replace("protocol > 4", "protocol > 5").replace("1<'protocol'<5", "1<'protocol'<6")
        if name == "save":
            source = re.sub(r"protocol: Literal\[2, 3, 4\] = 4", "protocol=5", source)
            source = re.sub(r"\) -> None:", "):", source, count=1)
            source = re.sub(r"^(@.*\n)+", "", source)
        if os.environ.get("P5_READONLY"):
            source = re.sub(r"np\.array\((self|value)(\.cpu\(\))?\)", r"_read_only_view(\1)", source)
        exec(compile("from __future__ import annotations\n" + source, io.__file__, "exec"), io.__dict__)
    io._read_only_view = _read_only_view
    paddle.save = paddle.framework.save = io.save
    assert inspect.signature(io.save).parameters["protocol"].default == 5


def patch_fp16():
    """Loss scaling, which Paddle switches off on a CPU."""
    import paddle.amp.grad_scaler as grad_scaler
    from paddle import _legacy_C_ops

    source = textwrap.dedent(inspect.getsource(grad_scaler.AmpScaler.__init__))
    source = source.replace("if enable and not (", "if False and not (")
    place = grad_scaler.__dict__
    exec(compile("from __future__ import annotations\n" + source, grad_scaler.__file__, "exec"), place)
    grad_scaler.AmpScaler.__init__ = place.pop("__init__")

    def check_finite_and_unscale(gradients, scale, outs, found, *_):
        bad = False
        with paddle.no_grad():
            for gradient, out in zip(gradients, outs, strict=True):
                value = gradient.astype("float32") / scale
                bad |= not bool(paddle.isfinite(value).all())
                paddle.assign(value.astype(out.dtype), out)
            paddle.assign(paddle.to_tensor(np.array([bad])), found)

    _legacy_C_ops.check_finite_and_unscale = check_finite_and_unscale


def patch_muon():
    """Muon of Paddle 3.4: ``MUON_OVERLAY`` is a folder with its two files, as ``muon_up`` and ``muon_sharding_up``."""
    import paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer as hybrid
    import paddle.optimizer
    import paddleformers.trainer.trainer_utils as trainer_utils
    import paddleformers.trainer.utils.reshard.common as reshard
    import paddleformers.utils.moe_hybrid_parallel_optimizer as of_experts
    from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy

    sys.path.insert(0, os.environ["MUON_OVERLAY"])
    muon, sharded = importlib.import_module("muon_up"), importlib.import_module("muon_sharding_up")
    sys.modules["paddle.optimizer.muon"] = muon
    sys.modules["paddle.distributed.fleet.meta_optimizers.muon_sharding_optimizer"] = sharded
    paddle.optimizer.muon, paddle.optimizer.Muon = muon, muon.Muon
    DistributedStrategy.use_muon_sharding = False  # of newer strategies, which then choose the class below
    hybrid.DygraphShardingOptimizerV2 = sharded.MuonShardingOptimizer
    for module in (trainer_utils, reshard, of_experts):
        module.MuonShardingOptimizer = sharded.MuonShardingOptimizer


def know_matrices(model):
    """Say which parameters Muon has, by the rule of newer models, without slices."""
    from paddle.optimizer.muon import MuonParamInfo
    from paddle.optimizer.muon import _default_should_use_muon as is_muons

    of_single = getattr(model, "_pp_to_single_mapping", None) or {}
    if hasattr(model, "_set_pipeline_name_mapping"):
        named = (model._set_pipeline_name_mapping() or {}).items()
        of_single = {value: key for key, value in named} or of_single

    def build(model, config):
        left_out = config.muon_configs["muon_exclude_patterns"]
        return {
            parameter.name: MuonParamInfo(
                use_muon=is_muons(of_single.get(key, key), parameter.shape, left_out)
                and is_muons(parameter.name, parameter.shape, left_out)
            )
            for key, parameter in model.named_parameters()
        }

    object.__setattr__(model, "build_muon_param_info_map", build)


def with_adapters(model, degree, dtype, **given):
    """Adapters on the library's own choice of modules; ``degree`` is that of tp."""
    from paddleformers.cli.utils.llm_utils import get_lora_target_modules
    from paddleformers.peft import LoRAConfig, LoRAModel

    given = {"target_modules": get_lora_target_modules(model), "r": 4, **given}
    given.setdefault("lora_alpha", 2 * given["r"])
    config = LoRAConfig(
        merge_weights=False,
        tensor_model_parallel_size=degree,
        dtype=dtype,
        base_model_name_or_path="base",
        **given,
    )
    adapted = LoRAModel(model, config)
    if hasattr(adapted, "_set_pipeline_name_mapping"):
        adapted._set_pipeline_name_mapping()
    return adapted


def make_lora(model, asked, args, dtype):
    """Adapters with the same values in every topology; on one card the base is saved, too."""
    degree = args.tensor_model_parallel_size
    if dist.get_world_size() == 1:
        base = os.path.join(asked.out, "base")
        os.makedirs(base, exist_ok=True)
        model.save_pretrained(base, save_checkpoint_format=None, save_to_hf=False, safe_serialization=False)
    adapted = with_adapters(model, degree, dtype, **json.loads(asked.lora))
    with paddle.no_grad():
        for key, tensor in adapted.model.state_dict().items():
            if "lora_" not in key:
                continue
            shape, axis = list(tensor.shape), truth.tp_axis(key, tensor)
            is_cut = truth.is_tp(key, tensor, args)
            if is_cut:
                shape[axis] *= degree
            # B is not zero, as it would be at birth: A would get no gradient in the first step.
            numbers = np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFF).randn(*shape)
            value = numbers.astype("float32") * (0.1 if "lora_A" in key else 0.02)
            if is_cut and asked.init == truth.BY_KEY:
                value = truth.cut_by_key(value, key, axis, model.config, args)
            elif is_cut:  # as the corpus was made: adapters of fused tensors are others on other tp ranks
                value = np.split(value, degree, axis=axis)[args.tensor_parallel_rank]
            paddle.assign(paddle.to_tensor(value).astype(tensor.dtype), tensor)
    return adapted


def unfuse(optimizer, model):
    """With ``stage1_tensor_fusion`` states are of fused buffers: find each parameter in them by its address."""
    chain = truth._chain(optimizer)
    fusing = next((one for one in chain if one.__dict__.get("_rank2fused")), None)
    if fusing is None:
        return
    inner = chain[-1]
    masters = dict(inner._master_weights)
    states = {word: dict(tensors) for word, tensors in inner._accumulators.items()}
    for fused in fusing._rank2fused[fusing._sharding_rank]:
        master, elements = masters[fused.name], int(np.prod(fused.shape))
        for parameter in model.state_dict().values():
            start = (parameter.data_ptr() - fused.data_ptr()) // 2
            if not 0 <= start < elements:
                continue
            place = slice(start, start + int(np.prod(parameter.shape)))
            weight = master[place].reshape(parameter.shape)
            weight.name = parameter.name + "_fp32_master_0"
            inner._master_weights[parameter.name] = weight
            for word, tensors in states.items():
                state = tensors[master.name]
                own = state.clone() if state.shape == [1] else state[place].reshape(parameter.shape)
                inner._accumulators[word][weight.name] = own
