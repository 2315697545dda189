"""The table of formats: whose files are these, and who knows the name of a format."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from safetensors.numpy import save

from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.formats.registry import FORMATS, format_of
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.tasks.index import index_here

OF_TRANSFORMERS, OF_PADDLE = save({}, {"format": "pt"}), save({}, {"format": "np"})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": OF_TRANSFORMERS, "config.json": b"{}"}, "huggingface"),
        ({"model-00001-of-00002.safetensors": OF_TRANSFORMERS}, "huggingface"),
        ({"model.safetensors": OF_PADDLE}, "unified"),
        ({"model.safetensors": OF_TRANSFORMERS, "scheduler.pdparams": b""}, "huggingface"),
        ({"model-00001-of-00001.safetensors": b"", "optimizer-00001-of-00001.safetensors": b""}, "unified"),
        ({"optimizer.tp00_shard01.safetensors": b""}, "unified"),
        ({"model.safetensors": OF_TRANSFORMERS, "optimizer.pdopt": b""}, "hybrid-plain"),
        ({"model_state.pdparams": b"", "optimizer.pdopt": b""}, "hybrid-plain"),
        ({"model_state/0.metadata": b"", "model_state/0_0.safetensors": b""}, "flex"),
        ({"dist_ckpt/0_0.distcp": b"", "dist_ckpt/0.metadata": b""}, "auto-parallel"),
        ({"notes.txt": b""}, "hybrid-plain"),
    ],
)
def test_a_folder_is_of_one_format_by_its_files(
    files: dict[str, bytes], expected: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = format_of(SourceFiles(LocalSource(tmp_path), None, index_here, index_here))
    assert found.name == expected


# --------------------------------------------------------------------------------------- who knows a format's name

ROOT = Path(__file__).parents[2]
FOLDERS = {module.parent.name for module in (ROOT / "pipeline/formats").glob("*/format.py")}
ABOUT_SOMETHING_ELSE = {
    "pipeline/core/suggest.py": "words of other tools, and which of ours they may mean",
    "pipeline/core/errors.py": "the command that goes on from a refusal that concerns nothing but the optimizer",
    "pipeline/model/forms.py": "the entry of a rule that says what a tensor is in transformers",
    "pipeline/checkpoint/training_job.py": "the format that a job needs, in what is said of it",
    "pipeline/model/described.py": "the entry of a rule that says what a tensor is in transformers",
    "pipeline/changes/aoa/forms.py": "the entry of a rule that says what a tensor is in transformers",
    "pipeline/model/ernie.py": "the entry of a rule that says what a tensor is called where the recipe publishes it",
    "pipeline/model/weights.py": "the entry of a rule that says what a tensor is called in transformers",
    "pipeline/changes/as_stored.py": "what AOA statements see, which depends on the library whose files they are about",
    "pipeline/formats/registry.py": "the table",
    "pipeline/formats/writing.py": "formats that hold what others cannot, in a refusal",
    "pipeline/model/rules/extends.py": "the entry of a rule that says what a tensor is in transformers",
    "pipeline/cli/commands/conversion.py": "an example in the help of a command",
    "pipeline/cli/commands/ema.py": "an example in the help of a command",
    "pipeline/training/names.py": "names of parameters in a running job, which only files of its ranks tell",
    "pipeline/training/resume_point.py": "formats in which trainers keep files of ranks by default, and adapters",
    "pipeline/training/within_job.py": "formats in which ranks find files of their own, as a trainer tries them",
    "pipeline/request/read_options.py": "the help of an option of resume",
    "pipeline/examine/inspection.py": "the arrays of a downloaded model that are a tensor each, whatever the library",
    "pipeline/indexing/as_stored.py": "degrees in names of files that no format could read",
    "pipeline/training/async_ema.py": "writes the averages of a running job, as its trainer does",
    "pipeline/training/flex.py": "writes the averages of a running job, as its trainer does",
    "pipeline/training/paddle_objects.py": "describes tensors of a running job by the boxes of a dist checkpoint",
}


def named(module: Path) -> list[str]:
    """Formats that a module knows: by name in a text that is no docstring, by an import, or by a class."""
    tree = ast.parse(module.read_text("utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, FORMATS))})(?![\w./-])")
    folders = re.compile(rf"\.formats\.({'|'.join(FOLDERS)})(\.|$)")
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            found += words.findall(node.value)
        if isinstance(node, ast.ImportFrom) and folders.search(node.module or ""):
            found.append(node.module or "")
    return found


def test_no_code_outside_its_folder_names_a_format() -> None:
    """Adding a format is a folder and a line of the table."""
    knowing = {}
    modules = [
        module
        for top in ("pipeline", "storage", "tasks", "clusters")
        for module in (ROOT / top).rglob("*.py")
    ]
    assert len(modules) > 200
    for module in modules:
        path = module.relative_to(ROOT)
        if set(path.parts[2:-1]) & FOLDERS:
            continue
        if (found := named(module)) and str(path) not in ABOUT_SOMETHING_ELSE:
            knowing[str(path)] = found
    assert not knowing


@pytest.mark.parametrize("path", ABOUT_SOMETHING_ELSE)
def test_every_exception_is_needed(path: str) -> None:
    assert named(ROOT / path)


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_no_format_is_made_of_another(folder: str) -> None:
    others = FOLDERS - {folder}
    for module in (ROOT / "pipeline/formats" / folder).glob("*.py"):
        imported = [
            n.module or "" for n in ast.walk(ast.parse(module.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        assert not [name for name in imported if set(name.split(".")) & others], module
