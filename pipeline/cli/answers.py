"""What each command prints with ``--json``, as types; ``make schemas`` makes ``docs/schemas/output-1.json`` of them.

``Annotated[Entries, X]`` is what ``asdict`` makes of the dataclass ``X``: its fields, and what they mean;
``Annotated[Entries, X, Y]`` the same with the entries of ``Y``, also in place of its own. Of every answer the schema
also has the entries of :class:`~paddle_reshard.pipeline.core.answer.Answer`. No command imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from paddle_reshard.pipeline.convert.integrity import IntegrityReport
from paddle_reshard.pipeline.convert.run import MoveReport
from paddle_reshard.pipeline.core.stored import StoredTensor
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.examine.coverage import Coverage
from paddle_reshard.pipeline.examine.diff import DifferenceSummary, TensorDifference
from paddle_reshard.pipeline.examine.explain import ExplainedTensor
from paddle_reshard.pipeline.examine.inspection import StateSummary
from paddle_reshard.pipeline.examine.launch import Launch
from paddle_reshard.pipeline.examine.overview import RunCheckpoint
from paddle_reshard.pipeline.examine.verify import VerifyReport
from paddle_reshard.pipeline.formats.registry import FormatName
from paddle_reshard.pipeline.planning.compare import Difference

Entries: TypeAlias = dict[str, Any]
Texts: TypeAlias = Sequence[str]
Axes: TypeAlias = Annotated[Entries, Topology]
"""Every axis with its size."""
Root: TypeAlias = Annotated[str, "^sha256:[0-9a-f]{64}$"]


class LeftBehind(TypedDict):
    """A file or tensor that is not taken along."""

    path: str
    reason: str


class Adapter(TypedDict):
    """The facts of a LoRA adapter."""

    rank: int
    scaling: float
    base: str | None


class InspectedTensor(TypedDict):
    """A parameter of the model."""

    key: str
    shape: Sequence[int]
    dtype: str
    tied_to: str | None
    missing: bool
    rule: str


class Inspected(TypedDict):
    """Printed by ``inspect``."""

    path: str
    format: str
    convention: str
    family: str
    topology: Axes | None
    sharding_strategy: str | None
    comm_overlap: bool
    sequence_parallel: bool | None
    ema: bool
    lora: Adapter | None
    newer: str
    unproven: str
    misnamed: str
    tensor_files: int
    tensor_bytes: int
    states: list[Annotated[Entries, StateSummary]]
    tensors: list[InspectedTensor]
    rules: str | None
    stored: list[Annotated[Entries, StoredTensor]]
    other_files: Texts
    left_out: list[LeftBehind]


class Portion(TypedDict):
    """A part of a conversion."""

    ranks: str
    """Global ranks, as in 8-15."""
    world_size: int
    whole: str
    """Digest of the whole: equal for all portions of one whole."""


class PlannedSource(TypedDict):
    """What is converted."""

    format: str
    topology: Axes | None
    sharding_strategy: str | None


class _TargetOptions(TypedDict, total=False):
    path: str
    topology: Axes
    sharding_strategy: str
    sharding_strategy_reason: str
    model_meta: bool
    state: str
    dtype: str | None
    max_shard_bytes: int | None
    paddle_version: str


class PlannedTarget(_TargetOptions):
    """What is written; entries that a format does not have are missing."""

    format: FormatName
    not_carried: list[LeftBehind]
    states_not_carried: Texts
    remarks: Texts
    donated_files: Texts


class File(TypedDict):
    """A file of a target."""

    path: str
    size_bytes: int


class Compared(TypedDict):
    """How many parameters are compared with their master weights."""

    full: int
    sample: int


class Complete(TypedDict):
    """Whether every byte is written exactly once, and every element used or left out for a reason."""

    complete: bool


class ConversionPlanned(TypedDict):
    """What a conversion reads, writes and needs."""

    plan_id: str
    portion: Annotated[Entries, Portion] | None
    """Which portion of which whole is made; null: all of it. plan_id is that of the whole."""
    source: PlannedSource
    target: PlannedTarget | None
    targets: list[PlannedTarget]
    tensors: int
    groups: int
    peak_bytes: int
    budget_bytes: int
    read_bytes: int
    read_amplification: float
    read_once_budget_bytes: int | None
    write_bytes: int
    copied_bytes: int
    copied_share: float
    files: list[File]
    carried: list[File]
    not_carried: list[LeftBehind]
    states_not_carried: Texts
    states_dropped: Texts
    compared_with_master_weights: Compared
    master_weights_made: int
    filled_tensors: Texts
    """Parameters that the source lacked and --fill gave."""
    donated_tensors: Texts


class _PlannedFurther(TypedDict, total=False):
    coverage: Annotated[Entries, Coverage, Complete]
    """With --prove."""


class Planned(ConversionPlanned, _PlannedFurther):
    """Printed by ``plan``."""


class CardBytes(TypedDict):
    """What the fullest rank holds; gradients, activations and communication buffers are not counted."""

    parameters: int
    master_weights: int
    moments: int
    total: int


class Lost(TypedDict):
    """What the target cannot hold."""

    name: str
    reason: str


class Alternative(TypedDict):
    """A topology of the cards."""

    topology: Axes
    to: str
    """The topology as --to takes it."""
    sharding_strategy: str
    sharding_strategy_reason: str
    card_bytes: CardBytes
    ema_bytes: int
    """Of the average, which is kept in host memory."""
    read_bytes: int
    write_bytes: int
    seconds: float
    """For one worker that reads and writes 1 GB/s at once."""
    lost: list[Lost]
    resumes: bool
    """Whether the trainer goes on at once, with optimizer and schedule."""
    not_resumed: str
    """Why it does not."""
    remarks: Texts
    command: str
    """What converts; empty if the checkpoint is for this topology already."""
    arguments: dict[str, str | int | bool]
    """Arguments of the trainer; empty if they are not known."""
    launch: str
    """The same for a shell."""
    nearest: bool


class RefusedTopology(TypedDict):
    """A topology that is not possible."""

    topology: Axes
    to: str
    reason: str


class Cards(TypedDict):
    """Printed by ``plan --cards``."""

    path: str
    cards: int
    format: str
    """Format of the targets."""
    any_topology: bool
    """Whether the trainer reads the checkpoint as it is in each of these topologies."""
    alternatives: list[Alternative]
    """The nearest first."""
    refused: list[RefusedTopology]


class Side(TypedDict):
    """Where a box of values lies in a file."""

    file: str
    start: int
    stop: int
    """One past the last byte of the box, whose elements may lie apart."""
    strides: Sequence[int]
    """Bytes from one element to the next along each dim."""
    dtype: str


class Origin(TypedDict):
    """A box of values on both sides."""

    key: str
    state: str
    offset: Sequence[int]
    extents: Sequence[int]
    target: Side
    source: Side
    source_state: str
    """State of the tensor that is read."""
    rank: dict[str, int]
    """Axis and coordinate of the rank that wrote the source file."""
    how: str
    """What happens to the values; empty if bytes and order stay."""
    copied: bool
    """Whether the storage copies it."""


class Explained(TypedDict):
    """Printed by ``explain``."""

    source_path: str
    source: str
    target: str
    tensors: list[Annotated[Entries, ExplainedTensor]]
    origins: list[Origin]


class Converted(TypedDict):
    """Printed by ``convert`` and ``ema``."""

    source_path: str
    target_path: str | None
    moved: Annotated[Entries, MoveReport]
    plan: ConversionPlanned


class Finished(TypedDict):
    """Printed by ``convert --resume`` without a request if there was nothing to do."""

    finished: Literal[True]
    message: str


class Verified(TypedDict):
    """Printed by ``verify`` of two checkpoints."""

    equal: bool


class Checked(TypedDict):
    """Printed by ``verify`` of a target alone."""

    intact: bool


class Fingerprint(TypedDict):
    """The fingerprint of a tensor."""

    key: str
    state: str
    dtype: str
    shape: Sequence[int]
    crc64nvme: Annotated[str, "^[0-9a-f]{16}$"]


class Fingerprinted(TypedDict):
    """Printed by ``fingerprint``."""

    path: str
    algorithm: Literal["crc64nvme"]
    root: Root
    """RFC 9162 Merkle tree hash over the lines of all tensors."""
    states: dict[str, Root]
    """State → the root over its tensors alone."""
    read_bytes: int
    tensors: list[Fingerprint]
    """Sorted by key, then by state."""


class Figures(TypedDict):
    """Figures of a difference; those that are infinite are null."""

    largest: float | None
    mean: float | None


class FiguresOfTensor(Figures):
    """The same of a tensor, with the two values at its first difference."""

    values: Sequence[float | None]
    changed_share: float


class Diffed(TypedDict):
    """Printed by ``diff``."""

    agree: bool
    """Whether all tensors are on both sides and agree within the tolerance."""
    tensors: int
    elements: int
    read_bytes: int
    atol: float
    rtol: float
    differing: list[Annotated[Entries, TensorDifference, FiguresOfTensor]]
    """Those outside the tolerance first, the largest relative difference first."""
    by_state: list[Annotated[Entries, DifferenceSummary, Figures]]
    by_layer: list[Annotated[Entries, DifferenceSummary, Figures]]
    unmatched: list[Annotated[Entries, Difference]]


class Listed(TypedDict):
    """Printed by ``ls``."""

    path: str
    checkpoints: list[Annotated[Entries, RunCheckpoint]]


class Cleaned(TypedDict):
    """Printed by ``clean``."""

    removed: Texts


class Submitted(TypedDict):
    """Printed by ``submit``, also of a job that failed."""

    submission_id: str
    """Of the Ray job."""
    attached: bool
    """Whether the job existed before."""
    status: Literal["SUCCEEDED", "FAILED", "STOPPED"] | None
    """Of the job when it ended; null if the command did not wait for it."""
    result: Entries | None
    """The object that the job printed; null if it printed none."""


class WatchedCheckpoint(TypedDict):
    """What a watcher did about a checkpoint."""

    result: Literal["converted", "done", "waiting", "stale", "failed"]
    message: str | None


class Watched(TypedDict):
    """Printed by ``watch``."""

    run: str
    """Folder or URL of the checkpoints."""
    targets: str
    """Folder or URL of the converted checkpoints."""
    checkpoints: dict[str, WatchedCheckpoint]
    """Name of each checkpoint and its result in the last pass."""


ANSWERS: dict[str, tuple[object, ...]] = {
    "inspect": (Inspected,),
    "launch": (Annotated[Entries, Launch],),
    "ls": (Listed,),
    "plan": (Planned, Cards),
    "explain": (Explained,),
    "convert": (Converted, Finished),
    "ema": (Converted,),
    "diff": (Diffed,),
    "fingerprint": (Fingerprinted,),
    "verify": (Annotated[Entries, VerifyReport, Verified], Annotated[Entries, IntegrityReport, Checked]),
    "clean": (Cleaned,),
    "submit": (Submitted,),
    "watch": (Watched,),
}
"""Command → what it prints, one of these."""
