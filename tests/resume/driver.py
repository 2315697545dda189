"""A process that runs conversions in forks of itself, and has them killed at a chosen effect.

It reads one JSON object per line and answers with one. Imports are paid once, so a run takes a fraction of a second.
Effects are counted below this package, at the system calls of a disk and at the requests to a store: nothing of the
package knows that it is watched.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import boto3

import paddle_reshard
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.session import ledger
from tests.sized import in_groups
from tests.storage.servers import described_once

CREATING = os.O_CREAT | os.O_TRUNC
EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link")
CALLS = ("write", "pwrite", "copy_file_range")
READING = ("get_object", "head_object", "list_objects_v2", "list_parts", "list_multipart_uploads")


class Counter:
    """Counts effects of a child; the process ends at one of them."""

    def __init__(self, kill_at: int | None, of: str, after: bool) -> None:
        self.kill_at, self.of, self.after = kill_at, re.compile(of), after
        self.numbers = itertools.count(1)
        self.names: list[str] = []
        self.alone = threading.Lock()

    def before(self, name: str) -> int:
        """An effect is about to happen; its number, 0 if it does not count."""
        with self.alone:
            self.names.append(name)
            number = next(self.numbers) if self.of.match(name) else 0
            if number == self.kill_at and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    def done(self, number: int) -> None:
        """An effect has happened."""
        if number == self.kill_at and self.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def watching(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            number = self.before(name)
            result = call(*args, **kwargs)
            self.done(number)
            return result

        return watched

    def watch_disk(self, below: str) -> None:
        """Everything that changes files below a folder."""

        def hook(event: str, args: tuple[Any, ...]) -> None:
            creates = event == "open" and isinstance(args[2], int) and args[2] & CREATING
            if (event in EVENTS or creates) and below in os.path.abspath(os.fsdecode(_path(args[0]))):
                self.before(f"{event} {os.path.basename(os.fsdecode(_path(args[0])))}")

        sys.addaudithook(hook)
        for call in CALLS:
            setattr(os, call, self.watching(call, getattr(os, call)))

    def watch_store(self) -> None:
        """Every request that changes what a store holds."""
        request = S3Folder.request

        def counted(folder: S3Folder, method: str, name: str, **parameters: Any) -> Any:
            if method in READING:
                return request(folder, method, name, **parameters)
            number = self.before(f"{method} {name}")
            answer = request(folder, method, name, **parameters)
            self.done(number)
            return answer

        S3Folder.request = counted  # type: ignore[method-assign]


def _path(value: Any) -> Any:
    """What an audit event calls a file: a path, or a number of an open one."""
    return os.readlink(f"/proc/self/fd/{value}") if isinstance(value, int) else value


def _convert(order: dict[str, Any]) -> dict[str, Any]:
    """One conversion, in this process."""
    counter = Counter(order.get("kill_at"), order.get("of", ""), order.get("after", False))
    ledger.LEASE_SECONDS = order.get("lease_seconds", ledger.LEASE_SECONDS)
    quick = retry.RetryPolicy(
        attempts=4, total_seconds=20, first_wait_seconds=0.01, longest_wait_seconds=0.05
    )
    retry.POLICY = retry.HURRIED = quick
    if order["target"].startswith("s3://"):
        counter.watch_store()
    else:
        counter.watch_disk(os.path.dirname(order["target"]))
    try:
        convert = in_groups(order["group_bytes"]).convert
        report = convert(order["source"], order["target"], **order["request"])
    except paddle_reshard.ReshardError as error:
        return {"error": str(error), "effects": counter.names}
    return {
        "groups": report.moved.groups,
        "resumed": report.moved.resumed_groups,
        "planned": report.plan.plan.groups,
        "effects": counter.names,
    }


def _in_a_fork(order: dict[str, Any]) -> dict[str, Any]:
    """The answer of a child, or the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = _convert(order)
        except BaseException:  # noqa: BLE001 (told to whoever asked)
            answer = {"crash": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return {"killed": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(said)


if __name__ == "__main__":
    with described_once():
        boto3.client("s3", region_name="us-east-1")  # has it read before there are forks
        for line in sys.stdin:
            print(json.dumps(_in_a_fork(json.loads(line))), flush=True)  # noqa: T201
