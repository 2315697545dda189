"""The rules of sharding and of pipeline segments are those of the installed Paddle, run here on random models.

Nothing is distributed: Paddle's own classes are given stand-ins for their communication groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3 as stage3
from paddle.distributed.fleet.utils import tensor_fusion_helper

from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.formats.jobs.segments import segment
from paddle_reshard.pipeline.formats.sharding import (
    FlatSlice,
    Parameter,
    ShardingOptions,
    partition_parameters,
    stage1_v1_owners,
    stage1_v2_slices,
    stage3_slice_elements,
)
from paddle_reshard.pipeline.model.rules.items import Item
from tests.sampling import examples

pytestmark = pytest.mark.filterwarnings(
    "ignore:nccl reduce_avg requires paddle compiled with cuda:UserWarning"
)

DTYPES = ("float32", "bfloat16", "float16")
Shapes = list[tuple[tuple[int, ...], str]]


@pytest.fixture(scope="module", autouse=True)
def _on_a_gpu() -> Iterator[None]:
    """Paddle is told that it runs on a GPU where it asks how to align buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_fusion_helper, "__current_device_type__", "gpu")
        yield


def parameters_of(shapes: Shapes, chunks: Sequence[int] = ()) -> list[Parameter]:
    chunk_of = chunks or [0] * len(shapes)
    return [
        Parameter(f"p{i}", prod(shape), dtype_named(dtype), chunk)
        for i, ((shape, dtype), chunk) in enumerate(zip(shapes, chunk_of, strict=True))
    ]


SHAPE = st.lists(st.integers(1, 60), min_size=1, max_size=2).map(tuple)
SHAPES = st.lists(st.tuples(SHAPE, st.sampled_from(DTYPES)), min_size=1, max_size=25)
DEGREES = st.integers(1, 9)


class Described:
    """What the rules of stage 2 and 3 ask of a parameter."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.elements, self.trainable = name, prod(shape), True
        self.dtype = getattr(paddle, dtype)

    def _numel(self) -> int:
        return self.elements


# --- stage 1 v1 and stage 2: whole parameters ---------------------------------------------------------


@settings(deadline=None)
@example(shapes=[((3,), "float32")] * 4, degree=2, sort=True)  # equal sizes keep their order
@given(shapes=SHAPES, degree=DEGREES, sort=st.booleans())
def test_stage1_v1_owners(shapes: Shapes, degree: int, sort: bool) -> None:
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
        DygraphShardingOptimizer,
    )

    job = SimpleNamespace(
        _sharding_world_size=degree,
        _parameter_list=[SimpleNamespace(name=f"p{i}", shape=list(s)) for i, (s, _) in enumerate(shapes)],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGS_sharding_sort_parameters", "1" if sort else "0")
        real = DygraphShardingOptimizer._partition_parameters(job)
    expected = [(p.name, rank) for rank in range(degree) for p in real[rank]]
    ours = stage1_v1_owners(parameters_of(shapes), degree, sort)
    assert list(ours.items()) == expected


@settings(deadline=None)
@given(shapes=SHAPES, degree=DEGREES)
def test_stage2_owners(shapes: Shapes, degree: int) -> None:
    from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import (
        GroupShardedOptimizerStage2,
    )

    job = SimpleNamespace(
        world_size=degree,
        _local_params=[Described(f"p{i}", *described) for i, described in enumerate(shapes)],
        _GroupShardedOptimizerStage2__segment_params=[],
    )
    real = GroupShardedOptimizerStage2._segment_params(job)
    expected = {p.name: {rank: None} for rank in range(degree) for p in real[rank]}
    assert partition_parameters("stage2", parameters_of(shapes), degree, ShardingOptions()) == expected


# --- stage 1 v2: slices of buffers --------------------------------------------------------------------


def tensor(name: str, shape: Sequence[int], dtype: str) -> Any:
    values = paddle.cast(paddle.zeros(list(shape)), dtype)
    parameter = paddle.base.framework.EagerParamBase.from_tensor(values)
    parameter.name, parameter.stop_gradient, parameter.trainable = name, False, True
    return parameter


class Group:
    """A sharding group as seen by one of its ranks, without any communication."""

    def __init__(self, nranks: int, rank: int) -> None:
        self.nranks, self.rank, self.ranks = nranks, rank, list(range(nranks))
        self.process_group = SimpleNamespace()

    def get_sharding_parallel_world_size(self) -> int:
        return self.nranks

    def get_sharding_parallel_rank(self) -> int:
        return self.rank

    def get_sharding_parallel_group(self) -> "Group":
        return self


class PipelineModel:
    """The virtual stages of one pipeline rank."""

    def __init__(self, chunks: list[list[Any]]) -> None:
        self.chunks = [SimpleNamespace(parameters=chunk.copy) for chunk in chunks]

    def get_num_virtual_stages(self) -> int:
        return 2  # more than one: the engine then asks for the chunks

    def get_model_chunks(self) -> list[Any]:
        return self.chunks


def slices_of(buffers: Sequence[Any]) -> dict[str, FlatSlice]:
    """What a rank stores of each parameter, by the views that Paddle makes on its buffers."""
    views = [item for buffer in buffers for item in buffer._sharding_param_grad_view.items()]
    return {
        name: FlatSlice(view._param_begin - view._index, view._param_end - view._index)
        for name, view in views
        if view._param_begin < view._param_end
    }


def by_rank(slices: dict[str, dict[int, FlatSlice]], rank: int) -> dict[str, FlatSlice]:
    return {key: ranks[rank] for key, ranks in slices.items() if rank in ranks}


@examples(30)
@given(
    shapes=SHAPES.map(lambda shapes: shapes[:12]),
    degree=st.sampled_from((1, 2, 3, 4, 8)),
    limit_bytes=st.sampled_from((1, 500, 5_000, 20_000, 256 << 20)),
)
def test_stage1_v2_slices(shapes: Shapes, degree: int, limit_bytes: int) -> None:
    """The real optimizer, once per rank. Only the limit of a buffer is made smaller than it can be set."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer

    assign = dygraph_sharding_optimizer.assign_group_by_size
    ours = stage1_v2_slices(parameters_of(shapes), degree, limit_bytes, comm_overlap=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.fleet, "_user_defined_strategy", fleet.DistributedStrategy(), raising=False)
        patch.setattr(dygraph_sharding_optimizer, "assign_group_by_size", lambda p, _: assign(p, limit_bytes))
        for rank in range(degree):
            parameters = [tensor(f"p{i}", *described) for i, described in enumerate(shapes)]
            inner = paddle.optimizer.AdamW(parameters=parameters, multi_precision=True)
            real = dygraph_sharding_optimizer.DygraphShardingOptimizerV2(inner, Group(degree, rank))
            event(f"buffers: {min(3, len(real._comm_buffer_list))}")
            assert by_rank(ours, rank) == slices_of(real._comm_buffer_list)


@examples(30)
@given(data=st.data(), shapes=SHAPES.map(lambda shapes: shapes[:12]), degree=st.sampled_from((2, 3, 4)))
def test_stage1_v2_slices_where_the_pipeline_makes_the_buffers(
    data: st.DataObject, shapes: Shapes, degree: int
) -> None:
    from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallel

    limit_bytes = data.draw(st.sampled_from((1, 500, 5_000, 128 << 20)))
    cuts = data.draw(st.lists(st.integers(1, max(1, len(shapes) - 1)), max_size=2, unique=True).map(sorted))
    starts = [cut for cut in cuts if cut < len(shapes)]
    chunks = [sum(i >= start for start in starts) for i in range(len(shapes))]
    ours = stage1_v2_slices(parameters_of(shapes, chunks), degree, limit_bytes, comm_overlap=True)
    for rank in range(degree):
        parameters = [tensor(f"p{i}", *described) for i, described in enumerate(shapes)]
        bounds = [0, *starts, len(shapes)]
        model = PipelineModel([parameters[low:high] for low, high in pairwise(bounds)])
        engine = SimpleNamespace(
            _sharding_split_param=True, _release_gradients=False, _chunk_2_comm_buffers=defaultdict(list)
        )
        by_chunk = PipelineParallel.fused_gradient(
            engine, model, Group(degree, rank), acc_steps=1, dp=False, group_size=limit_bytes
        )
        assert by_rank(ours, rank) == slices_of([b for buffers in by_chunk.values() for b in buffers])


def test_a_shared_layer_is_the_first_of_a_model_and_has_its_place_in_a_chunk() -> None:
    """So the buffers of a chunk have it elsewhere than the optimizer's list (``test_conversions`` cuts one)."""
    from paddle.distributed.fleet.base.topology import CommunicateTopology
    from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

    shared = SharedLayerDesc(
        "shared",
        paddle.nn.Embedding,
        shared_weight_attr="weight",
        forward_func=print,
        num_embeddings=2,
        embedding_dim=2,
    )
    layers = [shared, *[LayerDesc(paddle.nn.Linear, 2, 2)] * 2, LayerDesc(paddle.nn.LayerNorm, 2), shared]
    axes = ["data", "pipe", "sharding", "sep", "model"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed.ParallelEnv, "device_id", 0)
        model = PipelineLayer(
            layers,
            1,
            CommunicateTopology(axes, [1] * 5),
            seg_method="layer:Linear",
            num_virtual_pipeline_stages=2,
        )
    one, other = ([name for name, _ in chunk.named_parameters()] for chunk in model.get_model_chunks())
    assert next(model.named_parameters())[0] == "shared_layers.shared.weight"
    assert (one[0], other[-1]) == ("shared.weight", "shared.weight")


@settings(deadline=None)
@example(shapes=[((10,), "float32")] * 6, limit_bytes=80)  # a buffer is full when it reaches the limit
@example(shapes=[((10,), "float32")] * 6, limit_bytes=81)
@given(shapes=SHAPES, limit_bytes=st.sampled_from((1, 256, 4_096, 20_000, 1 << 20)))
def test_buffers_are_grouped_as_paddle_groups_them(shapes: Shapes, limit_bytes: int) -> None:
    """With one rank a parameter's padding is all there is to see, so look at which share a buffer."""
    tensors = [paddle.cast(paddle.zeros(list(shape)), dtype) for shape, dtype in shapes]
    limits = [limit_bytes, limit_bytes]
    real = paddle.framework.core.eager_assign_group_by_size(tensors, [False] * len(tensors), limits)
    degree = 1000  # so many ranks that the slices tell where in its buffer a parameter begins
    ours = stage1_v2_slices(parameters_of(shapes), degree, limit_bytes, comm_overlap=True)
    first_of_buffer = {f"p{group[0]}" for group in real}
    begins = {key for key, ranks in ours.items() if min(ranks) == 0 and ranks[0].start == 0}
    assert begins == first_of_buffer


# --- stage 3: every parameter in equal slices ---------------------------------------------------------


@settings(deadline=None)
@given(shapes=SHAPES, degree=DEGREES, segment_elements=st.sampled_from((0, 10, 200, 1 << 20)))
def test_stage3_slices(shapes: Shapes, degree: int, segment_elements: int) -> None:
    parameters = [Described(f"p{i}", *described) for i, described in enumerate(shapes)]
    totals: dict[str, int] = {}
    job = SimpleNamespace(
        _trainable_params={},
        _exclude_layer=[],
        _segment_size=segment_elements,
        _unslice_params=stage3.OrderedSet(),
        _param2buffer={},
        _param2buffer_size={},
        _group=SimpleNamespace(nranks=degree),
        _default_device="gpu",
        _param_storage=lambda parameter, size: totals.update({parameter.name: size}),
    )
    job._param2align = lambda parameter: stage3.GroupShardedStage3._param2align(job, parameter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage3, "param2dtype", {}, raising=False)
        stage3.GroupShardedStage3._flatten_layer_params(job, SimpleNamespace(), parameters)

    options = ShardingOptions(segment_elements=segment_elements)
    ours = partition_parameters("stage3", parameters_of(shapes), degree, options)
    assert list(ours) == [p.name for p in parameters]
    for parameter in parameters:
        ranks = ours[parameter.name]
        if parameter.name not in totals:
            assert parameter in job._unslice_params
            assert ranks == dict.fromkeys(range(degree))
            continue
        slices = [ranks[rank] for rank in range(degree)]
        assert [(s.start, s.stop) for s in slices if s] == job._param2buffer[parameter.name]
        length = stage3_slice_elements(parameter.elements, dtype_named(str(parameter.dtype)[7:]), degree)
        assert length * degree == totals[parameter.name]


# --- pipeline segments --------------------------------------------------------------------------------


class EmbeddingPipe:
    pass


class DecoderLayerPipe:
    pass


class RMSNormPipe:
    pass


class LMHeadPipe:
    pass


def model_items(layers: int) -> tuple[list[Item], list[type]]:
    classes = [EmbeddingPipe, *[DecoderLayerPipe] * layers, RMSNormPipe, LMHeadPipe]
    return [Item(c.__name__, c.__name__, repeated=c is DecoderLayerPipe) for c in classes], classes


def real_places(classes: list[type], pp: int, vpp: int, method: str | list[int]) -> list[tuple[int, int]]:
    """``(stage, chunk)`` of every item by Paddle's boundaries; part p belongs to stage p modulo pp."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SegmentLayers

    virtual = vpp if vpp > 1 else None
    bounds = SegmentLayers(classes, pp, method=method, num_virtual_pipeline_stage=virtual).do_segment()
    return [(part % pp, part // pp) for part, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]


METHODS = ("uniform", "layer:DecoderLayer", "layer:decoderlayer", "layer:Pipe$", "layer:Embedding|Norm")


@examples(150)
@given(
    layers=st.integers(1, 24), pp=st.integers(1, 8), vpp=st.integers(1, 4), method=st.sampled_from(METHODS)
)
def test_segments(layers: int, pp: int, vpp: int, method: str) -> None:
    if vpp > 1 and (method == "uniform" or pp <= 2):
        pp, method = max(pp, 3), "layer:DecoderLayer"
    items, classes = model_items(layers)
    try:
        expected = real_places(classes, pp, vpp, method)
    except AssertionError:
        event("refused")
        with pytest.raises(PlanError):
            segment(items, pp, vpp, method)
        return
    event("taken")
    assert segment(items, pp, vpp, method) == expected


@settings(deadline=None)
@given(data=st.data(), layers=st.integers(1, 12))
def test_segments_by_list(data: st.DataObject, layers: int) -> None:
    items, classes = model_items(layers)
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, len(items) - 1), max_size=6)))]
    pp = len(starts)
    assert segment(items, pp, 1, tuple(starts)) == real_places(classes, pp, 1, starts)


@pytest.mark.parametrize(("layers", "pp"), [(4, 1), (4, 2), (4, 3), (5, 2), (6, 3), (2, 5)])
def test_segments_of_the_model_classes(layers: int, pp: int) -> None:
    """Both trainers' models segment by decoder layers if their number divides, else uniformly."""
    items, classes = model_items(layers)
    method = "uniform" if layers % pp else "layer:DecoderLayer"
    assert segment(items, pp, 1, None) == real_places(classes, pp, 1, method)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "segmentation", "message"),
    [
        (2, 6, 1, None, "pp=6 exceeds the 5 pipeline items of this model"),
        (8, 2, 2, None, "vpp=2 with pp=2: Paddle's interleaved pipeline asserts pp > 2"),
        (
            7,
            3,
            1,
            "layer:DecoderLayer",
            "7 layers do not divide into 3 pipeline parts (pp × vpp): Paddle's segmentation "
            "'layer:DecoderLayer' asserts that they do",
        ),
        (
            2, 2, 1, "layer:Expert",
            "segmentation 'layer:Expert' matches none of DecoderLayerPipe, EmbeddingPipe, LMHeadPipe, RMSNormPipe",
        ),
        (2, 2, 1, "even", "segmentation 'even' is not 'uniform', 'layer:Regex' or a list of numbers"),
        *[
            (
                2,
                2,
                1,
                tuple(starts),
                f"segmentation {starts} must be 2 ascending item numbers from 0, below 5",
            )
            for starts in ([0], [1, 2], [0, 0], [2, 0], [0, 5], [0, 1, 2], [])
        ],
    ],
)  # fmt: skip
def test_segments_that_are_refused(layers: int, pp: int, vpp: int, segmentation: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        segment(model_items(layers)[0], pp, vpp, segmentation)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "segmentation", "message"),
    [
        (6, 3, 2, "uniform", "asserts a segmentation 'layer:Regex' for virtual stages"),
        (6, 3, 2, (0, 2, 3, 4, 6, 7), "asserts a segmentation 'layer:Regex' for virtual stages"),
        (4, 2, 1, "layer:(", "is not a regular expression"),
    ],
)
def test_a_segmentation_of_no_pipeline(
    layers: int, pp: int, vpp: int, segmentation: Any, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        segment(model_items(layers)[0], pp, vpp, segmentation)
