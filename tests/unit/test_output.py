"""What commands print and how they end: in pipes, on full disks, on terminals, for scripts and at prompts."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.output import EndingGroup, GuardedStream
from tests.conftest import COMMITTED
from tests.jobs.command import run_here
from tests.published import checked, hold

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
COMMAND = [sys.executable, "-m", "paddle_reshard"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """A command with its output in pipes, unless ``options`` say otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*COMMAND, *map(str, arguments)], text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, made with an output that cannot hold what is printed."""
    target = tmp_path_factory.mktemp("output") / "one-card"
    in_ascii("convert", DEMO, target, "--to", "tp=1", PYTHONIOENCODING="ascii")
    return target


def in_ascii(*arguments: object, **variables: str) -> None:
    """A conversion whose output cannot hold a character of what it prints."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", **variables}
    done = run(*arguments, env=environment)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "rng_state_0.pth ? rng_state_7.pth" in done.stdout


# ------------------------------------------------------------------------------------- output decides nothing


@pytest.mark.parametrize("closed", [">/dev/full", ">&-", "2>&-", "2>/dev/full", ">&- 2>&- <&-"])
def test_a_conversion_ends_well_whatever_becomes_of_its_output(closed: str, tmp_path: Path) -> None:
    line = " ".join([*COMMAND, "convert", str(DEMO), str(tmp_path / "out"), "--to", "tp=1", closed])
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert paddle_reshard.check(tmp_path / "out").intact


def test_a_stream_that_python_collects_leaves_the_inner_one_alone() -> None:
    """Python closes what it collects; who opened the inner stream has maybe closed it before that, or writes on."""
    inner = io.StringIO()
    GuardedStream(inner).close()
    inner.write("still open")
    guarded = GuardedStream(inner)
    inner.close()
    guarded.close()


def test_a_locale_without_a_character_does_not_fail_a_conversion(tmp_path: Path) -> None:
    """Python's own streams have the error handler ``surrogateescape`` in the locale C."""
    in_ascii("convert", DEMO, tmp_path / "out", "--to", "tp=1")


@pytest.mark.parametrize("format", ["--json", "--to=tp=1"])
def test_a_reader_that_goes_does_not_end_a_conversion(format: str, tmp_path: Path) -> None:
    """``2>&1 | head -0``: no line of it is read."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = run("convert", DEMO, tmp_path / "out", "--to", "tp=1", format, stdout=pipe, stderr=pipe)
    assert done.returncode == 0
    assert paddle_reshard.check(tmp_path / "out").intact


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["inspect", DEMO, "--json"], 1), (["plan", DEMO, "--to", "tp=1"], 1), (["verify", DEMO, DEMO], 2)],
)
def test_an_answer_that_cannot_be_written_is_trouble(arguments: list, status: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1] == "paddle-reshard: stdout: No space left on device"


def test_a_reader_that_has_had_enough_is_no_trouble_worth_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = run("inspect", DEMO, "--tensors", stdout=pipe)
    assert done.returncode == 141
    assert "paddle-reshard:" not in done.stderr


# --------------------------------------------------------------------------------------------------- scripts


def test_every_command_prints_one_object_of_the_published_schema(one_card: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    topology = checked(run_here("inspect", DEMO, "--json"))["topology"]
    assert topology == {"tp": 2, "pp": 2, "vpp": 1, "sharding": 2, "ep": 1, "dp": 1}
    assert checked(run_here("plan", DEMO, "--to", "tp=1", "--save", saved, "--json"))["command"] == "plan"
    several = ["--target", f"{tmp_path / 'a'}:hybrid:tp=2", "--target", f"{tmp_path / 'b'}:huggingface"]
    assert checked(run_here("convert", DEMO, *several, "--json"))["target_path"] is None
    made = checked(run_here("ema", DEMO, DEMO, tmp_path / "c", "--uniform", "--to", "tp=1", "--json"))
    assert made["command"] == "ema"
    assert checked(run_here("verify", DEMO, one_card, "--json"))["equal"] is True
    assert checked(run_here("verify", one_card, "--json"))["intact"] is True
    root = checked(run_here("fingerprint", DEMO, "--output", tmp_path / "f", "--json"))["root"]
    assert checked(run_here("fingerprint", one_card, "--json"))["root"] == root
    assert checked(run_here("verify", one_card, "--against", tmp_path / "f", "--json"))["equal"] is True
    apart = checked(run_here("diff", one_card, DEMO, "--states", "ema_master_weight:master_weight", "--json"))
    assert len(apart["differing"]) == 39
    assert checked(run_here("clean", one_card, "--json"))["removed"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "words"),
    [
        (["convert", "--json"], 2, "UsageError", "Missing argument 'SRC'"),
        (["convert", DEMO, "x", "--strategy", "a", "--json"], 2, "UsageError", "--sharding-strategy"),
        (["convert", DEMO, "--json"], 2, "UsageError", "give one target"),
        (["inspect", "/nowhere/at/all", "--json"], 1, "CheckpointError", "/nowhere/at/all"),
        (["verify", "/nowhere/at/all", DEMO, "--json"], 2, "CheckpointError", "/nowhere/at/all"),
        (["submit", "a", "b", "--to", "mp=2", "--json"], 2, "UsageError", "did you mean tp?"),
        (["nonsense", "--json"], 2, "UsageError", "nonsense"),
    ],
)
def test_every_refusal_is_one_object_of_the_published_schema(
    arguments: list, status: int, kind: str, words: str
) -> None:
    done = run_here(*arguments)
    found = checked(done)
    assert (done.returncode, found["kind"], found["retryable"]) == (status, kind, False)
    assert words in found["error"]


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/there"), False),
        (OSError(errno.ENOSPC, "No space left on device", "/there"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset", "/there"), True),
        (RecursionError("too deep: /there"), False),
        (KeyboardInterrupt(), True),
    ],
)
def test_whatever_ends_a_command_is_one_object(
    error: BaseException, retryable: bool, capsys: pytest.CaptureFixture
) -> None:
    @click.group(cls=EndingGroup)
    def commands() -> None:
        """Commands of which one fails."""

    @commands.command()
    @click.option("--json", "as_json", is_flag=True)
    def fails(as_json: bool) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        commands(["fails", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    hold(found)
    assert found["retryable"] is retryable
    if isinstance(error, KeyboardInterrupt):
        assert (ended.value.code, found["kind"], err.strip()) == (
            130,
            "Interrupted",
            "paddle-reshard: interrupted by SIGINT",
        )
    else:
        assert ended.value.code == 1
        assert "/there" in found["error"]
        assert err.count("\n") == 1


# ---------------------------------------------------------------------------------------------- small mistakes


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--format", "hf"], "huggingface"),
        (["--format", "flexcheckpoint"], "flex"),
        (["--to", "mp=2"], "tp"),
        (["--to", "mp_degree=2"], "tp"),
        (["--to", "shard=2"], "sharding"),
        (["--to", "tp=1", "--sharding-strategy", "stage1"], "stage1v1 or stage1v2"),
        (["--to", "tp=1", "--drop", "emas"], "ema"),
        (["--target", "x:hf"], "huggingface"),
        (["--target", "x:hybrid:mp=2"], "tp"),
    ],
)
def test_a_word_of_another_tool_gets_a_suggestion(arguments: list, meant: str) -> None:
    done = run_here("plan", DEMO, *arguments)
    assert done.returncode == 2
    assert f"did you mean {meant}?" in done.stderr


@pytest.mark.parametrize("size", ["99999999999999999999GiB", "1" + "0" * 400])
def test_more_memory_than_there_can_be(size: str) -> None:
    done = run_here("plan", DEMO, "--to", "tp=1", "--memory", size)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "more than any file or memory has" in done.stderr


def test_a_removed_working_directory_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    line = " ".join(["rmdir ../gone;", *COMMAND, "inspect", "checkpoint-3"])
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path / "gone", timeout=300
    )
    told = "paddle-reshard: the working directory has been removed: change to one that exists [Limits]"
    # on a slow machine it has said before how far it is
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, told)


@pytest.mark.parametrize("kibibytes", [200_000, 160_000, 300_000, 400_000])
def test_too_little_address_space_is_a_sentence_of_what_is_lacking(kibibytes: int, tmp_path: Path) -> None:
    """It fails at another place for every limit; none of them is a bug."""
    line = f"ulimit -v {kibibytes}; exec {' '.join(COMMAND)} convert {DEMO} {tmp_path / 'out'} --to tp=1"
    try:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:  # Python waits for ever for a thread that had no memory to begin with
        return
    assert "bug in paddle-reshard" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Errno" not in done.stderr


def test_a_manifest_of_nested_lists_is_refused(one_card: Path, tmp_path: Path) -> None:
    (tmp_path / "paddle_reshard.json").write_text('{"files": ' + "[" * 200_000 + "]" * 200_000 + "}")
    done = run_here("verify", tmp_path, "--json")
    assert done.returncode == 2
    assert checked(done)["kind"] != "Defect"


# ------------------------------------------------------------------------------------------------------ tables


def on_a_terminal(*arguments: object, columns: int) -> str:
    """What a command shows on a terminal of so many columns."""
    here, there = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=there, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(there)
        shown = b""
        while True:
            try:
                block = os.read(here, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            shown += block
        assert process.wait(timeout=300) == 0
    os.close(here)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


def test_names_are_whole_in_a_pipe_and_on_a_narrow_terminal() -> None:
    keys = [tensor.key for tensor in paddle_reshard.inspect(DEMO).tensors]
    piped = run_here("inspect", DEMO, "--tensors").stdout
    rows = [line.split("\t") for line in piped.splitlines()]
    assert [row[0] for row in rows[-len(keys) :]] == keys
    assert {len(row) for row in rows[-len(keys) :]} == {4}
    shown = on_a_terminal("inspect", DEMO, "--tensors", columns=40)
    assert [word for word in shown.split() if word in set(keys)] == keys
    assert "…" not in shown


def test_sentences_are_wrapped_between_words_and_commands_are_not() -> None:
    shown = on_a_terminal("launch", DEMO, columns=60).splitlines()
    (arguments,) = (line for line in shown if line.startswith("arguments"))
    assert arguments.endswith(paddle_reshard.launch(DEMO).command_line())
    assert max(len(line) for line in shown if line is not arguments and str(DEMO) not in line) <= 60
    (note,) = (number for number, line in enumerate(shown) if "the average is read with" in line)
    assert shown[note + 1].startswith(" " * shown[note].index("the") + "COEFFICIENT, ")
    said = on_a_terminal("verify", DEMO, columns=60).splitlines()
    assert max(map(len, said)) <= 60
    assert (
        " ".join(said[-2:]).split()
        == paddle_reshard.verify(DEMO).verdict.replace("equal", "consistent").split()
    )


def test_checkpoints_and_topologies_fit_a_screen(tmp_path: Path) -> None:
    """80 columns and 24 lines, whatever the names of files are; a command to copy may be longer than a line."""
    shutil.copytree(DEMO, tmp_path / DEMO.name)
    paddle_reshard.convert(DEMO, tmp_path / "checkpoint-1000", format="flex")
    (heading, row, converted) = on_a_terminal("ls", tmp_path, columns=80).splitlines()
    assert heading.split() == ["checkpoint", "topology", "holds", "status"]
    expected = "checkpoint-3 tp=2,pp=2,sharding=2 stage1v2 param master moments EMA complete"
    assert " ".join(row.split()) == expected
    assert " ".join(converted.split()) == "checkpoint-1000 any (flex) param master moments EMA converted"
    cards = on_a_terminal("plan", DEMO, "--cards", 4, columns=80).splitlines()
    assert sum(len(line) // 80 + 1 for line in cards) <= 24
    convert, start = cards.index(next(line for line in cards if line.startswith("convert"))), "start with"
    assert cards[convert].endswith(f"paddle-reshard convert {DEMO} TARGET --to tp=2,sharding=2")
    assert cards[convert + 1].startswith(start)


def test_what_is_piped_can_be_added_up() -> None:
    """As ``cut -f4 | paste -sd+ | bc`` does; on a terminal the same numbers have units and commas."""
    lines = run_here("inspect", DEMO).stdout.splitlines()
    first = lines.index("state\tdtype\ttensors\telements\tstored") + 1
    states = paddle_reshard.inspect(DEMO).states
    piped = [line.split("\t") for line in lines[first:]]
    assert sum(int(row[3]) for row in piped) == sum(state.elements for state in states)
    (row,) = (line.split("\t") for line in run_here("ls", DEMO.parent).stdout.splitlines()[1:])
    tensors = [
        p for p in DEMO.iterdir() if p.suffix in (".pdopt", ".pdparams") and p.name != "scheduler.pdparams"
    ]
    assert int(row[5]) == sum(path.stat().st_size for path in tensors)
    shown = on_a_terminal("inspect", DEMO, columns=200)
    assert "139,840" in shown and " 2.3 MiB" in shown


# --------------------------------------------------------------------------------------------------- prompts


def test_results_are_short_at_a_prompt(tmp_path: Path) -> None:
    report = paddle_reshard.convert(DEMO, tmp_path / "out", to="tp=1")
    found = paddle_reshard.inspect(DEMO)
    compared = paddle_reshard.verify(DEMO, tmp_path / "out")
    intact = paddle_reshard.check(tmp_path / "out")
    for result in (report, report.plan, report.plan.targets[0], report.moved, found, compared, intact):
        assert len(repr(result)) < 500
    assert repr(compared).startswith("<VerifyReport: equal; 273 tensors")
