"""Complete means all that the class has: whatever is taken away from a real checkpoint is missed, or on a list.

The files are indexed as they lie; what is taken away is left out of what their indexes say, as if it had never been
saved: a class of tensors, a kind of state, all states of a rank's file, single tensors.
"""

import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.formats.flex.source import DataFile
from paddle_reshard.pipeline.formats.hybrid.entries import FileEntries
from paddle_reshard.pipeline.indexing.detect import index_source
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.pipeline.model.rules.rule import form_of
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.files.dist_metadata import DistMetadata
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from paddle_reshard.storage.files.safetensors import SafetensorsPayload
from paddle_reshard.storage.locate import open_source
from paddle_reshard.tasks.index import index_here
from tests.conftest import CORPUS, case_directory
from tests.lab.job import RECIPES, described

Array = tuple[str, int]
"""File and first byte of a stored array."""
SINGLES, CLASSES = 3, 6
"""How many single tensors and classes of tensors are drawn; `tests/facts` takes all of them from what classes build."""


ALONE = (
    r"config\.json is missing|no file holds it, and it has no master weight|ckpt_quant_stage|global_step is|"
    "under parameter names"
)
"""Refusals of whole checkpoints: they need ``--config`` or ``--fill``, or are of kinds that are not read."""


@dataclass(frozen=True)
class Taken:
    """What is taken away: arrays, and the keys of parameters of which nothing is left."""

    arrays: Set[Array] = frozenset()
    keys: Set[str] = frozenset()
    pieces: Set[tuple[str, str]] = frozenset()
    """File and name of every array that is taken."""

    def index(self, indexer: Any, store: Any, sizes: Mapping[str, int], *rest: Any) -> dict[str, Any]:
        """As ``index_here``, without what is taken."""
        found = index_here(indexer, store, sizes, *rest)
        return {path: self.less(path, entry) for path, entry in found.items()}

    def less(self, path: str, entry: Any) -> Any:
        """What an index says of a file."""
        if isinstance(entry, FileEntries):
            return FileEntries(self._of_pickle(path, entry))
        if isinstance(entry, SafetensorsPayload):
            return replace(entry, tensors=self._kept(path, entry.tensors))
        if isinstance(entry, DataFile):
            return replace(entry, arrays=self._kept(path, entry.arrays))
        assert isinstance(entry, DistMetadata)
        return self._of_metadata(path, entry)

    def _kept(self, path: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: array for name, array in arrays.items() if (path, array.byte_offset) not in self.arrays}

    def _of_pickle(self, path: str, entries: FileEntries) -> dict[str, Any]:
        left = {}
        for name, value in entries.items():
            if name == MASTER_WEIGHTS:
                left[name] = self._of_pickle(path, value)
            elif name == STRUCTURED_NAMES:
                left[name] = {key: of for key, of in value.items() if key not in self.keys}
            elif (path, getattr(value, "byte_offset", None)) not in self.arrays:
                left[name] = value
        return left

    def _of_metadata(self, path: str, entry: DistMetadata) -> DistMetadata:
        folder = path.rpartition("/")[0]
        files = [f"{folder}/{file}".lstrip("/") for file in entry.files]
        keys = [entry.keys[number] for number in entry.pieces["key"]]
        held = [(files[of["file"]], keys[of["piece"]]) not in self.pieces for of in entry.locations]
        locations = entry.locations[np.array(held, dtype=bool)]
        pieces = np.unique(locations["piece"])
        numbers = np.unique(entry.pieces["key"][pieces])
        renumbered = entry.pieces[pieces].copy()
        renumbered["key"] = np.searchsorted(numbers, renumbered["key"])
        located = locations.copy()
        located["piece"] = np.searchsorted(pieces, located["piece"])
        kept = tuple(entry.keys[number] for number in numbers)
        mapping = {key: of for key, of in entry.flat_mapping.items() if key in kept}
        return replace(entry, keys=kept, pieces=renumbered, locations=located, flat_mapping=mapping)


@dataclass(frozen=True)
class Whole:
    """A checkpoint, and where each of its tensors is stored."""

    folder: Path
    config: Mapping[str, Any] | None
    checkpoint: Checkpoint
    arrays: Mapping[tuple[str, str], Set[Array]]
    """(Key, state) -> arrays."""
    names: Mapping[Array, str]

    def without(
        self, tensors: Set[tuple[str, str]], keys: Set[str] = frozenset(), of: str = ""
    ) -> Checkpoint:
        """What is read without some tensors; ``of`` a file alone, if that is given."""
        arrays = {a for tensor in tensors for a in self.arrays[tensor] if of in ("", a[0])}
        pieces = frozenset((path, self.names[path, start]) for path, start in arrays)
        return read(self.folder, self.config, Taken(frozenset(arrays), keys, pieces))


def read(folder: Path, config: Mapping[str, Any] | None, taken: Taken) -> Checkpoint:
    store = open_source(str(folder), {})
    return index_source(SourceFiles(store, config, taken.index, taken.index), shipped_tables())


def whole(folder: Path, config: Mapping[str, Any] | None) -> Whole:
    """The checkpoint of a folder, with nothing taken away."""
    ranges: dict[str, list[tuple[int, int, str]]] = defaultdict(list)

    def note(path: str, arrays: Any) -> None:
        for name, value in arrays:
            if isinstance(value, FileEntries):
                note(path, value.items())
            elif hasattr(value, "byte_offset"):
                ranges[path].append((value.byte_offset, value.byte_offset + value.nbytes, name))

    class Noting(Taken):
        def less(self, path: str, entry: Any) -> Any:
            if isinstance(entry, FileEntries):
                note(path, entry.items())
            elif not isinstance(entry, DistMetadata):
                note(path, (entry.tensors if isinstance(entry, SafetensorsPayload) else entry.arrays).items())
            return entry

    checkpoint = read(folder, config, Noting())
    catalog = checkpoint.catalog
    stored: dict[tuple[str, str], set[Array]] = defaultdict(set)
    rows = catalog.fragments
    for tensor, file, base in zip(rows["tensor"], rows["file"], rows["byte_base"], strict=True):
        path, of = catalog.files[file].path, catalog.tensors[int(tensor)]
        [start] = [begin for begin, end, _ in ranges[path] if begin <= base < end]
        stored[of.key, of.state].add((path, start))
    names = {(path, begin): name for path, of in ranges.items() for begin, _, name in of}
    return Whole(folder, config, checkpoint, stored, names)


def removals(of: Whole, chance: random.Random) -> Iterator[tuple[str, Set[tuple[str, str]], Set[str], str]]:
    """What is taken, in words; its tensors, the keys of which nothing is left, and the file, if it is of one."""
    classes: dict[str, set[str]] = defaultdict(set)
    for key, _ in of.arrays:
        classes[form_of(key)].add(key)
    for form, keys in chance.sample(sorted(classes.items()), min(CLASSES, len(classes))):
        yield f"class {form}", {tensor for tensor in of.arrays if tensor[0] in keys}, keys, ""
    for state in sorted({state for _, state in of.arrays}):
        yield f"kind {state}", {tensor for tensor in of.arrays if tensor[1] == state}, set(), ""
    files = {path for arrays in of.arrays.values() for path, _ in arrays}
    for path in sorted(files):
        held = {t for t, arrays in of.arrays.items() if t[1] != PARAM and any(a[0] == path for a in arrays)}
        if held:
            yield f"states in {path}", held, set(), path
    for key, state in chance.sample(sorted(of.arrays), min(SINGLES, len(of.arrays))):
        yield f"tensor {key} ({state})", {(key, state)}, {key} if state == PARAM else set(), ""


def why_not_missed(of: Whole, tensors: Set[tuple[str, str]], keys: Set[str]) -> str | None:
    """The list of what is converted without."""
    states = {state for _, state in tensors}
    if (keys or states == {PARAM}) and not of.checkpoint.model.config:
        return "without config.json nothing says of what class the model is"
    if (keys or states == {PARAM}) and of.checkpoint.model.table.not_known:
        return "no rule table describes the class in this format: its own files do"
    if states == {PARAM} and all((key, MASTER_WEIGHT) in of.arrays for key, _ in tensors):
        return "it is cast from its master weight"
    if all(state.startswith("ema") for state in states) and not keys:
        return "a job need not keep an average"
    if of.checkpoint.model.has_lora and not any("lora_" in key for key, _ in tensors):
        return "nothing says what an adapter trains beside its matrices"
    if states == {MASTER_WEIGHT} and of.checkpoint.format == "unified":
        return "remove_master_weight leaves them out, and the loader casts the parameters"
    if {(key, state) for key, state in of.arrays if state in ACCUMULATORS} <= tensors and not keys:
        return "SGD keeps none, and master weights at most"
    return None


def cases() -> list[str]:
    """Every real checkpoint; first one whose ranks keep whole parameters."""
    found = (f"{p.parent.name}/{p.name.removesuffix('.tar.xz')}" for p in CORPUS.rglob("*.tar.xz"))
    return sorted(found, key=lambda case: (case != "dense/sh2_s1v1", case))


@pytest.mark.parametrize("case", cases())
def test_what_is_taken_from_a_real_checkpoint_is_missed(case: str) -> None:
    directory = case_directory(case)
    folder = max([*directory.glob("checkpoint-*")] or [*directory.glob("hf-export")], default=directory)
    try:
        of = whole(folder, None)
    except ReshardError as error:
        assert re.search(ALONE, str(error))
        return
    assert not not_missed(of, case)


def not_missed(of: Whole, case: str) -> list[str]:
    """What can be taken away and is on no list, in words."""
    accepted = []
    for words, tensors, keys, file in removals(of, random.Random(case)):
        if why_not_missed(of, tensors, keys):
            continue
        try:
            of.without(tensors, keys, file)
        except ReshardError:
            continue
        accepted.append(words)
    return accepted


NOT_OF_THE_HUB = {
    "families/deepseek_v3_mtp_single": r"eh_proj\.weight: .* shape",
    "families/gemma3_text_single": r"up_gate_proj\.weight: no row .* has this key in a Hugging Face checkpoint",
    "families/glm4v_moe_single": r"fused_ffn_tmp\.GATE_0: no row .* has this key in a Hugging Face checkpoint",
    "families/qwen3_next_single": r"up_gate_proj\.weight: no row .* has this key in a Hugging Face checkpoint",
}
"""Exports of the library with keys or shapes that the models of the hub do not have: refused whole."""


def exports() -> list[str]:
    """Every real job that also exported its model for Hugging Face."""
    return sorted(name for name, job in described().items() if job.export and job.family not in RECIPES)


@pytest.mark.parametrize("case", exports())
def test_what_is_taken_from_a_real_export_is_missed(case: str, tmp_path: Path) -> None:
    """As one file, of which no index says what is in it."""
    folder, export = tmp_path, case_directory(case) / "hf-export"
    [weights] = export.glob("*.safetensors")
    shutil.copy(weights, folder / "model.safetensors")
    shutil.copy(export / "config.json", folder)
    if case in NOT_OF_THE_HUB:
        with pytest.raises(ReshardError, match=NOT_OF_THE_HUB[case]):
            whole(folder, None)
    else:
        assert not not_missed(whole(folder, None), case)
