"""What the conversion of a job says of its end, in the log of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paddle_reshard.pipeline.core.answer import SCHEMA_VERSION, Answer
from paddle_reshard.pipeline.core.errors import (
    JobError,
    RefusedJobError,
    ReshardError,
    StaleSessionError,
    error_class,
)
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import Bounds, typed


@dataclass(frozen=True, slots=True)
class _Head:
    """The common entries of every :class:`Answer` of ``convert``; the remaining ones are its facts."""

    OPEN: ClassVar[bool] = True
    schema_version: Annotated[int, Bounds(SCHEMA_VERSION, SCHEMA_VERSION)]
    command: Literal["convert"]
    error: str | None
    kind: str | None
    retryable: bool


def answer_of_job(lines: Sequence[str]) -> Answer | None:
    """The result of a job's conversion, from the output of ``convert --json`` in its log; ``None`` if there is none.

    The log also contains output of Ray and of libraries, which may be JSON too: only an answer of ``convert`` counts.
    """
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                entries = parse_json(line)
                head = typed(entries, _Head)
            except JsonError:
                continue
            facts = {name: value for name, value in entries.items() if name not in _Head.__slots__}
            return Answer(head.command, head.error, head.kind, head.retryable, facts)
    return None


def failure_of_job(answer: Answer | None, message: str) -> ReshardError:
    """The error that ended a job's conversion, as if it were raised here; ``message`` if the job reported none."""
    if answer is None or answer.error is None or answer.kind is None:
        return JobError(message)
    if issubclass(error_class(answer.kind), StaleSessionError):
        return StaleSessionError(answer.error)
    return JobError(answer.error) if answer.retryable else RefusedJobError(answer.error)
