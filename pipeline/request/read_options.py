"""Options of functions that only read.

Options with the name of a conversion option mean the same, unless documented here. Their defaults and help are declared
in :mod:`~paddle_reshard.pipeline.request.options`.
"""

# No "from __future__ import annotations": the annotations are needed when the options are listed.

from collections.abc import Sequence
from typing import TypedDict

from paddle_reshard.pipeline.core.choices import Replicas
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.locate import StorageOptions


class ReadOptions(TypedDict, total=False):
    """How a checkpoint is accessed and interpreted."""

    rules: PathLike | None
    """A rule table for the model family, instead of the built-in tables."""
    allow_links: bool
    """Follow links that lead out of the checkpoint's folder."""
    storage_options: StorageOptions | None
    """fsspec options to access stores that are not local folders: credentials, endpoint, profile."""
    allow_scheme: Sequence[str]
    """URL schemes to open in addition to those that are always allowed: ``("sftp",)``."""


class InspectOptions(ReadOptions, total=False):
    """Options of ``inspect``."""

    config: PathLike | None
    """The model's ``config.json``, for a checkpoint without one."""


class VerifyOptions(InspectOptions, total=False):
    """Options of ``verify``."""

    memory: str
    """Memory budget of each worker, default ``"1GiB"``."""
    cluster: str
    """Where tensors are compared: ``"inline"`` (default), ``"ray"`` or ``"ray:ADDRESS"``, as in ``convert``."""
    workers: int | None
    """On Ray, the number of workers. Inline, the number of groups at a time."""
    label_selector: Sequence[str]
    """On Ray, the labels of the nodes on which workers run, as in ``convert``."""
    replicas: Replicas
    """``"compare"`` (default): differing copies of a tensor within one checkpoint count as a difference; ``"first"``:
    only the first copy is read."""
    allow_missing: Sequence[str]
    """Patterns of keys (``*`` matches anything) that either checkpoint may lack."""
    source_storage_options: StorageOptions | None
    """``storage_options`` for ``a`` only."""
    target_storage_options: StorageOptions | None
    """``storage_options`` for ``b`` only."""


class CheckOptions(TypedDict, total=False):
    """Options of ``check``."""

    allow_links: bool
    """Follow links that lead out of a folder."""
    storage_options: StorageOptions | None
    """fsspec options to access stores that are not local folders."""
    allow_scheme: Sequence[str]
    """URL schemes to open in addition to those that are always allowed."""
    source_storage_options: StorageOptions | None
    """``storage_options`` for ``source`` only."""
    target_storage_options: StorageOptions | None
    """``storage_options`` for the target only."""


class LoadOptions(ReadOptions, total=False):
    """Options of ``load_into``."""

    memory: str
    """Memory that loading may use in addition to the tensors, default ``"1GiB"``."""
    fill: PathLike | None
    """A checkpoint, Hugging Face model or safetensors file that has what the checkpoint lacks."""
    allow_missing: Sequence[str]
    """Patterns of names (``*`` matches anything): entries that keep their values if the checkpoint has none for them,
    and parameters that the checkpoint may lack."""
    allow_master_drift: bool
    """Load parameters that differ from their rounded master weights and report them, instead of refusing."""


class FingerprintOptions(InspectOptions, total=False):
    """Options of ``fingerprint``."""

    memory: str
    """Memory budget of each worker, default ``"1GiB"``."""
    allow_missing: Sequence[str]
    """Patterns of keys (``*`` matches anything) that the checkpoint may lack."""
    cluster: str
    """Where the tensors are read: ``"inline"`` (default), ``"ray"`` or ``"ray:ADDRESS"``, as in ``convert``."""
    workers: int | None
    """On Ray, the number of workers. Inline, the number of groups at a time."""
    label_selector: Sequence[str]
    """On Ray, the labels of the nodes on which workers run, as in ``convert``."""


class DiffOptions(InspectOptions, total=False):
    """Options of ``diff``."""

    memory: str
    """Memory budget, default ``"1GiB"``."""
    allow_missing: Sequence[str]
    """Patterns of keys (``*`` matches anything) that either checkpoint may lack."""
    source_storage_options: StorageOptions | None
    """``storage_options`` for ``a`` only."""
    target_storage_options: StorageOptions | None
    """``storage_options`` for ``b`` only."""
