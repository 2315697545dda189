"""From a wheel to a resumed job, as a new user would, with the minutes of every step.

``python -m tests.parity.first_job``: the wheel is built and installed into an empty environment, a job of four ranks
trains and is stopped, ``paddle-reshard`` converts its checkpoint, and the job continues on two ranks with exactly the
arguments that ``launch`` prints. The same job also continues without a stop, for its losses.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.parity.lab import PARITY, REPO, SCRIPTS, Lab, LabError, open_lab, run_command, say

WORK = PARITY / "first-job"
TRAIN = Path(__file__).with_name("first_job_train.py")
TIMEOUT_SECONDS = 300
STOP, END = 3, 6
BEFORE = "--tensor_model_parallel_size 2 --sharding stage1 --sharding_parallel_size 2 --split_param true"
SHARDED_FILES = (
    "--save_checkpoint_format sharding_io --load_checkpoint_format sharding_io --load_sharded_model true"
)
TO = "pp=2"
RANKS_BEFORE, RANKS_AFTER = 4, 2
# The global batch is four samples: two data-parallel ranks before, one after.
ACCUMULATION_BEFORE, ACCUMULATION_AFTER = 2, 4
CLOSE = 5e-3
"""Largest difference of losses: sums in another order, in bfloat16."""
LOSS = re.compile(r"(?<![a-z_])loss: ([0-9.]+).*?global_step: ([0-9]+)")
ALWAYS = (
    "--bf16 true --fp16_opt_level O2 --amp_master_grad true --learning_rate 2e-3 --warmup_steps 0 "
    "--per_device_train_batch_size 1 --save_strategy steps --save_steps 3 --logging_steps 1 --device cpu "
    "--report_to none --save_tokenizer false --save_to_hf false --dataloader_shuffle false --seed 42 "
    "--skip_memory_metrics true --partial_send_recv false --disable_tqdm true --max_grad_norm 1.0"
)


class _Clock:
    """Seconds of each step, printed as they pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        say(f"{self.seconds[name]:8.1f} s  {name}")


def main() -> int:
    """Go the whole way; 0 if the job continued where it was stopped."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    clock = _Clock()
    try:
        with clock.step("the trainer's environment (which a user has; some minutes if it is made)"):
            lab = open_lab()
        with clock.step("python -m pip wheel (from the sources)"):
            wheel = _wheel()
        with clock.step("python -m venv env; pip install paddle_reshard-*.whl"):
            _install(wheel)
        with clock.step(f"train {END} steps on {RANKS_BEFORE} ranks without a stop, for comparison"):
            undisturbed = _losses(_train(lab, "undisturbed", BEFORE_ARGUMENTS, RANKS_BEFORE, END))
        checkpoint = WORK / "undisturbed" / f"checkpoint-{STOP}"
        for command in ("inspect {0}", "plan {0} --to {1}", "convert {0} {2} --to {1}", "verify {0} {2}"):
            with clock.step(f"paddle-reshard {command.format('checkpoint-3', TO, 'converted')}"):
                say(_reshard(*command.format(checkpoint, TO, WORK / "converted").split()))
        with clock.step("paddle-reshard launch converted"):
            launch = _reshard("launch", str(WORK / "converted"))
            say(launch)
        arguments = _arguments(launch) + f" --gradient_accumulation_steps {ACCUMULATION_AFTER}"
        with clock.step(f"train steps {STOP + 1} to {END} on {RANKS_AFTER} ranks with these arguments"):
            resumed = _losses(_train(lab, "resumed", arguments, RANKS_AFTER, END))
    except (LabError, subprocess.CalledProcessError) as error:
        say(f"failed: {error}\n{getattr(error, 'stderr', None) or ''}")
        return 2
    return _judge(undisturbed, resumed, clock)


BEFORE_ARGUMENTS = f"{BEFORE} {SHARDED_FILES} --gradient_accumulation_steps {ACCUMULATION_BEFORE}"


def _judge(undisturbed: dict[int, float], resumed: dict[int, float], clock: _Clock) -> int:
    for step in range(1, END + 1):
        say(
            f"step {step}: loss {undisturbed.get(step)} without a stop, {resumed.get(step, 'not trained')} resumed"
        )
    say(f"{sum(clock.seconds.values()) / 60:.1f} minutes")
    steps = list(range(STOP + 1, END + 1))
    if sorted(resumed) != steps:
        say(f"failed: the resumed job trained the steps {sorted(resumed)} instead of {steps}")
        return 1
    if any(abs(resumed[step] - undisturbed[step]) > CLOSE for step in steps):
        say(f"failed: a loss differs by more than {CLOSE}")
        return 1
    return 0


def _wheel() -> Path:
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(WORK), str(REPO))
    (wheel,) = WORK.glob("*.whl")
    return wheel


def _install(wheel: Path) -> None:
    _run(sys.executable, "-m", "venv", str(WORK / "env"))
    _run(str(WORK / "env" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel))


def _reshard(*arguments: str) -> str:
    return _run(str(WORK / "env" / "bin" / "paddle-reshard"), *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=WORK).stdout


def _arguments(launch: str) -> str:
    """Return what ``launch`` prints behind *arguments*, as a user copies it."""
    (line,) = [line for line in launch.splitlines() if line.startswith("arguments")]
    return line.removeprefix("arguments").strip()


def _train(lab: Lab, name: str, arguments: str, ranks: int, steps: int) -> str:
    out = WORK / name
    command = [str(lab.python), str(TRAIN), "--name", name, "--shim", str(SCRIPTS)]
    command += f"--output_dir {out} --max_steps {steps} {ALWAYS} {arguments}".split()
    logs = WORK / f"{name}-logs"
    logs.mkdir()
    run_command(command, name, logs, ranks=ranks, timeout_seconds=TIMEOUT_SECONDS, environment={})
    return "".join(log.read_text(errors="replace") for log in sorted(logs.glob("rank*.log")))


def _losses(log: str) -> dict[int, float]:
    """Step → loss, from the trainer's own lines."""
    return {int(step): float(loss) for loss, step in LOSS.findall(log)}


if __name__ == "__main__":
    sys.exit(main())
