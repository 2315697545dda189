"""The command ``sign``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer
from paddle_reshard.pipeline.cli.options import LOCATION, declared, given, json_option, quiet_option


@click.command()
@click.argument("path", type=LOCATION, metavar="FILE|DST")
@click.option(
    "--key", metavar="KEY.pem", required=True, help="The private key, on an elliptic curve and unencrypted."
)
@click.option(
    "--certificate",
    metavar="CERT.pem",
    help="The certificate of the key and, after it, those that lead to an authority's; the signature contains them.",
)
@click.option(
    "--signature",
    metavar="FILE",
    help="Write the signature to this local file. Default: beside the signed file, with .sig appended.",
)
@declared("storage_options", "--target-storage-options")
@declared("allow_scheme")
@json_option
@quiet_option
@click.pass_context
def sign(
    context: click.Context,
    /,
    path: str,
    key: str,
    certificate: str | None,
    signature: str | None,
    **_: Any,
) -> None:
    """Sign fingerprints, or the manifest of a target.

    FILE is written by fingerprint --output. The manifest of a target DST says what was made of what: source and
    versions, plan, request and checksums. The format is OpenSSF model signing, and the network is not used. Check
    signatures with verify --public-key or --ca-certificate.
    """
    report = paddle_reshard.sign(
        path, key=key, certificate=certificate, signature=signature, **given(context)
    )
    answer(report)
