"""Options of ``delta`` and ``apply_delta``; each is the option of a conversion of that name.

They are declared, with defaults and help, in :mod:`~paddle_reshard.pipeline.convert.options`.
"""

# No "from __future__ import annotations": the annotations are needed when the options are listed.

from collections.abc import Sequence
from typing import TypedDict

from paddle_reshard.storage.locate import StorageOptions


class DeltaOptions(TypedDict, total=False):
    """How checkpoints are reached, and how a target is made."""

    memory: str
    """Memory budget, default ``"1GiB"``."""
    overwrite: bool
    """Replace a checkpoint or a delta that the target already holds."""
    resume: bool
    """Continue an unfinished run of the same request, if there is one."""
    take_over: bool
    """Resume even if that run was on another machine and may still be alive; implies ``resume``."""
    no_space_check: bool
    """Do not compare the free space of the target's disk with what will be written."""
    allow_links: bool
    """Follow links that lead out of a folder that is read."""
    storage_options: StorageOptions | None
    """What fsspec needs to reach stores that are not local folders: credentials, endpoint, profile."""
    allow_scheme: Sequence[str]
    """Schemes of URLs that are opened in addition to the plain ones: ``("sftp",)``."""
    source_storage_options: StorageOptions | None
    """Options for the stores that are read only; replace ``storage_options``."""
    target_storage_options: StorageOptions | None
    """Options for the store of the target only; replace ``storage_options``."""
