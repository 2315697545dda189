"""What Paddle has for GPUs only, for ranks on CPUs: imported before anything that uses it.

Replaced are collectives that gloo lacks, kernels that the CPU build lacks (bfloat16, AdamW with master weights, those
of tensor parallelism), and helpers of CUDA. Nothing here cuts, flattens, names or writes a tensor. One value decides
about files: buffers of stage 1 v2 and of stages 2 and 3 are aligned to 256 bytes, as they are on a GPU.

Environment: ``SHIM_BOX``, a folder for messages between ranks; ``SHIM_STORE_PORT``, the first of the ports of groups;
``SHIM_SEGMENT``, from how many elements on stage 3 cuts a parameter, which the trainer's arguments do not say.
"""

import os
import sys
import time
import types

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.distributed.collective as collective
import paddle.distributed.fleet.meta_parallel
import paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication as p2p
import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 as stage2
import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 as stage3
import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage as sharded_storage
import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils as sharded_utils
import paddle.distributed.fleet.utils.tensor_fusion_helper as fusion
import paddle.distributed.sharding as sharding
import paddle.distributed.sharding.group_sharded as group_sharded
from paddle import _C_ops
from paddle.base import core
from paddle.distributed.communication.group import _GroupManager
from paddle.distributed.communication.reduce import ReduceOp, _get_reduce_op
from paddle.distributed.fleet.layers.mpu import mp_ops

LOW = (paddle.bfloat16, paddle.float16)
_BOX = os.environ.get(
    "SHIM_BOX", f"/dev/shm/shim_box_{os.environ.get('PADDLE_MASTER', 'x').replace(':', '_')}"
)
os.makedirs(_BOX, exist_ok=True)


# ---- collectives of gloo


class Done:
    """A task that is over."""

    def wait(self, *_):
        return True

    is_completed = synchronize = wait


Group = core.ProcessGroupGloo
_all_reduce, _broadcast = Group.all_reduce, Group.broadcast
_gather_into_tensor, _gather = Group.all_gather_into_tensor, Group.all_gather


def all_reduce(group, tensor, op=None, *_):
    if group.size() > 1:
        total = _get_reduce_op(ReduceOp.SUM)
        averages = op is not None and op == getattr(core.ReduceOp, "AVG", None)
        _all_reduce(group, tensor, total if op is None or averages else op, True).wait()
        if averages:
            with paddle.no_grad():
                tensor.scale_(1.0 / group.size())
    return Done()


def broadcast(group, tensor, source, *_):
    if group.size() > 1:
        _broadcast(group, tensor, source, True).wait()
    return Done()


def all_gather_into_tensor(group, out, given, *_):
    if group.size() == 1:
        with paddle.no_grad():
            paddle.assign(given.reshape(out.shape), out)
        return Done()
    copied = given.clone() if out._is_shared_buffer_with(given) else given
    _gather_into_tensor(group, out, copied.contiguous(), True).wait()
    return Done()


def all_gather(group, parts, given, *_):
    _gather(group, parts, given, True).wait()
    return Done()


def reduce_scatter(group, out, given, op=None, *_):
    """Reduce a copy everywhere and keep this rank's slice."""
    if isinstance(given, list | tuple):
        given = paddle.concat([part.flatten() for part in given])
    with paddle.no_grad():
        whole = given.detach().clone()
        all_reduce(group, whole, op)
        count = out._numel()
        mine = whole.flatten()[group.rank() * count : (group.rank() + 1) * count]
        paddle.assign(mine.reshape(out.shape), out)
    return Done()


Group.all_reduce = Group.all_reduce_on_calc_stream = all_reduce
Group.broadcast_on_calc_stream = broadcast
Group.reduce = Group.reduce_on_calc_stream = lambda group, tensor, _, op=None, *__: all_reduce(
    group, tensor, op
)
Group.all_gather_into_tensor = Group.all_gather_into_tensor_on_calc_stream = all_gather_into_tensor
Group.all_gather_on_calc_stream = all_gather
Group.reduce_scatter = Group.reduce_scatter_on_calc_stream = reduce_scatter
Group.reduce_scatter_tensor = Group.reduce_scatter_tensor_on_calc_stream = reduce_scatter
if hasattr(Group, "_start_coalescing"):
    Group._start_coalescing = lambda _: None
    Group._end_coalescing = lambda *_: None
if not hasattr(core, "nccl_version"):
    core.nccl_version = lambda: 21805  # asked for where an average is reduced


# ---- messages between two ranks, by files: gloo's send waits for the other side, where both may send first

_counts = {}
_names = {}


def _name_of(group):
    """What a group is called on all of its ranks."""
    if id(group) not in _names:
        known = _GroupManager.group_map_by_id.values()
        _names[id(group)] = next(f"g{one.id}" for one in known if getattr(one, "_pg", None) is group)
    return _names[id(group)]


def _next_message(group, source, target, way):
    key = f"{_name_of(group)}_{source}_{target}"
    _counts[way, key] = _counts.get((way, key), 0) + 1
    return f"{_BOX}/{key}_{_counts[way, key]}.npy"


def send(group, tensor, target, *_):
    path = _next_message(group, group.rank(), target, "sent")
    with open(path + ".tmp", "wb") as file:
        np.save(file, tensor.detach().contiguous().numpy())  # of bfloat16, uint16
    os.rename(path + ".tmp", path)
    return Done()


def receive(group, tensor, source, *_):
    path = _next_message(group, source, group.rank(), "received")
    began = time.time()
    while not os.path.exists(path):
        time.sleep(0.0005)
        if time.time() - began > 240:
            raise RuntimeError(f"nothing was received as {path}")
    array = np.load(path)
    os.unlink(path)
    with paddle.no_grad():
        if array.dtype == np.uint16:
            told = core.eager.Tensor(
                value=array, place=paddle.CPUPlace(), persistable=False, zero_copy=False, name=None,
                stop_gradient=True,
            )  # fmt: skip
            told = told if told.dtype == paddle.bfloat16 else paddle.view(told, "bfloat16")
        else:
            told = paddle.to_tensor(array)
        _fill(tensor, told)
    return Done()


def _fill(tensor, value):
    stops, tensor.stop_gradient = tensor.stop_gradient, True
    tensor.copy_(value.reshape(tensor.shape), True)
    tensor.stop_gradient = stops


def all_to_all(group, out, given, *sizes):
    """Exchange by messages; ``sizes``: rows for each rank, of what comes and of what goes."""
    ranks, me = range(group.size()), group.rank()
    if isinstance(out, list | tuple):
        for rank in ranks:
            send(group, given[rank], rank)
        for rank in ranks:
            receive(group, out[rank], rank)
        return Done()
    told = [one for one in sizes if one is None or isinstance(one, list | tuple)] + [None, None]
    come, go = (
        np.cumsum([0, *(counts or [tensor.shape[0] // len(ranks)] * len(ranks))]).tolist()
        for tensor, counts in zip((out, given), told, strict=False)
    )
    source = given.detach().contiguous()
    for rank in ranks:
        if rank != me:
            send(group, source[go[rank] : go[rank + 1]], rank)
    pieces = []
    for rank in ranks:
        piece = source[go[rank] : go[rank + 1]].clone()
        if rank != me:
            piece = paddle.empty([come[rank + 1] - come[rank], *out.shape[1:]], dtype=out.dtype)
            receive(group, piece, rank)
        pieces.append(piece)
    with paddle.no_grad():
        _fill(out, paddle.concat(pieces, axis=0))
    return Done()


Group.send = Group.send_on_calc_stream = send
Group.recv = Group.recv_on_calc_stream = receive
Group.send_partial = Group.send_partial_on_calc_stream = send
Group.recv_partial = Group.recv_partial_on_calc_stream = receive
Group.all_gather_partial = Group.all_gather_partial_on_calc_stream = lambda *_: Done()
for _name in ("all_to_all", "all_to_all_single", "all_to_all_tensor"):
    for _ending in ("", "_on_calc_stream"):
        setattr(Group, _name + _ending, all_to_all)


def _all_sends_first(operations):
    """A batch of operations is one group of NCCL's."""
    for wanted in (p2p._send_on_calc_stream, p2p._recv_on_calc_stream):
        for one in operations:
            if one.op is wanted:
                one.op(one.tensor, one.group, one.peer, one.nranks, one.rank_id)


p2p.batch_send_recv_on_calc_stream = _all_sends_first


# ---- kernels of tensor parallelism


class ConcatOfRanks(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, x, group, rank):
        ctx.width, ctx.rank = x.shape[-1], rank
        parts = []
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        return paddle.concat(parts, axis=-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., ctx.rank * ctx.width : (ctx.rank + 1) * ctx.width].clone()


class CrossEntropyOfRanks(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx, logits, label, group, ignored):
        parts = []
        dist.all_gather(parts, logits.detach().astype("float32").contiguous(), group=group)
        whole = paddle.concat(parts, axis=-1)
        words = whole.shape[-1]
        flat = paddle.nn.functional.softmax(whole, axis=-1).reshape([-1, words])
        labels = label.reshape([-1])
        counts = labels != ignored
        labels = paddle.where(counts, labels, paddle.zeros_like(labels))
        found = paddle.take_along_axis(flat, labels.unsqueeze(-1), axis=1)
        loss = -paddle.log(found) * counts.astype("float32").unsqueeze(-1)
        ctx.kept = flat, labels, counts, words
        ctx.width, ctx.rank, ctx.shape, ctx.dtype = logits.shape[-1], group.rank, logits.shape, logits.dtype
        return loss.reshape([*logits.shape[:-1], 1])

    @staticmethod
    def backward(ctx, gradient):
        flat, labels, counts, words = ctx.kept
        found = flat - paddle.nn.functional.one_hot(labels, words).astype("float32")
        found = found * counts.astype("float32").unsqueeze(-1) * gradient.reshape([-1, 1]).astype("float32")
        mine = found[:, ctx.rank * ctx.width : (ctx.rank + 1) * ctx.width]
        return mine.reshape(ctx.shape).astype(ctx.dtype)


def c_split(x, rank, ranks, *_):
    width = x.shape[-1] // ranks
    return x[..., rank * width : (rank + 1) * width].clone()


def cross_entropy(logits, label, group=None, return_softmax=False, ignore_index=-100):
    assert not return_softmax
    return CrossEntropyOfRanks.apply(logits, label, group, ignore_index)


_C_ops.c_identity = lambda x, *_: paddle.assign(x)
_C_ops.c_split = c_split
_C_ops.c_concat = lambda x, rank, _, ring=0, *__: ConcatOfRanks.apply(
    x, _GroupManager.group_map_by_id[ring], rank
)
mp_ops._c_softmax_with_cross_entropy = cross_entropy


# ---- bfloat16: kernels get float32, and activations stay so, as there is no sum or product of bfloat16 either


def _in_float32(name):
    kernel = getattr(_C_ops, name, None)
    if kernel is None:
        return None

    def widened(value):
        if isinstance(value, paddle.Tensor):
            return value.astype("float32") if value.dtype in LOW else value
        return type(value)(map(widened, value)) if isinstance(value, list | tuple) else value

    def of_float32(*given, **named):
        return kernel(*map(widened, given), **{key: widened(value) for key, value in named.items()})

    of_float32.__name__ = name
    setattr(_C_ops, name, of_float32)
    return of_float32


for _name in (
    "linear", "linear_v2", "softmax", "silu", "swiglu", "rms_norm", "layer_norm", "embedding", "c_embedding",
    "cross_entropy_with_softmax", "einsum", "bmm", "fused_rms_norm", "log_softmax", "index_sample", "mean", "gelu",
    "squared_l2_norm", "conv2d", "conv3d", "depthwise_conv2d", "softplus", "group_norm", "batch_norm",
    "bilinear_interp", "bicubic_interp", "grid_sample",
):  # fmt: skip
    _in_float32(_name)
paddle.matmul = paddle.tensor.matmul = paddle.tensor.linalg.matmul = _in_float32("matmul")
paddle.Tensor.matmul = paddle.Tensor.__matmul__ = paddle.matmul
_astype, _add, _concat = paddle.Tensor.astype, paddle.Tensor.__add__, _C_ops.concat


def astype(tensor, dtype):
    """Rounding within a forward pass does nothing; that of parameters, of gradients and without gradients does."""
    low = (
        {"bfloat16": paddle.bfloat16, "float16": paddle.float16}.get(dtype, dtype)
        if type(dtype) is str
        else dtype
    )
    forward = not tensor.stop_gradient and paddle.is_grad_enabled()
    if low in LOW and tensor.dtype == paddle.float32 and forward:
        return tensor
    return _astype(tensor, dtype)


def add(tensor, other):
    """A sum of two tensors of bfloat16 is rounded once."""
    if isinstance(other, paddle.Tensor) and tensor.dtype in LOW and other.dtype == tensor.dtype:
        return _astype(_add(_astype(tensor, "float32"), _astype(other, "float32")), tensor.dtype)
    return _add(tensor, other)


def concat(tensors, axis=0, *more, **named):
    if isinstance(tensors, list | tuple) and len({one.dtype for one in tensors}) > 1:
        tensors = [one.astype("float32") if one.dtype in LOW else one for one in tensors]
    return _concat(tensors, axis, *more, **named)


paddle.Tensor.astype, paddle.Tensor.__add__, _C_ops.concat = astype, add, concat


def fused_rms_norm(x, scale, epsilon=1e-5):
    wide = x.astype("float32")
    inverse = paddle.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    return wide * inverse * scale.astype("float32"), inverse.squeeze(-1)


_C_ops.fused_rms_norm_ext = fused_rms_norm
_adamw = _C_ops.adamw_
_MASTER, _HAS_MASTER = 6, 16


def adamw_(parameter, gradient, *given):
    """With a master weight: the kernel of float32 on it, rounded into the parameter."""
    if gradient.dtype != paddle.float32:
        gradient = gradient.astype("float32")
    if not given[_HAS_MASTER] and parameter.dtype == paddle.float32:
        return _adamw(parameter, gradient, *given)
    master = given[_MASTER]
    of_float32 = (*given[:_MASTER], None, *given[_MASTER + 1 : _HAS_MASTER], False, *given[_HAS_MASTER + 1 :])
    found = _adamw(master, gradient, *of_float32)
    with paddle.no_grad():
        paddle.assign(master.astype(parameter.dtype), parameter)
    return found


_C_ops.adamw_ = adamw_


def _drawn_in_float32(name):
    draw = getattr(paddle.Tensor, name)

    def drawn(tensor, *given, **named):
        if tensor.dtype not in LOW:
            return draw(tensor, *given, **named)
        wide = tensor.astype("float32")
        draw(wide, *given, **named)
        paddle.assign(wide.astype(tensor.dtype), tensor)
        return tensor

    setattr(paddle.Tensor, name, drawn)


_drawn_in_float32("uniform_")
_drawn_in_float32("normal_")


# ---- devices: alignment, streams, and what refuses to run on a CPU

fusion.alignment["cpu"] = stage2.alignment["cpu"] = stage3.alignment["cpu"] = 256
fusion.__dict__["__current_device_type__"] = "cpu"
paddle.Tensor.cuda = lambda tensor, *_, **__: tensor
paddle.Tensor.pin_memory = lambda tensor, *_, **__: tensor.clone()
dist.ParallelEnv.device_id = property(lambda _: 0)


class Stream:
    """A stream, an event of one, and its context: nothing to wait for."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def query(self):
        return True

    def record_event(self, *_):
        return Stream()

    def wait(self, *_):
        pass

    wait_stream = wait_event = synchronize = record = wait


cuda = paddle.device.cuda
cuda.Stream = cuda.Event = cuda.stream_guard = Stream
cuda.current_stream = lambda *_, **__: Stream()
cuda.synchronize = cuda.empty_cache = paddle.device.synchronize = lambda *_, **__: None
for _name, _module in list(sys.modules.items()):
    if _name.startswith("paddle.distributed.fleet") and hasattr(_module, "broadcast_input_data"):
        _module.broadcast_input_data = lambda _, *inputs, **named: (
            inputs,
            named,
        )  # all ranks make the same batch

_new_group, _stores = collective._new_process_group_impl, []


def new_group(backend, store, rank, world_size, group_name, pg_options, group_id=0, *more, **named):
    """A store of its own for each group: in one, groups that are made at once read each other's addresses."""
    if backend == "gloo" and group_id:
        port = int(os.environ.get("SHIM_STORE_PORT", "21000")) + group_id * 8
        for tries_left in (2, 1, 0):
            try:
                store = core.TCPStore("127.0.0.1", port, rank == 0, world_size, 120)
                break
            except Exception:
                if not tries_left:
                    raise
                time.sleep(0.5)
        _stores.append(store)
    return _new_group(backend, store, rank, world_size, group_name, pg_options, group_id, *more, **named)


collective._new_process_group_impl = new_group


class Once(list):
    """Devices among which any is, the first time that it is asked."""

    asked = 0

    def __contains__(self, _):
        self.asked += 1
        return self.asked == 1


def _starts_on_a_cpu(kind):
    start = kind.__init__

    def init(self, *given, **named):
        devices, device, once = core.get_all_custom_device_type, paddle.get_device, Once()
        core.get_all_custom_device_type, paddle.get_device = lambda: once, lambda: "cpu:0"
        try:
            return start(self, *given, **named)
        finally:
            core.get_all_custom_device_type, paddle.get_device = devices, device

    kind.__init__ = init


_starts_on_a_cpu(stage2.GroupShardedOptimizerStage2)
_starts_on_a_cpu(stage3.GroupShardedStage3)
_group_sharded, _clip = group_sharded.group_sharded_parallel, sharded_utils.GroupShardedClipGrad.__init__
_as_view = sharded_storage.ParamStorage._add_param_as_view


def group_sharded_parallel(*given, **named):
    if os.environ.get("SHIM_SEGMENT"):
        named["segment_size"] = int(os.environ["SHIM_SEGMENT"])
    devices, once = paddle.device.get_all_custom_device_type, Once()
    paddle.device.get_all_custom_device_type = lambda: once
    try:
        return _group_sharded(*given, **named)
    finally:
        paddle.device.get_all_custom_device_type = devices


def device_to_cpu(tensor, convert_dtype=False):
    """A copy: on a CPU, ``cpu()`` is the tensor itself, which is cleared next."""
    copied = (paddle.cast(tensor, "float32") if convert_dtype else tensor).clone()
    tensor._clear_data()
    return copied


for _module in (sharding, group_sharded, dist):
    _module.group_sharded_parallel = group_sharded_parallel
stage3._device2cpu = device_to_cpu
for _module in (sharded_utils, sharded_storage, stage2, stage3):
    if hasattr(_module, "cvt_to_device"):
        _module.cvt_to_device = lambda tensor, *_, **__: tensor.clone()
sharded_utils.GroupShardedClipGrad.__init__ = lambda self, clip, device, group: _clip(
    self, clip, device if ":" in device else device + ":0", group
)
# Its other way copies to a GPU and back, which here is no copy.
sharded_storage.ParamStorage._add_param_as_view = lambda self, parameter, align, *_: _as_view(
    self, parameter, align, False
)

# ---- modules that need CUDA, and that the library's eager classes only import

if "paddlefleet_ops" not in sys.modules:
    _operations = types.ModuleType("paddlefleet_ops")
    _operations.is_deep_ep_available = lambda: False
    _provider = types.ModuleType("paddleformers.transformers.gpt_provider")
    _provider.GPTModelProvider = type("GPTModelProvider", (), {"transform_rules": {}})
    _provider.GPTModel = type("GPTModel", (), {})
    sys.modules |= {"paddlefleet_ops": _operations, "paddleformers.transformers.gpt_provider": _provider}
