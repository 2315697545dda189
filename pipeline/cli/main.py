"""The command line: arguments become API calls, results become tables, lines or JSON.

Exit status: 0 success, 1 refused or failed, 2 wrong usage, 128 + n after signal n (130: interrupted). Those of
``verify`` and ``diff`` are in their modules.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Final

import click

import paddle_reshard
from paddle_reshard.pipeline.cli.output import EndingGroup, occupy_standard_files
from paddle_reshard.pipeline.cli.signals import handled_signals
from paddle_reshard.pipeline.cli.terminal import log_to_terminal

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Look": {"inspect": "inspect", "ls": "ls", "plan": "conversion", "explain": "explain"},
    "Convert": {"convert": "conversion", "ema": "ema", "launch": "launch", "clean": "clean"},
    "Check": {"verify": "verify", "diff": "diff", "fingerprint": "fingerprint"},
    "Automate": {"submit": "submit", "watch": "watch", "resume": "resume"},
}
"""What commands are for → command → the module of ``commands`` that declares a function of the same name."""
COMMANDS: Final[Mapping[str, str]] = {
    name: module for group in GROUPS.values() for name, module in group.items()
}


class CommandsOnDemand(Mapping[str, click.Command]):
    """The commands by name. A command is imported, with its options, when it is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = getattr(import_module(f"{__package__}.commands.{COMMANDS[name]}"), name)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(EndingGroup):
    """The commands, which help lists by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, their columns aligned."""
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                limit = formatter.width - width - 6
                rows = [(f"{name:{width}}", self.commands[name].get_short_help_str(limit)) for name in names]
                formatter.write_dl(rows)


@click.group(
    cls=Commands, commands=CommandsOnDemand(), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(paddle_reshard.__version__, prog_name="paddle-reshard")
def cli() -> None:
    """Convert PaddlePaddle training checkpoints to any other topology and format, bit for bit."""
    log_to_terminal()


def spare_processor() -> None:
    """Leave out what a process that runs one command need not do: a quarter of the processor time of a short one.

    To be called before NumPy is imported.
    """
    # NumPy's OpenBLAS, which nothing here asks to compute, starts a thread for each further processor. Each spins for
    # 50 ms before it sleeps. What `resume` becomes has the environment of its job.
    if sys.argv[1:2] != ["resume"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Modules are no garbage: neither while they are imported, nor at the end, when the system takes all memory back.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)


def main() -> None:
    """Entry point of ``paddle-reshard``."""
    occupy_standard_files()
    spare_processor()
    with handled_signals():
        cli()
