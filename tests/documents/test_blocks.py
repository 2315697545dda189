"""Every block of every document is run, compared, or listed in ``pages.py`` with the reason why not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conftest import REPO
from tests.documents.blocks import blocks_of, command_lines, documents
from tests.documents.names import names_of
from tests.documents.pages import PAGES, Page
from tests.documents.session import ON_A_CLUSTER, Session, lay_out
from tests.jobs.head import BIN, running_head
from tests.storage.servers import Store

TRANSLATED = {"README.zh.md": "README.md"} | {
    str(path.relative_to(REPO)): str(path.relative_to(REPO)).replace("/zh/", "/")
    for path in sorted((REPO / "docs/zh").rglob("*.md"))
}
SHOWN = [
    name
    for name in (str(path.relative_to(REPO)) for path in documents())
    if name not in TRANSLATED and blocks_of((REPO / name).read_text("utf-8"))
]


ON_CLUSTERS = ("README.md", "docs/guides/clusters.md", "docs/operations.md", "docs/unattended.md")
"""Documents with lines that need a Ray head, or start one; without ``make cluster`` they are parsed."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, and an environment that may be changed."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield tmp_path


@pytest.fixture
def buckets(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes the buckets that are asked for, in the store that the environment names, and empties them in the end."""
    made: list[str] = []
    store: Store | None = None

    def make(names: set[str]) -> Store | None:
        nonlocal store
        if names:
            store = request.getfixturevalue("store")
            os.environ |= {
                "AWS_ENDPOINT_URL": store.url,
                "AWS_ACCESS_KEY_ID": store.key,
                "AWS_SECRET_ACCESS_KEY": store.secret,
            }
            for name in sorted(names - set(made)):
                store.client.create_bucket(Bucket=name)
                made.append(name)
        return store

    yield make
    for name in made:
        assert store is not None
        for found in store.client.list_objects_v2(Bucket=name).get("Contents", []):
            store.client.delete_object(Bucket=name, Key=found["Key"])
        store.client.delete_bucket(Bucket=name)


def buckets_of(name: str) -> set[str]:
    blocks = blocks_of((REPO / name).read_text("utf-8"))
    return set(re.findall(r"s3://(\w+)", "\n".join(block.text for block in blocks)))


def run_document(name: str, folder: Path, buckets: Any, cluster: dict[str, str] | None = None) -> None:
    text = (REPO / name).read_text("utf-8")
    page = PAGES.get(name, Page())
    blocks = blocks_of(text)
    store = buckets(buckets_of(name))
    if store is not None:
        page = page.at(store)
    lay_out(page, folder, store)
    session = Session(page, names_of(name, folder), cluster)
    for block in blocks:
        session.run(block)
    for line in page.after:
        session.line(f"paddle-reshard {line}")
    unused = {*page.shows, *page.saved, *page.not_run} - session.visited
    assert not unused, f"pages.py lists for {name} what it does not show: {unused}"


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_document_shows_is_true(name: str, reader: Path, buckets: Any) -> None:
    run_document(name, reader, buckets)


@pytest.mark.cluster
@pytest.mark.parametrize("name", ON_CLUSTERS)
def test_lines_for_a_cluster_are_true(name: str, reader: Path, buckets: Any) -> None:
    """On a real head, whose machines have the credentials of the store; those that start a Ray of their own too."""
    buckets(buckets_of(name))
    with running_head(with_package=True) as head:
        os.environ |= head.env | {"PATH": f"{BIN}:{head.env['PATH']}"}
        cluster = {
            "http://HEAD:8265": head.address,
            "HEAD:6379": head.cluster,
            "RAY_AUTH_TOKEN=…": f"RAY_AUTH_TOKEN={head.env['RAY_AUTH_TOKEN']}",
        }
        run_document(name, reader, buckets, cluster)


def test_every_document_with_such_lines_is_run_there() -> None:
    found = {
        name
        for name in SHOWN
        for block in blocks_of((REPO / name).read_text("utf-8"))
        for line in command_lines(block)
        if ON_A_CLUSTER.search(line)
    }
    assert found == set(ON_CLUSTERS)


def test_documents_that_are_listed_exist() -> None:
    assert set(PAGES) <= set(SHOWN)


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translation_shows_the_same_blocks(name: str) -> None:
    """``README.zh.md`` shows some of them."""
    own = [block.text for block in blocks_of((REPO / name).read_text("utf-8"))]
    shown = [block.text for block in blocks_of((REPO / TRANSLATED[name]).read_text("utf-8"))]
    assert own == shown if name != "README.zh.md" else set(own) <= set(shown)
