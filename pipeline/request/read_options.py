"""Options of functions that only read.

Each is an option of a conversion (:mod:`~paddle_reshard.pipeline.request.options`), with the same default. A text here
replaces its help, where it means something else.
"""

# No "from __future__ import annotations": the annotations are needed when the options are listed.

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypedDict

from paddle_reshard.pipeline.core.choices import (
    Convention,
    Dropped,
    ReadMasterWeights,
    ReadReplicas,
    Replicas,
)
from paddle_reshard.pipeline.core.topology import Strategy
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.registry import FormatName
from paddle_reshard.storage.locate import StorageOptions

READ_AS: Final = (
    "Library as whose model a Hugging Face checkpoint is read, where its keys fit those of several."
)
LACKS: Final = "Keys that either checkpoint may lack; * matches anything."


class ReadOptions(TypedDict, total=False):
    """How a checkpoint is accessed and interpreted."""

    rules: PathLike | None
    allow_links: bool
    storage_options: StorageOptions | None


class InspectOptions(ReadOptions, total=False):
    """Options of ``inspect``."""

    config: PathLike | None
    convention: Annotated[Convention | None, READ_AS]


class VerifyOptions(InspectOptions, total=False):
    """Options of ``verify``."""

    memory: str | int
    cluster: Annotated[str, "Where tensors are compared, as in convert."]
    workers: int | None
    replicas: Annotated[
        ReadReplicas,
        "Copies of a tensor within one checkpoint: count as a difference if they differ, or read only the first.",
    ]
    allow_missing: Annotated[Sequence[str], LACKS]


class CheckOptions(TypedDict, total=False):
    """Options of ``check``."""

    allow_links: bool
    storage_options: StorageOptions | None


class LoadOptions(ReadOptions, total=False):
    """Options of ``load_into``."""

    memory: Annotated[str | int, "Memory that loading may use besides the tensors, as in 512MiB or 4GiB."]
    convention: Annotated[Convention | None, READ_AS]
    fill: PathLike | None
    allow_missing: Annotated[
        Sequence[str],
        "Names of entries that keep their values if the checkpoint has none for them, and of parameters that it may "
        "lack; * matches anything.",
    ]
    master_weights: Annotated[
        ReadMasterWeights,
        "compare: refuse parameters that are not their master weights, rounded; report: load both, and report them.",
    ]


class ResumeOptions(ReadOptions, total=False):
    """Options of ``resume``."""

    config: PathLike | None
    format: Annotated[
        FormatName | None,
        "Format of the files that ranks read, if they have to be made. Default: that of the checkpoint, or flex if its "
        "format has no files of ranks. If given, they are also made where the job could read the checkpoint as it is.",
    ]
    sharding_strategy: Strategy | None
    layout: PathLike | Mapping[str, Any] | None
    memory: Annotated[str | int, "Memory budget of a conversion, as in 512MiB or 4GiB."]
    allow_missing: Sequence[str]
    replicas: Replicas
    master_weights: Annotated[
        ReadMasterWeights,
        "compare: refuse parameters that are not their master weights, rounded; report: keep both, and report them.",
    ]
    drop: Sequence[Dropped]


class FingerprintOptions(InspectOptions, total=False):
    """Options of ``fingerprint``."""

    memory: str | int
    allow_missing: Annotated[Sequence[str], "Keys that the checkpoint may lack; * matches anything."]
    cluster: Annotated[str, "Where the tensors are read, as in convert."]
    workers: int | None


class DiffOptions(InspectOptions, total=False):
    """Options of ``diff``."""

    memory: str | int
    allow_missing: Annotated[Sequence[str], LACKS]
