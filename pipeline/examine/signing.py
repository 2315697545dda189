"""Sign what a target or a fingerprint file says, and check whose statement it is.

The manifest of a target is the statement of what was made of what: source with its files and versions, plan id, form of
the target, version of this package, checksums of its parts and, if recorded, the root.
A signature covers exactly its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.pipeline.convert.integrity import check_target_quickly
from paddle_reshard.pipeline.convert.manifest import Manifest, parse_manifest
from paddle_reshard.pipeline.core.errors import CheckpointError, SignatureError, TargetError, UsageError
from paddle_reshard.pipeline.core.file_names import MANIFEST, SIGNATURE, SIGNATURE_SUFFIX
from paddle_reshard.pipeline.core.shown import Facts, Shown
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.fingerprint import read_document
from paddle_reshard.storage.documents.fingerprints import parse_fingerprints
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.locate import StorageOptions, is_local, local_path, open_source
from paddle_reshard.storage.os_errors import translated
from paddle_reshard.storage.signatures import (
    Trusted,
    check_signature,
    is_signature,
    require_library,
    sign_bytes,
)
from paddle_reshard.storage.store import Source


@dataclass(frozen=True, slots=True, repr=False)
class SignReport(Shown):
    """A signature that was made."""

    path: str
    """The file that was signed."""
    signature: str
    """Where the signature was written."""
    signed_by: str
    """Whose it is: ``key sha256:`` and the SHA-256 of the public key as a PEM file, or ``certificate``, its subject and
    ``sha256:`` of its DER form."""

    def _in_short(self) -> str:
        return f"{self.path} signed by {self.signed_by}"

    def facts(self) -> Facts:
        """What was signed, by whom, and where the signature is."""
        return [("signed", self.path), ("by", self.signed_by), ("signature", self.signature)]


def sign(
    path: PathLike,
    *,
    key: PathLike,
    certificate: PathLike | None = None,
    signature: PathLike | None = None,
    storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
) -> SignReport:
    """Sign fingerprints, or the manifest of a target, in the OpenSSF model signing format. Needs no network.

    Parameters
    ----------
    path
        A local file written by :func:`fingerprint`, a local manifest, or a finished target, whose manifest is signed.
    key
        A private elliptic-curve key in PEM format, unencrypted.
    certificate
        The certificate of the key in PEM format and, after it in the same file, those that lead to the one of an
        authority. The signature contains them.
    signature
        A local file to write the signature to. The default is beside the signed file, also in an object store, with
        ``.sig`` appended to its name. An existing signature is replaced.

    Raises
    ------
    UnsupportedError
        If the extra ``sign`` is not installed.
    UsageError
        If ``key`` or ``certificate`` cannot be used.
    CheckpointError
        If ``path`` is neither, was changed, or is a target that visibly differs from its manifest.
    TargetError
        If the signature cannot be written, or a file that is no signature is in the way.
    """
    require_library()
    location = os.fspath(path)
    mine = Path(key), None if certificate is None else Path(certificate)
    if is_local(location) and local_path(location).is_file():
        file = local_path(location)
        data = read_document(file)
        _check_document(data, location)
        bundle, signer = sign_bytes(file.name, data, *mine)
        written = _write(Path(f"{file}{SIGNATURE_SUFFIX}" if signature is None else signature), bundle)
        return SignReport(location, written, signer)
    store = open_source(location, storage_options or {}, allow_scheme)
    data, manifest = manifest_of(store)
    if manifest.changed:
        raise CheckpointError(f"{store.location}/{MANIFEST}: {manifest.changed}")
    if damages := check_target_quickly(store, manifest):
        raise CheckpointError(
            f"{store.location}: {damages[0].path}: {damages[0].detail}; it is not signed. See verify {store.location}"
        )
    bundle, signer = sign_bytes(MANIFEST, data, *mine)
    if signature is not None:
        written = _write(Path(signature), bundle)
    else:
        with translated(Path(store.location), store.location, TargetError):
            open_root(location, storage_options or {}, allow_scheme).replace(SIGNATURE, bundle)
        written = f"{store.location}/{SIGNATURE}"
    return SignReport(f"{store.location}/{MANIFEST}", written, signer)


def _check_document(data: bytes, path: str) -> None:
    """Refuse a file that is neither fingerprints nor a manifest, or was changed."""
    if own_manifest(data) is None:
        parse_fingerprints(data, path)
    elif changed := parse_manifest(data, path).changed:
        raise CheckpointError(f"{path}: the manifest {changed}")


def _write(path: Path, bundle: bytes) -> str:
    """Write a signature to a local file, and replace only another signature."""
    try:
        if path.exists() and not is_signature(path.read_bytes()):
            raise TargetError(f"{path}: exists and is not a signature; choose another file with --signature")
        path.write_bytes(bundle)
    except OSError as error:
        raise TargetError(f"{path}: cannot be written: {error.strerror or error}") from error
    return str(path)


def manifest_of(store: Source) -> tuple[bytes, Manifest]:
    """The manifest of a target, as it is stored and parsed.

    Raises
    ------
    CheckpointError
        If it has none.
    """
    sizes = store.sizes()
    if MANIFEST not in sizes:
        raise CheckpointError(
            f"{store.location}: has no {MANIFEST}; it was not made by this package, or is incomplete"
        )
    data = store.read(MANIFEST, 0, sizes[MANIFEST])
    return data, parse_manifest(data, f"{store.location}/{MANIFEST}")


def read_trusted(
    public_key: PathLike | None, ca_certificate: PathLike | None, signature: PathLike | None
) -> Trusted | None:
    """By whom a signature must be; ``None`` if none is checked.

    Raises
    ------
    UsageError
        If both are given, or a signature without either.
    """
    if public_key is not None and ca_certificate is not None:
        raise UsageError("--public-key and --ca-certificate exclude each other; a signature has one signer")
    if public_key is not None:
        return Trusted(Path(public_key))
    if ca_certificate is not None:
        return Trusted(Path(ca_certificate), of_authorities=True)
    if signature is not None:
        raise UsageError("--signature requires --public-key or --ca-certificate, which it is checked with")
    return None


def signer_of_target(
    store: Source, manifest: bytes, trusted: Trusted | None, signature: PathLike | None
) -> str | None:
    """Whose signature the manifest of a target has; ``None`` if nobody is trusted, which is no claim about it.

    Raises
    ------
    SignatureError
        If it has none, or not by whom is trusted.
    """
    if trusted is None:
        return None
    if signature is not None:
        return _signer(MANIFEST, manifest, trusted, Path(signature))
    where, size_bytes = f"{store.location}/{SIGNATURE}", store.sizes().get(SIGNATURE)
    if size_bytes is None:
        raise SignatureError(where, MANIFEST, str(trusted), trusted.option, "no such file")
    return check_signature(where, MANIFEST, manifest, store.read(SIGNATURE, 0, size_bytes), trusted)


def signer_of_file(
    path: PathLike, data: bytes, trusted: Trusted | None, signature: PathLike | None
) -> str | None:
    """The same for a local file with this content."""
    if trusted is None:
        return None
    beside = Path(f"{os.fspath(path)}{SIGNATURE_SUFFIX}" if signature is None else signature)
    return _signer(Path(path).name, data, trusted, beside)


def _signer(name: str, data: bytes, trusted: Trusted, signature: Path) -> str:
    try:
        bundle = signature.read_bytes()
    except OSError as error:
        detail = (error.strerror or str(error)).lower()
        raise SignatureError(str(signature), name, str(trusted), trusted.option, detail) from error
    return check_signature(str(signature), name, data, bundle, trusted)
