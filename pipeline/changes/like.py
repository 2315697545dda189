"""Complete a checkpoint with what the model that training began from has (``--like``)."""

from __future__ import annotations

from dataclasses import replace

from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.checkpoint import DONOR
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.formats.registry import read_donor
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount
from paddle_reshard.tasks.index import index_here


def completed(donor_store: Source, altered: Altered, reading: Reading) -> Altered:
    """The checkpoint with what it lacks of the donor, and the store that serves both."""
    donor = read_donor(SourceFiles(donor_store, None, index_here, reading.index_files))
    source, wanted = donor.complete(altered.source, altered.wanted)
    store = JoinedSource((Mount("", altered.store), Mount(DONOR, donor_store)))
    return replace(altered, store=store, source=source, wanted=wanted)
