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

if TYPE_CHECKING:  # "as" makes a name public to type checkers
    from paddle_reshard.pipeline.api import (
        clean as clean,
        convert as convert,
        plan as plan,
    )
    from paddle_reshard.pipeline.examine.cards import (
        Alternative as Alternative,
        CardsPlan as CardsPlan,
        RefusedTopology as RefusedTopology,
    )
    from paddle_reshard.pipeline.examine.checking import check as check
    from paddle_reshard.pipeline.convert.conversion import ConversionReport as ConversionReport
    from paddle_reshard.pipeline.examine.coverage import (
        Coverage as Coverage,
        prove as prove,
    )
    from paddle_reshard.pipeline.examine.diff import (
        DifferenceSummary as DifferenceSummary,
        DiffReport as DiffReport,
        TensorDifference as TensorDifference,
        diff as diff,
    )
    from paddle_reshard.pipeline.examine.explain import (
        ExplainedTensor as ExplainedTensor,
        Explanation as Explanation,
        Origin as Origin,
    )
    from paddle_reshard.pipeline.examine.explain import (
        explain as explain,
    )
    from paddle_reshard.pipeline.examine.fingerprint import (
        FingerprintReport as FingerprintReport,
        fingerprint as fingerprint,
    )
    from paddle_reshard.pipeline.examine.inspection import (
        Inspection as Inspection,
        StateSummary as StateSummary,
        inspect as inspect,
    )
    from paddle_reshard.pipeline.convert.integrity import (
        Damage as Damage,
        IntegrityReport as IntegrityReport,
    )
    from paddle_reshard.pipeline.examine.launch import (
        Launch as Launch,
        launch as launch,
    )
    from paddle_reshard.pipeline.request.options import (
        AverageOptions as AverageOptions,
        ConversionOptions as ConversionOptions,
        ConvertOptions as ConvertOptions,
        TargetOptions as TargetOptions,
    )
    from paddle_reshard.pipeline.changes.change import LeftOut as LeftOut
    from paddle_reshard.pipeline.convert.plan import (
        ConversionPlan as ConversionPlan,
        PlannedTarget as PlannedTarget,
    )
    from paddle_reshard.pipeline.request.read_options import (
        CheckOptions as CheckOptions,
        DiffOptions as DiffOptions,
        FingerprintOptions as FingerprintOptions,
        InspectOptions as InspectOptions,
        LoadOptions as LoadOptions,
        ReadOptions as ReadOptions,
        ResumeOptions as ResumeOptions,
        VerifyOptions as VerifyOptions,
    )
    from paddle_reshard.pipeline.convert.run import MoveReport as MoveReport
    from paddle_reshard.pipeline.convert.series import (
        average as average,
        ema as ema,
    )
    from paddle_reshard.pipeline.examine.verify import (
        VerifyReport as VerifyReport,
        verify as verify,
    )
    from paddle_reshard.pipeline.core.catalog import File as File
    from paddle_reshard.pipeline.core.errors import (
        AgreementError as AgreementError,
        BusyError as BusyError,
        CastError as CastError,
        CheckpointError as CheckpointError,
        ClusterError as ClusterError,
        CoverageError as CoverageError,
        DriftError as DriftError,
        FinishedError as FinishedError,
        FormatError as FormatError,
        GroupFailedError as GroupFailedError,
        JobError as JobError,
        ListingError as ListingError,
        MasterDriftError as MasterDriftError,
        MemoryBudgetError as MemoryBudgetError,
        OccupiedError as OccupiedError,
        PlanError as PlanError,
        RefusedJobError as RefusedJobError,
        ReshardError as ReshardError,
        RuleError as RuleError,
        StaleSessionError as StaleSessionError,
        TargetError as TargetError,
        TiedDriftError as TiedDriftError,
        UnsafePickleError as UnsafePickleError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
    )
    from paddle_reshard.pipeline.core.events import (
        Event as Event,
        FilesRead as FilesRead,
        GroupEnded as GroupEnded,
        Observer as Observer,
        Planned as Planned,
        Progress as Progress,
        StepEnded as StepEnded,
        StepStarted as StepStarted,
        Waiting as Waiting,
        WorkerAssigned as WorkerAssigned,
    )
    from paddle_reshard.pipeline.core.fingerprints import Fingerprints as Fingerprints
    from paddle_reshard.pipeline.core.stored import StoredTensor as StoredTensor
    from paddle_reshard.pipeline.core.tensors import (
        DType as DType,
        Tensor as Tensor,
    )
    from paddle_reshard.pipeline.core.topology import Topology as Topology
    from paddle_reshard.pipeline.core.units import PathLike as PathLike
    from paddle_reshard.pipeline.training.async_ema import (
        AsyncEma as AsyncEma,
        EmaCounts as EmaCounts,
    )
    from paddle_reshard.pipeline.training.paddle_objects import rank_pieces as rank_pieces
    from paddle_reshard.pipeline.training.resume import (
        Piece as Piece,
        RankPieces as RankPieces,
    )
    from paddle_reshard.pipeline.training.stretches import Weights as Weights
    from paddle_reshard.pipeline.training.ema_callback import ema_callback as ema_callback
    from paddle_reshard.pipeline.checkpoint.format import NotLoaded as NotLoaded
    from paddle_reshard.pipeline.checkpoint.format import RankBytes as RankBytes
    from paddle_reshard.pipeline.model.lora_config import Adapter as Adapter
    from paddle_reshard.pipeline.model.model import ModelTensor as ModelTensor
    from paddle_reshard.pipeline.training.converter import CheckpointConverter as CheckpointConverter
    from paddle_reshard.pipeline.training.load import (
        LoadReport as LoadReport,
        load_into as load_into,
    )
    from paddle_reshard.pipeline.training.names import check_names as check_names
    from paddle_reshard.pipeline.training.tensors import stage3_state_dict as stage3_state_dict
    from paddle_reshard.pipeline.training.names_callback import names_callback as names_callback
    from paddle_reshard.pipeline.training.within_job import resume as resume
    from paddle_reshard.pipeline.training.describe import (
        describe as describe,
        describe_callback as describe_callback,
    )
    from paddle_reshard.pipeline.planning.compare import Difference as Difference
    from paddle_reshard.pipeline.planning.plan import (
        CarriedFile as CarriedFile,
        Plan as Plan,
    )
    from paddle_reshard.pipeline.report.html_report import HtmlReport as HtmlReport
    from paddle_reshard.pipeline.examine.overview import (
        Run as Run,
        RunCheckpoint as RunCheckpoint,
        ls as ls,
    )
    from paddle_reshard.storage.locate import StorageOptions as StorageOptions
    from paddle_reshard.tasks.figures import WorkerFigures as WorkerFigures

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
    "pipeline.examine.verify": ("VerifyReport", "verify"),
    "pipeline.examine.cards": ("Alternative", "CardsPlan", "RefusedTopology"),
    "pipeline.checkpoint.format": ("NotLoaded", "RankBytes"),
    "pipeline.examine.checking": ("check",),
    "pipeline.planning.compare": ("Difference",),
    "pipeline.examine.diff": ("DiffReport", "DifferenceSummary", "TensorDifference", "diff"),
    "pipeline.examine.fingerprint": ("FingerprintReport", "fingerprint"),
    "pipeline.core.fingerprints": ("Fingerprints",),
    "pipeline.convert.integrity": ("Damage", "IntegrityReport"),
    "pipeline.changes.change": ("LeftOut",),
    "pipeline.convert.plan": ("ConversionPlan", "PlannedTarget"),
    "pipeline.examine.coverage": ("Coverage", "prove"),
    "pipeline.examine.explain": ("ExplainedTensor", "Explanation", "Origin", "explain"),
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
        "ResumeOptions",
        "VerifyOptions",
    ),
    "pipeline.core.topology": ("Topology",),
    "pipeline.core.units": ("PathLike",),
    "storage.locate": ("StorageOptions",),
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
    "pipeline.training.within_job": ("resume",),
    "pipeline.training.describe": ("describe", "describe_callback"),
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
        "AgreementError",
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
        "OccupiedError",
        "PlanError",
        "RefusedJobError",
        "ReshardError",
        "RuleError",
        "StaleSessionError",
        "TargetError",
        "TiedDriftError",
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
    __all__ = sorted((*_HOME, "__version__"))

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
