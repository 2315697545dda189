"""Signatures of small files in the OpenSSF model signing format. All cryptography is that of ``model-signing``.

The library signs and checks files, so a copy is written to a private folder. What is checked are exactly the bytes that
the caller goes on with, whatever happens to the original in between. The private key is read by the library alone.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paddle_reshard.pipeline.core.errors import SignatureError, UsageError
from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json

KEYS = "an unencrypted elliptic-curve key in PEM format, on P-256, P-384 or P-521"


def sign_bytes(name: str, data: bytes, private_key: Path) -> tuple[bytes, str]:
    """Sign a file of this name and content. Returns the signature, a Sigstore bundle, and whose it is.

    Raises
    ------
    UnsupportedError
        If the extra ``sign`` is not installed.
    UsageError
        If the library cannot sign with the key.
    """
    require_library()
    from model_signing import signing

    with _copies(data=(name, data)) as folder:
        bundle = folder / "signature"
        try:
            config = _config(signing).use_elliptic_key_signer(private_key=private_key)
        except Exception as error:
            raise UsageError(f"{private_key}: {_reason(error)}; --key needs {KEYS}") from error
        config.sign(folder / "data" / name, bundle)
        signature = bundle.read_bytes()
    return signature, f"key sha256:{hint_of(signature)}"


def check_signature(where: str, name: str, data: bytes, signature: bytes, public_key: Path) -> str:
    """Check the signature of a file of this name and content. Returns whose it is.

    Keys are known by the SHA-256 of their PEM file, as in the signature itself.

    Parameters
    ----------
    where
        Location of the signature, for messages.

    Raises
    ------
    UnsupportedError
        If the extra ``sign`` is not installed.
    UsageError
        If the file of the public key does not hold one that the library takes.
    SignatureError
        If it is not a signature of these bytes by this key.
    """
    require_library()
    from cryptography.hazmat.primitives import serialization
    from model_signing import verifying

    key = _read_key(public_key)
    with _copies(data=(name, data), key=("key.pem", key), signature=("signature", signature)) as folder:
        path = folder / "key" / "key.pem"
        try:
            config = _config(verifying).use_elliptic_key_verifier(public_key=path)
        except Exception as error:
            raise UsageError(f"{public_key}: {_reason(error)}; --public-key needs {KEYS}") from error
        try:
            with redirect_stdout(io.StringIO()):  # it prints a remark on signatures of older versions
                config.verify(folder / "data" / name, folder / "signature" / "signature")
        except Exception as error:
            raise SignatureError(where, name, str(public_key), _reason(error)) from error
    loaded: Any = serialization.load_pem_public_key(key)
    pem = loaded.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"key sha256:{hashlib.sha256(pem).hexdigest()}"


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


def hint_of(signature: bytes) -> str:
    """The SHA-256 of the public key, as a signature that was just made has it."""
    values: Any = parse_json(signature)
    hint: str = values["verificationMaterial"]["publicKey"]["hint"]
    return hint


def require_library() -> None:
    """Check that the extra ``sign`` is installed.

    Raises
    ------
    UnsupportedError
        If it is not.
    """
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
