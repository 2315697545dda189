"""The process that has imported the trainer, as this side sees it."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.job import Job
from tests.parity.lab import PARITY, LabError, python_of

SECONDS = 400


class Laboratory:
    """Runs one job after the other; a context, at whose end the process ends."""

    def __enter__(self) -> "Laboratory":
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "PYTHONPATH", "PYTHONDONT"))
        }
        self._process = subprocess.Popen(
            [str(python_of("pf")), str(Path(__file__).with_name("trainer") / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=inherited | {"PYTHONPYCACHEPREFIX": str(PARITY / "bytecode")},
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # the ranks are of its session
        self._process.communicate()  # closes its pipes

    def run(self, job: Job, out: Path, resume: Path | None = None, names: bool = True, **files: Path) -> str:
        """Run a job, or let it resume and stop; return the words with which the trainer refused it, or none.

        ``names``: whether a resuming job first lets ``names_callback`` compare its parameters' names;
        ``init``: a file of the values to begin with; ``dump``: where to put its own, instead of training.
        """
        asked: dict[str, Any] = {"job": job.as_json(), "out": str(out), "seconds": SECONDS, "names": names}
        asked |= {name: str(path) for name, path in {"resume": resume, **files}.items() if path is not None}
        return self._answer(asked)

    def script(
        self,
        command: Sequence[str],
        name: str,
        logs: Path,
        *,
        ranks: int,
        seconds: float,
        environment: Mapping[str, str],
    ) -> list[str]:
        """Run a script with its arguments in every rank, as a launcher does; return what each has written.

        The logs are ``rank<N>.log`` in the folder ``logs``, which is made anew. Every rank must say ``CASE_OK`` and
        ``name`` before it ends.

        Raises
        ------
        LabError
            If a rank fails or the time is over; with the error of the rank that failed.
        """
        asked = {"script": list(command), "out": str(logs), "ranks": ranks, "seconds": seconds}
        words = self._answer({**asked, "environment": dict(environment)})
        texts = [path.read_text(errors="replace") for path in sorted(logs.glob("rank*.log"))]
        if words or not all(f"CASE_OK {name}" in text for text in texts):
            raise LabError(f"{words or 'a rank ended before its end'}; see {logs}")
        return texts

    def _answer(self, asked: Mapping[str, Any]) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise LabError(f"the trainer's process ended, see {asked['out']}")
        return json.loads(answer)["refused"]
