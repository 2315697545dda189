"""The command ``resume``: it becomes what starts the trainer, as soon as that has something to resume from."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import Any, cast

import click

from paddle_reshard.pipeline.cli.command import running
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    SectionedCommand,
    Words,
    all_of,
    declared,
    execution_option,
    given,
    outcome_option,
    quiet_option,
    read_duration,
)
from paddle_reshard.pipeline.cli.terminal import say
from paddle_reshard.pipeline.core.choices import READ_MASTER_WEIGHTS
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.request.options import help_of
from paddle_reshard.pipeline.request.read_options import ResumeOptions

AUTO = "auto"


def read_cards(text: str) -> int | str:
    """A number of cards, or ``auto``."""
    if text == AUTO:
        return text
    if not (text.isascii() and text.isdigit() and int(text[:10]) > 0):
        raise click.BadParameter(f"{text!r}: give the number of all cards of the job, or {AUTO}")
    return int(text)


class BeforeCommand(SectionedCommand):
    """A command whose arguments end with those of another, after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; of an option that is likely the other command's, say what is missing."""
        marked = "--" in args
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if marked:
                raise
            message = f"{error.message} If it is one of COMMAND, -- is missing before COMMAND."
            raise click.NoSuchOption(error.option_name, message, error.possibilities, error.ctx) from error


@click.command(
    cls=BeforeCommand,
    examples=(
        "run-7 --to tp=2,sharding=4 --local /local/run-7 -- \\\n"
        "      python -m paddle.distributed.launch train.py …",
        "s3://bucket/run-7 --cards auto --local /local/run-7 -- \\\n"
        "      python -m paddle.distributed.launch --nnodes 2 --rank $I train.py …",
    ),
)
@click.argument("run", type=LOCATION, metavar="RUN")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@declared("to", help="Topology of the job: tp=2,pp=2.")
@outcome_option(
    "--cards",
    type=read_cards,
    metavar="N|auto",
    help="In place of --to: the nearest topology of N cards, as plan --cards calls it; auto: of those that the "
    "launcher reports, on all nodes.",
)
@execution_option(
    "--local",
    required=True,
    type=LOCATION,
    metavar="DIR",
    help="Folder on a disk, or in memory, of this node: for the files of its ranks.",
)
@execution_option(
    "--nodes",
    type=click.IntRange(1),
    metavar="N",
    help="Number of nodes. Default: what the launcher is told (PADDLE_NNODES, --nnodes in COMMAND), or 1.",
)
@execution_option(
    "--node",
    type=click.IntRange(0),
    metavar="I",
    help="Number of this node, from 0. Default: what the launcher is told (PADDLE_RANK, --rank in COMMAND).",
)
@execution_option(
    "--wait",
    type=read_duration,
    default="30m",
    show_default=True,
    metavar="DURATION",
    help="How long a node waits for the others, which find the checkpoint and make their files: 90s, 30m, 2h.",
)
@execution_option(
    "--without",
    multiple=True,
    metavar="NAME",
    help="An argument of launch that COMMAND does not take, such as fine_tuning. Can be repeated.",
)
@outcome_option(
    "--format",
    type=Words(tuple(name for name, format in FORMATS.items() if "to" in format.options)),
    help=help_of("format", ResumeOptions),
)
@all_of(
    *(
        declared(name, of=ResumeOptions, choices=READ_MASTER_WEIGHTS if name == "master_weights" else ())
        for name in ResumeOptions.__annotations__
        if name != "format"
    )
)
@quiet_option
@click.pass_context
def resume(
    context: click.Context,
    /,
    run: str,
    command: tuple[str, ...],
    cards: int | str | None,
    local: str,
    nodes: int | None,
    node: int | None,
    wait: float,
    without: tuple[str, ...],
    quiet: bool,
    **_: Any,
) -> None:
    """Start COMMAND from the newest complete checkpoint of RUN.

    In the start script of a job, on every node, in place of COMMAND. If the job cannot read the checkpoint as it
    is, the files that the ranks of this node read are made in DIR first. COMMAND gets --resume_from_checkpoint and
    the arguments that launch prints; without a checkpoint yet it starts as it is.
    """
    options = given(context)
    to = options.pop("to", None)
    topology = None if to is None else Topology.of(to)
    if not command:
        raise UsageError(
            "give the command that starts the trainer, after --: resume RUN … -- python -m paddle.distributed.launch …"
        )
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: no such command")
    from paddle_reshard.pipeline.training.launcher import TrainerCommand, node_of

    here = node_of(os.environ, command, nodes, node)
    if cards == AUTO:
        if here.cards is None:
            raise UsageError(
                "--cards auto: nothing tells the cards of a node: PADDLE_NPROC_PER_NODE, or --devices in COMMAND; "
                "give the number of all cards, --cards N"
            )
        cards = here.nodes * here.cards
    number = cards if isinstance(cards, int) else None
    trainer = TrainerCommand(command, frozenset(name.lstrip("-") for name in without))
    from paddle_reshard.pipeline.training.resume_point import Start

    def tell(message: str) -> None:
        if not quiet:
            say(f"paddle-reshard: {message}", err=True)

    with running("looking at the checkpoints") as observe:
        asked = cast(ResumeOptions, options)
        start = Start(run, local, here, topology, number, asked, trainer.check, tell, observe)
        if here.nodes > 1:
            from paddle_reshard.pipeline.training.agreement import Agreement

            point = Agreement.of(start, wait).agree()
        else:
            point = start.make_ready(start.find(), lambda whole: None)
    words = command
    if point.arguments is None or point.topology is None:
        tell(f"{run}: no checkpoint yet; the job begins")
    else:
        words = trainer.starting_from(point.arguments, point.topology, point.library)
        for remark in point.remarks:
            tell(f"note: {remark}")
    _become(program, words)


def _become(program: str, words: tuple[str, ...]) -> None:
    """Replace this process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and a program expects to be ended by them
        signal.signal(number, signal.SIG_DFL)
    os.execv(program, words)
