"""The command ``fingerprint``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import LOCATION, answer_options, declared, given
from paddle_reshard.pipeline.request.read_options import FingerprintOptions


@click.command()
@click.argument("source", type=LOCATION, metavar="SRC")
@click.option("--output", metavar="FILE", help="Write the fingerprints of all tensors to this file.")
@declared("memory")
@declared("cluster", of=FingerprintOptions)
@declared("workers")
@declared("rules")
@declared("config")
@declared("convention", of=FingerprintOptions)
@declared("allow_missing", of=FingerprintOptions)
@declared("allow_links")
@declared("storage_options")
@answer_options
@click.pass_context
def fingerprint(context: click.Context, /, source: str, output: str | None, **_: Any) -> None:
    """Compute checksums that no topology changes.

    One for each tensor and one for the whole checkpoint; no format changes them either.

    The number of a tensor is the CRC-64/NVME of its values, row-major and little-endian. Tensors are read once, within
    --memory. Compare them with verify --against FILE.
    """
    with running("reading headers") as run:
        report = paddle_reshard.fingerprint(source, output=output, observe=run, **given(context))
    answer(report)
