"""Runs in the trainer's Python: imports the library once, and forks the ranks of one job after the other.

A request is a line of JSON: ``job``, as ``job.py`` describes it, the folder ``out``, and ``seconds``; with ``resume``
the job loads that checkpoint, tells what it then holds and ends; with ``names`` it first compares parameters' names;
``init`` is a file of the values to begin with, and with ``dump`` a job ends when it has put its own there. The answer
is a line with the trainer's refusal, or none. A request with ``script`` instead of a job names a script and its
arguments, which every one of ``ranks`` runs with ``environment``.
"""

import json
import os
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOG_v": "0"}
LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(LAB / "trainer"), str(LAB), str(LAB.parents[1] / "src")]

from job import BY_KEY, RECIPES, SEQUENCE, Job, job_of


def main() -> int:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import models
    import paddleformers.cli.utils.llm_utils
    import paddleformers.peft  # noqa: F401
    import train  # noqa: F401
    from ranks import fork_ranks

    for line in sys.stdin:
        request = json.loads(line)
        out, job = Path(request["out"]), job_of(request["job"]) if "job" in request else None
        if job and job.family not in RECIPES:
            models.get(job.family, SEQUENCE)  # its module is imported for all ranks
        for _ in range(2):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            ends = fork_ranks(
                job.topology.ranks if job else request["ranks"],
                lambda _, job=job, request=request: be_rank(job, request) if job else be_script(request),
                out,
                request["seconds"],
            )
            words = "" if not any(ends) else words_of(out, ends)
            if -6 not in ends and "gloo" not in words:  # two groups that met at one port
                break
        answers.write(json.dumps({"refused": words}) + "\n")
        answers.flush()
    return 0


def words_of(out: Path, ends: list[int]) -> str:
    """The error of the rank that failed by itself rather than by another's end, and where it was raised."""
    found = []
    for rank in range(len(ends)):
        lines = (out / f"rank{rank}.log").read_text(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
        last = [line for line in lines[starts[-1] + 1 :] if line.strip()] if starts else []
        error = next((line for line in last if not line.startswith(" ")), "")
        places = [number for number, line in enumerate(last) if line.strip().startswith('File "')]
        name = Path(last[places[-1]].split('"')[1]).name if places else ""
        if places and ":" not in error:  # an assertion without a word
            error += f": {last[places[-1] + 1].strip()}"
        if error:
            found.append(f"{error[:300]} ({name})")
    # Signal 9 ends those that wait for one that failed; of others, an error of another rank says more.
    found += [f"rank {rank} ended by signal {-end}" for rank, end in enumerate(ends) if end < 0 and end != -9]
    return min(found, key=lambda words: "gloo" in words, default=f"exit statuses {ends}")


def be_script(request: Mapping[str, Any]) -> None:
    """Run a script as Python itself would."""
    os.environ |= request["environment"]
    os.chdir(request["out"])
    sys.argv = request["script"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def be_rank(job: Job, request: Mapping[str, Any]) -> None:
    """Train and tell what is in memory, or load, tell, and leave."""
    import train

    os.environ |= job.environment
    if job.segment:
        os.environ["SHIM_SEGMENT"] = str(job.segment)
    resume, of_recipe = request.get("resume") or "", job.family in RECIPES
    args = job.trainer_arguments()
    if resume and job.format == "hybrid":
        args |= {"load_checkpoint_format": "sharding_io", "load_sharded_model": True}
    further = 0 if of_recipe else job.model.get("num_nextn_predict_layers") or 0
    train.run(
        train.Asked(
            out=request["out"],
            args=args,
            model=dict(job.model),
            family=job.family,
            head=job.head,
            init=request.get("init") or (BY_KEY if job.start == BY_KEY else ""),
            dump_init=request.get("dump") or "",
            global_batch=job.batch,
            seq=job.sequence or SEQUENCE + further,
            steps=0 if request.get("dump") else job.steps,
            resume=resume,
            lora=json.dumps({**job.adapters, "r": job.lora}) if job.lora else "",
            patch=job.patches(),
            freeze=job.frozen,
            optimizer=job.optimizer,
            export=int(job.export),
            names=int(bool(resume) and request["names"] and job.format.startswith("hybrid")),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
