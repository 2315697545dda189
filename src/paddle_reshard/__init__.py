"""Convert PaddlePaddle hybrid-parallel training checkpoints to any other topology, bit for bit.

This file is the table of contents of the Python face: every public name and the module that it comes from, by subject.
``docs/api.md`` says what each is for.
"""

from __future__ import annotations

from paddle_reshard import _import_path  # noqa: F401

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.core.version import __version__ as __version__

if TYPE_CHECKING:
    from paddle_reshard.pipeline.api import clean, convert, plan
    from paddle_reshard.pipeline.examine.cards import Alternative, CardsPlan, RefusedTopology
    from paddle_reshard.pipeline.examine.checking import check
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.examine.coverage import Coverage, prove
    from paddle_reshard.pipeline.examine.diff import DifferenceSummary, DiffReport, TensorDifference, diff
    from paddle_reshard.pipeline.examine.explain import explain
    from paddle_reshard.pipeline.examine.explanation import ExplainedTensor, Explanation, Origin, Stretch
    from paddle_reshard.pipeline.examine.fingerprint import FingerprintReport, fingerprint
    from paddle_reshard.pipeline.examine.inspection import Inspection, StateSummary, inspect
    from paddle_reshard.pipeline.convert.integrity import Damage, IntegrityReport
    from paddle_reshard.pipeline.examine.launch import Launch, launch
    from paddle_reshard.pipeline.request.options import (
        AverageOptions,
        ConversionOptions,
        ConvertOptions,
        TargetOptions,
    )
    from paddle_reshard.pipeline.changes.change import LeftOut
    from paddle_reshard.pipeline.convert.plan import ConversionPlan, PlannedTarget
    from paddle_reshard.pipeline.request.read_options import (
        CheckOptions,
        DiffOptions,
        FingerprintOptions,
        InspectOptions,
        LoadOptions,
        ReadOptions,
        VerifyOptions,
    )
    from paddle_reshard.pipeline.convert.run import MoveReport
    from paddle_reshard.pipeline.convert.series import average, ema
    from paddle_reshard.pipeline.examine.signing import SignReport, sign
    from paddle_reshard.pipeline.examine.verify import VerifyReport, verify
    from paddle_reshard.pipeline.core.catalog import File
    from paddle_reshard.pipeline.core.errors import (
        BusyError,
        CastError,
        CheckpointError,
        ClusterError,
        CoverageError,
        DriftError,
        FinishedError,
        FormatError,
        GroupFailedError,
        JobError,
        ListingError,
        MasterDriftError,
        MemoryBudgetError,
        PlanError,
        RefusedJobError,
        RereadError,
        ReshardError,
        RuleError,
        SignatureError,
        StaleSessionError,
        TargetError,
        UnsafePickleError,
        UnsupportedError,
        UsageError,
    )
    from paddle_reshard.pipeline.core.events import (
        Event,
        FilesRead,
        GroupEnded,
        Observer,
        Planned,
        Progress,
        StepEnded,
        StepStarted,
        Waiting,
        WorkerAssigned,
    )
    from paddle_reshard.pipeline.core.fingerprints import Fingerprints
    from paddle_reshard.pipeline.core.stored import StoredTensor
    from paddle_reshard.pipeline.core.tensors import DType, Tensor
    from paddle_reshard.pipeline.core.topology import Topology
    from paddle_reshard.pipeline.core.units import PathLike
    from paddle_reshard.pipeline.training.async_ema import AsyncEma, EmaCounts
    from paddle_reshard.pipeline.training.paddle_objects import rank_pieces
    from paddle_reshard.pipeline.training.resume import Piece, RankPieces
    from paddle_reshard.pipeline.training.stretches import Weights
    from paddle_reshard.pipeline.training.ema_callback import ema_callback
    from paddle_reshard.pipeline.checkpoint.format import RankBytes
    from paddle_reshard.pipeline.model.lora_config import Adapter
    from paddle_reshard.pipeline.model.model import ModelTensor
    from paddle_reshard.pipeline.training.converter import CheckpointConverter
    from paddle_reshard.pipeline.training.load import LoadReport, load_into
    from paddle_reshard.pipeline.training.names import check_names
    from paddle_reshard.pipeline.training.tensors import stage3_state_dict
    from paddle_reshard.pipeline.training.names_callback import names_callback
    from paddle_reshard.pipeline.planning.compare import Difference
    from paddle_reshard.pipeline.planning.plan import CarriedFile, Plan
    from paddle_reshard.pipeline.report.html_report import HtmlReport
    from paddle_reshard.pipeline.versions.publish import publish
    from paddle_reshard.pipeline.versions.pull import pull
    from paddle_reshard.pipeline.versions.reports import PublishReport, PullReport
    from paddle_reshard.pipeline.examine.overview import Run, RunCheckpoint, ls
    from paddle_reshard.storage.locate import StorageOptions
    from paddle_reshard.tasks.figures import WorkerFigures

__all__ = [
    "Adapter",
    "Alternative",
    "AsyncEma",
    "AverageOptions",
    "BusyError",
    "CardsPlan",
    "CarriedFile",
    "CastError",
    "CheckOptions",
    "CheckpointConverter",
    "CheckpointError",
    "ClusterError",
    "ConversionOptions",
    "ConversionPlan",
    "ConversionReport",
    "ConvertOptions",
    "Coverage",
    "CoverageError",
    "DType",
    "Damage",
    "DiffOptions",
    "DiffReport",
    "Difference",
    "DifferenceSummary",
    "DriftError",
    "EmaCounts",
    "Event",
    "ExplainedTensor",
    "Explanation",
    "File",
    "FilesRead",
    "FingerprintOptions",
    "FingerprintReport",
    "Fingerprints",
    "FinishedError",
    "FormatError",
    "GroupEnded",
    "GroupFailedError",
    "HtmlReport",
    "InspectOptions",
    "Inspection",
    "IntegrityReport",
    "JobError",
    "Launch",
    "LeftOut",
    "ListingError",
    "LoadOptions",
    "LoadReport",
    "MasterDriftError",
    "MemoryBudgetError",
    "ModelTensor",
    "MoveReport",
    "Observer",
    "Origin",
    "PathLike",
    "Piece",
    "Plan",
    "PlanError",
    "Planned",
    "PlannedTarget",
    "Progress",
    "PublishReport",
    "PullReport",
    "RankBytes",
    "RankPieces",
    "ReadOptions",
    "RefusedJobError",
    "RefusedTopology",
    "RereadError",
    "ReshardError",
    "RuleError",
    "Run",
    "RunCheckpoint",
    "SignReport",
    "SignatureError",
    "StaleSessionError",
    "StateSummary",
    "StepEnded",
    "StepStarted",
    "StorageOptions",
    "StoredTensor",
    "Stretch",
    "TargetError",
    "TargetOptions",
    "Tensor",
    "TensorDifference",
    "Topology",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "VerifyOptions",
    "VerifyReport",
    "Waiting",
    "Weights",
    "WorkerAssigned",
    "WorkerFigures",
    "__version__",
    "average",
    "check",
    "check_names",
    "clean",
    "convert",
    "diff",
    "ema",
    "ema_callback",
    "explain",
    "fingerprint",
    "inspect",
    "launch",
    "load_into",
    "ls",
    "names_callback",
    "plan",
    "prove",
    "publish",
    "pull",
    "rank_pieces",
    "sign",
    "stage3_state_dict",
    "verify",
]

_HOMES = {
    # What a checkpoint is, and what it becomes: `inspect`, `plan`, `convert`, `ema`, `verify` and `clean` as functions
    "pipeline.core.stored": ("StoredTensor",),
    "pipeline.examine.inspection": ("Inspection", "StateSummary", "inspect"),
    "pipeline.examine.launch": ("Launch", "launch"),
    "pipeline.model.lora_config": ("Adapter",),
    "pipeline.model.model": ("ModelTensor",),
    "pipeline.core.tensors": ("DType", "Tensor"),
    "pipeline.api": ("clean", "convert", "plan"),
    "pipeline.convert.series": ("average", "ema"),
    "pipeline.examine.signing": ("SignReport", "sign"),
    "pipeline.examine.verify": ("VerifyReport", "verify"),
    "pipeline.examine.cards": ("Alternative", "CardsPlan", "RefusedTopology"),
    "pipeline.checkpoint.format": ("RankBytes",),
    "pipeline.examine.checking": ("check",),
    "pipeline.planning.compare": ("Difference",),
    "pipeline.examine.diff": ("DiffReport", "DifferenceSummary", "TensorDifference", "diff"),
    "pipeline.examine.fingerprint": ("FingerprintReport", "fingerprint"),
    "pipeline.core.fingerprints": ("Fingerprints",),
    "pipeline.convert.integrity": ("Damage", "IntegrityReport"),
    "pipeline.changes.change": ("LeftOut",),
    "pipeline.convert.plan": ("ConversionPlan", "PlannedTarget"),
    "pipeline.examine.coverage": ("Coverage", "prove"),
    "pipeline.examine.explain": ("explain",),
    "pipeline.examine.explanation": ("ExplainedTensor", "Explanation", "Origin", "Stretch"),
    "pipeline.planning.plan": ("CarriedFile", "Plan"),
    "pipeline.core.catalog": ("File",),
    "pipeline.convert.conversion": ("ConversionReport",),
    "pipeline.convert.run": ("MoveReport",),
    "tasks.figures": ("WorkerFigures",),
    # What is asked for
    "pipeline.request.options": ("AverageOptions", "ConversionOptions", "ConvertOptions", "TargetOptions"),
    "pipeline.request.read_options": (
        "CheckOptions",
        "DiffOptions",
        "FingerprintOptions",
        "InspectOptions",
        "LoadOptions",
        "ReadOptions",
        "VerifyOptions",
    ),
    "pipeline.core.topology": ("Topology",),
    "pipeline.core.units": ("PathLike",),
    "storage.locate": ("StorageOptions",),
    # Versions of weights for inference engines
    "pipeline.versions.publish": ("publish",),
    "pipeline.versions.pull": ("pull",),
    "pipeline.versions.reports": ("PublishReport", "PullReport"),
    # Progress: the events that an observer is called with
    "pipeline.report.html_report": ("HtmlReport",),
    "pipeline.core.events": (
        "Event",
        "FilesRead",
        "GroupEnded",
        "Observer",
        "Planned",
        "Progress",
        "StepEnded",
        "StepStarted",
        "Waiting",
        "WorkerAssigned",
    ),
    # Into a running job
    "pipeline.training.load": ("LoadReport", "load_into"),
    "pipeline.training.names": ("check_names",),
    "pipeline.training.names_callback": ("names_callback",),
    "pipeline.training.tensors": ("stage3_state_dict",),
    "pipeline.training.converter": ("CheckpointConverter",),
    # Averages beside training
    "pipeline.training.ema_callback": ("ema_callback",),
    "pipeline.training.async_ema": ("AsyncEma", "EmaCounts"),
    "pipeline.training.stretches": ("Weights",),
    "pipeline.training.paddle_objects": ("rank_pieces",),
    "pipeline.training.resume": ("Piece", "RankPieces"),
    # Every error, as the tree at the top of `pipeline/core/errors.py` has it
    "pipeline.core.errors": (
        "BusyError",
        "CastError",
        "CheckpointError",
        "ClusterError",
        "CoverageError",
        "DriftError",
        "FinishedError",
        "FormatError",
        "GroupFailedError",
        "JobError",
        "ListingError",
        "MasterDriftError",
        "MemoryBudgetError",
        "PlanError",
        "RefusedJobError",
        "RereadError",
        "ReshardError",
        "RuleError",
        "SignatureError",
        "StaleSessionError",
        "TargetError",
        "UnsafePickleError",
        "UnsupportedError",
        "UsageError",
    ),
    "pipeline.examine.overview": ("Run", "RunCheckpoint", "ls"),
}
"""Module → the public names that come from it. Each is imported when it is first asked for, so that `--help` and
`--version` start without NumPy; type checkers read the imports above."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker that saw this would accept any name

    def _replaced() -> Any:
        return import_module(f"{__name__}.pipeline.core.replaced").NAMES

    def __getattr__(name: str) -> Any:
        if name not in _HOME and (other := _replaced().get(name)):
            raise AttributeError(f"{__name__}.{name} is replaced by {other}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
