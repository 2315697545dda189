"""One draw: two jobs of one model, what a conversion from the first to the second must be, and what is not."""

import fnmatch
import json
import re
import shutil
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import paddle_reshard
from tests.lab.draws import files
from tests.lab.job import RECIPES, Job, Topology, job_of
from tests.lab.laboratory import Laboratory
from tests.parity.tensors import Tensor, differences, read_tensors, write_tensors

STRUCTURE = "structure.json"
"""What the files of the target's own job hold."""
WRONG = "wrong.txt"
ALLOWED_OF_DRIFTED: dict[str, tuple[str, Any]] = {
    "replicas": ("--replicas report", "report"),
    "master_weights": ("--master-weights report", "report"),
}
STATES = (".w_0", ".moment1_0", ".velocity_0")
"""One of them every trained parameter has, unless SGD trains it in float32."""
DOCUMENTED = (
    r"AdamWMini",
    r"keeps no states, as SGD does",
    r"stage 2.*flex|flex.*stage 2|FlexCheckpoint.*stage2",
    r"--drop head",
    r"takes \S+sinks, which its class cuts",  # gpt_oss, in a FlexCheckpoint over tp
    r"sinks of the first rank, which its class cuts",  # and from one
    r"the trainer's router asserts sequence_parallel",
    r"amp_master_grad, and sharded saving would lose it",  # frozen experts
    r"whether the target job counts frozen parameters when it distributes parameters is not known",  # SGD
    r"model_meta\.json of a LoRA job also lists the tensors of the base model",  # with a head for labels
    r"cuts tensors with fused parts, such as gate and up, as if they were not fused",  # said by `launch`
    r"pipeline class of \S+ has no multi-token prediction",
    r"the target would keep the master weight only",  # of experts that tp ranks let drift apart
    r"no tensor of this model is of single experts",  # where first_k_dense_replace leaves none
    r"knows Adam's states alone",  # the loader of `hybrid`
    r"has no optimizer states in the source, as in a job without sharding",  # correction biases of a recipe
    r"does not distribute experts over ep",  # qwen2_moe as a target with ep, of whose ranks each has all experts
    r"files by name hold one of the two",  # ernie4_5_moe, whose class gives experts of MTP blocks names of others
)
"""What the documents say is refused: counted apart, as refusals of the trainer are."""


@dataclass(frozen=True)
class Draw:
    """The job whose checkpoint is converted, that of the target, and a third target without a job."""

    number: int
    source: Job
    target: Job
    third: Job
    resumes: bool = False

    def as_json(self) -> dict[str, Any]:
        """A form that ``draw_of`` reads again."""
        return asdict(self)


def draw_of(entries: Mapping[str, Any]) -> Draw:
    """The inverse of :meth:`Draw.as_json`."""
    jobs = {name: job_of(entries[name]) for name in ("source", "target", "third")}
    return Draw(**{**entries, **jobs})


@dataclass
class Outcome:
    """What became of a draw."""

    draw: Draw
    refused: dict[str, str] = field(default_factory=dict)
    """What the trainer, or a documented limit of ours, refused, and with which words."""
    tensors: int = 0
    """Tensors compared with memory."""
    structures: int = 0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)


def _documented(error: paddle_reshard.ReshardError) -> bool:
    return any(re.search(pattern, str(error), re.DOTALL) for pattern in DOCUMENTED)


def check(draw: Draw, lab: Laboratory, folder: Path) -> Outcome:
    """Run, convert and compare; an exception of the product is a finding like any other."""
    outcome = Outcome(draw)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "draw.json").write_text(json.dumps(draw.as_json(), indent=1))
    if words := lab.run(draw.source, folder / "source"):
        outcome.refused["source"] = words
        return outcome
    try:
        _check(outcome, lab, folder)
    except paddle_reshard.ReshardError as error:
        if _documented(error):
            outcome.refused["conversion"] = str(error)
        else:
            outcome.wrong.append(f"refused: {error}")
    except Exception:
        outcome.wrong.append(traceback.format_exc(limit=-4))
    return outcome


def _check(outcome: Outcome, lab: Laboratory, folder: Path) -> None:
    draw, wrong = outcome.draw, outcome.wrong
    outcome.tensors, found = conversions(draw, folder)
    wrong += found
    if words := lab.run(draw.target, folder / "target"):
        outcome.refused["target"] = words
        return
    real, made = checkpoint_in(folder / "target"), folder / "to"
    (folder / STRUCTURE).write_text(json.dumps(files.structure_of(real, draw.target)))
    wrong += differences_from_target(draw, folder)
    wrong += files.exchanged(made, real)
    outcome.structures += 1
    if draw.resumes:
        paddle_reshard.launch(made, **_config(folder, draw.source), **_topology_of(draw.target))
        place = made.rename(folder / real.name)
        if words := lab.run(draw.target, folder / "resumed", place):
            wrong.append(f"the trainer does not resume: {words}")
            return
        memory = files.memory_of(folder / "source", draw.source)
        wrong += _differences_of_memory(folder / "resumed", draw.target, memory)
        outcome.resumed += 1


def conversions(draw: Draw, folder: Path) -> tuple[int, list[str]]:
    """Make and compare what needs no trainer; return how many tensors were compared and what is wrong."""
    source = checkpoint_in(folder / "source")
    memory = files.memory_of(folder / "source", draw.source)
    config = _config(folder, draw.source)
    options = {**config, **_fill(source, memory, folder)}
    whole = _in_whole_tensors(draw.source)
    allowed = _convert(source, folder / "one", {**whole, **options}, memory)
    wrong = files.differences_from_memory(
        folder / "one", memory, draw.source.tied, files.twins_of(folder / "source")
    )
    wrong += _verified(draw, source, folder / "one", config, allowed)
    of_target = {**draw.target.target(), **options, **allowed}
    _convert(source, folder / "to", _with_base(of_target, draw, folder), memory)
    of_third = {**draw.third.target(), **config}
    _convert(folder / "to", folder / "third", _with_base(of_third, draw, folder), memory)
    _convert(folder / "third", folder / "back", {**whole, **config}, memory)
    return len(memory), wrong + _same_files(folder / "one", folder / "back")


def differences_from_target(draw: Draw, folder: Path) -> list[str]:
    """Compare the files of the conversion with what those of the target's own job hold."""
    mine = files.structure_of(folder / "to", draw.target)
    entries = json.loads((folder / STRUCTURE).read_text())
    own = {name: [(key, value) for key, value in of] for name, of in entries.items()}
    if draw.target.tied and draw.target.format == "flex":
        mine = files.without_states_of_words(mine, own)
    if draw.target.family == RECIPES[0] and draw.target.topology.sharding == 1:
        # Correction biases have states in jobs with sharding alone; a conversion keeps them.
        mine = {name: [one for one in of if "_corr_bias_0_" not in one[0]] for name, of in mine.items()}
    for name in [name for name in mine.keys() & own.keys() if _named_otherwise(name, draw.target)]:
        del mine[name], own[name]
    return files.differences_of_structure(mine, own, _left_out(folder, draw))


def _named_otherwise(file: str, job: Job) -> bool:
    """Whether the trainer writes keys that nothing can be found by, where a conversion has those of the model.

    From shares of parameters that a class has renamed it does not resume; over stages the keys of LoRA in
    ``model_meta.json`` are numbers of the items of the pipeline, which depend on the degree.
    """
    renamed = job.family == "qwen2_5_vl" and job.topology.sharding > 1 and file.startswith("model_state.")
    return renamed or bool(job.lora and job.topology.pp > 1 and file == "model_meta.json")


def _left_out(folder: Path, draw: Draw) -> set[str]:
    """Keys of what is not trained: files of ranks lack them unless the source, or ``--fill``, had them.

    And of what a FlexCheckpoint over tp has of the first rank alone.
    """
    memory = files.memory_of(folder / "source", draw.source)
    if not draw.target.format.startswith("hybrid"):
        return {key for key in memory if files.SINKS in key and draw.target.topology.tp > 1}
    return {key for key in memory if not any(key + state in memory for state in STATES)}


def checkpoint_in(folder: Path) -> Path:
    """The checkpoint of a job's last step."""
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def _topology_of(job: Job) -> dict[str, Any]:
    return {"to": str(job.topology)} if "to" not in job.target() else {}


def _config(folder: Path, job: Job) -> dict[str, Any]:
    """The model's config where the checkpoint, a FlexCheckpoint, has none, or lacks what the library does not keep."""
    beside, config = checkpoint_in(folder / "source") / "config.json", folder / "source" / "config.json"
    if job.model.get("moe_use_aux_free") is False:
        corrected = beside if beside.exists() else config
        entries = json.loads(corrected.read_text()) | {"moe_use_aux_free": False}
        corrected.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")  # as the trainer writes it
    return {} if beside.exists() else {"config": config}


def _fill(source: Path, memory: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """What the trainer leaves out: of files of ranks parameters that are not trained, of others some buffers."""
    if any(source.glob("*.safetensors")):
        return {}
    stored = files.stored_parameters(source)
    lacking = {
        key: tensor
        for key, tensor in memory.items()
        if "@" not in key and not files.STATE.search(key) and key not in stored and f"{key}.w_0" not in memory
    }
    if not lacking:
        return {}
    write_tensors(lacking, folder / "fill.safetensors")
    return {"fill": folder / "fill.safetensors"}


def _filled(folder: Path) -> set[str]:
    filled = folder / "fill.safetensors"
    return set(read_tensors(filled)) if filled.exists() else set()


def _with_base(options: dict[str, Any], draw: Draw, folder: Path) -> dict[str, Any]:
    """A FlexCheckpoint of LoRA also holds the base, which other formats do not."""
    if not draw.source.lora or options["format"] != "flex":
        return options
    return {**options, "fill": folder / "source" / "truth_base.safetensors"}


def _in_whole_tensors(job: Job) -> dict[str, Any]:
    """What is compared with memory: one card's files, and of the recipe that needs stages a FlexCheckpoint."""
    return {"format": "flex"} if job.family == RECIPES[1] else {"to": "tp=1", "format": "hybrid-plain"}


def _asked_for(text: str, memory: Mapping[str, Tensor]) -> dict[str, Any]:
    """Options that a refusal asks for, as far as the job's memory says the same.

    Copies may differ where those in memory did, and missing may be what was not there or not trained.
    """
    found: dict[str, Any] = {}
    if any("@" in key for key in memory):
        found |= {option: value for option, (flag, value) in ALLOWED_OF_DRIFTED.items() if flag in text}
    _, _, after = text.partition("--allow-missing ")
    trained = [key for key in memory if any(key + state in memory for state in STATES)]
    missing = [pattern for pattern in re.findall(r"'([^']+)'", after) if not fnmatch.filter(trained, pattern)]
    return found | ({"allow_missing": missing} if missing else {})


def _convert(
    source: Path, target: Path, options: dict[str, Any], memory: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Convert, with what a refusal asks for and the job allows; return what had to be allowed."""
    allowed: dict[str, Any] = {}
    if (source / "config.json").exists():  # of a conversion, which says its own topology
        options = {name: value for name, value in options.items() if name != "config"}
    while True:
        try:
            paddle_reshard.convert(source, target, **{**options, **allowed})
        except paddle_reshard.ReshardError as error:
            if _documented(error):
                raise
            given, more = {**options, **allowed}, _asked_for(str(error), memory)
            if missing := more.get("allow_missing"):
                before = given.get("allow_missing", ())
                more["allow_missing"] = [*before, *(one for one in missing if one not in before)]
            if all(given.get(option) == value for option, value in more.items()):
                raise
            allowed |= more
        else:
            return allowed


def _verified(
    draw: Draw, source: Path, one: Path, config: dict[str, Any], allowed: dict[str, Any]
) -> list[str]:
    """``verify`` must find the conversion equal but for an adapter's base, and one flipped bit of it."""
    options = {**config, **({"replicas": "first"} if allowed.keys() & ALLOWED_OF_DRIFTED.keys() else {})}
    lacks = _filled(one.parent)
    if unsaid := lacks | {*allowed.get("allow_missing", ())}:
        options["allow_missing"] = sorted(unsaid)
    # A FlexCheckpoint of LoRA also holds the base, which files of one card do not.
    with_base = draw.source.lora and draw.source.format == "flex"
    base = read_tensors(source.parent / "truth_base.safetensors") if with_base else ()
    omitted = {(f"{key} (param)", "only in A") for key in base}
    if draw.source.tied:
        omitted.discard(("lm_head.weight (param)", "only in A"))
    wrong = []
    report = paddle_reshard.verify(source, one, **options)
    if {(found.tensor, found.detail) for found in report.differences} != omitted and not lacks:
        wrong.append(f"verify says that the conversion differs: {report}"[:500])
    flipped = one.with_name("flipped")
    shutil.copytree(one, flipped)
    whose = files.flip_a_bit(flipped, draw.number * 7919 + 13)
    try:
        if paddle_reshard.verify(source, flipped, **options).differences == report.differences:
            wrong.append(f"verify does not find a flipped bit in {whose}")
    except paddle_reshard.ReshardError:
        pass  # a flipped bit may also make a parameter contradict its master weight
    shutil.rmtree(flipped)
    return wrong


def _same_files(direct: Path, over_others: Path) -> list[str]:
    """Compare files byte for byte, except the manifest, and the random state that one card hands to one card."""
    a, b = (
        {
            str(p.relative_to(of)): p
            for p in of.rglob("*")
            if p.is_file() and not p.name.startswith(("paddle_reshard", "rng_state"))
        }
        for of in (direct, over_others)
    )
    wrong = [
        f"{name}: only in one of the direct conversion and that over a third topology"
        for name in a.keys() ^ b.keys()
    ]
    return wrong + [
        f"{name}: over a third topology other bytes than directly"
        for name in sorted(a.keys() & b.keys())
        if a[name].read_bytes() != b[name].read_bytes() and not files.same_but_runtime_names(a[name], b[name])
    ]


def _differences_of_memory(resumed: Path, job: Job, memory: Mapping[str, Tensor]) -> list[str]:
    """Compare what a job holds after it has resumed with what the source's job had."""
    found = files.memory_of(resumed, job)
    expected = {
        key: tensor for key, tensor in memory.items() if "@" not in key and (job.ema or ".ema" not in key)
    }
    return [f"after resuming: {line}" for line in differences(found, expected)]


def simpler(draw: Draw) -> list[Draw]:
    """List draws with less in them, the largest cuts first."""
    found: list[Draw] = []

    def both(**changes: Any) -> Draw:
        return replace(draw, source=replace(draw.source, **changes), target=replace(draw.target, **changes))

    one = replace(draw.source, topology=Topology(), strategy="none", format="hybrid-plain", by_rank=False)
    found.append(replace(draw, third=one))
    found.append(replace(draw, target=replace(one, arguments={}), resumes=False))
    found.append(replace(draw, source=replace(one, arguments={})))
    layers = draw.source.model.get("num_hidden_layers", 2)
    if layers > 1:
        found.append(both(model={**draw.source.model, "num_hidden_layers": layers - 1}))
    for name in ("ema", "lora", "frozen", "optimizer", "tied"):
        if getattr(draw.source, name):
            found.append(both(**{name: type(getattr(draw.source, name))()}))
    if draw.source.precision != "bfloat16":
        found.append(both(precision="bfloat16"))
    if draw.source.steps > 1:
        found.append(both(steps=1))
    for name in ("source", "target"):
        job = getattr(draw, name)
        found += [
            replace(
                draw, **{name: replace(job, arguments={k: v for k, v in job.arguments.items() if k != gone})}
            )
            for gone in job.arguments
        ]
        found += [
            replace(draw, **{name: replace(job, topology=replace(job.topology, **{axis: 1}))})
            for axis, degree in asdict(job.topology).items()
            if degree > 1
        ]
    return [one for one in found if one != draw]


def shrink(outcome: Outcome, lab: Laboratory, folder: Path, tries: int = 12) -> Outcome:
    """Leave things out of a failing draw as long as it fails in the same way."""
    kind = _kind(outcome)
    for _ in range(tries):
        for smaller in simpler(outcome.draw):
            tries -= 1
            found = check(smaller, lab, folder)
            if found.wrong and _kind(found) == kind:
                outcome = found
                break
            if tries <= 0:
                return outcome
        else:
            return outcome
    return outcome


def _kind(outcome: Outcome) -> str:
    return re.sub(r"[\d\[\]'\"(),]+|model\.\S+", "", outcome.wrong[0])[:60]
