"""Options of the functions that only read. Where nothing else is said, each is the option of a conversion of that name.

They are declared, with defaults and help, in :mod:`~paddle_reshard.pipeline.convert.options`.
"""

# No "from __future__ import annotations": the annotations are needed when the options are listed.

from collections.abc import Sequence
from typing import TypedDict

from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.locate import StorageOptions


class ReadOptions(TypedDict, total=False):
    """How a checkpoint is reached and understood."""

    rules: PathLike | None
    """A rule table for the model family, instead of those that come with the package."""
    allow_links: bool
    """Follow links in the checkpoint that lead out of it."""
    storage_options: StorageOptions | None
    """What fsspec needs to reach a store that is not a local folder: credentials, endpoint, profile."""
    allow_scheme: Sequence[str]
    """Schemes of URLs that are opened in addition to the plain ones: ``("sftp",)``."""


class InspectOptions(ReadOptions, total=False):
    """Options of ``inspect``."""

    config: PathLike | None
    """The model's ``config.json``, for a checkpoint that has none."""


class VerifyOptions(InspectOptions, total=False):
    """Options of ``verify``."""

    memory: str
    """Memory budget, default ``"1GiB"``."""
    replicas: str
    """``"compare"`` (default): copies of a tensor that differ within a side are a difference; ``"first"``: only the
    first copy is read."""
    allow_missing: Sequence[str]
    """Patterns (``*`` stands for anything) of keys that no file of a side has to hold."""
    source_storage_options: StorageOptions | None
    """Options for the store of ``a`` only; replace ``storage_options``."""
    target_storage_options: StorageOptions | None
    """Options for the store of ``b`` only; replace ``storage_options``."""


class CheckOptions(TypedDict, total=False):
    """Options of ``check``."""

    allow_links: bool
    """Follow links that lead out of a folder."""
    storage_options: StorageOptions | None
    """What fsspec needs to reach stores that are not local folders."""
    allow_scheme: Sequence[str]
    """Schemes of URLs that are opened in addition to the plain ones."""
    source_storage_options: StorageOptions | None
    """Options for the store of ``source`` only; replace ``storage_options``."""
    target_storage_options: StorageOptions | None
    """Options for the store of the target only; replace ``storage_options``."""


class LoadOptions(ReadOptions, total=False):
    """Options of ``load_into``."""

    memory: str
    """How much memory loading may use beside the tensors, default ``"1GiB"``."""
    fill: PathLike | None
    """A safetensors file with the tensors that the checkpoint should hold and no file of it does."""
    allow_missing: Sequence[str]
    """Patterns of names (``*`` stands for any text): of entries that keep their values if the checkpoint has nothing
    for them, and of parameters that the checkpoint may lack."""
    allow_master_drift: bool
    """Load parameters that are not the cast of their master weights, and report them, instead of refusing."""
