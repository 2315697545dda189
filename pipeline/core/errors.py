"""Every error a user can meet. Each is a small report: which tensor, which two values, which file, what to do.

::

    ReshardError
    ├── UsageError            the request itself is wrong (exit status 2)
    ├── CheckpointError       what was given is not one whole, consistent checkpoint
    │   ├── FormatError       a file does not say what its format promises (path, byte_offset, reason)
    │   │   └── UnsafePickleError    it asks for something outside the allow-list
    │   ├── CoverageError     a hole, an overlap or a contradiction in a tensor
    │   └── DriftError        copies of one tensor differ (only the bytes can show it)
    │       └── MasterDriftError  a parameter is not the cast of its master weight
    ├── PlanError             it is whole, but cannot become what was asked
    │   ├── RuleError         no rule covers a tensor, or a rule contradicts it
    │   ├── MemoryBudgetError
    │   │   └── RereadError   it would do if source bytes were read several times
    │   ├── UnsupportedError  known, named, and not done by this version
    │   └── CastError         a value has no place in the dtype that was asked for (only the bytes can show it)
    ├── TargetError           the target is occupied
    │   ├── BusyError         another run is writing it
    │   ├── StaleSessionError    what is left there belongs to another conversion
    │   └── FinishedError     there is nothing to go on with: it is finished (exit status 0)
    ├── ListingError          a store would not show what it holds, or not take a small file
    ├── ClusterError          a cluster could not be reached, or did not do what it was asked
    │   ├── JobError          it would not take a job, or was lost on the way
    │   └── GroupFailedError  a group could not be run, wherever it was tried
    └── RefusedJobError       the conversion of a job was refused; another try would end the same

A store may refuse any of this to the source or the target: that is a CheckpointError or a TargetError whose
``retryable`` is true. Facts are passed positionally, so every error survives pickling and crosses process
boundaries whole.
"""

from __future__ import annotations


class ReshardError(Exception):
    """Base of all errors of this package. ``str(error)`` is one clear sentence."""

    exit_status = 1
    retryable = False
    """Whether the same request may end otherwise later, though neither it nor the checkpoint has changed: the trouble
    was a store's or a cluster's."""


class UsageError(ReshardError):
    """The request itself is wrong: an unknown option, a malformed topology."""

    exit_status = 2


class CheckpointError(ReshardError):
    """The source is not one whole, consistent checkpoint."""


class FormatError(CheckpointError):
    """A file does not hold what its format promises.

    ``reason`` is a short machine-readable code, ``byte_offset`` the place in the file (or ``None``).
    """

    def __init__(self, reason: str, path: str, byte_offset: int | None, detail: str) -> None:
        super().__init__(reason, path, byte_offset, detail)
        self.reason, self.path, self.byte_offset, self.detail = reason, path, byte_offset, detail

    def __str__(self) -> str:
        where = "" if self.byte_offset is None else f" at byte {self.byte_offset}"
        return f"{self.path}{where}: {self.detail} [{self.reason}]"


class UnsafePickleError(FormatError):
    """A pickle asks for a global, an opcode or a call outside the allow-list. Nothing was executed."""


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


class PlanError(ReshardError):
    """The checkpoint is whole but cannot become what was asked."""


class RuleError(PlanError):
    """No layout rule covers a tensor, or the rule contradicts what the files say."""

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(tensor, detail)
        self.tensor, self.detail = tensor, detail

    def __str__(self) -> str:
        return f"{self.tensor}: {self.detail}"


class MemoryBudgetError(PlanError):
    """A group, or what is known of all tensors, does not fit the memory budget.

    ``needed_bytes`` is the smallest budget that would do; with ``at_least`` it may turn out that more is needed.
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


class RereadError(MemoryBudgetError):
    """The budget suffices only if source bytes are read ``amplification`` times on average.

    ``needed_bytes`` is a budget with which each would be read once.
    """

    def __init__(self, tensor: str, budget_bytes: int, needed_bytes: int, amplification: float) -> None:
        super().__init__(tensor, budget_bytes, needed_bytes)
        self.args = (tensor, budget_bytes, needed_bytes, amplification)
        self.amplification = amplification

    def __str__(self) -> str:
        return (
            f"{self.tensor}: within the budget of {self.budget_bytes} bytes, source bytes would be read "
            f"{self.amplification:.2f} times; use --memory {-(-self.needed_bytes >> 20)}MiB or more to read them "
            "once, or --allow-reread"
        )


class UnsupportedError(PlanError):
    """Known and named, and not done by this version."""


class CastError(PlanError):
    """A finite value is too large for the dtype that was asked for. Nothing is published."""

    def __init__(self, tensor: str, detail: str) -> None:
        super().__init__(tensor, detail)
        self.tensor, self.detail = tensor, detail

    def __str__(self) -> str:
        return f"{self.tensor}: {self.detail}; ask for bfloat16 or float32, which have the range of float32"


class TargetError(ReshardError):
    """The target is occupied, or was changed under us."""


class BusyError(TargetError):
    """Another run is writing the target, or has just taken it over."""

    retryable = True


class StaleSessionError(TargetError):
    """The unfinished conversion at the target belongs to another plan, source or version."""


class FinishedError(TargetError):
    """There is nothing to go on with: the target is finished, and at a glance what its manifest says."""

    exit_status = 0


class ListingError(ReshardError):
    """A store would not show what it holds, or not take a small file."""

    retryable = True


class ClusterError(ReshardError):
    """A cluster could not be reached, or did not do what it was asked."""

    retryable = True


class JobError(ClusterError):
    """The cluster would not take a job, or contact with it was lost."""


class RefusedJobError(ReshardError):
    """The conversion of a job was refused there, in these words; another try would end the same."""


class GroupFailedError(ClusterError):
    """A group could not be run, wherever it was tried. ``tensor`` is the first one in it."""

    def __init__(self, tensor: str, group: int, attempts: int, cause: str) -> None:
        super().__init__(tensor, group, attempts, cause)
        self.tensor, self.group, self.attempts, self.cause = tensor, group, attempts, cause

    def __str__(self) -> str:
        return f"{self.tensor}: group {self.group} failed {self.attempts} times, at last with: {self.cause}"


class DriftError(CheckpointError):
    """Two stored copies of the same values differ. Nothing is published.

    ``replicas`` tells copies of one tensor from a parameter that is not the cast of its master weight.
    """

    def __init__(self, tensor: str, detail: str, path_a: str, path_b: str, replicas: bool) -> None:
        super().__init__(tensor, detail, path_a, path_b, replicas)
        self.tensor, self.detail, self.path_a, self.path_b = tensor, detail, path_a, path_b
        self.replicas = replicas

    def __str__(self) -> str:
        found = f"{self.tensor}: {self.detail}: {self.path_a} and {self.path_b} differ"
        if self.replicas:
            return f"{found}; with --allow-replica-drift the first copy is taken"
        return f"{found}; the target would keep the master weight only"


class MasterDriftError(DriftError):
    """A stored parameter is not its stored master weight, rounded. Nothing is published."""

    PHRASE = "its master weight"
    """In every ``detail``, and nowhere else: it tells these from other drift where only the text is kept."""

    def __init__(self, tensor: str, detail: str, path_a: str, path_b: str) -> None:
        super().__init__(tensor, detail, path_a, path_b, False)
        self.args = (tensor, detail, path_a, path_b)

    def __str__(self) -> str:
        return (
            f"{self.tensor}: {self.detail} ({self.path_a} and {self.path_b}): the files are not of one step, or have "
            "changed places; with --allow-master-drift (allow_master_drift=True) both are taken as they are"
        )


def error_class(kind: str) -> type[ReshardError]:
    """The class that ``kind`` names in what ``--json`` printed, of this version or another; the base of all if unknown.

    >>> error_class("StaleSessionError").__name__
    'StaleSessionError'
    >>> error_class("AnErrorToCome").__name__
    'ReshardError'
    """
    left: list[type[ReshardError]] = [ReshardError]
    while left:
        known = left.pop()
        if known.__name__ == kind:
            return known
        left += known.__subclasses__()
    return ReshardError
