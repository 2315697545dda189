"""What verification finds of thousands of changes of real checkpoints; the table of it is in ``README.md`` here.

``python -m tests.mutations.study`` makes all changes of the suite and writes the counts and the table.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import paddle_reshard
from paddle_reshard import ReshardError
from tests.conftest import case_directory
from tests.mutations import changes
from tests.mutations.changes import Change, Folder
from tests.mutations.places import Place

COUNTS = Path(__file__).with_name("counts.json")
DOCUMENT = Path(__file__).with_name("README.md")

TWO, ALONE, AGAINST = "verify SRC DST", "verify DST", "verify DST --against"
CONVERT, THEN = "convert", "convert, then verify SRC DST"
KNOWN = "`convert --fingerprint known` of a target with fingerprints"
OF_TARGETS, OF_SOURCES = (TWO, ALONE, AGAINST), (CONVERT, THEN)

NUMBERS = {
    "trainer_state.bin": (b"global_step", b"epoch"),
    "scheduler.pdparams": (b"last_epoch", b"last_lr"),
}
"""Numbers in small files to change."""

Found = bool | frozenset[str]
"""Whether a change was found; for a batch, the tensors that were named."""

Counts = dict[str, dict[str, list[int]]]
"""Kind of change → command → how many it found, of how many."""


# ------------------------------------------------------------------------------------------------ of targets


@dataclass(frozen=True)
class Target:
    """A checkpoint that a conversion made."""

    case: str
    options: Mapping[str, Any]
    small_files: bool = False
    """Whether all of its small files and its manifest are changed too."""
    another_run: str = ""
    """A case of the same model from another run."""


QWEN = "small-families/qwen2_single"
QWEN_ELSEWHERE = "small-families/qwen2_mp2pp2sh2_s1v2_meta"
EXPERTS = "small-unified/ep2_uc_sh2_s1v2"
AVERAGES = "small-flex/fc_moe_mp2sh2_s1v2_ema"
TARGETS = {
    "one card": Target(QWEN, {"to": "tp=1"}, True, QWEN_ELSEWHERE),
    "tp=2, pp=2, sharding=2, stage1v1": Target(
        QWEN, {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v1"}, False, QWEN_ELSEWHERE
    ),
    "tp=2, sharding=2, stage1v2, averages": Target(
        AVERAGES, {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2"}
    ),
    "ep=2, pp=2, sharding=2, stage1v2": Target(
        EXPERTS, {"to": "ep=2,pp=2,sharding=2", "sharding_strategy": "stage1v2"}
    ),
    "sharding=2, stage3": Target(
        QWEN,
        {
            "format": "hybrid-plain",
            "to": "sharding=2",
            "sharding_strategy": "stage3",
            "layout": {"stage3_segment_size": 512},
        },
    ),
    "tp=2, float16": Target("states/fp16_single", {"to": "tp=2"}),
    "flex, two files": Target(QWEN, {"format": "flex", "files": 2}, True, QWEN_ELSEWHERE),
    "flex, averages": Target(AVERAGES, {"format": "flex"}),
    "unified, experts": Target(EXPERTS, {"format": "unified"}, True),
    "unified, float32": Target("small-unified/uc_single_fp32", {"format": "unified"}),
    "huggingface": Target(QWEN, {"format": "huggingface"}, True, QWEN_ELSEWHERE),
}


def source_of(case: str, folder: Path) -> Path:
    """A copy of a real checkpoint, with a tokenizer."""
    source = folder / "source"
    real = case_directory(case)
    shutil.copytree(real / "checkpoint-3", source, copy_function=shutil.copyfile)
    if not (source / "config.json").exists():
        shutil.copy(real / "config.json", source)
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    return source


class Sandbox:
    """A sound checkpoint, files of which are changed and put back."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def with_change(self, change: Change, run: Callable[[], Any]) -> Any:
        """Run something while a change is in the files."""
        root = self.folder.path
        try:
            for file, content in change.files.items():
                if content is None:
                    (root / file).unlink()
                else:
                    (root / file).write_bytes(content)
            return run()
        finally:
            for file in change.files:
                if file in self.folder.content:
                    (root / file).write_bytes(self.folder.content[file])
                else:
                    (root / file).unlink()


class Made(Sandbox):
    """A target, with all that it can be compared with."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.made = target, folder / "made"
        self.source = source_of(target.case, folder)
        self.fingerprints = folder / "fingerprints.json"
        self.subset = target.options.get("format") == "huggingface"
        paddle_reshard.convert(self.source, self.made, **target.options)
        paddle_reshard.fingerprint(self.source, output=self.fingerprints)
        super().__init__(Folder(self.made))
        parts = json.loads(self.folder.content[changes.MANIFEST])["parts"]
        self.parts = {
            (file, sum(entry["bytes"][:number])): nbytes
            for file, entry in parts.items()
            for number, nbytes in enumerate(entry["bytes"])
        }
        assert not any(self.found(command, Change("", {})) for command in OF_TARGETS)

    def found(self, command: str, change: Change) -> Found:
        """What a command finds of a change."""
        try:
            named = {TWO: self._two, ALONE: self._alone, AGAINST: self._against}[command]()
        except ReshardError:
            # Refused as a whole, which says nothing about each change of a batch.
            return change.labels is None
        if change.labels is None:
            return bool(named)
        if command == ALONE:
            assert named == self._parts_with(change), (command, change.kind, change.where)
            return change.labels
        implied = {label.replace("master_weight", "param") for label in change.labels}
        assert named <= change.labels | implied, (command, change.kind, change.where, named)
        return change.labels & named

    def _two(self) -> set[str]:
        report = paddle_reshard.verify(self.source, self.made, subset=self.subset)
        return {difference.tensor for difference in report.differences}

    def _alone(self) -> set[tuple[str, int]]:
        return {(damage.path, damage.byte_offset) for damage in paddle_reshard.check(self.made).damages}

    def _against(self) -> set[str]:
        report = paddle_reshard.verify(self.made, against=self.fingerprints, subset=self.subset)
        return {difference.tensor for difference in report.differences}

    def _parts_with(self, change: Change) -> set[tuple[str, int]]:
        """The parts of the manifest with a byte that changed."""
        return {
            (file, start)
            for (file, start), nbytes in self.parts.items()
            if change.files.get(file, self.folder.content[file])[start : start + nbytes]  # type: ignore[index]
            != self.folder.content[file][start : start + nbytes]
        }

    def changes(self, share: int) -> Iterator[tuple[Change, tuple[str, ...]]]:
        """All changes, each with the commands that it is tried on; ``share`` times as many of bytes and files."""
        folder = self.folder
        yield from ((change, OF_TARGETS) for change in _of_values(folder))
        yield from ((change, OF_TARGETS) for change in changes.padding(folder, 6 * share))
        yield from ((change, OF_TARGETS) for change in changes.framing(folder, 8 * share, True))
        yield from ((change, (ALONE,)) for change in changes.framing(folder, 400 * share, False))
        yield from ((change, OF_TARGETS) for change in changes.keys(folder, 4 * share))
        files = folder.tensor_files[:: max(1, len(folder.tensor_files) // 2)][: 2 * share]
        yield from ((change, OF_TARGETS) for change in changes.whole_files(folder, files))
        if self.target.another_run:
            yield from ((change, OF_TARGETS) for change in self._another_run())
        if self.target.options.get("format", "hybrid").startswith("hybrid"):
            yield from ((change, OF_TARGETS) for change in changes.exchanged_names(folder, 3 * share))
        if changes.META in folder.content:
            every = 1 + 40 // share
            found = changes.json_entries(folder, changes.META, "an entry of `model_meta.json`", every)
            yield from ((change, OF_TARGETS) for change in found)
        if self.target.small_files:
            yield from self._small()

    def _another_run(self) -> Iterator[Change]:
        with tempfile.TemporaryDirectory() as scratch:
            source = source_of(self.target.another_run, Path(scratch))
            paddle_reshard.convert(source, Path(scratch) / "made", **self.target.options)
            other = Folder(Path(scratch) / "made").content
        yield from changes.of_another(self.folder, other, "a file of another run")
        tensors = {file: other[file] for file in self.folder.tensor_files}
        yield Change("all tensor files of another run", tensors)

    def _small(self) -> Iterator[tuple[Change, tuple[str, ...]]]:
        folder = self.folder
        two = (TWO, ALONE)
        for file in folder.content:
            if file == "config.json" and self.target.options.get("format") in (None, "huggingface"):
                yield from ((c, two) for c in changes.json_entries(folder, file, "an entry of `config.json`"))
            elif file.endswith(".index.json"):
                found = changes.json_entries(folder, file, "an entry of an index of tensors", 8)
                yield from ((c, two) for c in found)
            elif file == changes.MANIFEST:
                found = changes.json_entries(folder, file, "an entry of the manifest", 3)
                yield from ((c, (ALONE,)) for c in found)
                yield from (
                    (c, (ALONE,)) for c in changes.any_byte(folder, file, "a bit of the manifest", 40)
                )
            elif file == "tokenizer.json":
                yield from ((c, two) for c in changes.any_byte(folder, file, "a bit of the tokenizer", 10))
            for key in NUMBERS.get(file, ()):
                found = changes.numbers_in_pickle(
                    folder, file, "a number of the schedule or the trainer's state", key
                )
                yield from ((c, two) for c in found)
            if file.endswith(("json", "scheduler.pdparams", "trainer_state.bin")):
                yield Change("a small file removed", {file: None}, where=file), two
        for file in folder.tensor_files:
            if b"LR_Scheduler" in folder.content[file]:
                found = changes.numbers_in_pickle(
                    folder, file, "a number of the schedule or the trainer's state", b"last_epoch"
                )
                yield from ((c, two) for c in found)


def _of_values(folder: Folder) -> Iterator[Change]:
    return chain(changes.bits_of_values(folder), changes.swapped_stretches(folder))


# ------------------------------------------------------------------------------------------------- of sources


SOURCES = {
    "8 ranks, stage1v2": QWEN_ELSEWHERE,
    "flex, 4 ranks, experts, averages": AVERAGES,
    "unified, experts": EXPERTS,
}


class Source(Sandbox):
    """A real checkpoint, which is converted after each change."""

    def __init__(self, case: str, folder: Path) -> None:
        self.sound = source_of(case, folder)
        self.changed, self.made = folder / "changed", folder / "made"
        shutil.copytree(self.sound, self.changed, copy_function=shutil.copyfile)
        super().__init__(Folder(self.changed))
        assert not self.found(CONVERT, Change("", {})), "the sound one is refused"
        assert not self.found(THEN, Change("", {})), "the sound one differs"

    def found(self, command: str, change: Change) -> Found:
        """Whether a command finds a change."""
        shutil.rmtree(self.made, ignore_errors=True)
        try:
            paddle_reshard.convert(self.changed, self.made, to="tp=1")
        except ReshardError:
            return True
        return command == THEN and not _equal(self.sound, self.made)

    def changes(self, share: int) -> Iterator[tuple[Change, tuple[str, ...]]]:
        """All changes, each with the commands that it is tried on."""
        folder = self.folder
        for kind, values in {"first": 0, "last": -1}.items():
            for state, places in _by_state(folder).items():
                for place in places[:: 1 + len(places) // (2 * share)]:
                    edited = changes.Edited(folder)
                    at = place.start + (place.values + values * place.itemsize) % place.values
                    edited[place.file][at + place.itemsize - 1] ^= 1
                    yield (
                        Change(f"a bit of a value: {state}", edited.done(), where=f"{place.name}, {kind}"),
                        OF_SOURCES,
                    )
        found = chain(
            changes.framing(folder, 8 * share, True),
            changes.keys(folder, 4 * share),
            changes.whole_files(folder, folder.tensor_files[:: max(1, len(folder.tensor_files) // 2)]),
            self._schedules(),
        )
        yield from ((change, OF_SOURCES) for change in found)

    def _schedules(self) -> Iterator[Change]:
        """The learning-rate schedule and the trainer's state, in one file at a time."""
        folder, kind = self.folder, "a number of the schedule or the trainer's state"
        for file, content in folder.content.items():
            for key in (b"last_epoch", b"global_step"):
                if key in content and file.endswith((".pdparams", ".pdopt", ".bin")):
                    yield from changes.numbers_in_pickle(folder, file, kind, key)


class Recorded(Sandbox):
    """A target whose manifest has fingerprints, as a source."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.changed, self.made = folder / "changed", folder / "made"
        paddle_reshard.convert(
            source_of(target.case, folder), self.changed, fingerprint="full", **target.options
        )
        super().__init__(Folder(self.changed))
        assert not self.found(KNOWN, Change("", {})), "the sound one is refused"

    def found(self, command: str, change: Change) -> Found:
        """Whether a conversion is refused."""
        shutil.rmtree(self.made, ignore_errors=True)
        try:
            paddle_reshard.convert(self.changed, self.made, to="tp=1", fingerprint="known")
        except ReshardError:
            return True
        return False

    def changes(self, share: int) -> Iterator[tuple[Change, tuple[str, ...]]]:
        """A bit of values of every state."""
        for state, places in _by_state(self.folder).items():
            for number, place in enumerate(places[:: 1 + len(places) // (4 * share)]):
                edited = changes.Edited(self.folder)
                edited[place.file][place.start + number * place.itemsize % place.values] ^= 1
                yield Change(f"a bit of a value: {state}", edited.done(), where=place.name), (KNOWN,)


def _by_state(folder: Folder) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = defaultdict(list)
    for place in folder.places:
        if place.values:
            found[changes.kind_of_value(place.label)].append(place)
    return found


def _equal(a: Path, b: Path) -> bool:
    try:
        return bool(paddle_reshard.verify(a, b))
    except ReshardError:
        return False


# ------------------------------------------------------------------------------------------------ the study


@dataclass
class Result:
    """What was found in one checkpoint."""

    counts: Counts
    missed: list[tuple[str, Change]]
    """Command and change."""


def study(box: Made | Source | Recorded, share: int, every: int) -> Result:
    """Make all changes of a checkpoint, or of each kind that are made one by one the first of every so many."""
    counts: Counts = defaultdict(dict)
    missed = []
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for change, commands in box.changes(share):
        if change.labels is None:  # a batch has all tensors, and is a single run
            seen[change.kind, commands] += 1
            if (seen[change.kind, commands] - 1) % every:
                continue
        sound = box.folder.content
        assert change.labels is None or change.labels, change
        assert any(content != sound.get(file) for file, content in change.files.items()), change

        def try_all(change: Change = change, commands: tuple[str, ...] = commands) -> dict[str, Found]:
            return {command: box.found(command, change) for command in commands}

        for command, found in box.with_change(change, try_all).items():
            for kind, labels in change.kinds().items():
                tally = counts[kind].setdefault(command, [0, 0])
                wanted = 1 if labels is None else len(labels)
                named = len(found & labels) if isinstance(found, frozenset) and labels else int(bool(found))
                tally[0] += named
                tally[1] += wanted
                if named < wanted:
                    missed.append((command, replace(change, kind=kind)))
    return Result(dict(counts), missed)


BOXES: dict[str, Callable[[Path], Made | Source | Recorded]] = {
    **{f"target: {name}": partial(Made, target) for name, target in TARGETS.items()},
    **{f"source: {name}": partial(Source, case) for name, case in SOURCES.items()},
    "source: recorded, stage1v2": partial(Recorded, TARGETS["tp=2, sharding=2, stage1v2, averages"]),
    "source: recorded, unified": partial(Recorded, TARGETS["unified, experts"]),
}


SLOW = (
    "target: one card",
    "target: tp=2, sharding=2, stage1v2, averages",
    "target: tp=2, float16",
    "target: flex, averages",
    "target: unified, float32",
    "source: flex, 4 ranks, experts, averages",
    "source: unified, experts",
    "source: recorded, unified",
    "source: recorded, stage1v2",
    "target: flex, two files",
    "target: sharding=2, stage3",
    "target: tp=2, pp=2, sharding=2, stage1v1",
)
"""Left to ``make exhaustive``: further states and dtypes of formats that the others have too."""


def run(name: str, folder: Path, share: int = 1, every: int = 1) -> Result:
    """The study of one checkpoint."""
    return study(BOXES[name](folder), share, every)


# ------------------------------------------------------------------------------------------------ the document

NAMES = "`verify DST` finds it. Conversion writes such names anew, and no state is looked up under them."
SMALL = (
    "Entries of the topology, the dtype, and the library that wrote it may differ: "
    "`MAY_DIFFER_IN_CONFIG` in `pipeline/indexing/small_files.py` lists each with its reason."
)
REMOVED = (
    "A checkpoint need not have `config.json` (`--config`), its own `scheduler.pdparams` (the optimizer files hold the "
    "schedule too) or a manifest; with `--subset`, an export may lack other small files. "
    "`verify DST` knows what there was."
)
EXPLAINED = {
    **{
        (command, kind): reason
        for kind, reason in {
            "a bit of the padding of a slice": "No reader uses padding. `verify DST` finds it.",
            "a bit of a name that an array has besides its key": NAMES,
            "a bit of a pickle, which then loads as before": "Every reader gets the same. `verify DST` finds it.",
            "a bit of a `.metadata` file": (
                "Names in `flat_mapping`, and the name of an attribute that is `None`: neither says where a value is. "
                "`verify DST` finds it."
            ),
            "a copy dropped, of which there are others": (
                "Some ranks store the same values. All values are still there; `verify DST` finds it."
            ),
            "a file renamed": (
                "The single safetensors file of an export, which may have any name. `verify DST` finds it."
            ),
        }.items()
        for command in (TWO, AGAINST, CONVERT, THEN)
    },
    (TWO, "an entry of `config.json` changed"): SMALL,
    (TWO, "an entry of `config.json` removed"): SMALL,
    (TWO, "a small file removed"): REMOVED,
    **{
        (TWO, f"an entry of an index of tensors {deed}"): (
            "`total_size`, which no reader needs. Indexes say where tensors are, and these are compared."
        )
        for deed in ("changed", "removed")
    },
    **{
        (CONVERT, f"a bit of a value: {state}"): (
            "A value like any other, if nothing else in the source contradicts it: a copy, the master weight of a "
            "parameter, the step. It is in the target, where `verify` of the sound source finds it."
        )
        for state in ("param", "master weight", "moment1", "moment2", "average")
    },
}
"""Command and kind of change → why some changes are not found."""

MARKS = re.compile(r"(<!-- table -->\n).*(<!-- end of table -->)", re.DOTALL)


def table() -> str:
    """What is found by what, and why something is not."""
    total: Counts = defaultdict(dict)
    for counts in json.loads(COUNTS.read_text()).values():
        for kind, commands in counts.items():
            for command, (found, tried) in commands.items():
                tally = total[kind].setdefault(command, [0, 0])
                tally[0], tally[1] = tally[0] + found, tally[1] + tried
    made = sum(
        max(tried for _, tried in commands.values())
        for counts in json.loads(COUNTS.read_text()).values()
        for commands in counts.values()
    )
    words = [f"{made:,} changes of {len(BOXES)} checkpoints. `3 / 4`: three of four were found.", ""]
    reasons: dict[str, int] = {}
    for commands in (OF_TARGETS, OF_SOURCES):
        with_recorded = (*commands, KNOWN) if commands is OF_SOURCES else commands
        words += [
            f"| change of a {'target' if commands is OF_TARGETS else 'source'} | "
            + " | ".join(f"`{command}`" if command != KNOWN else command for command in with_recorded)
            + " |",
            "| --- " + "| ---: " * len(with_recorded) + "|",
        ]
        for kind in sorted(total):
            cells = []
            for command in with_recorded:
                if command not in total[kind]:
                    cells.append("")
                    continue
                found, tried = total[kind][command]
                note = ""
                if found < tried:
                    number = reasons.setdefault(EXPLAINED[command, kind], len(reasons) + 1)
                    note = f" ({number})"
                cells.append(f"{found:,}" if found == tried else f"**{found:,} / {tried:,}**{note}")
            if any(cells):
                words.append(f"| {kind} | {' | '.join(cells)} |")
        words.append("")
    words += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(words) + "\n"


def with_current_table() -> tuple[str, str]:
    """The document as it is, and with the table of the counts."""
    text = DOCUMENT.read_text("utf-8")
    assert MARKS.search(text)
    return text, MARKS.sub(lambda marks: f"{marks[1]}{table()}{marks[2]}", text)


if __name__ == "__main__":
    total = json.loads(COUNTS.read_text()) if COUNTS.exists() and sys.argv[1:] else {}
    for name in sys.argv[1:] or BOXES:
        with tempfile.TemporaryDirectory() as scratch:
            started = time.process_time()
            result = run(name, Path(scratch))
        lines = [f"{name}: {time.process_time() - started:.1f} s"]
        lines += [f"   {command} | {change.kind} | {change.where}" for command, change in result.missed]
        sys.stdout.write("\n".join(lines) + "\n")
        total[name] = result.counts
        COUNTS.write_text(json.dumps(total, indent=1, sort_keys=True) + "\n")
    DOCUMENT.write_text(with_current_table()[1], "utf-8")
