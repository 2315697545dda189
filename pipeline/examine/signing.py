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

from paddle_reshard.pipeline.convert.integrity import check_target_quickly, manifest_of
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    ListingError,
    SignatureError,
    TargetError,
    UsageError,
)
from paddle_reshard.pipeline.core.file_names import MANIFEST, SIGNATURE, SIGNATURE_SUFFIX
from paddle_reshard.pipeline.core.shown import Facts, Shown
from paddle_reshard.pipeline.core.units import PathLike, texts_of
from paddle_reshard.pipeline.examine.fingerprint import read_document
from paddle_reshard.pipeline.request.arguments import checked
from paddle_reshard.storage.documents.fingerprints import parse_fingerprints
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import open_root
from paddle_reshard.storage.local.folders import written_whole
from paddle_reshard.storage.locate import StorageOptions, is_local, local_path, open_source
from paddle_reshard.storage.os_errors import writing
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


@checked
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
    location, access = os.fspath(path), (storage_options or {}, texts_of(allow_scheme))
    beside = None if signature is None else Path(signature)
    if is_local(location) and local_path(location).is_file():
        file = local_path(location)
        name, signed, data = file.name, location, _statement(file)
        beside = beside or Path(f"{file}{SIGNATURE_SUFFIX}")
    else:
        store = open_source(location, *access)
        name, signed, data = MANIFEST, f"{store.location}/{MANIFEST}", _manifest(store)
    bundle, signer = sign_bytes(name, data, Path(key), None if certificate is None else Path(certificate))
    if beside is not None:
        _write(beside, bundle)
    else:
        try:
            open_root(location, *access).replace(SIGNATURE, bundle)
        except ListingError as error:
            failure = TargetError(str(error))
            failure.retryable = error.retryable
            raise failure from error
    return SignReport(signed, str(beside or f"{store.location}/{SIGNATURE}"), signer)


def _statement(file: Path) -> bytes:
    """A file of fingerprints, or an unchanged manifest."""
    data = read_document(file)
    if own_manifest(data) is None:
        parse_fingerprints(data, str(file))
    elif changed := parse_manifest(data, str(file)).changed:
        raise CheckpointError(f"{file}: the manifest {changed}")
    return data


def _manifest(store: Source) -> bytes:
    """The unchanged manifest of a target whose files have the names and sizes that it lists."""
    data, manifest = manifest_of(store)
    if manifest.changed:
        raise CheckpointError(f"{store.location}/{MANIFEST}: {manifest.changed}")
    if damages := check_target_quickly(store, manifest):
        raise CheckpointError(
            f"{store.location}: {damages[0].path}: {damages[0].detail}; it is not signed. See verify {store.location}"
        )
    return data


def _write(path: Path, bundle: bytes) -> None:
    """Write a signature to a local file, and replace only another signature."""
    with writing(path, TargetError):
        if path.exists() and not is_signature(path.read_bytes()):
            raise TargetError(f"{path}: exists and is not a signature; choose another file with --signature")
    with written_whole(path, TargetError) as file:
        file.write(bundle)


def read_trusted(
    public_key: PathLike | None, ca_certificate: PathLike | None, signature: PathLike | None
) -> Trusted | None:
    """By whom a signature must be; ``None`` if none is checked."""
    if public_key is not None and ca_certificate is not None:
        raise UsageError("--public-key and --ca-certificate exclude each other; a signature has one signer")
    if (path := public_key or ca_certificate) is not None:
        return Trusted(Path(path), of_authorities=public_key is None)
    if signature is not None:
        raise UsageError("--signature requires --public-key or --ca-certificate, which it is checked with")
    return None


def signer_of_target(
    store: Source, manifest: bytes, trusted: Trusted | None, signature: PathLike | None
) -> str | None:
    """Whose signature the manifest of a target has; ``None`` if nobody is trusted, which is no claim about it.

    A :class:`SignatureError` if it has none, or not by whom is trusted.
    """
    if trusted is None or signature is not None:
        return signer_of_file(MANIFEST, manifest, trusted, signature)
    where, size_bytes = f"{store.location}/{SIGNATURE}", store.sizes().get(SIGNATURE)
    if size_bytes is None:
        raise SignatureError(where, MANIFEST, str(trusted), trusted.option, "no such file")
    return check_signature(where, MANIFEST, manifest, store.read(SIGNATURE, 0, size_bytes), trusted)


def signer_of_file(
    path: PathLike, data: bytes, trusted: Trusted | None, signature: PathLike | None
) -> str | None:
    """Whose signature a local file with this content has, as :func:`signer_of_target`."""
    if trusted is None:
        return None
    beside, name = Path(signature or f"{os.fspath(path)}{SIGNATURE_SUFFIX}"), Path(path).name
    try:
        bundle = beside.read_bytes()
    except OSError as error:
        detail = (error.strerror or str(error)).lower()
        raise SignatureError(str(beside), name, str(trusted), trusted.option, detail) from error
    return check_signature(str(beside), name, data, bundle, trusted)
