"""The commands ``publish`` and ``pull``."""

from __future__ import annotations

from typing import Any

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.command import answer, running
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    SectionedCommand,
    all_of,
    answer_options,
    declared,
    given,
    outcome_option,
)
from paddle_reshard.pipeline.versions.form import CHECKSUMS, Encoding

_EXPORT = ("state", "dtype", "quantize", "max_shard_size", "aoa", "fill", "merge_into", "like", "lora_config")
_MODEL = ("rules", "config", "allow_missing", "vocab_pad", "vocab_trim", "drop", "replicas", "check")
_CONSENT = ("allow_replica_drift", "allow_master_drift", "allow_reread", "allow_links", "no_space_check")
_STORES = ("storage_options", "allow_scheme", "source_storage_options", "target_storage_options")


@click.command(
    cls=SectionedCommand,
    examples=(
        "checkpoint-1000 versions",
        "checkpoint-1000 s3://serving/model --state ema --dtype bfloat16 --full-every 20",
    ),
)
@click.argument("checkpoint", type=LOCATION, metavar="SRC")
@click.argument("versions", type=LOCATION, metavar="VERSIONS")
@outcome_option(
    "--encoding",
    type=click.Choice([encoding.value for encoding in Encoding]),
    default=Encoding.XOR.value,
    show_default=True,
    help="How a delta states new bytes.",
)
@outcome_option(
    "--checksum",
    type=click.Choice(list(CHECKSUMS)),
    default=next(iter(CHECKSUMS)),
    show_default=True,
    help="What a delta states of the new bytes of each tensor.",
)
@outcome_option(
    "--full-every", type=click.IntRange(1), metavar="N", help="Publish a full version after N deltas."
)
@all_of(*map(declared, (*_EXPORT, "memory", *_MODEL, *_CONSENT, *_STORES)))
@answer_options
@click.pass_context
def publish(
    context: click.Context,
    /,
    checkpoint: str,
    versions: str,
    encoding: str,
    checksum: str,
    full_every: int | None,
    **_: Any,
) -> None:
    """Publish the weights of a checkpoint as the next version, for inference engines.

    Versions lie in one folder. The first is a Hugging Face checkpoint, later ones hold what changed.
    """
    with running() as run:
        report = paddle_reshard.publish(
            checkpoint,
            versions,
            encoding=encoding,
            checksum=checksum,
            full_every=full_every,
            observe=run,
            **given(context),
        )
    answer(report)


@click.command()
@click.argument("versions", type=LOCATION, metavar="VERSIONS")
@click.argument("local", type=LOCATION, metavar="LOCAL")
@outcome_option(
    "--version",
    "version",
    type=click.IntRange(1),
    metavar="N",
    help="Number of the version. Default: the newest.",
)
@all_of(*map(declared, ("memory", "take_over", "no_space_check", "storage_options", "allow_scheme")))
@answer_options
@click.pass_context
def pull(
    context: click.Context,
    /,
    versions: str,
    local: str,
    version: int | None,
    **_: Any,
) -> None:
    """Make or update a local copy of a published version.

    It is an ordinary Hugging Face checkpoint. LOCAL is replaced when the new copy is complete and every checksum right.
    """
    with running() as run:
        report = paddle_reshard.pull(versions, local, version=version, observe=run, **given(context))
    answer(report)
