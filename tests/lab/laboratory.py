"""The process that has imported the trainer, as this side sees it."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.lab.job import Job
from tests.parity.lab import PARITY, LabError, open_lab

SECONDS = 400


class Laboratory:
    """Runs one job after the other; a context, at whose end the process ends."""

    def __enter__(self) -> "Laboratory":
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "PYTHONPATH", "PYTHONDONT"))
        }
        self._process = subprocess.Popen(
            [str(open_lab().python), str(Path(__file__).with_name("trainer") / "server.py")],
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
        self._process.wait()

    def run(self, job: Job, out: Path, resume: Path | None = None, names: bool = True, **files: Path) -> str:
        """Run a job, or let it resume and stop; return the words with which the trainer refused it, or none.

        ``names``: whether a resuming job first lets ``names_callback`` compare its parameters' names;
        ``init``: a file of the values to begin with; ``dump``: where to put its own, instead of training.
        """
        asked: dict[str, Any] = {"job": job.as_json(), "out": str(out), "seconds": SECONDS, "names": names}
        asked |= {name: str(path) for name, path in {"resume": resume, **files}.items() if path is not None}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise LabError(f"the trainer's process ended, see {out}")
        return json.loads(answer)["refused"]
