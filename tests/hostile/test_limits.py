"""Numbers that somebody else chose cost neither time nor memory before they are refused.

Every attack runs in a process of its own that may take little memory more than one that only imports what it needs;
without a limit each would take gigabytes, or minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UsageError
from tests.hostile.damage import copied, sound

CASE = "mp2pp2sh2_s1v2_meta_ema"
MIB = 1 << 20
ROOM_BYTES = 160 * MIB
"""Beyond what the process has before it begins; a window of each file, a JSON text, the limits' own allowances."""
GUARD_SECONDS = 300
"""Only so that a missing limit ends in a failure; refusing takes a fraction of a second."""

RUN = """
import json, resource, sys
from pathlib import Path
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
import numpy, paddle_reshard.pipeline.api, paddle_reshard.pipeline.convert.run
from paddle_reshard.pipeline.cli.main import main
room, lines = int(sys.argv[1]), json.loads(sys.argv[2])
kib = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
most = int(kib.split()[1]) * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
said = []
for line in lines:
    words, sys.argv = StringIO(), ["paddle-reshard", *line]
    with redirect_stderr(words), redirect_stdout(words):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    said.append([status, words.getvalue()])
print(json.dumps(said))
"""


def run(*lines: list[str]) -> list[tuple[int, str]]:
    """Exit status and words of command lines, run one after the other in a process with little memory."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOM_BYTES), json.dumps([list(map(str, line)) for line in lines])],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [(status, " ".join(text.split())) for status, text in json.loads(done.stdout)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copied(CASE, tmp_path / "source")


def check_all(sources: dict[Path, str]) -> None:
    """``inspect`` refuses each with these words, or says them of a file and describes what lies beside it."""
    outcomes = run(*(["inspect", source] for source in sources))
    for (source, what), (status, said) in zip(sources.items(), outcomes, strict=True):
        assert status == (0 if "left out" in said else 1), (source.name, said)
        assert what in said, (source.name, said)


OPTIONS = {
    "--to dp=100000000": "at most 262144 are supported",
    "--to tp=1000,pp=1000,sharding=1000": "at most 262144 are supported",
    "--to tp=1,ep=999999999": "at most 262144 are supported",
    "--to pp=3,vpp=99999999": "at most 4096 are supported",
    "--to tp=1 --memory much": "--memory 'much' is not a size",
    "--to tp=1 --memory 99999999999999999999GiB": "is more than any file or memory has",
    f"--to tp=1 --memory {'9' * 400}": "is more than any file or memory has",
    f"--format huggingface --max-shard-size {'9' * 40}TB": "is more than any file or memory has",
    f"--to tp=1 --vocab-size {10**15}": "at most 268435456 rows",
    f'--to sharding=2 --layout {{"comm_buffer_size_MB":{10**30}}}': "must be at most 1048576",
}


def test_options(source: Path) -> None:
    target = source.with_name("target")
    outcomes = run(*(["convert", source, target, *words.split()] for words in OPTIONS))
    for words, (status, said) in zip(OPTIONS, outcomes, strict=True):
        assert status in (1, 2), (words, said)
        assert OPTIONS[words] in said, (words, said)
    assert not target.exists()


@pytest.mark.parametrize("format", ["huggingface", "unified", "flex", "auto-parallel"])
def test_a_shard_size_that_makes_more_files_than_names_have_room_for(
    format: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paddle_reshard.pipeline.formats.writing.MAX_TARGET_FILES", 10)
    with pytest.raises(UsageError, match=r"max-shard-size 1 the target has \d+ files of a kind; at most 10"):
        paddle_reshard.plan(
            source, source.with_name("target"), format=format, max_shard_size="1", drop=["ema"]
        )


NAMES = {
    "optimizer.tp9999999.pdopt": "names the rank 9999999; jobs of at most 262144 ranks",
    f"optimizer.tp{'9' * 200}.pdopt": "jobs of at most 262144 ranks",
    "optimizer.tp200000_pp200000_shard200000.pdopt": "at most 262144 are supported",
    "optimizer.tp200000_pp00_shard00.pdopt": "at most 262144 are supported",
    "optimizer.tp30000_pp00_shard00.pdopt": "files for tp=30001 pp=2 sharding=2 are missing",
    "model-00001-of-999999999.safetensors": "a total of 999999999 files; at most 99999",
}


def test_numbers_in_file_names(tmp_path: Path) -> None:
    sources = {}
    for number, (name, what) in enumerate(NAMES.items()):
        source = copied(CASE, tmp_path / str(number))
        sources[source] = what
        (source / "model_meta.json").unlink()  # which tells other degrees
        if not name.endswith(".safetensors"):
            shutil.copy(next(source.glob("optimizer.*")), source / name)
            continue
        for path in source.glob("*.pd*"):
            path.unlink()
        header = b'{"__metadata__":{"format":"pd"}}'
        (source / name).write_bytes(len(header).to_bytes(8, "little") + header)
        shutil.copy(source / name, source / "optimizer-00001-of-00001.safetensors")
    check_all(sources)


COUNT = 16 * MIB
PICKLES = {
    "empty lists": (b"]" * COUNT, "stack"),
    "empty dicts": (b"}" * COUNT, "stack"),
    "marks": (b"(" * COUNT, "marks"),
    "a list of lists": (b"]" + b"]a" * (COUNT // 2), "containers"),
    "a list of tuples": (b"]" + b"N\x85a" * (COUNT // 3), "opcodes"),
    "remembered again and again": (b"N" + b"\x94" * COUNT, "opcodes"),
    "lists between long texts": (
        b"]" + (b"]a" * 20_000 + b"X" + (60_000).to_bytes(4, "little") + b"x" * 60_000 + b"a") * 100,
        "containers",
    ),
    "a text for each list": (b"]" + b"]aX\2\0\0\0xya" * (COUNT // 10), "containers"),
}


def test_pickles_that_are_all_structure(tmp_path: Path) -> None:
    sources = {}
    for attack, (body, what) in PICKLES.items():
        source = copied(CASE, tmp_path / attack)
        sources[source] = what
        next(source.glob("optimizer.*")).write_bytes(b"\x80\x04" + body + b".")
    check_all(sources)


JSONS = {
    "a large file": (b'{"a":"' + b"x" * 85 * MIB + b'"}', "at most 4194304 are supported"),
    "lists": (b'{"a":[' + b"[]," * (MIB - 1) + b"[]]}", "values"),
    "numbers": (b'{"a":[' + b"1," * MIB + b"1]}", "values"),
}


def test_json_that_is_all_structure(tmp_path: Path) -> None:
    sources = {}
    for attack, (content, what) in JSONS.items():
        source = copied(CASE, tmp_path / attack)
        sources[source] = what
        (source / "config.json").write_bytes(content)
    check_all(sources)


def test_headers_of_safetensors_that_are_all_structure(tmp_path: Path) -> None:
    header = b'{"a":[' + b"[]," * (10 * MIB) + b"[]]}"
    tmp_path.joinpath("model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    shutil.copy(sound(CASE) / "config.json", tmp_path)
    check_all({tmp_path: "values"})
