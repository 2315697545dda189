"""Buckets, a proxy and quick retries per test."""

import datetime
import ipaddress
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from paddle_reshard.storage.remote import retry
from tests.storage.contents import ONE_CARD, SMALL, TARGET, convert_locally, fill_bucket
from tests.storage.servers import HOST, Store


@pytest.fixture(scope="session")
def small_source(store: Store) -> str:
    """The small checkpoint on S3, for tests that only read it."""
    name = f"source-{secrets.token_hex(6)}"
    store.client.create_bucket(Bucket=name)
    fill_bucket(store, name, "here/", SMALL)
    return f"s3://{name}/here"


@pytest.fixture(scope="session")
def for_one_card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the small checkpoint becomes on a disk."""
    return convert_locally(SMALL, tmp_path_factory.mktemp("made") / "one", **ONE_CARD)


@pytest.fixture(scope="session")
def for_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same for four ranks."""
    return convert_locally(SMALL, tmp_path_factory.mktemp("made") / "four", **TARGET)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = retry.RetryPolicy(
        attempts=4, total_seconds=20, first_wait_seconds=0.01, longest_wait_seconds=0.05
    )
    monkeypatch.setattr(retry, "POLICY", quick)
    monkeypatch.setattr(retry, "HURRIED", quick)


@pytest.fixture(autouse=True)
def _empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of one test is seen by another, in memory or staged for it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "here")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return path
