"""Signatures, held against the command line of the library that defines their format."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import paddle_reshard
from paddle_reshard import CheckpointError, FormatError, SignatureError, TargetError, UsageError
from paddle_reshard.pipeline.convert.manifest import format_manifest
from tests.conftest import COMMITTED
from tests.jobs.command import invoke
from tests.published import SCHEMA

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
PEM = serialization.Encoding.PEM


def library(*arguments: object) -> tuple[int, str]:
    """Run ``model_signing`` with these arguments."""
    (script,) = entry_points(group="console_scripts", name="model_signing")
    done = CliRunner().invoke(script.load(), [str(argument) for argument in arguments])
    return done.exit_code, done.output


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    how = (
        serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    )
    return bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how))


def new_keys(folder: Path, curve: ec.EllipticCurve) -> tuple[Path, Path]:
    """A private key and its public key."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(curve)
    private, public = folder / "key.pem", folder / "public.pem"
    private.write_bytes(private_pem(key))
    private.chmod(0o400)
    public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return new_keys(tmp_path_factory.mktemp("keys"), ec.SECP256R1())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and fingerprints of it, not signed."""
    folder = tmp_path_factory.mktemp("made")
    paddle_reshard.convert(SOURCE, folder / "target", to="tp=1", fingerprint="full")
    paddle_reshard.fingerprint(SOURCE, output=folder / "fingerprints.json")
    return folder


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "target", tmp_path / "target", copy_function=shutil.copy)
    return tmp_path / "target"


@pytest.fixture
def fingerprints(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made / "fingerprints.json", tmp_path))


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_each_verifies_what_the_other_signed(
    curve: ec.EllipticCurve, target: Path, fingerprints: Path, tmp_path: Path
) -> None:
    private, public = new_keys(tmp_path / "keys", curve)
    owner = f"key sha256:{hashlib.sha256(public.read_bytes()).hexdigest()}"

    report = paddle_reshard.sign(fingerprints, key=private)
    assert (report.signature, report.signed_by) == (f"{fingerprints}.sig", owner)
    told = library("verify", "key", fingerprints, "--signature", report.signature, "--public_key", public)
    assert told == (0, "Verification succeeded\n")
    assert paddle_reshard.verify(target, against=fingerprints, public_key=public).signed_by == owner

    theirs = tmp_path / "theirs.sig"
    manifest = target / "paddle_reshard.json"
    assert library("sign", "key", manifest, "--private_key", private, "--signature", theirs)[0] == 0
    checked = paddle_reshard.check(target, public_key=public, signature=theirs)
    assert (checked.intact, checked.signed_by) == (True, owner)
    assert paddle_reshard.check(target).signed_by is None


def test_a_signed_target_is_a_target_as_any_other(
    target: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    private, public = keys
    before = {path.name for path in target.iterdir()}
    signed = invoke("sign", target, "--key", private, "--json")
    assert signed.exit_code == 0, signed.output
    assert {path.name for path in target.iterdir()} - before == {"paddle_reshard.json.sig"}
    manifest, signature = target / "paddle_reshard.json", target / "paddle_reshard.json.sig"
    assert library("verify", "key", manifest, "--signature", signature, "--public_key", public)[0] == 0

    told = invoke("verify", target, "--public-key", public)
    assert (told.exit_code, told.output.splitlines()[-2:]) == (
        0,
        [f"signed by {json.loads(signed.output)['signed_by']}", "intact; 8 files, 8 parts (2.4 MiB read)"],
    )
    paddle_reshard.convert(target, tmp_path / "next", to="tp=2")
    assert not (tmp_path / "next" / signature.name).exists()
    paddle_reshard.convert(SOURCE, target, to="tp=2", overwrite=True)
    assert not signature.exists()
    assert paddle_reshard.check(target)


def test_a_signed_manifest_does_not_excuse_a_changed_file(target: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    paddle_reshard.sign(target, key=private)
    file = target / "optimizer.pdopt"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    told = invoke("verify", target, "--public-key", public, "--json")
    found = json.loads(told.output)
    assert (told.exit_code, found["intact"]) == (1, False)
    assert found["signed_by"].startswith("key sha256:")
    with pytest.raises(CheckpointError, match="is not signed"):
        file.write_bytes(content[:-1])
        paddle_reshard.sign(target, key=private)


def _rewrite(
    target: Path, entry: str = "source", name: str = "location", value: Any = "/another/run"
) -> None:
    """Another source or request in the manifest, with a digest that fits."""
    values = json.loads((target / "paddle_reshard.json").read_text())
    assert values[entry][name] != value
    values[entry][name] = value
    del values["digest"]
    (target / "paddle_reshard.json").write_bytes(format_manifest(values))


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_rewrite, "Hash mismatch"),
        (lambda target: _rewrite(target, "request", "targets", [{"to": "tp=4"}]), "Hash mismatch"),
        (lambda target: (target / "paddle_reshard.json.sig").unlink(), "no such file"),
        (lambda target: (target / "paddle_reshard.json.sig").write_text("{}"), "verificationMaterial"),
        (
            lambda target: _replace(target / "paddle_reshard.json.sig", '"sig":"ME', '"sig":"MF'),
            "InvalidSignature",
        ),
        (
            lambda target: _replace(target / "paddle_reshard.json.sig", '"payload":"ewog', '"payload":"ewoK'),
            "InvalidSignature",
        ),
    ],
    ids=("manifest", "request", "missing", "empty", "signature", "statement"),
)
def test_what_is_not_what_was_signed_is_refused(
    change: Callable[[Path], object], reason: str, target: Path, keys: tuple[Path, Path]
) -> None:
    paddle_reshard.sign(target, key=keys[0])
    change(target)
    with pytest.raises(SignatureError, match=reason):
        paddle_reshard.check(target, public_key=keys[1])
    told = invoke("verify", target, "--public-key", keys[1], "--json")
    (line,) = told.stdout.splitlines()
    assert (told.exit_code, json.loads(line)["kind"]) == (1, "SignatureError")


def test_another_key_is_refused(fingerprints: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    paddle_reshard.sign(fingerprints, key=keys[0], signature=tmp_path / "mine.sig")
    _, strange = new_keys(tmp_path / "strange", ec.SECP256R1())
    with pytest.raises(SignatureError, match="Key mismatch"):
        paddle_reshard.verify(
            SOURCE, against=fingerprints, public_key=strange, signature=tmp_path / "mine.sig"
        )
    with pytest.raises(SignatureError, match=r"fingerprints\.json\.sig: .*no such file"):
        paddle_reshard.verify(SOURCE, against=fingerprints, public_key=keys[1])


def test_keys_that_cannot_sign_are_refused_and_never_shown(
    fingerprints: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    elliptic = ec.generate_private_key(ec.SECP256R1())
    wrong = {
        "encrypted": (private_pem(elliptic, b"secret"), "encrypted"),
        "rsa": (private_pem(rsa.generate_private_key(65537, 2048)), "not an elliptic-curve key"),
        "curve": (private_pem(ec.generate_private_key(ec.SECP256K1())), "secp256k1"),
        "public": (keys[1].read_bytes(), "key"),
        "garbage": (b"no key", "PEM"),
    }
    for name, (content, reason) in wrong.items():
        (tmp_path / name).write_bytes(content)
        told = invoke("sign", fingerprints, "--key", tmp_path / name)
        assert told.exit_code == 2
        assert reason in told.output
        assert "an unencrypted elliptic-curve key" in told.output
        assert content.decode().splitlines()[1 if b"-----" in content else 0] not in told.output
    assert "cannot be read" in invoke("sign", fingerprints, "--key", tmp_path / "none").output
    assert not Path(f"{fingerprints}.sig").exists()
    assert keys[0].stat().st_mode & 0o777 == 0o400


def test_what_is_no_statement_of_ours_is_not_signed(
    fingerprints: Path, target: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    with pytest.raises(FormatError, match="not valid JSON"):
        paddle_reshard.sign(notes, key=keys[0])
    with pytest.raises(TargetError, match="exists and is not a signature"):
        paddle_reshard.sign(fingerprints, key=keys[0], signature=notes)
    assert notes.read_text() == "notes"
    with pytest.raises(CheckpointError, match=r"has no paddle_reshard\.json"):
        paddle_reshard.sign(SOURCE, key=keys[0])
    _replace(target / "paddle_reshard.json", '"topology": "tp=1"', '"topology": "tp=2"')
    for place in (target, target / "paddle_reshard.json"):
        with pytest.raises(CheckpointError, match="was changed after it was written"):
            paddle_reshard.sign(place, key=keys[0])


def test_a_signature_is_replaced_as_a_whole(fingerprints: Path, keys: tuple[Path, Path]) -> None:
    """A part of one, as a full disk leaves it, would be in the way of the next: it is no signature."""
    signature = Path(paddle_reshard.sign(fingerprints, key=keys[0]).signature)
    kept, before = fingerprints.with_name("kept"), signature.read_bytes()
    kept.hardlink_to(signature)
    paddle_reshard.sign(fingerprints, key=keys[0])
    assert kept.read_bytes() == before != signature.read_bytes()


def test_a_key_without_something_signed_is_refused(target: Path, keys: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="--public-key requires --against"):
        paddle_reshard.verify(SOURCE, target, public_key=keys[1])
    with pytest.raises(UsageError, match="--signature requires --public-key or --ca-certificate"):
        paddle_reshard.check(target, signature="x.sig")
    paddle_reshard.sign(target, key=keys[0])
    told = invoke("verify", target, "--public-key", keys[0])
    assert (told.exit_code, "--public-key needs" in told.output) == (2, True)


def test_json_is_as_published(target: Path, keys: tuple[Path, Path]) -> None:
    import jsonschema

    for arguments in (("sign", target, "--key", keys[0]), ("verify", target, "--public-key", keys[1])):
        jsonschema.validate(json.loads(invoke(*arguments, "--json").stdout), SCHEMA)


@dataclass(frozen=True)
class Issued:
    """A key, its certificate, and files of them."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    private: Path
    public: Path
    """The certificate, and after it that of its issuer."""


def issue(
    folder: Path, name: str, by: Issued | None = None, authority: bool = False, may_sign: bool = True
) -> Issued:
    """Issue a certificate that has expired since; of itself where ``by`` is missing."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    certificate = (
        x509.CertificateBuilder(
            by.certificate.subject if by else subject, subject, key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
        .add_extension(
            x509.KeyUsage(may_sign, not may_sign, False, False, False, authority, False, False, False),
            critical=True,
        )
        .sign(by.key if by else key, hashes.SHA256())
    )
    private, public = folder / f"{name}.key", folder / f"{name}.pem"
    private.write_bytes(private_pem(key))
    chain = [certificate, by.certificate] if by else [certificate]
    public.write_bytes(b"".join(one.public_bytes(PEM) for one in chain))
    return Issued(key, certificate, private, public)


@dataclass(frozen=True)
class Office:
    """An authority, an office that it trusts, and somebody whom that trusts."""

    root: Issued
    office: Issued
    ada: Issued

    @property
    def name(self) -> str:
        """Whose a signature of ``ada`` is."""
        der = self.ada.certificate.public_bytes(serialization.Encoding.DER)
        return f"certificate CN=ada sha256:{hashlib.sha256(der).hexdigest()}"


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    folder = tmp_path_factory.mktemp("office")
    root = issue(folder, "root", authority=True)
    middle = issue(folder, "office", root, authority=True)
    return Office(root, middle, issue(folder, "ada", middle))


def test_each_verifies_what_the_other_signed_with_a_certificate(
    office: Office, target: Path, fingerprints: Path, tmp_path: Path
) -> None:
    ada, roots = office.ada, office.root.public
    report = paddle_reshard.sign(fingerprints, key=ada.private, certificate=ada.public)
    assert report.signed_by == office.name
    signature = report.signature
    told = library(
        "verify", "certificate", fingerprints, "--signature", signature, "--certificate_chain", roots
    )
    assert told == (0, "Verification succeeded\n")
    compared = invoke("verify", target, "--against", fingerprints, "--ca-certificate", roots, "--json")
    assert json.loads(compared.stdout)["signed_by"] == office.name, compared.output

    theirs, manifest = tmp_path / "theirs.sig", target / "paddle_reshard.json"
    mine = ("--private_key", ada.private, "--signing_certificate", ada.public)
    chain = ("--certificate_chain", office.office.public)
    assert library("sign", "certificate", manifest, *mine, *chain, "--signature", theirs)[0] == 0
    checked = paddle_reshard.check(target, ca_certificate=roots, signature=theirs)
    assert (checked.intact, checked.signed_by) == (True, office.name)


@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")  # by the library
def test_certificates_of_others_are_refused(
    office: Office, keys: tuple[Path, Path], fingerprints: Path, tmp_path: Path
) -> None:
    def refused(match: str, **trusted: Path) -> None:
        with pytest.raises(SignatureError, match=match):
            paddle_reshard.verify(SOURCE, against=fingerprints, **trusted)

    ada, roots = office.ada, office.root.public
    paddle_reshard.sign(fingerprints, key=ada.private, certificate=ada.public)
    refused("unable to get local issuer", ca_certificate=issue(tmp_path, "stranger", authority=True).public)
    refused("by the key of", public_key=keys[1])
    mute = issue(tmp_path, "mute", office.office, may_sign=False)
    paddle_reshard.sign(fingerprints, key=mute.private, certificate=mute.public)
    refused("cannot be used for signing", ca_certificate=roots)
    paddle_reshard.sign(fingerprints, key=keys[0])
    refused("made without a certificate; check that --signature and --ca-cert", ca_certificate=roots)
    with pytest.raises(UsageError, match="--certificate needs the certificate of --key"):
        paddle_reshard.sign(fingerprints, key=keys[0], certificate=ada.public)
    with pytest.raises(UsageError, match="--ca-certificate needs certificates"):
        paddle_reshard.verify(SOURCE, against=fingerprints, ca_certificate=keys[1])
    with pytest.raises(UsageError, match="exclude each other"):
        paddle_reshard.verify(SOURCE, against=fingerprints, ca_certificate=roots, public_key=keys[1])
    with pytest.raises(UsageError, match="--ca-certificate requires --against"):
        paddle_reshard.verify(SOURCE, SOURCE, ca_certificate=roots)


def test_a_signature_has_the_name_of_the_certificate_that_was_checked(
    office: Office, fingerprints: Path, tmp_path: Path
) -> None:
    """A bundle may spell names in several ways, and could show one certificate to each reader."""
    ada = office.ada
    signature = Path(paddle_reshard.sign(fingerprints, key=ada.private, certificate=ada.public).signature)
    bundle = json.loads(signature.read_text())
    material = bundle["verificationMaterial"]
    real = material["x509CertificateChain"]
    stranger = issue(tmp_path, "eve").certificate.public_bytes(serialization.Encoding.DER)
    shown = {"certificates": [{"rawBytes": base64.b64encode(stranger).decode()}]}
    for first, second in ((real, shown), (shown, real)):
        material.clear()
        material.update(
            x509CertificateChain=first, x509_certificate_chain=second, certificate=second["certificates"][0]
        )
        signature.write_text(json.dumps(bundle))
        if first is shown:
            with pytest.raises(SignatureError, match="by a certificate issued by"):
                paddle_reshard.verify(SOURCE, against=fingerprints, ca_certificate=office.root.public)
        else:
            found = paddle_reshard.verify(SOURCE, against=fingerprints, ca_certificate=office.root.public)
            assert found.signed_by == office.name
