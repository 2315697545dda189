"""Every error crosses process boundaries whole, and its text holds the facts."""

import pickle

import pytest

from paddle_reshard.pipeline.core import errors
from paddle_reshard.pipeline.core.errors import (
    AgreementError,
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
    OccupiedError,
    PlanError,
    RefusedJobError,
    ReshardError,
    RuleError,
    StaleSessionError,
    TargetError,
    TiedDriftError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)

EXAMPLES = [
    (ReshardError("what went wrong"), "what went wrong", 1),
    (UsageError("unknown axis 'mp'"), "unknown axis 'mp'", 2),
    (CheckpointError("config.json is missing"), "config.json is missing", 1),
    (
        FormatError("truncated", "a.pdopt", 17, "ends inside a payload"),
        "a.pdopt at byte 17: ends inside a payload [truncated]",
        1,
    ),
    (FormatError("not_json", "a.json", None, "is no JSON"), "a.json: is no JSON [not_json]", 1),
    (
        UnsafePickleError("forbidden_global", "a.pdopt", 0, "asks for os.system"),
        "a.pdopt at byte 0: asks for os.system [forbidden_global]",
        1,
    ),
    (CoverageError("w (param)", "is not whole"), "w (param): is not whole", 1),
    (CoverageError("w (param)", "is not whole", ("a", "b", "c", "d")), "w (param): is not whole (in a, b, c, d)", 1),
    (
        CoverageError("w (param)", "is not whole", ("a", "b", "c", "d", "e", "f")),
        "w (param): is not whole (in a, b, c, d and 2 more)",
        1,
    ),
    (PlanError("pp=9 is more than 6 items"), "pp=9 is more than 6 items", 1),
    (RuleError("w", "no row fits"), "w: no row fits", 1),
    (
        MemoryBudgetError("w (moment1)", 268435456, 400000001),
        "w (moment1): needs 400000001 bytes of memory at once, the budget is 268435456 bytes; use --memory "
        "382MiB or more",
        1,
    ),
    (UnsupportedError("ep=2"), "ep=2", 1),
    (
        CastError("w (param)", "the value 70000.0 is too large for float16"),
        "w (param): the value 70000.0 is too large for float16; ask for bfloat16 or float32, which have the range of "
        "float32",
        1,
    ),
    (TargetError("out: is not empty"), "out: is not empty", 1),
    (
        OccupiedError("out", "there is notes.txt, which paddle-reshard did not write"),
        "out: is not empty: there is notes.txt, which paddle-reshard did not write; move that away, or choose another "
        "target",
        1,
    ),
    (BusyError("out: another conversion is writing it"), "out: another conversion is writing it", 1),
    (FinishedError("out: already finished"), "out: already finished", 0),
    (StaleSessionError("out: begun with plan 1, this is 2"), "out: begun with plan 1, this is 2", 1),
    (ListingError("s3://b/run: access denied"), "s3://b/run: access denied", 1),
    (ClusterError("cannot join Ray at 'head:6379'"), "cannot join Ray at 'head:6379'", 1),
    (JobError("the cluster rejected the job"), "the cluster rejected the job", 1),
    (AgreementError("node 1 did not answer"), "node 1 did not answer", 1),
    (RefusedJobError("tp=3 does not divide"), "tp=3 does not divide", 1),
    (
        GroupFailedError("w (param)", 7, 4, "WorkerCrashedError: it died"),
        "w (param): group 7 failed 4 times, at last with: WorkerCrashedError: it died",
        1,
    ),
    (
        DriftError("w (moment1)", "element (0,) is 1.0 and 2.0", "a", "b", True),
        "w (moment1): element (0,) is 1.0 and 2.0: a and b differ; with --replicas report the first copy is taken",
        1,
    ),
    (
        DriftError("w (param)", "element (0,) is 1.0 and 2.0", "a", "b", False),
        "w (param): element (0,) is 1.0 and 2.0: a and b differ; the target would keep the master weight only; "
        "--format hybrid-plain with --master-weights report keeps both",
        1,
    ),
    (
        TiedDriftError("w (param)", "h", False, "element (0,) is 1.0 and 2.0", "a", "b"),
        "w (param) and h: element (0,) is 1.0 and 2.0 (a and b): config.json makes the two one tensor "
        "(tie_word_embeddings), but they are two parameters with values of their own, of which one would be lost. With "
        '"tie_word_embeddings": false in config.json (that of the source, or of --config where it has none) both are '
        "converted",
        1,
    ),
    (
        MasterDriftError("w (param)", "element (0,) is 1.0, its master weight 2.0 is rounded to 2.0", "a", "b"),
        "w (param): element (0,) is 1.0, its master weight 2.0 is rounded to 2.0 (a and b): the files are not of one "
        "step, or have changed places; with --master-weights report both are taken as they are",
        1,
    ),
]  # fmt: skip


def test_every_class_has_an_example() -> None:
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes == {type(example) for example, _, _ in EXAMPLES}


@pytest.mark.parametrize(("error", "text", "status"), EXAMPLES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_survives_pickling(error: ReshardError, text: str, status: int, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == text
    assert vars(copy) == vars(error)
    assert copy.exit_status == status


def test_only_failures_of_stores_and_clusters_are_retryable() -> None:
    kinds = {type(error) for error, _, _ in EXAMPLES if error.retryable}
    assert kinds == {BusyError, ListingError, ClusterError, JobError, GroupFailedError, AgreementError}
    refused_by_a_store = TargetError("s3://b/c: the store is throttling requests")
    refused_by_a_store.retryable = True
    assert pickle.loads(pickle.dumps(refused_by_a_store)).retryable


def test_the_suggested_budget_is_enough() -> None:
    """Rounded up to whole MiB, never down."""
    assert "--memory 1MiB" in str(MemoryBudgetError("w", 1, 1 << 20))
    assert "--memory 2MiB" in str(MemoryBudgetError("w", 1, (1 << 20) + 1))


def test_families() -> None:
    """Callers catch by what went wrong: the request, the source, the plan, the target."""
    assert issubclass(UnsafePickleError, FormatError)
    assert {FormatError, CoverageError, DriftError} <= set(CheckpointError.__subclasses__())
    assert {RuleError, MemoryBudgetError, UnsupportedError} <= set(PlanError.__subclasses__())
    assert not issubclass(UsageError, (CheckpointError, PlanError))
