"""What checkpoints hold, read with pickle and NumPy alone: tensors by key, and the structure of files."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.compare_one_card import load, read_one_card
from tests.lab.job import Job
from tests.parity.run import _in_order
from tests.parity.tensors import Tensor, read_metadata, read_tensors

NAMES = "StructuredToParameterName@@"
WORDS = "model.embed_tokens.weight"
ENDINGS_OF_WORDS = ("embed_tokens.weight", "model.embed.words.weight")
STATE = re.compile(r"\.(w_0|ema_w_0|ema|moment1_0|moment2_0|moment2_max_0|velocity_0|beta[12]_pow_acc_0)$")
NOT_COMPARED = re.compile(
    r"(rng_state|saved_signal|training_args|trainer_state|paddle_reshard|config\.json|generation_config|scheduler"
    r"|scaler|static_name|lora_config|.*\.html$)"
)
OF_ARRAYS = (".pdparams", ".pdopt", ".distcp")
RUNTIME_NAMES = ("eager_tmp_", "generated_tensor_")
FAR = 0.6
"""A relative distance that training of some steps does not make, and an exchanged tensor does."""

Structure = dict[str, list[tuple[str, str]]]


def memory_of(folder: Path, job: Job) -> dict[str, Tensor]:
    """The tensors that a job had in memory, by key, and after ``@`` further copies that had drifted apart."""
    tensors = read_tensors(folder / "truth.safetensors")
    if (drifted := folder / "truth_alt.safetensors").exists():
        tensors |= read_tensors(drifted)
    if job.family == "phi3" and job.topology.tp > 1:
        config = json.loads((folder / "config.json").read_bytes())
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        each = config["hidden_size"] // heads
        widths = tuple(n * each // job.topology.tp for n in (heads, kv, kv))
        tensors = {
            key: _in_order(one, widths) if ".qkv_proj." in key and "pow_acc" not in key else one
            for key, one in tensors.items()
        }
    without_number = re.compile(r"\.(velocity|moment2_max)(?=@|$)")
    return {without_number.sub(r"\g<0>_0", key): tensor for key, tensor in tensors.items()}


def twins_of(folder: Path) -> dict[str, list[str]]:
    """Key → keys of the same parameter, of which files have the states once; names begin anew on every stage."""
    report, alike = folder / "truth_report.json", dict[tuple[str, ...], list[str]]()
    names = json.loads(report.read_text())["names"] if report.exists() else {}
    for key, of in names.items():
        layer = re.match(r".*?\.\d+\.", key)
        alike.setdefault((layer[0] if layer else key, *of), []).append(key)
    return {key: keys for keys in alike.values() if len(keys) > 1 for key in keys}


def differences_from_memory(
    one_card: Path, memory: Mapping[str, Tensor], tied: bool, twins: Mapping[str, list[str]]
) -> list[str]:
    """Name every tensor of a checkpoint with whole tensors that is not, bit for bit, what the job had."""
    found = _whole_tensors(one_card)
    if any(key.startswith("model.language_model.") for key in memory):
        found = {_in_memory(key): data for key, data in found.items()}
    copies: dict[str, list[bytes]] = {}
    for key, tensor in memory.items():
        copies.setdefault(key.partition("@")[0], []).append(tensor.data)
    wrong = [f"{key}: not in the job's memory" for key in found.keys() - copies.keys()]
    words = next((key for key in memory if key.endswith(ENDINGS_OF_WORDS)), "")
    for key, values in copies.items():
        # Of tied words a file of one card holds the states once.
        of = key if key in found or not tied else re.sub(r"^(lm_head|answer\.words)\.weight", words, key)
        state = "".join(STATE.findall(of)[:1])
        if state and of not in found:
            others = (f"{twin}.{state}" for twin in twins.get(of.removesuffix(f".{state}"), ()))
            of = next((other for other in others if other in found), of)
        if of not in found:
            wrong.append(f"{key}: lost")
        elif found[of] not in values:
            wrong.append(f"{key}: {_differing(found[of], values[0])}")
    return sorted(wrong)


def _whole_tensors(checkpoint: Path) -> dict[str, bytes]:
    """Of one card, or of a FlexCheckpoint that is not by rank, whose one file has the keys of the truth."""
    pieces = sorted(checkpoint.rglob("*.distcp"))
    if not pieces:
        return read_one_card(checkpoint)
    return {
        _averaged(key) if path.parent.name == "ema_state" else key: array.tobytes()
        for path in pieces
        for key, array in load(path).items()
        if key != NAMES
    }


def _averaged(key: str) -> str:
    return f"{key.removesuffix('.w_0')}.ema_w_0" if key.endswith(".w_0") else f"{key}.ema"


def _in_memory(key: str) -> str:
    """A model of images has other keys in memory than in files."""
    if "language_model." in key:
        return key
    return re.sub(r"^visual\.", "model.visual.", re.sub(r"^model\.(?!visual)", "model.language_model.", key))


def _differing(mine: bytes, real: bytes) -> str:
    if len(mine) != len(real):
        return f"{len(mine)} bytes, not {len(real)}"
    count = int((np.frombuffer(mine, "u1") != np.frombuffer(real, "u1")).sum())
    return f"{count} of {len(real)} bytes differ"


def stored_parameters(checkpoint: Path) -> set[str]:
    """Keys of the parameters that lie in files of their own, not only as master weights."""
    files = [path for path in checkpoint.glob("*.pdparams") if not NOT_COMPARED.match(path.name)]
    files += checkpoint.glob("model_state/*.distcp")
    return {name for path in files for key in load(path) for name in (key, _in_memory(key))}


def structure_of(checkpoint: Path, job: Job) -> Structure:
    """Each file's entries in order: paths of keys, with parameter names, dtypes and shapes.

    What the writer may choose is left out, so that only the logical tensors are listed: of a format in how many files
    whole tensors are, and of files by rank how many ranks have a copy of an average, or of what no rank reads.
    """
    if job.format == "unified":
        return {kind: sorted(entries) for kind, entries in _of_unified(checkpoint, job)}
    found: Structure = {}
    copies_vary = {"ema_state"} | ({"model_state"} if job.strategy == "stage1v2" else set())
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if NOT_COMPARED.match(path.name) or not path.is_file():
            continue
        if job.format == "flex":
            by_rank = job.by_rank and path.parent.name not in copies_vary
            if path.name.endswith(".metadata"):
                found[name] = sorted(_of_metadata(read_metadata(path), by_rank))
            elif by_rank and path.name.endswith(".distcp"):
                found[name] = list(_entries(load(path), "", False))
        elif path.name.endswith(".json"):
            found[name] = list(_entries(json.loads(path.read_bytes()), "", True))
        else:
            entries = _entries(load(path), "", True) if path.suffix in (".pdparams", ".pdopt") else ()
            found[name] = [entry for entry in entries if "LR_Scheduler" not in entry[0]]
    return found


def _entries(value: Any, path: str, with_names: bool) -> Iterator[tuple[str, str]]:
    """Flatten what a file holds; parameter names are read by nobody in a FlexCheckpoint."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key != NAMES or with_names:
                yield from _entries(below, f"{path}/{key}", with_names)
        if not value:
            yield path, "empty"
    elif isinstance(value, tuple | list) and any(isinstance(part, np.ndarray) for part in value):
        name = value[0] if with_names and not value[0].startswith(RUNTIME_NAMES) else "?"
        yield path, f"{name} {value[1].dtype}{list(value[1].shape)}"
    elif isinstance(value, np.ndarray):
        yield path, f"{value.dtype}{list(value.shape)}"
    elif isinstance(value, str) and value.startswith(RUNTIME_NAMES):
        yield path, "?"
    else:
        yield path, repr(value)[:120]


def _of_metadata(metadata: Any, by_rank: bool) -> Iterator[tuple[str, str]]:
    for key, pieces in metadata.state_dict_metadata.items():
        pieces = pieces if isinstance(pieces, list) else [pieces]
        first = pieces[0]
        yield key, f"{first.dtype} of {list(getattr(first, 'global_shape', None) or ())}"
        for piece in pieces if by_rank else ():
            ranges = (piece.global_offset, piece.local_shape, getattr(piece, "flattened_range", None))
            yield key, " ".join(str([int(n) for n in of or ()]) for of in ranges)


def _of_unified(checkpoint: Path, job: Job) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    kinds: dict[str, dict[str, str]] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            kind = re.split(r"[-.]", path.name)[0]
            # Under stage 1 v2 the job itself writes flattened tensors with padding, those of two ranks in two files.
            shape = "" if job.strategy == "stage1v2" else list(tensor.shape)
            kinds.setdefault(kind, {})[key] = f"{tensor.dtype}{shape}"
    yield from ((kind, list(entries.items())) for kind, entries in kinds.items())


def without_states_of_words(mine: Structure, real: Structure) -> Structure:
    """Leave out the states of tied words that a conversion to a FlexCheckpoint has under both keys, for any job.

    A job without stages has them under the key of the head, in the place of the words.
    """
    left: Structure = {}
    for name, entries in mine.items():
        kept, of_key = {key for key, _ in real.get(name, ())}, dict[str, list[tuple[str, str]]]()
        for entry in entries:
            of_key.setdefault(entry[0], []).append(entry)
        instead = {
            key: key.replace(WORDS, "lm_head.weight") for key in of_key if WORDS in key and key not in kept
        }
        order = (instead.get(key, key) for key in of_key if key not in instead.values())
        left[name] = [entry for key in order for entry in of_key.get(key, ())]
    return left


def differences_of_structure(mine: Structure, real: Structure, except_keys: set[str]) -> list[str]:
    """Say in which files, keys, orders and entries a conversion is not what the job itself wrote."""
    wrong = [f"{name}: only in the conversion" for name in sorted(mine.keys() - real.keys())]
    wrong += [f"{name}: only in the job's checkpoint" for name in sorted(real.keys() - mine.keys())]
    for name in sorted(mine.keys() & real.keys()):
        a, b = (
            [e for e in of[name] if e[0].rpartition("/")[2] not in except_keys and e[1] != "empty"]
            for of in (mine, real)
        )
        if a == b:
            continue
        keys_of_a, keys_of_b = dict(a), dict(b)
        extra, lacking = (
            [k for k in x if k not in y] for x, y in ((keys_of_a, keys_of_b), (keys_of_b, keys_of_a))
        )
        other = [(x, y) for x, y in zip(sorted(a), sorted(b), strict=False) if x != y]
        if extra or lacking:
            wrong.append(
                f"{name}: {len(extra)} keys of the conversion alone {extra[:3]}, "
                f"{len(lacking)} of the job alone {lacking[:3]}"
            )
        elif other:
            wrong.append(f"{name}: {len(other)} entries differ: {other[0][0]}, the job has {other[0][1]}")
        else:
            place = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            wrong.append(f"{name}: another order from {a[place][0]}, where the job has {b[place][0]}")
    return wrong


def same_but_runtime_names(a: Path, b: Path) -> bool:
    """Whether two files differ at most in names of buffers that a process counts, which nobody reads."""
    if a.suffix not in OF_ARRAYS:
        return False
    x, y = load(a), load(b)
    if list(_entries(x, "", True)) != list(_entries(y, "", True)):
        return False
    pairs = zip(_arrays(x, ""), _arrays(y, ""), strict=True)
    return all(mine[1].tobytes() == real[1].tobytes() for mine, real in pairs)


SINKS = ".self_attn.sinks"


def exchanged(mine: Path, real: Path) -> list[str]:
    """Name parameters and master weights that are far from those of the job, which began with the same values."""
    wrong, report = [], real.parent / "truth_report.json"
    names = json.loads(report.read_text())["names"] if report.exists() else {}
    sinks = {name for key, of in names.items() if key.endswith(SINKS) for name in (key, *of)}
    for path in sorted(mine.rglob("*.pd*")):
        other = real / path.relative_to(mine)
        if NOT_COMPARED.match(path.name) or not other.exists():
            continue
        a, b = dict(_arrays(load(path), "")), dict(_arrays(load(other), ""))
        for key in a.keys() & b.keys():
            if key.rpartition("/")[2] in sinks:
                continue  # as it starts, the trainer gives all tp ranks of gpt_oss the first one's
            is_weight = key.startswith("/master_weights") or path.name.startswith(("model", "lora"))
            if not is_weight or a[key].shape != b[key].shape:
                continue
            x, y = floats(a[key]), floats(b[key])
            if np.linalg.norm(x - y) > FAR * np.linalg.norm(y):
                wrong.append(f"{path.name}{key}: far from the job's own value")
    return wrong


def _arrays(value: Any, path: str) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _arrays(below, f"{path}/{key}")
    elif isinstance(value, np.ndarray):
        yield path, value
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
        yield path, value[1]


def floats(array: np.ndarray) -> np.ndarray:
    """As float32; two bytes are bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def flip_a_bit(checkpoint: Path, choice: int) -> str:
    """Flip one bit of one array, chosen by a number; return whose it was."""
    stored = [path for path in sorted(checkpoint.rglob("*")) if path.suffix in OF_ARRAYS]
    stored = [path for path in stored if not NOT_COMPARED.match(path.name) and _long_arrays(path)]
    path = stored[choice % len(stored)]
    arrays = _long_arrays(path)
    content = bytearray(path.read_bytes())
    key, array = arrays[choice // 2 % len(arrays)]
    place = content.index(array.tobytes(order="A"))
    content[place + choice // 2 % array.nbytes] ^= 1 << choice % 8
    path.write_bytes(content)
    return f"{path.name}{key}"


def _long_arrays(path: Path) -> list[tuple[str, np.ndarray]]:
    return [(key, a) for key, a in _arrays(load(path), "") if a.nbytes >= 32 and a.any()]
