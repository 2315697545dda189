"""The table of formats: whose files are these, and who knows the name of a format."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save

from paddle_reshard.pipeline.layouts.formats import FORMATS, format_of
from paddle_reshard.pipeline.layouts.reading import SourceFiles
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
        ({"model.safetensors": OF_TRANSFORMERS, "optimizer.pdopt": b""}, "hybrid"),
        ({"model_state.pdparams": b"", "optimizer.pdopt": b""}, "hybrid"),
        ({"model_state/0.metadata": b"", "model_state/0_0.safetensors": b""}, "flex"),
        ({"dist_ckpt/0_0.distcp": b"", "dist_ckpt/0.metadata": b""}, "flex"),
        ({"notes.txt": b""}, "hybrid"),
    ],
)
def test_a_folder_is_of_one_format_by_its_files(
    files: dict[str, bytes], expected: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    found = format_of(SourceFiles(LocalSource(tmp_path), None, index_here, index_here))
    assert type(found) is type(FORMATS[expected])
