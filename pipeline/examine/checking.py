"""Compare a target with its manifest."""

from __future__ import annotations

import os

from paddle_reshard.pipeline.convert.integrity import IntegrityReport, check_target, manifest_of
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import CheckOptions
from paddle_reshard.storage.locate import open_source, source_access, target_access


@with_options(CheckOptions)
def check(
    target: PathLike,
    *,
    source: PathLike | None = None,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[CheckOptions],
) -> IntegrityReport:
    """Compare a target with its manifest: every file, every part, every byte.

    Parameters
    ----------
    source
        The checkpoint that the target was made from, to compare with parts that the storage copied without reporting an
        MD5. The location recorded in the manifest is never opened.

    Raises
    ------
    CheckpointError
        If the target has no manifest, or one without checksums, or if ``source`` does not exist.
    """
    store = open_source(os.fspath(target), *target_access(options))
    made_from = None if source is None else open_checkpoint(os.fspath(source), source_access(options))
    return check_target(store, manifest_of(store), made_from, observe)
