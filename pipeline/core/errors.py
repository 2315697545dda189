"""Every error a user can meet. Each is a small report: which tensor, which two values, which file, what to do.

::

    ReshardError
    ├── UsageError            the request itself is wrong (exit status 2)
    ├── CheckpointError       the source is not a complete, consistent checkpoint
    │   ├── FormatError       a file violates its format (path, byte_offset, reason)
    │   │   └── UnsafePickleError    a pickle refers to something outside the allow-list
    │   ├── CoverageError     a hole, an overlap or a contradiction in a tensor
    │   ├── DriftError        copies of one tensor differ (only the bytes can show it)
    │   │   ├── TiedDriftError  two tensors that tie_word_embeddings makes one differ
    │   │   └── MasterDriftError  a parameter is not the cast of its master weight
    ├── PlanError             the checkpoint is complete, but cannot become the requested target
    │   ├── RuleError         no rule covers a tensor, or a rule contradicts it
    │   ├── MemoryBudgetError
    │   ├── UnsupportedError  not supported by this version
    │   └── CastError         a value is too large for the requested dtype (only the bytes can show it)
    ├── TargetError           the target is occupied
    │   ├── OccupiedError     by something that this package did not write
    │   ├── BusyError         another run is writing it
    │   ├── StaleSessionError    the unfinished conversion there is a different one
    │   └── FinishedError     nothing to resume: the target is complete (exit status 0)
    ├── ListingError          a store refused to list its contents, or to accept a small file
    ├── ClusterError          a cluster could not be reached, or failed
    │   ├── JobError          it refused a job, or contact was lost
    │   └── GroupFailedError  a group failed on every worker that tried it
    ├── AgreementError        the nodes of a job do not resume from the same
    └── RefusedJobError       the conversion of a job was refused; a retry would fail too

If a store refuses a request, that is a CheckpointError or a TargetError with ``retryable`` true. Facts are positional
arguments, so every error survives pickling and crosses process boundaries unchanged.
"""

from __future__ import annotations

from typing import TypeVar


class ReshardError(Exception):
    """Base class of all errors of this package."""

    exit_status = 1
    retryable = False
    """Whether the same request may succeed later without changes, because a store, a cluster or another node caused the
    failure."""
    of_optimizer = False
    """Whether nothing but the optimizer's files is affected, so that the parameters can be read without them."""


class UsageError(ReshardError):
    """The request itself is wrong: an unknown option, a malformed topology."""

    exit_status = 2


class CheckpointError(ReshardError):
    """The source is not a complete, consistent checkpoint."""

    unfinished = False
    """Whether completion signals are missing, or older than the tensors: the trainer may still write it."""
    unannounced_mtp = 0
    """How many layers of multi-token prediction the files hold that ``config.json`` does not count."""


def unfinished(message: str) -> CheckpointError:
    """The error of a checkpoint that its trainer may still write."""
    error = CheckpointError(message)
    error.unfinished = True
    return error


class FormatError(CheckpointError):
    """A file violates its format. ``reason`` is a short code for programs."""

    def __init__(self, reason: str, path: str, byte_offset: int | None, detail: str) -> None:
        super().__init__(reason, path, byte_offset, detail)
        self.reason, self.path, self.byte_offset, self.detail = reason, path, byte_offset, detail

    def __str__(self) -> str:
        where = "" if self.byte_offset is None else f" at byte {self.byte_offset}"
        return f"{self.path}{where}: {self.detail} [{self.reason}]"


class UnsafePickleError(FormatError):
    """A pickle contains a global, an opcode or a call outside the allow-list. Nothing was executed."""


class CoverageError(CheckpointError):
    """The pieces of a tensor do not cover it exactly once, or contradict each other."""

    def __init__(self, tensor: str, detail: str, paths: tuple[str, ...] = ()) -> None:
        super().__init__(tensor, detail, paths)
        self.tensor, self.detail, self.paths = tensor, detail, paths

    def __str__(self) -> str:
        shown = ", ".join(self.paths[:4]) + (
            f" and {len(self.paths) - 4} more" if len(self.paths) > 4 else ""
        )
        return f"{self.tensor}: {self.detail}" + (f" (in {shown})" if shown else "")


_E = TypeVar("_E", bound=ReshardError)


WITHOUT_OPTIMIZER = "parameters alone are exported without it: --format huggingface"
"""The way on from a refusal that concerns nothing but the optimizer."""


def of_optimizer(error: _E) -> _E:
    """The same error, marked as one that concerns nothing but the optimizer's files."""
    error.of_optimizer = True
    return error


class PlanError(ReshardError):
    """The checkpoint is complete, but cannot become the requested target."""


class RuleError(PlanError):
    """No rule covers a tensor, or the rule contradicts the files."""

    fitting: tuple[str, ...] = ()
    """The libraries whose tables all fit the files, of which the user has to name one."""

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(tensor, detail)
        self.tensor, self.detail = tensor, detail

    def __str__(self) -> str:
        return f"{self.tensor}: {self.detail}"


class MemoryBudgetError(PlanError):
    """A group, or the metadata of all tensors, exceeds the memory budget.

    ``needed_bytes`` is the smallest sufficient budget, or with ``at_least`` a lower bound of it.
    """

    def __init__(self, tensor: str, budget_bytes: int, needed_bytes: int, at_least: bool = False) -> None:
        super().__init__(tensor, budget_bytes, needed_bytes, at_least)
        self.tensor, self.budget_bytes, self.needed_bytes = tensor, budget_bytes, needed_bytes
        self.at_least = at_least

    def __str__(self) -> str:
        return (
            f"{self.tensor}: needs {'at least ' * self.at_least}{self.needed_bytes} bytes of memory at once, the "
            f"budget is {self.budget_bytes} bytes; use --memory {-(-self.needed_bytes >> 20)}MiB or more"
            + ", how much more is known when the target is laid out"
            * self.at_least
        )


class UnsupportedError(PlanError):
    """Not supported by this version."""


class CastError(PlanError):
    """A finite value is too large for the requested dtype. Nothing is published."""

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(tensor, detail)
        self.tensor, self.detail = tensor, detail

    def __str__(self) -> str:
        return f"{self.tensor}: {self.detail}; ask for bfloat16 or float32, which have the range of float32"


class TargetError(ReshardError):
    """The target is occupied, or was changed by another process."""


class OccupiedError(TargetError):
    """Something lies at the target that this package did not write; no option replaces it.

    ``held`` names what lies there. ``checkpoint`` says which checkpoint that is, if it is one.
    """

    def __init__(self, location: str, held: str, overwrite: bool = False, checkpoint: str = "") -> None:
        super().__init__(location, held, overwrite, checkpoint)
        self.location, self.held, self.overwrite, self.checkpoint = location, held, overwrite, checkpoint

    def __str__(self) -> str:
        only = (
            "; --overwrite replaces what a manifest of paddle-reshard lists, and nothing else"
            * self.overwrite
        )
        if self.checkpoint:
            return (
                f"{self.location}: holds {self.checkpoint}, that paddle-reshard did not write; are SRC and DST "
                f"exchanged? Choose another target, or move that away{only}"
            )
        return f"{self.location}: is not empty: {self.held}; move that away, or choose another target{only}"


class BusyError(TargetError):
    """Another run is writing the target, or has just taken it over."""

    retryable = True

    def __init__(self, message: str, expires_seconds: float | None = None) -> None:
        super().__init__(message)
        self.expires_seconds = expires_seconds
        """When its lock expires unless it is renewed; ``None`` of a process that is certainly running."""


class StaleSessionError(TargetError):
    """The unfinished conversion at the target belongs to another plan, source or version."""


class FinishedError(TargetError):
    """There is nothing to resume: the target is complete and agrees with its manifest at a quick check."""

    exit_status = 0


class ListingError(ReshardError):
    """A store refused to list its contents, or to accept a small file."""

    retryable = True


class ClusterError(ReshardError):
    """A cluster could not be reached, or failed."""

    retryable = True


class JobError(ClusterError):
    """The cluster refused a job, or contact with it was lost."""


class AgreementError(ReshardError):
    """The nodes of a job have not agreed on what they resume from: one is missing, or sees something else."""

    retryable = True


class RefusedJobError(ReshardError):
    """The conversion of a job was refused with this message; a retry would fail too."""


class GroupFailedError(ClusterError):
    """A group failed on every worker that tried it. ``tensor`` is its first tensor."""

    def __init__(self, tensor: str, group: int, attempts: int, cause: str) -> None:
        super().__init__(tensor, group, attempts, cause)
        self.tensor, self.group, self.attempts, self.cause = tensor, group, attempts, cause

    def __str__(self) -> str:
        return f"{self.tensor}: group {self.group} failed {self.attempts} times, at last with: {self.cause}"


class DriftError(CheckpointError):
    """Two stored copies of the same values differ. Nothing is published.

    ``replicas``: the copies are of the same tensor; otherwise a parameter is not the cast of its master weight.
    """

    def __init__(self, tensor: str, detail: str, path_a: str, path_b: str, replicas: bool) -> None:
        super().__init__(tensor, detail, path_a, path_b, replicas)
        self.tensor, self.detail, self.path_a, self.path_b = tensor, detail, path_a, path_b
        self.replicas = replicas

    def __str__(self) -> str:
        drift = f"{self.tensor}: {self.detail}: {self.path_a} and {self.path_b} differ"
        if self.replicas:
            return f"{drift}; with --replicas report the first copy is taken"
        return (
            f"{drift}; the target would keep the master weight only; --format hybrid-plain with "
            "--master-weights report keeps both"
        )


class TiedDriftError(DriftError):
    """Two tensors that the config or the class of the model makes one have different values. Nothing is published.

    They are two parameters, of which one would be lost; no option takes the first of them.
    """

    def __init__(self, tensor: str, twin: str, by_class: bool, detail: str, path_a: str, path_b: str) -> None:
        super().__init__(tensor, detail, path_a, path_b, False)
        self.args = (tensor, twin, by_class, detail, path_a, path_b)
        self.twin, self.by_class = twin, by_class

    def __str__(self) -> str:
        apart = f"{self.tensor} and {self.twin}: {self.detail} ({self.path_a} and {self.path_b})"
        if self.by_class:
            return (
                f"{apart}: the class of this model has one tensor for both, whatever tie_word_embeddings says, and no "
                "job of it can hold the head of these files: one of the two would be lost"
            )
        return (
            f"{apart}: config.json makes the "
            "two one tensor (tie_word_embeddings), but they are two parameters with values of their own, of which one "
            'would be lost. With "tie_word_embeddings": false in config.json (that of the source, or of --config where '
            "it has none) both are converted"
        )


class MasterDriftError(DriftError):
    """A stored parameter is not its stored master weight, rounded. Nothing is published."""

    PHRASE = "its master weight"
    """Contained in every ``detail`` of this class, which identifies it where only the text is available."""

    def __init__(self, tensor: str, detail: str, path_a: str, path_b: str) -> None:
        super().__init__(tensor, detail, path_a, path_b, False)
        self.args = (tensor, detail, path_a, path_b)

    def __str__(self) -> str:
        return (
            f"{self.tensor}: {self.detail} ({self.path_a} and {self.path_b}): the files are not of one step, or have "
            "changed places; with --master-weights report both are taken as they are"
        )


def error_class(kind: str) -> type[ReshardError]:
    """The error class for ``kind`` in JSON output of any version; ``ReshardError`` if unknown.

    >>> error_class("StaleSessionError").__name__
    'StaleSessionError'
    >>> error_class("AnErrorToCome").__name__
    'ReshardError'
    """
    pending: list[type[ReshardError]] = [ReshardError]
    while pending:
        known = pending.pop()
        if known.__name__ == kind:
            return known
        pending += known.__subclasses__()
    return ReshardError
