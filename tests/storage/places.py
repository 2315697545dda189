"""A folder in each kind of store, filled and looked at without the code under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from paddle_reshard.storage.locate import Access, open_source, open_target
from paddle_reshard.storage.store import Permission, Source, TargetStore
from tests.storage.contents import in_bucket, put_in_bucket, uploads
from tests.storage.servers import Store


@dataclass(frozen=True)
class Place:
    """Where a checkpoint can be, in a room with nothing else in it."""

    room: str
    """The location of the room; that of the checkpoint is ``url``."""
    held: Callable[[], dict[str, bytes]]
    """Path below the room → bytes of every file."""
    put: Callable[[str, bytes], object]
    """Put a file of a path below the room there."""
    begun: Callable[[], object]
    """What is staged or uploaded, and no file yet."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def url(self) -> str:
        """The location of the checkpoint."""
        return f"{self.room}/c"

    @property
    def files(self) -> dict[str, bytes]:
        """Path → bytes of everything in the checkpoint but what an unfinished conversion keeps for itself."""
        return {
            path.removeprefix("c/"): content
            for path, content in self.held().items()
            if path.startswith("c/") and not path.rpartition("/")[2].startswith(".paddle_reshard_")
        }

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Put files into the checkpoint."""
        for path, content in files.items():
            self.put(f"c/{path}", content)

    def open_source(self) -> Source:
        """The checkpoint to be read."""
        return open_source(self.url, self.options)

    def open_target(self, **permission: bool) -> TargetStore:
        """The checkpoint to be made."""
        return open_target(self.url, Access(self.options), Permission(**permission))


def on_disk(folder: Path) -> Place:
    """In a folder."""
    room = folder / "room"
    room.mkdir()

    def held() -> dict[str, bytes]:
        below = {str(path.relative_to(room)): path for path in sorted(room.rglob("*")) if path.is_file()}
        return {path: file.read_bytes() for path, file in below.items() if not path.startswith(".c.reshard")}

    def put(path: str, content: bytes) -> None:
        (room / path).parent.mkdir(parents=True, exist_ok=True)
        (room / path).write_bytes(content)

    return Place(str(room), held, put, lambda: [*room.glob(".c.reshard/*")])


def in_memory_of_fsspec(folder: Path) -> Place:
    """Where fsspec reaches, staged in a folder."""
    memory = fsspec.filesystem("memory")

    def held() -> dict[str, bytes]:
        return {path.removeprefix("/room/"): memory.cat_file(path) for path in sorted(memory.find("/room"))}

    return Place(
        "memory://room",
        held,
        lambda path, content: memory.pipe_file(f"/room/{path}", content),
        lambda: [*folder.iterdir()],
    )


def on_s3(store: Store, bucket: str) -> Place:
    """On a server."""
    return Place(
        f"s3://{bucket}",
        lambda: in_bucket(store, bucket),
        lambda path, content: put_in_bucket(store, bucket, "", {path: content}),
        lambda: uploads(store, bucket),
        store.options,
    )
