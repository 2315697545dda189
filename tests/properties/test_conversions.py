"""Whatever the model, wherever it comes from and goes to: values, files and refusals are as promised.

``make fuzz`` draws many more examples.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import paddle_reshard
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.formats.hybrid.target import layout_hybrid
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.pipeline.planning import plan as planning
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.store import Receipt
from paddle_reshard.tasks.run_group import run_group
from tests import oracle
from tests.properties import synthetic
from tests.properties.synthetic import Model
from tests.reads import OneByOne
from tests.sampling import examples
from tests.sized import in_groups

MANIFEST = "paddle_reshard.json"
MOST_RANKS = 12
BUDGET_BYTES = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def _oracle_rounds_nans() -> Iterator[None]:
    """Real training has no NaN, so the oracle refuses to round one; here they are wanted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "round_to_bfloat16", synthetic.round_to_bfloat16)
        yield


# --- what is drawn ------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Odd sizes throughout, but heads and MLP such that tensor parallelism has something to divide."""
    library = draw(st.sampled_from(("paddleformers", "paddlenlp")))
    kv_heads = draw(st.sampled_from((1, 2, 3, 4)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3)))
    bfloat16 = draw(st.booleans())
    fused = st.booleans() if library == "paddlenlp" else st.just(False)
    return Model(
        library=library,
        hidden=draw(st.integers(1, 14)),
        intermediate=draw(st.sampled_from((heads, 2 * heads, 12, 24, 7))),
        vocab=draw(st.integers(1, 40)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        layers=draw(st.sampled_from((1, 2, 3, 4, 6))),
        tied=draw(st.booleans()),
        fused_attention=draw(fused),
        fused_ffn=draw(fused),
        bfloat16=bfloat16,
        float32_norms=bfloat16 and draw(st.booleans()),
        ema=draw(st.booleans()),
        column_major=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 32)),
    )


@dataclass(frozen=True)
class Target:
    """What to convert to."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sharding: int = 1
    dp: int = 1
    strategy: str | None = None
    format: str = "hybrid"
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def topology(self) -> paddle_reshard.Topology:
        return paddle_reshard.Topology(
            tp=self.tp, pp=self.pp, vpp=self.vpp, sharding=self.sharding, dp=self.dp
        )

    @property
    def without_meta(self) -> bool:
        """The trainer saves ``model_meta.json`` for stage 1 only."""
        return self.strategy in ("stage2", "stage3")

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by which the files are named."""
        return {"tp": self.tp, "pp": self.pp, "shard": self.sharding}


@st.composite
def targets(draw: st.DrawFn, model: Model) -> Target:
    """A topology that the model can take, and every option that belongs to it."""
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4, 6) if model.accepts_tp(tp)]))
    pp = draw(st.sampled_from([pp for pp in (1, 2, 3, 4) if pp <= model.items and tp * pp <= MOST_RANKS]))
    sharding = draw(st.sampled_from([n for n in (1, 2, 3, 5, 8) if tp * pp * n <= MOST_RANKS]))
    strategies = [None, "none"]
    if sharding > 1:
        strategies = ["stage1v1", "stage1v2"]  # what is not asked for would be as the source has it
        strategies += ["stage2"] if pp == 1 else []
        strategies += ["stage3"] if tp == pp == 1 else []
    strategy = draw(st.sampled_from(strategies))
    vpp, segmentation = draw(segmentations(model, pp))
    layout: dict[str, Any] = {"sequence_parallel": draw(st.booleans())}
    if segmentation is not None:
        layout["segmentation"] = segmentation
    if strategy == "stage1v2":
        if draw(st.booleans()):
            layout["comm_buffer_size_MB"] = 1
        if pp > 1:
            layout["comm_overlap"] = draw(st.booleans())
    elif strategy == "stage3":
        layout["stage3_segment_size"] = draw(st.sampled_from((0, 20, 100, 1 << 20)))
    elif strategy != "stage2":
        layout["sort_parameters"] = draw(st.booleans())
    return Target(
        tp=tp,
        pp=pp,
        vpp=vpp,
        sharding=sharding,
        dp=draw(st.sampled_from((1, 1, 2))),
        strategy=strategy,
        format=draw(st.sampled_from(("hybrid", "hybrid", "hybrid-plain"))),
        layout=layout,
    )


@st.composite
def segmentations(draw: st.DrawFn, model: Model, pp: int) -> tuple[int, Any]:
    """``(vpp, segmentation)``; virtual stages need pp > 2 and a number of layers that divides."""
    if pp > 2 and model.layers % (2 * pp) == 0 and draw(st.booleans()):
        return 2, draw(st.sampled_from((None, "layer:DecoderLayer")))
    kinds = ["default", "uniform", "list"]
    if model.layers % pp == 0:
        kinds.append("layers")
    match draw(st.sampled_from(kinds)):
        case "default":
            return 1, None
        case "uniform":
            return 1, "uniform"
        case "layers":
            return 1, "layer:DecoderLayer"
    starts = st.lists(st.integers(1, model.items - 1), min_size=pp - 1, max_size=pp - 1, unique=True)
    return 1, [0, *sorted(draw(starts))]


# --- helpers ------------------------------------------------------------------------------------------


@contextmanager
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; the manifest is not compared, it describes where a checkpoint came from."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = contents(folder)
    yield
    assert contents(folder) == before


def convert(
    source: Path, folder: Path, target: Target, group_bytes: int = PlanSizes().group_bytes
) -> paddle_reshard.ConversionReport:
    with unchanged(source):
        return in_groups(group_bytes).convert(
            source,
            folder,
            to=target.topology,
            sharding_strategy=target.strategy,
            format=target.format,
            layout=target.layout,
        )


def assert_same_files(one: Path, other: Path) -> None:
    a, b = contents(one), contents(other)
    assert sorted(a) == sorted(b)
    assert [name for name in a if a[name] != b[name]] == []


# --- values -------------------------------------------------------------------------------------------


@examples(12)
@given(st.data())
def test_any_conversion_keeps_every_bit(data: st.DataObject) -> None:
    model = data.draw(models())
    target = data.draw(targets(model))
    with workspace() as folder:
        tensors = synthetic.write_checkpoint(model, folder / "S")
        report = convert(folder / "S", folder / "A", target)

        oracle.assert_same_tensors(oracle.read_checkpoint(folder / "A", model.shapes), tensors)
        assert oracle.degrees_of(oracle.find_files(folder / "A")["optimizer"]) == target.degrees
        has_meta = target.format == "hybrid" and target.sharding > 1 and not target.without_meta
        assert (folder / "A" / "model_meta.json").exists() == has_meta
        if has_meta:
            oracle.check_distribution(folder / "A", model.shapes)
        assert report.moved.written_bytes == sum(map(len, contents(folder / "A").values()))
        assert sorted(path.name for path in folder.iterdir()) == ["A", "S"]


@pytest.mark.parametrize("strategy", ["stage1v1", "stage1v2", "stage2"])
def test_parameters_of_one_element(strategy: str) -> None:
    """Every second moment is a single number then, as AdamWMini's are; so is every first moment."""
    model = Model(hidden=1, vocab=1, intermediate=1, heads=1, kv_heads=1, head_dim=1, bfloat16=False)
    with workspace() as folder:
        tensors = synthetic.write_checkpoint(model, folder / "S")
        convert(folder / "S", folder / "A", Target(sharding=2, strategy=strategy))
        oracle.assert_same_tensors(oracle.read_checkpoint(folder / "A", model.shapes), tensors)


@pytest.mark.parametrize("overlap", [False, True])
def test_several_communication_buffers(overlap: bool) -> None:
    """Tensors that are larger than a communication buffer of 1 MB."""
    model = Model(hidden=512, vocab=520, intermediate=24, bfloat16=False, head_dim=1)
    layout = {"comm_buffer_size_MB": 1, "comm_overlap": overlap}
    target = Target(pp=2, sharding=3, strategy="stage1v2", layout=layout)
    with workspace() as folder:
        tensors = synthetic.write_checkpoint(model, folder / "S")
        convert(folder / "S", folder / "A", target)
        oracle.assert_same_tensors(oracle.read_checkpoint(folder / "A", model.shapes), tensors)
        # The embedding fills a buffer of its own, so all three ranks hold equally much of it.
        ranks = [folder / "A" / f"optimizer.pp00_shard{rank:02d}.pdopt" for rank in range(3)]
        slices = [oracle.unpickle(path)["embedding_0.w_0_moment1_0"] for path in ranks]
        assert [len(values) for values in slices] == [520 * 512 // 192 * 192 // 3 + 64] * 3


def test_a_shared_head_lies_last_in_the_buffers_of_its_chunk(tmp_path: Path) -> None:
    """And first in those of a stage, as in Paddle's own layers (``tests/unit/test_sharding_rules.py``)."""
    model = Model(library="paddlenlp", hidden=16, vocab=24, intermediate=8, layers=6, tied=True, head_dim=4)
    tensors = synthetic.write_checkpoint(model, tmp_path / "S")
    held = {}
    for overlap in (True, False):
        layout, folder = {"comm_overlap": overlap}, tmp_path / f"overlap {overlap}"
        target = Target(pp=3, vpp=2, sharding=2, strategy="stage1v2", layout=layout)
        convert(tmp_path / "S", folder, target)
        meta = json.loads((folder / "model_meta.json").read_text())
        names = meta["sharding_metas"]["tp00_pp02"]["structure_name_mapping"]
        held[overlap] = [
            {key for key, name in names.items() if name in oracle.unpickle(path)["master_weights"]}
            for path in (folder / f"optimizer.pp02_shard{rank:02d}.pdopt" for rank in range(2))
        ]
        convert(folder, tmp_path / "back", Target())
        oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "back", model.shapes), tensors)
        shutil.rmtree(tmp_path / "back")
    head = "lm_head.weight"
    assert [head in of_rank for of_rank in held[True]] == [False, True]
    assert [head in of_rank for of_rank in held[False]] == [True, False]


@examples(6)
@given(st.data())
def test_a_stop_on_the_way_leaves_no_trace(data: st.DataObject) -> None:
    """Neither on the way back nor elsewhere."""
    model = data.draw(models())
    first, second, last = (data.draw(targets(model)) for _ in range(3))
    with workspace() as folder:
        synthetic.write_checkpoint(model, folder / "S")
        convert(folder / "S", folder / "A", first)
        convert(folder / "A", folder / "B", second)
        convert(folder / "B", folder / "back", first)
        assert_same_files(folder / "back", folder / "A")
        convert(folder / "B", folder / "via", last)
        convert(folder / "A", folder / "direct", last)
        assert_same_files(folder / "via", folder / "direct")


@pytest.mark.parametrize("tied", [False, True])
def test_plain_files_of_overlapped_virtual_stages_are_read(tied: bool, tmp_path: Path) -> None:
    """Nothing in them tells of the overlap, which closes communication buffers at the end of each virtual stage."""
    model = Model(layers=6, tied=tied, bfloat16=False)
    plain = {"sequence_parallel": False}
    one = Target(1, 1, 1, 1, 1, None, "hybrid", plain)
    overlapped = Target(1, 3, 2, 2, 1, "stage1v2", "hybrid-plain", {**plain, "comm_overlap": True})
    synthetic.write_checkpoint(model, tmp_path / "S")
    convert(tmp_path / "S", tmp_path / "one", one)
    convert(tmp_path / "one", tmp_path / "overlapped", overlapped)
    convert(tmp_path / "overlapped", tmp_path / "back", one)
    assert_same_files(tmp_path / "back", tmp_path / "one")


# --- refusals -----------------------------------------------------------------------------------------


@st.composite
def any_targets(draw: st.DrawFn) -> Target:
    """Any topology, whether or not a model can take it."""
    sharding = draw(st.sampled_from((1, 2)))
    return Target(
        tp=draw(st.sampled_from((1, 2, 3, 4, 5, 8))),
        pp=draw(st.sampled_from((1, 2, 3, 4, 9, 11))),
        vpp=draw(st.sampled_from((1, 1, 1, 2, 3))),
        sharding=sharding,
        strategy=draw(st.sampled_from((None, "none", "stage1v1", "stage1v2", "stage2", "stage3"))),
    )


def trainer_accepts(model: Model, target: Target) -> bool:
    """What the model classes, the trainer's arguments and Paddle's pipeline assert."""
    if not model.accepts_tp(target.tp):
        return False
    if target.strategy is not None and (target.strategy == "none") != (target.sharding == 1):
        return False
    if (target.strategy == "stage2" and target.pp > 1) or (
        target.strategy == "stage3" and (target.pp > 1 or target.tp > 1)
    ):
        return False
    if target.vpp > 1:
        return target.pp > 2 and model.layers % (target.pp * target.vpp) == 0
    return target.pp <= model.items


@examples(12)
@given(models(), any_targets())
def test_a_topology_is_taken_or_refused_without_a_trace(model: Model, target: Target) -> None:
    with workspace() as folder:
        synthetic.write_checkpoint(model, folder / "S")
        accepted = trainer_accepts(model, target)
        event(f"{accepted=}")
        if accepted:
            convert(folder / "S", folder / "A", target)
        else:
            with pytest.raises(paddle_reshard.ReshardError) as caught:
                convert(folder / "S", folder / "A", target)
            assert type(caught.value) is not paddle_reshard.ReshardError
            assert str(caught.value)
        assert sorted(path.name for path in folder.iterdir()) == (["A", "S"] if accepted else ["S"])


# --- groups -------------------------------------------------------------------------------------------


class Recorder(OneByOne):
    """A target in memory that counts how often each byte is written, and what a group holds at once."""

    def __init__(self, files: TargetFiles, source: LocalSource) -> None:
        self.content = {file.path: np.zeros(file.size_bytes, np.uint8) for file in files.files}
        self.writes = {file.path: np.zeros(file.size_bytes, np.int64) for file in files.files}
        self.source = source
        self.held_bytes = 0

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.held_bytes += len(buffer)
        self.source.read_into(path, byte_offset, buffer)

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        self.held_bytes += len(buffer)
        place = slice(byte_offset, byte_offset + len(buffer))
        assert place.stop <= len(self.content[path])
        self.content[path][place] = buffer
        self.writes[path][place] += 1
        return Receipt(path, byte_offset, len(buffer))

    def run(self, works: list[GroupWork]) -> None:
        for work in works:
            self.held_bytes = 0
            report = run_group(work, self, self)
            assert self.held_bytes == work.peak_bytes == report.read_bytes + report.written_bytes

    def bytes(self) -> dict[str, bytes]:
        return {path: content.tobytes() for path, content in self.content.items()}


def plan_in_groups(
    checkpoint: Checkpoint, files: TargetFiles, group_bytes: int, gap_bytes: int
) -> planning.Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "JOIN_GAP_BYTES", gap_bytes)
        settings = PlanSettings(BUDGET_BYTES, sizes=PlanSizes(group_bytes=group_bytes))
        return planning.plan_conversion(checkpoint.catalog, files, [], settings)


def lay_out(source: Path, target: Target, buffer_bytes: int) -> tuple[Checkpoint, TargetFiles]:
    """The target's files, with communication buffers far smaller than a trainer can be told to use."""
    plan = paddle_reshard.plan(
        source,
        source.with_name("nothing is written here"),
        to=target.topology,
        sharding_strategy=target.strategy,
        format=target.format,
        layout=target.layout,
    )
    sharding = replace(plan.targets[0].spec.sharding, buffer_bytes=buffer_bytes)
    return plan.source, layout_hybrid(plan.source, replace(plan.targets[0].spec, sharding=sharding))


@examples(10)
@given(
    st.data(),
    st.sampled_from((1, 500, 3_000, 10_000, 30_000, 100_000)),
    st.sampled_from((0, 0, 64, 4_096)),
    st.sampled_from((64, 300, 2_000, 1 << 20)),
    st.randoms(use_true_random=False),
)
def test_groups_in_any_order_write_every_byte_once(
    data: st.DataObject, group_bytes: int, gap_bytes: int, buffer_bytes: int, shuffle: random.Random
) -> None:
    model = data.draw(models())
    there, target = data.draw(targets(model)), data.draw(targets(model))
    with workspace() as folder:
        tensors = synthetic.write_checkpoint(model, folder / "S")
        start = folder / data.draw(st.sampled_from("SA"))
        if start.name == "A":
            convert(folder / "S", start, there)
        with unchanged(start):
            source = LocalSource(start)
            checkpoint, files = lay_out(start, target, buffer_bytes)

            whole = Recorder(files, source)
            whole.run(list(RemainingGroups(plan_in_groups(checkpoint, files, BUDGET_BYTES, 4_096))))

            plan = plan_in_groups(checkpoint, files, group_bytes, gap_bytes)
            works = list(RemainingGroups(plan))
            event(f"groups: 10^{len(str(len(works)))}")
            shuffle.shuffle(works)
            recorder = Recorder(files, source)
            recorder.run(works)
            assert all((counts == 1).all() for counts in recorder.writes.values())
            assert recorder.bytes() == whole.bytes()
            recorder.run(works[:1])
            assert recorder.bytes() == whole.bytes()

        written = folder / "B"
        written.mkdir()
        for name, content in recorder.bytes().items():
            (written / name).write_bytes(content)
        shutil.copy(start / "config.json", written)
        oracle.assert_same_tensors(oracle.read_checkpoint(written, model.shapes), tensors)


# --- verify -------------------------------------------------------------------------------------------


def flip_bit(path: Path, byte: int, bit: int) -> tuple[int, int]:
    """Flip one bit of a file; returns the byte before and after."""
    content = bytearray(path.read_bytes())
    before = content[byte]
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return before, content[byte]


def element_byte(fragment: Any, shuffle: random.Random) -> tuple[int, int]:
    """Byte in the file, and within its element, of a random byte of a stored box."""
    place = [shuffle.randrange(extent) for extent in fragment["extents"].tolist()]
    within = shuffle.randrange(DTYPES[fragment["dtype"]].itemsize)
    start = int(fragment["byte_base"]) + int(np.dot(place, fragment["strides"]))
    return start + within, within


def read_index(folder: Path) -> Catalog:
    return index_checkpoint(LocalSource(folder), shipped_tables()).catalog


def also_changed(catalog: Catalog, other: Catalog, tensor: int, old: bytes, new: bytes) -> set[str]:
    """The parameter that is the cast of a changed master weight, where it is compared on its own."""
    changed = set()
    for implied, master in catalog.implied.items():
        label = catalog.tensors[implied].label
        on_both_sides = label in {other.tensors[i].label for i in other.implied}
        if master == tensor and not on_both_sides:
            before, after = (synthetic.round_to_bfloat16(np.frombuffer(b, "<f4")) for b in (old, new))
            if before != after:
                changed.add(label)
    return changed


def pick(fragments: Fragments, catalog: Catalog, shuffle: random.Random) -> Any:
    """A random stored box of a random state and tensor, so that small tensors come up as often as large."""
    states = sorted({catalog.tensors[t].state for t in fragments["tensor"]})
    state = shuffle.choice(states)
    stored = sorted({int(t) for t in fragments["tensor"] if catalog.tensors[t].state == state})
    of_tensor = fragments[fragments["tensor"] == shuffle.choice(stored)]
    copies = of_tensor[of_tensor["replica"] == shuffle.choice(sorted(set(of_tensor["replica"].tolist())))]
    return copies.rows()[shuffle.randrange(len(copies))]


@examples(6)
@given(st.data(), st.randoms(use_true_random=False), st.sampled_from((2_000, 20_000, 1 << 26)))
def test_verify_finds_exactly_what_differs(
    data: st.DataObject, shuffle: random.Random, group_bytes: int
) -> None:
    model = data.draw(models())
    here, there = data.draw(targets(model)), data.draw(targets(model))
    verify = in_groups(group_bytes).verify
    with workspace() as folder:
        synthetic.write_checkpoint(model, folder / "S")
        convert(folder / "S", folder / "A", here, group_bytes)
        convert(folder / "A", folder / "B", there, group_bytes)
        one, two = read_index(folder / "A"), read_index(folder / "B")
        report = verify(folder / "A", folder / "B")
        assert report.equal, report.differences
        assert report.tensors == len(one.tensors) == len(two.tensors)
        assert verify(folder / "B", folder / "A").equal

        for sides in (("A", "B"), ("B", "A")):
            fragment = pick(two.fragments, two, shuffle)
            event(f"copy: {min(1, int(fragment['replica']))}")
            path = folder / "B" / two.files[fragment["file"]].path
            byte, within = element_byte(fragment, shuffle)
            size = DTYPES[fragment["dtype"]].itemsize
            start = byte - within
            old = path.read_bytes()[start : start + size]
            bit = shuffle.randrange(8)
            flip_bit(path, byte, bit)
            new = path.read_bytes()[start : start + size]

            tensor = int(fragment["tensor"])
            expected = {two.tensors[tensor].label} | also_changed(two, one, tensor, old, new)
            report = verify(*(folder / side for side in sides))
            assert {difference.tensor for difference in report.differences} == expected
            flip_bit(path, byte, bit)


@pytest.mark.parametrize("stored_in", ["A", "B"])
def test_verify_compares_a_stored_parameter_with_the_master_weight_of_the_other_side(stored_in: str) -> None:
    """One side stores the bfloat16 parameters, on the other they are the cast of their master weights."""
    model = Model(layers=1)
    formats = {"A": "hybrid", "B": "hybrid"} | {stored_in: "hybrid-plain"}
    with workspace() as folder:
        synthetic.write_checkpoint(model, folder / "S")
        for name, format_name in formats.items():
            target = Target(sharding=2, strategy="stage1v1", format=format_name)
            convert(folder / "S", folder / name, target)
        catalog = read_index(folder / stored_in)
        assert paddle_reshard.verify(folder / "A", folder / "B").equal
        for number, tensor in enumerate(catalog.tensors):
            if tensor.state != "param":
                continue
            (fragment,) = catalog.fragments[catalog.fragments["tensor"] == number]
            path = folder / stored_in / catalog.files[fragment["file"]].path
            flip_bit(path, int(fragment["byte_base"]), 0)
            report = paddle_reshard.verify(folder / "A", folder / "B")
            assert [difference.tensor for difference in report.differences] == [tensor.label]
            flip_bit(path, int(fragment["byte_base"]), 0)


@examples(8)
@given(st.data(), st.randoms(use_true_random=False))
def test_padding_is_not_content(data: st.DataObject, shuffle: random.Random) -> None:
    model = data.draw(models())
    sharding = data.draw(st.sampled_from((2, 3, 5)))
    target = Target(sharding=sharding, strategy="stage1v2")
    with workspace() as folder:
        tensors = synthetic.write_checkpoint(model, folder / "S")
        files = convert(folder / "S", folder / "A", target).plan.targets[0].files
        assume(files.fills)
        for file, byte, nbytes in shuffle.sample(files.fills, min(4, len(files.fills))):
            flip_bit(folder / "A" / files.files[file].path, byte + shuffle.randrange(nbytes), 3)
        assert paddle_reshard.verify(folder / "S", folder / "A").equal
        # Whatever the padding holds, it is not carried on: new padding is zero.
        convert(folder / "A", folder / "B", replace(target, sharding=sharding + 1))
        oracle.assert_same_tensors(oracle.read_checkpoint(folder / "B", model.shapes), tensors)
