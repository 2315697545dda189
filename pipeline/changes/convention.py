"""Give a checkpoint the names and layouts of another library (``--convention``)."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.changes.aoa.conventions import configured_for, to_convention
from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.indexing.small_files import trainer_state_for


def in_convention(convention: str, altered: Altered, reading: Reading) -> Altered:
    """A checkpoint as another library has it: names, layouts, config, and the state of its trainer."""
    drops_mtp = reading.missing.drops_mtp
    translated = to_convention(altered.source, convention, reading.tables, reading.config, drops_mtp)
    rewritten = trainer_state_for(altered.own, convention)
    translated = replace(translated, history=replace(translated.history, rewritten=rewritten))
    return replace(altered, source=translated, wanted=configured_for(translated, convention))
