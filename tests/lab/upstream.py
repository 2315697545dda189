"""What changed in the trainer's libraries of what the formats depend on?

    python3 tests/lab/upstream.py compare OLD NEW
    python3 tests/lab/upstream.py record SITE_PACKAGES > tests/lab/upstream.json

OLD and NEW are each a ``site-packages`` folder, a source tree with the libraries in it, or a recorded list such as
``upstream.json``, which has those that made the corpus. Sources are parsed, nothing is imported. Definitions are equal
if they differ in comments, docstrings, annotations and format alone. Where both sides are folders, the lines that
changed are printed too. Exits with 0 for no difference, 1 for some, 2 if a side cannot be read.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FLEX = "paddle/distributed/flex_checkpoint"
FLEET = "paddle/distributed/fleet"
TRAINER = "paddleformers/trainer"
WATCHED: dict[str, tuple[str, ...]] = {
    # files of tensors
    "paddle/framework/io.py": (
        "_build_saved_state_dict",
        "_pickle_save",
        "_is_state_dict",
        "_legacy_save",
        "save",
        "_parse_load_result",
        "load",
    ),
    "paddle/framework/io_utils.py": (
        "_unpack_saved_dict",
        "_pack_loaded_dict",
        "_reconstruct_dense_tensor_data",
    ),
    "paddle/framework/restricted_unpickler.py": ("*",),
    # FlexCheckpoint
    f"{FLEX}/dcp/metadata.py": ("*",),
    f"{FLEX}/dcp/metadata_reader.py": ("*",),
    f"{FLEX}/dcp/sharded_weight.py": ("*",),
    f"{FLEX}/dcp/save_state_dict.py": ("*",),
    f"{FLEX}/dcp/load_state_dict.py": (
        "get_checkpoint_files",
        "_modify_mw_name_for_compatibility",
        "load_state_dict",
    ),
    f"{FLEX}/dcp/utils.py": ("*",),
    f"{FLEX}/aoa/aoa_engine.py": ("*",),
    f"{FLEX}/aoa/lexer.py": ("*",),
    f"{FLEX}/aoa/macros.py": ("*",),
    f"{FLEX}/aoa/parser.py": ("*",),
    # states of optimizers, and how ranks share them
    "paddle/optimizer/optimizer.py": ("Optimizer.state_dict", "Optimizer.set_state_dict"),
    "paddle/optimizer/adamw.py": ("AdamW.sharded_state_dict",),
    "paddle/optimizer/muon.py": ("*",),
    f"{FLEET}/base/topology.py": ("*",),
    f"{FLEET}/meta_parallel/parallel_layers/pp_layers.py": ("SegmentLayers", "PipelineLayer"),
    f"{FLEET}/meta_optimizers/dygraph_optimizer/dygraph_sharding_optimizer.py": ("*",),
    f"{FLEET}/meta_parallel/sharding/group_sharded_stage3.py": ("GroupShardedStage3", "_PartitionParam"),
    f"{FLEET}/utils/tensor_fusion_helper.py": ("*",),
    # the trainer
    f"{TRAINER}/trainer_callback.py": ("TrainerState",),
    f"{TRAINER}/utils/sharding_io.py": ("*",),
    f"{TRAINER}/utils/zero_cost_checkpoint.py": ("*",),
    f"{TRAINER}/utils/reshard/common.py": ("*",),
    f"{TRAINER}/unified_checkpoint/load_save_single_card.py": ("*",),
    f"{TRAINER}/unified_checkpoint/sharding_split_param_utils.py": ("*",),
    f"{TRAINER}/unified_checkpoint/unified_checkpoint.py": ("*",),
    f"{TRAINER}/unified_checkpoint/utils.py": ("*",),
    "paddleformers/utils/env.py": ("*",),
    "paddleformers/transformers/conversion_utils.py": ("*",),
    "paddleformers/peft/lora/lora_config.py": ("LoRAConfig",),
    "paddleformers/peft/lora/lora_model.py": ("LoRAModel",),
}
"""Module → definitions that the formats depend on; ``*``: all of it. A class stands for all of its methods."""

LIBRARIES = ("paddlepaddle", "paddlepaddle_gpu", "paddleformers")


@dataclass
class Side:
    """One of the two versions."""

    versions: dict[str, str] = field(default_factory=dict)
    """Library → version, where it is told."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """Module → definition → digest."""
    sources: dict[tuple[str, str], str] = field(default_factory=dict)


def read_folder(folder: Path) -> Side:
    """Digest what a folder of libraries has of the watched definitions."""
    side = Side()
    for path in sorted(folder.glob("paddle*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name in LIBRARIES:
            side.versions[name] = version
    for module, wanted in WATCHED.items():
        path = folder / module
        if not path.exists():
            continue
        found = side.digests[module] = {}
        for name, node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            if "*" in wanted or name in wanted or name.partition(".")[0] in wanted:
                found[name] = hashlib.sha256(repr(normalised(node)).encode()).hexdigest()[:16]
                side.sources[module, name] = ast.unparse(node)
    if not side.digests:
        raise FileNotFoundError(f"{folder}: none of the watched modules is below it")
    return side


def definitions(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every function, method, class (without its methods) and constant of a module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in module.body:
        if isinstance(node, functions):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, functions)]
            for method in methods:
                yield f"{node.name}.{method.name}", method
            rest = [part for part in node.body if part not in methods] or [ast.Pass()]
            yield node.name, ast.ClassDef(node.name, node.bases, node.keywords, rest, node.decorator_list)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and node.value is not None:
                yield target.id, node


def normalised(node: object) -> object:
    """What a definition does, the same in every version of Python: no docstrings, annotations and positions."""
    if isinstance(node, list):
        return [normalised(part) for part in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    if isinstance(node, ast.Constant):
        return "Constant", normalised(node.value)
    skipped = {"type_comment", "type_params", "kind", "returns", "annotation", "ctx"}
    fields = {name: value for name, value in ast.iter_fields(node) if name not in skipped}
    if isinstance(node, ast.AnnAssign) and node.value is None:
        skipped.remove("annotation")  # a field of a dataclass is nothing else
        fields["annotation"] = node.annotation
    if isinstance(fields.get("body"), list):
        fields["body"] = [part for part in fields["body"] if not _is_text(part)]
    return type(node).__name__, {
        name: normalised(value) for name, value in sorted(fields.items()) if value not in (None, [])
    }


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def read_record(path: Path) -> Side:
    """A list that :func:`main` recorded."""
    values = json.loads(path.read_text())
    return Side(values["versions"], values["digests"])


def differences(old: Side, new: Side) -> Iterator[str]:
    """A line for each definition that is not the same, with the lines of its source that are not."""
    lacking = libraries(old) ^ libraries(new)
    yield from (f"{name}: is on one side only" for name in sorted(lacking))
    for module in WATCHED:
        if module.partition("/")[0] in lacking:
            continue
        before, after = old.digests.get(module), new.digests.get(module)
        if before is None or after is None:
            if before is not after:
                yield f"{module}: {'is new' if before is None else 'is gone'}"
            continue
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                yield f"{module}: {name} is gone"
            elif name not in before:
                yield f"{module}: {name} is new"
            elif before[name] != after[name]:
                yield f"{module}: {name} changed"
                yield from _changed_lines(old.sources.get((module, name)), new.sources.get((module, name)))


def libraries(side: Side) -> set[str]:
    """The packages that a side has."""
    return {module.partition("/")[0] for module in side.digests}


def in_words(side: Side) -> str:
    """The versions of a side."""
    return ", ".join(f"{name} {version}" for name, version in side.versions.items())


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(f"{text}\n")


def _changed_lines(old: str | None, new: str | None) -> Iterator[str]:
    if old is not None and new is not None:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1)
        yield from (f"    {line}" for line in lines if not line.startswith(("---", "+++")))


def main(arguments: list[str]) -> int:
    """As the module says."""
    try:
        if arguments[:1] == ["record"] and len(arguments) == 2:
            side = read_folder(Path(arguments[1]))
            say(json.dumps({"versions": side.versions, "digests": side.digests}, indent=1))
            return 0
        if arguments[:1] != ["compare"] or len(arguments) != 3:
            sys.stderr.write(f"{__doc__}\n")
            return 2
        old, new = (
            read_folder(path) if path.is_dir() else read_record(path) for path in map(Path, arguments[1:])
        )
    except (OSError, SyntaxError, ValueError, KeyError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    say(f"{in_words(old) or arguments[1]} → {in_words(new) or arguments[2]}")
    found = list(differences(old, new))
    say("\n".join(found) if found else "nothing that the formats depend on has changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
