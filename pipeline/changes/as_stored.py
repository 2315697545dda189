"""A Hugging Face checkpoint as its files hold it, which is what AOA statements are about."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.formats.huggingface.format import HUGGINGFACE
from paddle_reshard.pipeline.formats.huggingface.source import read_as_stored


def as_statements_see(altered: Altered, reading: Reading) -> Altered:
    """A Hugging Face checkpoint with the tensors that its files hold, as Paddle's loader reads them; others as given.

    Raises
    ------
    UnsupportedError
        If an earlier change has brought further tensors, which are in the layout of the trainer.
    """
    source = altered.source
    if source.format != HUGGINGFACE or source.catalog.mixtures:
        return altered
    if altered.store is not altered.own or source.model.has_lora:
        raise UnsupportedError(
            "--aoa with a Hugging Face checkpoint: its statements are about the tensors in the files, to which another "
            "option adds some in the trainer's layout; convert in two steps, the first without --aoa and with --format "
            "flex, where statements are about the tensors in the trainer's layout"
        )
    files = SourceFiles(altered.own, reading.config, reading.index_files, reading.index_files)
    catalog = read_as_stored(files)
    return altered.each(lambda checkpoint: replace(checkpoint, catalog=catalog))
