"""Options of a store that speaks S3: names and meanings are those of s3fs, as for every other tool of this kind.

s3fs itself is not imported. It loads a client of its own, which takes as long as a small conversion makes requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from fsspec.config import apply_config

from paddle_reshard.pipeline.core.errors import UsageError

_OTHER_NAMES = {"username": "key", "password": "secret"}
_OF_ITS_CLIENT = (
    "cache_regions",
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "fixed_upload_size",
    "listings_expiry_time",
    "loop",
    "max_concurrency",
    "max_paths",
    "version_aware",
)
"""What the client of s3fs would do with files and listings; nothing here does."""


@dataclass(frozen=True)
class S3Options:
    """With what requests are made."""

    protocol: ClassVar[tuple[str, ...]] = ("s3", "s3a")
    """Under which names fsspec's configuration, files and variables of the environment, has defaults."""

    anon: bool = False
    """Whether requests are not signed."""
    endpoint_url: str | None = None
    key: str | None = None
    secret: str | None = None
    token: str | None = None
    use_ssl: bool = True
    client_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For botocore's ``Session.create_client``."""
    config_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For botocore's ``Config``."""
    s3_additional_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of every request that has them."""
    requester_pays: bool = False
    local_expiry_check: bool = False
    session: None = None
    session_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For botocore's ``Session``: a ``profile``."""

    def __post_init__(self) -> None:
        if self.session is not None:
            raise UsageError("storage options: session: give a profile, or key, secret and token instead")

    @property
    def of_every_request(self) -> dict[str, Any]:
        """Parameters of every request that has them."""
        payer = {"RequestPayer": "requester"} if self.requester_pays else {}
        return {**self.s3_additional_kwargs, **payer}


def read_options(options: Mapping[str, Any]) -> S3Options:
    """The options of a user, and those of fsspec's configuration where the user gives none.

    >>> read_options({"username": "me", "profile": "work"})
    S3Options(..., key='me', ..., session_kwargs={'profile': 'work'})

    Raises
    ------
    UsageError
        If a session is given, of which botocore could make nothing.
    ValueError
        If something is given under both its names.
    """
    given = {
        name: value
        for name, value in apply_config(S3Options, options).items()
        if name not in _OF_ITS_CLIENT and value is not None
    }
    for other, name in _OTHER_NAMES.items():
        if value := given.pop(other, None):
            if given.get(name):
                raise ValueError(f"{name} and {other} are two names of one option; give one")
            given[name] = value
    known = {own.name for own in fields(S3Options)} - {"session_kwargs"}
    rest = {name: value for name, value in given.items() if name not in known}
    return S3Options(**{name: value for name, value in given.items() if name in known}, session_kwargs=rest)
