"""A plan is the saved one, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.synthetic import Dims, catalog_of
from paddle_reshard.pipeline.convert import plan_file
from paddle_reshard.pipeline.convert.plan_file import check_is_saved, save_plan
from paddle_reshard.pipeline.core.errors import FormatError, PlanError, UsageError
from paddle_reshard.pipeline.core.part_limits import CopyLimits, PartLimits
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan, _repr_of, _reprs, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import RemainingGroups
from tests.limited import files_up_to


@pytest.fixture(scope="module")
def plan() -> Plan:
    source = catalog_of(
        Dims(64, 128, 4, 8, 8, 512, ema=True), HybridTarget(Topology(tp=2, pp=2, sharding=4), "stage1v2")
    )
    files = layout_hybrid(source, HybridTarget(Topology(tp=4, sharding=2), "stage1v1"))
    carried = [CarriedFile("training_args.bin", "training_args.bin", 77)]
    limits = PartLimits(copies=CopyLimits(256, 1 << 20))
    planned = plan_conversion(source.catalog, files, carried, PlanSettings(1 << 30), limits)
    assert (planned.parts["source_file"] >= 0).any()  # some are copied by the storage
    return planned


@pytest.fixture
def saved(plan: Plan, tmp_path: Path) -> Path:
    save_plan(plan, tmp_path / "plan.arrow")
    return tmp_path / "plan.arrow"


def tables_in(path: Path) -> dict[str, pa.Table]:
    """Every table of a plan file by its name, as any Arrow library reads it."""
    tables = {}
    with path.open("rb") as file:
        while file.tell() < path.stat().st_size:
            table = pa.ipc.open_stream(file).read_all()
            tables[table.schema.metadata[b"table"].decode()] = table
    return tables


@pytest.mark.parametrize("rows", [7, plan_file.BATCH_ROWS])
def test_any_arrow_library_reads_tensors_and_files(
    plan: Plan, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_file, "BATCH_ROWS", rows)
    save_plan(plan, tmp_path / "plan")
    tables = tables_in(tmp_path / "plan")
    for name in ("source_files", "target_files"):
        sizes = [(file.path, file.size_bytes) for file in getattr(plan, name)]
        assert list(zip(*tables[name].to_pydict().values(), strict=True)) == sizes
    assert tables["tensors"].to_pylist() == [
        {
            "key": tensor.key,
            "state": tensor.state,
            "dtype": tensor.dtype.name,
            "global_shape": list(tensor.global_shape),
            "aliases": list(tensor.aliases),
        }
        for tensor in plan.tensors
    ]
    carried = {"source_path": "training_args.bin", "target_path": "training_args.bin", "size_bytes": 77}
    assert tables["carried"].to_pylist() == [carried]


def test_the_same_plan_is_the_same_file(plan: Plan, saved: Path, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


def test_the_id_is_that_of_the_tensors_as_objects(plan: Plan) -> None:
    tensors = tuple(replace(tensor, aliases=("it's", 'a "b"')) for tensor in plan.tensors)
    for given in (tuple(plan.tensors), tensors, tensors[:1], ()):
        pieces = _repr_of((_reprs(Tensors(given)), map(repr, plan.carried)))
        assert "".join(pieces) == repr((given, plan.carried))


def test_a_file_cut_short_or_damaged_is_refused(plan: Plan, saved: Path) -> None:
    """No damage makes another plan of it: what has another id, or none, is refused."""
    whole, other = saved.read_bytes(), replace(plan, carried=())
    random = np.random.default_rng(0)
    header = whole.index(b"digest")
    for stop in (0, 3, *random.integers(4, header, 20).tolist()):
        saved.write_bytes(whole[:stop])
        with pytest.raises(FormatError, match="bad_plan_file"):
            check_is_saved(plan, saved)
    for stop in random.integers(header, len(whole) - 200, 20).tolist():
        saved.write_bytes(whole[:stop])
        with pytest.raises((FormatError, PlanError)):
            check_is_saved(other, saved)
    for place in random.integers(0, len(whole), 80).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(random.integers(8))
        saved.write_bytes(damaged)
        with pytest.raises((FormatError, PlanError)):
            check_is_saved(other, saved)


def test_another_generation_is_refused(plan: Plan, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "GENERATION", 2)
    with pytest.raises(FormatError, match="has generation 4; this version reads 2: make the plan again"):
        check_is_saved(plan, saved)


def test_a_plan_that_does_not_fit_leaves_the_one_that_was_there(plan: Plan, saved: Path) -> None:
    before = saved.read_bytes()
    with files_up_to(100), pytest.raises(UsageError, match=r"; give another file$"):
        save_plan(plan, saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_what_is_no_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    other = tmp_path / "other.arrow"
    with pa.OSFile(str(other), "wb") as file, pa.ipc.new_stream(file, pa.schema([("a", pa.int8())])):
        pass
    with pytest.raises(FormatError, match="not a paddle-reshard plan"):
        check_is_saved(plan, other)
    other.write_bytes(b"PAR1 something else")
    with pytest.raises(FormatError, match="not a paddle-reshard plan"):
        check_is_saved(plan, other)
    with pytest.raises(UsageError, match="the plan cannot be read"):
        check_is_saved(plan, tmp_path / "missing")
    with pytest.raises(UsageError, match="cannot be written: is a directory"):
        save_plan_into_a_folder(tmp_path)


def save_plan_into_a_folder(folder: Path) -> None:
    source = catalog_of(Dims(8, 8, 1, 1, 1, 8), HybridTarget(Topology(), "none"))
    files = layout_hybrid(source, HybridTarget(Topology(), "none"))
    save_plan(plan_conversion(source.catalog, files, [], PlanSettings(1 << 30)), folder)


def test_another_plan_than_the_saved_one_is_refused_with_what_has_changed(plan: Plan, saved: Path) -> None:
    check_is_saved(plan, saved)
    grown = tuple(replace(file, size_bytes=file.size_bytes + 1) for file in plan.source_files)
    name, size = plan.source_files[0].path, plan.source_files[0].size_bytes
    bands = plan.bands.copy()
    bands["start"][0] += 1
    for changed, what in (
        (
            replace(plan, source_files=grown),
            f"{name} has {size} bytes in the saved plan and has {size + 1} bytes now",
        ),
        (replace(plan, target_files=plan.target_files[1:]), "and is missing now"),
        (replace(plan, carried=()), "carried files differ"),
        (replace(plan, bands=bands), "different parts"),
        (replace(plan, bands=bands, budget_bytes=7), "the budget was 1073741824 bytes and is 7"),
    ):
        with pytest.raises(PlanError, match=what):
            check_is_saved(changed, saved)


def test_a_plan_after_its_run_is_described_as_before(plan: Plan) -> None:
    carried_out = replace(plan, ops=plan.ops.copy(), literals=plan.literals.copy())
    carried_out.release_ops()
    assert (len(carried_out.ops), len(carried_out.literals)) == (0, 0)
    for fact in (
        "plan_id",
        "read_bytes",
        "read_amplification",
        "checked_parameters",
        "written_bytes",
        "copied_share",
        "groups",
    ):
        assert getattr(carried_out, fact) == getattr(plan, fact), fact
    assert plan.payload_bytes > 0
    with pytest.raises(PlanError, match="plan the conversion again"):
        next(RemainingGroups(carried_out))
