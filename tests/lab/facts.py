"""Build model classes of PaddleFormers, tiny and not trained, and write down what they hold: ``tests/facts``.

Runs in the laboratory's Python (``make facts``). The library is imported once; every family and topology then
gets forked ranks, which build the base config and its variants one after the other. A variant changes one entry
that a constructor was seen to read.
"""

import json
import lzma
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOG_v="0", SHIM_BOX=tempfile.mkdtemp(prefix="facts_"))
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "lab"), str(TESTS / "lab" / "trainer")]

from job import described
from ranks import fork_ranks

TARGET = TESTS / "facts" / "facts.json.xz"
SEQUENCE = 16
SECONDS = 900
WORKERS = 2
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {TP: 2}),
    "tp2sp": (2, {TP: 2, "sequence_parallel": True}),
    "pp2": (2, {PP: 2}),
    "tp2pp2": (4, {TP: 2, PP: 2}),
    "tp2pp2sp": (4, {TP: 2, PP: 2, "sequence_parallel": True}),
    "ep2": (2, {"sharding": "stage1", "sharding_parallel_size": 2, "use_expert_parallel": True, EP: 2}),
}
TEXT = ("llama", "qwen2", "qwen3", "ernie4_5", "phi3", "gemma3_text")
EXPERTS = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "qwen3_next")
IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "glm_ocr", "paddleocr_vl")
BOTH = ("tp2pp2", "tp2pp2sp")
WITHOUT_BOTH = ("ernie4_5", "glm4_moe", "gpt_oss", "gemma3_text")
"""Not built with tp and stages: three refuse two stages, which pp2 tells; gemma3_text ends as stages share words."""
TIED = {"tie_word_embeddings": True}
"""Built in every topology without stages; with them, stages that share a parameter need both ranks to get so far."""
BIASES = {"text_config": {"attention_bias": True}}
"""Of the language model of families of images; a switch like those of a config without sections."""
HEADS = {
    "qwen2": ("SequenceClassification", "TokenClassification", "SentenceEmbedding"),
    "qwen3": ("SequenceClassification", "TokenClassification", "SentenceEmbedding", "Model"),
    "deepseek_v3": ("SequenceClassification",),
}
"""Family → the heads of its classes with another than that for language models, or with none; none has a Pipe class.
``Model`` is the base class, whose keys lack ``model.``."""
LORA: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("llama", "phi3", "gpt_oss", "qwen2_5_vl"), ({"r": 4},)),
    "qwen3_moe": ({"r": 4}, {"r": 4, "target_modules": [".*self_attn.*_proj.*"]}),
}
"""Family → the LoRA configs to build, on one card and with tp; the modules are the library's choice, or those named."""
LABELS: tuple[dict[str, Any], ...] = ({}, {"num_labels": 1}, {"num_labels": 3})
RUN_DEPENDENT = ("tensor_parallel_rank", "moe_group", "pp_seg_method")
"""Entries that say where a rank is; no user sets them in a config."""


def topologies_of(family: str) -> list[str]:
    """Name the topologies to try: those of Pipe classes only where the library has one."""
    if family in IMAGES:
        return ["tp1", "tp2", "tp2sp"]
    left_out = {*(() if family in EXPERTS else ("ep2",)), *(BOTH if family in WITHOUT_BOTH else ())}
    return [name for name in TOPOLOGIES if name not in left_out]


# ---- in a rank


def arguments(options: Mapping[str, Any]) -> Any:
    """Make the trainer's arguments; this sets up the groups of the topology."""
    from paddleformers.trainer import TrainingArguments

    fixed: dict[str, Any] = dict(
        output_dir=os.environ["SHIM_BOX"], bf16=True, fp16_opt_level="O2", device="cpu"
    )
    fixed |= dict(report_to="none", save_checkpoint_format=None, load_checkpoint_format=None, seed=42)
    fixed |= dict(partial_send_recv=False, disable_tqdm=True, fuse_sequence_parallel_allreduce=False)
    return TrainingArguments(**(fixed | options))


def build(
    family: str,
    model: Mapping[str, Any],
    args: Any,
    *,
    tied: bool,
    vpp: int = 1,
    head: str = "",
    lora: Mapping[str, Any] | None = None,
) -> Any:
    """Build one class as the laboratory's training scripts do, with names counted from zero."""
    import models
    import patches
    from paddle.utils import unique_name

    with unique_name.guard():
        pipe = args.pipeline_model_parallel_size > 1
        config, built = models.build(family, dict(model), args, SEQUENCE, tied, vpp, pipe, head=head)[1:]
        if lora:
            built = patches.with_adapters(built, args.tensor_model_parallel_size, "bfloat16", **lora).model
        return config, built


def rows(model: Any) -> list[list[Any]]:
    """Describe every entry of the state dict; a tie names the first key of the same tensor."""
    state = model.state_dict()
    trained = {id(p) for p in model.parameters()}
    first: dict[int, str] = {}
    found = []
    for key, tensor in state.items():
        same = first.setdefault(id(tensor), key)
        is_parameter = id(tensor) in trained
        found.append(
            [
                key,
                # Buffers are named by a counter of the whole process, which no file's reader relies on.
                tensor.name if is_parameter else None,
                list(tensor.shape),
                str(tensor.dtype).removeprefix("paddle."),
                bool(getattr(tensor, "is_distributed", False)),
                getattr(tensor, "split_axis", None),
                bool(getattr(tensor, "no_sync", False)),
                bool(getattr(tensor, "expert", False)),
                None if same == key else same,
                is_parameter and not tensor.stop_gradient,
                is_parameter,
            ]
        )
    return found


def sharded(model: Any) -> dict[str, list[Any]] | str:
    """Describe ``sharded_state_dict()``, or say why it does not run."""
    try:
        return {
            key: [
                str(w.key), list(w.local_shape), list(w.global_shape), list(w.global_offset),
                bool(getattr(w, "is_flattened", False)),
            ]
            for key, w in model.sharded_state_dict().items()
        }  # fmt: skip
    except Exception as error:
        return words(error)


def words(error: BaseException) -> str:
    """Say the first line of an error without addresses."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text.split(' at 0x')[0][:200]}"


def attempt(family: str, model: Mapping[str, Any], args: Any, **options: Any) -> dict[str, Any]:
    try:
        config, built = build(family, model, args, **options)
        if options.get("head"):
            config.architectures = [type(built).__name__]  # as save_pretrained of the model has them
        entries = saved(config)
    except ImportError as error:
        # Two things look alike: a class of a library that is not public (paddlefleet), and a broken laboratory.
        if "paddlefleet" not in str(error):
            raise
        return {"refused": words(error), "where": "import"}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"refused": words(error), "where": f"{Path(frame.filename).name}:{frame.name}"}
    found = {"class": type(built).__name__, "saved": entries}
    return {**found, "rows": rows(built), "sharded": sharded(built), "maps": maps(built), **transposed(built)}


def transposed(model: Any) -> dict[str, list[str]]:
    """Say which weights are written transposed with ``save_to_hf``; what is no list the library ignores."""
    endings = model.transpose_weight_keys
    return {"transposed": list(map(str, endings))} if isinstance(endings, list) else {}


def maps(model: Any) -> list[list[str]] | str:
    """What the class says of Hugging Face checkpoints: the statements that read one, and those that write one."""
    try:
        return [
            [str(statement) for statement in getattr(type(model), name)(model.config)["aoa_statements"]]
            for name in ("_gen_aoa_config", "_gen_inv_aoa_config")
        ]
    except Exception as error:
        return words(error)


def saved(config: Any) -> dict[str, Any]:
    """Read the config.json that a checkpoint of the model has."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        entries: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return entries


def read_entries(family: str, args: Any) -> dict[str, Any]:
    """Build the base config and note which of its entries the constructors read, with their values."""
    import models

    seen: dict[str, Any] = {}
    kind = models.get(family, SEQUENCE)[1]
    building = False

    def noting(self: Any, name: str) -> Any:
        value = original(self, name)
        if building and not name.startswith("_") and not callable(value):
            seen.setdefault(name, value)
        return value

    original = kind.__getattribute__
    own = "__getattribute__" in vars(kind)
    start = kind.__init__

    def init(self: Any, *a: Any, **k: Any) -> None:
        nonlocal building
        building = False
        start(self, *a, **k)
        building = True

    kind.__getattribute__, kind.__init__ = noting, init
    try:
        build(family, {}, args, tied=False)
    finally:
        kind.__init__ = start
        if own:
            kind.__getattribute__ = original
        else:
            del kind.__getattribute__
    return {name: seen[name] for name in sorted(seen) if name not in RUN_DEPENDENT}


def other_values(value: Any) -> list[Any]:
    """List what to try in place of a value: for switches the other one, for counts also none and one."""
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [True, 1, 16]
    if isinstance(value, int):
        return [v for v in (None, 0, 1, 2, 3) if v != value]
    return [None] if isinstance(value, str | list | dict) else []


def facts_of(family: str, topology: str, variants: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Build the base and its variants; on one card, find the variants and keep those that change something."""
    args = arguments(TOPOLOGIES[topology][1])
    base = attempt(family, {}, args, tied=False)
    found = [{"config": {}, **base}]
    if variants is None:
        try:
            read = read_entries(family, args)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            return [*found, {"config": "unknown", "refused": words(error), "where": "reading the config"}]
        tried = [{name: value} for name, was in read.items() for value in other_values(was)]
        tried += [BIASES] if "text_config" in base.get("saved", ()) else []
    else:
        tried = variants
    for change in tried:
        model = {k: v for k, v in change.items() if k != "tie_word_embeddings"}
        one = attempt(family, model, args, tied=bool(change.get("tie_word_embeddings", False)))
        if _of_model(one) != _of_model(base):
            found.append({"config": change, **one})
    for head in HEADS.get(family, ()) if "pp2" not in topology else ():
        for labels in LABELS if "Classification" in head else LABELS[:1]:
            one = attempt(family, labels, args, tied=False, head=head)
            found.append({"config": {"head": head, **labels}, **one})
    return found + (of_adapters(family, args) if topology in ("tp1", "tp2") else [])


def of_adapters(family: str, args: Any) -> list[dict[str, Any]]:
    """Build the base wrapped in adapters."""
    return [
        {"config": {"lora": given}, **attempt(family, {}, args, tied=False, lora=given)}
        for given in LORA.get(family, ())
    ]


def _of_model(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in one.items() if name not in ("saved", "maps", "transposed")}


def switches(builds: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
    """List the variants that turned something on or off on one card, for the other topologies, and tied words."""
    found = [one["config"] for one in builds if one["family"] == family and "rows" in one]
    switched = (c for c in found if c == BIASES or set(map(type, c.values())) <= {bool, type(None)})
    return [*(c for c in switched if c and c != TIED), TIED]


def case_of(job: Any) -> list[dict[str, Any]]:
    """Build what a case of the corpus trained."""
    options = job.trainer_arguments()
    vpp, tied = options.pop("_vpp"), options.pop("_tie")
    one = attempt(job.family, job.model, arguments(options), tied=tied, vpp=vpp)
    return [{"config": {}, **one}]


# ---- around the ranks


def run_ranks(count: int, work: Callable[[], Any]) -> list[Any]:
    """Fork ``count`` ranks; return what each found, or nothing where a rank ended or hung."""
    box = Path(tempfile.mkdtemp(prefix="facts_"))

    def be_rank(rank: int) -> None:
        found = work()
        (box / f"{rank}.json.part").write_text(json.dumps(found, default=str))
        (box / f"{rank}.json.part").rename(box / f"{rank}.json")
        # The first to leave would break the connections of the others.
        while len([*box.glob("*.json")]) < count:
            time.sleep(0.02)

    try:
        fork_ranks(count, be_rank, box, SECONDS)
        outs = [box / f"{rank}.json" for rank in range(count)]
        return [json.loads(o.read_text()) if o.exists() else None for o in outs]
    finally:
        shutil.rmtree(box, ignore_errors=True)


def cases() -> list[tuple[str, Any]]:
    """Look up the jobs of the corpus cases that ``tests/facts`` is held against."""
    jobs = described()
    return [(name, jobs[name]) for name in (TESTS / "facts" / "cases.txt").read_text().split()]


def pack(builds: list[dict[str, Any]]) -> bytes:
    """Store each different row and each different table of rows once."""
    table_of_rows: dict[str, int] = {}
    tables: dict[str, int] = {}
    configs: dict[str, int] = {}
    maps_of: dict[str, int] = {}
    transposed_of: dict[str, int] = {}

    def number(of: dict[str, int], value: Any) -> int:
        return of.setdefault(json.dumps(value, separators=(",", ":")), len(of))

    for one in builds:
        if "maps" in one:
            one["maps"] = number(maps_of, one["maps"])
        if "transposed" in one:
            one["transposed"] = number(transposed_of, one["transposed"])
        if "saved" in one:
            one["saved"] = number(configs, one["saved"])
        for part in ("rows", "sharded"):
            if isinstance(one.get(part), dict):
                one[part] = [[key, *value] for key, value in one[part].items()]
            if isinstance(one.get(part), list):
                one[part] = number(tables, [number(table_of_rows, row) for row in one[part]])
    whole = {
        "rows": [json.loads(row) for row in table_of_rows],
        "tables": [json.loads(table) for table in tables],
        "configs": [json.loads(config) for config in configs],
        "maps": [json.loads(pair) for pair in maps_of],
        "transposed": [json.loads(endings) for endings in transposed_of],
        "builds": builds,
    }
    return lzma.compress(json.dumps(whole, separators=(",", ":")).encode(), preset=9)


def main(families: list[str]) -> int:
    import paddle

    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401
    import models
    import paddle.distributed.fleet
    import paddleformers.trainer  # noqa: F401

    jobs: list[Any] = [*cases(), *(families or [*TEXT, *EXPERTS, *IMAGES])]
    for job in jobs:
        if isinstance(job, str):
            models.get(job, SEQUENCE)  # imports its module once, for all ranks
    box = Path(os.environ["SHIM_BOX"])
    workers = [_work_on(jobs, worker, box) for worker in range(WORKERS)]
    if any(os.waitpid(worker, 0)[1] for worker in workers):
        return 1
    builds = [one for i in range(len(jobs)) for one in json.loads((box / f"job{i}.json").read_text())]
    shutil.rmtree(box)
    refused, lost = (sum(word in one for one in builds) for word in ("refused", "lost"))
    if lost:  # what was not built would look as if no class built it
        print(f"{lost} of {len(builds)} builds gave no answer in {SECONDS} s; run it on a quieter machine")
        return 1
    TARGET.write_bytes(pack(builds))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {len(builds)} builds, {refused} refused")
    return 0


def _work_on(jobs: list[Any], worker: int, box: Path) -> int:
    """Fork a process that does every ``WORKERS``-th job; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for i in range(worker, len(jobs), WORKERS):
            job = jobs[i]
            builds: list[dict[str, Any]] = []
            if isinstance(job, str):
                variants: list[dict[str, Any]] | None = None
                for topology in topologies_of(job):
                    started = time.monotonic()
                    of_topology = variants and [v for v in variants if "pp2" not in topology or v != TIED]
                    found = run_ranks(
                        TOPOLOGIES[topology][0], lambda f=job, t=topology, v=of_topology: facts_of(f, t, v)
                    )
                    add(builds, job, topology, found)
                    variants = switches(builds, job) if variants is None else variants
                    print(
                        job,
                        topology,
                        [len(r or ()) for r in found],
                        f"{time.monotonic() - started:.0f}s",
                        flush=True,
                    )
            else:
                name, described_job = job
                found = run_ranks(described_job.topology.ranks, lambda of=described_job: case_of(of))
                add(builds, described_job.family, f"case {name}", found)
                print(name, [r and r[0].get("refused", "built") for r in found], flush=True)
            (box / f"job{i}.json").write_text(json.dumps(builds))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def add(builds: list[dict[str, Any]], family: str, topology: str, found: list[Any]) -> None:
    """Note what each rank found; a rank without an answer ended or hung, and says so."""
    for rank, of_rank in enumerate(found):
        for one in of_rank or [{"config": {}, "lost": "the process ended, or gave no answer in time"}]:
            builds.append({"family": family, "topology": topology, "rank": rank, **one})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
