"""A Hugging Face checkpoint as its files hold it, which is what AOA statements are about."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.formats.huggingface import HUGGINGFACE
from paddle_reshard.pipeline.formats.huggingface.source import read_as_stored


def check_library(source: Checkpoint, library: str) -> None:
    """Refuse a library with ``--aoa`` that would have to translate: statements and it would both rename tensors.

    Only a Hugging Face checkpoint does not say by its keys whose it is.

    Raises
    ------
    UsageError
        If the source is of another library, or of a format that is read without one.
    """
    table = source.model.table
    if source.format == HUGGINGFACE and library in (table.convention, *table.shared_with):
        return
    whose = f"the source is {table.convention}'s"
    if source.format == HUGGINGFACE:
        whose = f"the rule table that fits the source is {table.convention}'s"
    raise UsageError(
        f"--convention {library} and --aoa would both give tensors other keys: {whose}; leave --convention out, or "
        "convert in two steps"
    )


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
