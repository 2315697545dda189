"""Signatures of small files in the OpenSSF model signing format. All cryptography is that of ``model-signing``.

The library signs and checks files, so a copy is written to a private folder. What is checked are exactly the bytes that
the caller goes on with, whatever happens to the original in between. The private key is read by the library alone.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paddle_reshard.pipeline.core.errors import SignatureError, UsageError
from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json

KEYS = "an unencrypted elliptic-curve key in PEM format, on P-256, P-384 or P-521"


@dataclass(frozen=True, slots=True)
class Trusted:
    """The party that must have signed: the owner of a public key, or a holder of a certificate of an authority."""

    path: Path
    """A public key or, of authorities, their certificates; in PEM format."""
    of_authorities: bool = False

    @property
    def option(self) -> str:
        """The option that names the file."""
        return "--ca-certificate" if self.of_authorities else "--public-key"

    def __str__(self) -> str:
        return f"a certificate issued by {self.path}" if self.of_authorities else f"the key of {self.path}"


def sign_bytes(
    name: str, data: bytes, private_key: Path, certificate: Path | None = None
) -> tuple[bytes, str]:
    """Sign a file of this name and content. Returns the signature, a Sigstore bundle, and its owner.

    ``certificate`` has the certificate of the key, and after it those that lead to the one of an authority. A
    ``UsageError`` if the library cannot sign with the key, or the certificate is not that of the key.
    """
    require_library()
    from model_signing import signing

    with _copies(data=(name, data)) as folder:
        bundle = folder / "signature"
        try:
            config = _config(signing).use_elliptic_key_signer(private_key=private_key)
        except Exception as error:
            raise UsageError(f"{private_key}: {_reason(error)}; --key needs {KEYS}") from error
        if certificate is not None:
            try:
                config.use_certificate_signer(
                    private_key=private_key, signing_certificate=certificate, certificate_chain=[certificate]
                )
            except Exception as error:
                raise UsageError(
                    f"{certificate}: {_reason(error)}; --certificate needs the certificate of --key in PEM format"
                ) from error
        config.sign(folder / "data" / name, bundle)
        signature = bundle.read_bytes()
    if certificate is None:
        values: Any = parse_json(signature)
        return signature, f"key sha256:{values['verificationMaterial']['publicKey']['hint']}"
    return signature, _owner(_certificates(signature)[0])


def check_signature(where: str, name: str, data: bytes, signature: bytes, trusted: Trusted) -> str:
    """Check the signature of a file of this name and content. Returns its owner.

    Keys are known by the SHA-256 of their PEM file, as in the signature itself; certificates by their subject and the
    SHA-256 of their DER form. The library takes a signature whose certificate has expired since, because nothing says
    when a signature was made.

    Raises
    ------
    UsageError
        If the file of the public key or of the authorities does not hold one that the library takes.
    SignatureError
        If it is not a signature of these bytes by whom is trusted. ``where`` it is says the message.
    """
    require_library()
    from model_signing import verifying

    pem = _read_key(trusted.path)
    with _copies(data=(name, data), trusted=("trusted.pem", pem)) as folder:
        path = folder / "trusted" / "trusted.pem"
        config = _config(verifying)
        try:
            if trusted.of_authorities:
                config.use_certificate_verifier(certificate_chain=[path])
            else:
                config.use_elliptic_key_verifier(public_key=path)
        except Exception as error:
            needs = "certificates in PEM format" if trusted.of_authorities else KEYS
            raise UsageError(f"{trusted.path}: {_reason(error)}; {trusted.option} needs {needs}") from error
        bundle = folder / "signature"
        try:
            chain = _certificates(signature) if trusted.of_authorities else []
            bundle.write_bytes(_with_certificates(signature, chain) if chain else signature)
            with redirect_stdout(io.StringIO()):  # it prints a remark on signatures of older versions
                config.verify(folder / "data" / name, bundle)
        except Exception as error:
            raise SignatureError(where, name, str(trusted), trusted.option, _reason(error)) from error
    return _owner(chain[0]) if trusted.of_authorities else f"key sha256:{_digest_of_key(pem)}"


def _digest_of_key(pem: bytes) -> str:
    from cryptography.hazmat.primitives import serialization

    key: Any = serialization.load_pem_public_key(pem)
    written = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(written).hexdigest()


def _owner(certificate: bytes) -> str:
    """The owner of a certificate in DER form."""
    from cryptography import x509

    subject = x509.load_der_x509_certificate(certificate).subject.rfc4514_string()
    return f"certificate {subject} sha256:{hashlib.sha256(certificate).hexdigest()}"


def _certificates(signature: bytes) -> list[bytes]:
    """The certificates of a Sigstore bundle in DER form, that of the signer first; a ``ValueError`` if it has none."""
    try:
        values: Any = parse_json(signature)
        listed = values["verificationMaterial"]["x509CertificateChain"]["certificates"]
        certificates = [base64.b64decode(entry["rawBytes"], validate=True) for entry in listed]
    except (JsonError, KeyError, TypeError, ValueError) as error:
        raise ValueError("made without a certificate") from error
    if not certificates:
        raise ValueError("made without a certificate")
    return certificates


def _with_certificates(signature: bytes, chain: list[bytes]) -> bytes:
    """A bundle with these certificates and nothing else that could name a signer.

    Names of JSON have several spellings. The library sees the certificates in the one in which they were read here, so
    that the one it checks is the one that is named.
    """
    values: Any = parse_json(signature)
    certificates = [{"rawBytes": base64.b64encode(der).decode()} for der in chain]
    material = {"x509CertificateChain": {"certificates": certificates}, "tlogEntries": []}
    kept = {name: values[name] for name in ("mediaType", "dsseEnvelope") if name in values}
    return json.dumps({**kept, "verificationMaterial": material}).encode()


def is_signature(data: bytes) -> bool:
    """Whether this is a Sigstore bundle.

    >>> is_signature(b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}'), is_signature(b"notes")
    (True, False)
    """
    try:
        values = parse_json(data)
    except JsonError:
        return False
    kind = values.get("mediaType") if isinstance(values, dict) else None
    return isinstance(kind, str) and kind.startswith("application/vnd.dev.sigstore.bundle")


def require_library() -> None:
    """Check that the extra ``sign`` is installed; an ``UnsupportedError`` if not."""
    for package in ("model_signing", "OpenSSL"):  # it imports OpenSSL without declaring it
        require(package, "sign", "a signature")


def _config(module: Any) -> Any:
    """The library's configuration of signing or of verification; its classes have no types."""
    return module.Config()


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _copies(**files: tuple[str, bytes]) -> Iterator[Path]:
    """A private folder that holds each file, ``(name, content)``, in a folder of its own."""
    with TemporaryDirectory(prefix="paddle-reshard-") as root:
        for folder, (name, content) in files.items():
            Path(root, folder).mkdir()
            Path(root, folder, name).write_bytes(content)
        yield Path(root)


def _reason(error: Exception) -> str:
    """An error of the library in one line; its class where it has no text."""
    if isinstance(error, AttributeError):  # a key of another algorithm lacks what it asks for
        return "not an elliptic-curve key"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
