"""Read values for missing tensors from a file given by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError
from paddle_reshard.pipeline.core.units import texts_of
from paddle_reshard.pipeline.layouts.checkpoint import MissingPolicy
from paddle_reshard.storage.locate import Access, open_file
from paddle_reshard.storage.store import Source


@dataclass(frozen=True)
class Filling:
    """How missing tensors are treated, and the file that holds some of them."""

    policy: MissingPolicy
    given: tuple[Source, str] | None = None
    """The store of the file, and its name there."""

    def serve(self, source: Source) -> Source:
        """The checkpoint joined with the given file, under the path that ``policy`` uses."""
        if self.given is None or self.policy.file is None:
            return source
        from paddle_reshard.storage.views import JoinedSource, Mount

        store, name = self.given
        prefix = self.policy.file.path.removesuffix(name)
        return JoinedSource((Mount("", source), Mount(prefix, store)))


def read_filling(location: str | None, allowed: Sequence[str], access: Access) -> Filling:
    """Read the header of a safetensors file of missing tensors.

    Parameters
    ----------
    location
        Path or URL of the file; ``None`` if there is none.
    allowed
        Patterns of structured keys that may be missing from the target too.
    access
        Access to its store.

    Raises
    ------
    CheckpointError
        If the file does not exist or is not a safetensors file.
    """
    if location is None:
        return Filling(MissingPolicy(allowed=texts_of(allowed)))
    from paddle_reshard.storage.formats.safetensors import parse_safetensors

    store, name = open_file(location, access.options, access.schemes)
    size_bytes = store.sizes()[name]
    shown = f"--fill {store.location}/{name}"
    try:
        payload = parse_safetensors(
            lambda offset, nbytes: store.read(name, offset, nbytes), size_bytes, shown
        )
    except FormatError as error:
        raise CheckpointError(f"{error}; expected a safetensors file") from error
    file = File(shown, size_bytes)
    return Filling(MissingPolicy(payload.tensors, file, texts_of(allowed)), (store, name))
