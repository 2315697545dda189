"""What a job's launcher says of its nodes, and the command that starts the trainer on each of them.

The launchers are Paddle's (``distributed/launch/context/args_envs.py`` of Paddle 3.3), whose variables count before its
options, and ``paddleformers-cli`` (PaddleFormers 1.2 ``cli/cli.py``), which starts Paddle's. Nothing is read or started
here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.trainer_arguments import Arguments, sizes_of_axes, unprinted

_LAUNCHERS = ("paddle.distributed.launch", "fleetrun")
_CLI = "paddleformers-cli"
_CONFIG = (".yaml", ".yml", ".json")
_DEVICES = ("devices", "gpus", "xpus", "npus")
_TRUE = ("yes", "true", "t", "y", "1")
"""What the trainers' parser takes for true, in any case."""
_OF_SAVING = ("save_checkpoint_format", "save_sharded_model")
"""How a job saves is its own choice, whatever it reads."""
_PLAIN = re.compile(r"[\w./-]*[A-Za-z/][\w./-]*")
"""Texts that YAML reads as texts, but for its words for true, false and null."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node among the nodes of a job, which have consecutive ranks."""

    number: int
    """From 0."""
    nodes: int
    cards: int | None = None
    """Ranks of each node; ``None`` if nothing says how many."""

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.nodes:
            raise UsageError(
                f"node {self.number} of {self.nodes}: nodes are numbered from 0 to {self.nodes - 1}"
            )

    def ranks_of(self, topology: Topology) -> range:
        """The global ranks of this node; a ``UsageError`` if the job does not fit the nodes."""
        size = topology.world_size
        cards = self.cards or -(-size // self.nodes)
        if cards * self.nodes != size:
            said = f"{self.cards} ranks each" if self.cards else "which have the same number of ranks"
            raise UsageError(f"{topology} has {size} ranks, and the job {self.nodes} nodes, {said}")
        return range(self.number * cards, (self.number + 1) * cards)


def node_of(
    variables: Mapping[str, str], command: Sequence[str], nodes: int | None, number: int | None
) -> Node:
    """This node, as the options ``nodes`` and ``number``, the environment and the command say.

    >>> node_of({"PADDLE_NNODES": "2", "PADDLE_RANK": "1", "PADDLE_NPROC_PER_NODE": "8"}, ["train.py"], None, None)
    Node(number=1, nodes=2, cards=8)
    >>> node_of({}, "python -m paddle.distributed.launch --devices 0,1 train.py".split(), None, None)
    Node(number=0, nodes=1, cards=2)

    Raises
    ------
    UsageError
        If two of them disagree, or do not say which node this is.
    """
    said = _Said(variables, _launcher_options(command), _is_cli(command))
    found = said.number("--nodes", nodes, "PADDLE_NNODES", "nnodes", "NNODES")
    count = 1 if found is None else found
    place = said.number("--node", number, "PADDLE_RANK", "rank", "RANK")
    if place is None or place < 0:
        if count > 1:
            raise UsageError(
                f"a job of {count} nodes, and nothing says which this is: give --node I, or PADDLE_RANK to the "
                "launcher too, which otherwise chooses by itself"
            )
        place = 0
    return Node(place, count, said.cards())


@dataclass(frozen=True, slots=True)
class _Said:
    """What is said of the nodes."""

    variables: Mapping[str, str]
    options: Mapping[str, str]
    """Options of the launcher in the command."""
    cli: bool
    """Whether the command is ``paddleformers-cli``, which has variables of its own."""

    def number(
        self, flag: str, given: int | None, variable: str, option: str, of_cli: str | None = None
    ) -> int | None:
        """The number that all who say one agree on; ``None`` if nobody does."""
        texts = {flag: None if given is None else str(given), variable: self.variables.get(variable)}
        if self.cli and of_cli is not None:
            texts[of_cli] = self.variables.get(of_cli)
        texts[f"--{option} of COMMAND"] = self.options.get(option)
        said = {where: text.strip() for where, text in texts.items() if text is not None and text.strip()}
        if (
            given is not None
        ):  # a range, 2:4, is how many nodes may come, of which the user knows how many came
            said = {where: text for where, text in said.items() if ":" not in text}
        for where, text in said.items():
            if not re.fullmatch(r"-?[0-9]{1,9}", text):
                raise UsageError(f"{where} is {text!r}, no number; give {flag}")
        if len({int(text) for text in said.values()}) > 1:
            each = ", ".join(f"{where} {text}" for where, text in said.items())
            raise UsageError(f"it is not clear which of these is meant: {each}; give them alike")
        return next((int(text) for text in said.values()), None)

    def cards(self) -> int | None:
        """Ranks of this node: processes, or the devices that are listed."""
        flag = "PADDLE_NPROC_PER_NODE"
        if (count := self.number(flag, None, flag, "nproc_per_node")) is not None:
            return count
        listed = [self.variables.get("PADDLE_DEVICES"), *(self.options.get(name) for name in _DEVICES)]
        if self.cli:
            listed += [self.variables.get(f"{kind}_VISIBLE_DEVICES") for kind in ("CUDA", "XPU", "ASCEND_RT")]
        return next((len(text.split(",")) for text in listed if text), None)


def _is_cli(command: Sequence[str]) -> bool:
    return any(word.rpartition("/")[2] == _CLI for word in command)


def _launcher_options(command: Sequence[str]) -> Mapping[str, str]:
    """The options of Paddle's launcher: what stands between it and the script."""
    at = next((n for n, word in enumerate(command) if word.rpartition("/")[2] in _LAUNCHERS), None)
    return {} if at is None else dict(_options(command[at + 1 :], to_script=True))


def _options(words: Sequence[str], to_script: bool = False) -> Iterator[tuple[str, str]]:
    """Name and value of every ``--name value``, ``--name=value`` or ``--name``, with underscores."""
    number = 0
    while number < len(words):
        word, number = words[number], number + 1
        if not word.startswith("--"):
            if to_script:
                return
            continue
        name, mark, value = word[2:].partition("=")
        if not mark:
            value = "true"
            if number < len(words) and not words[number].startswith("--"):
                value, number = words[number], number + 1
        yield name.replace("-", "_"), value


@dataclass(frozen=True, slots=True)
class TrainerCommand:
    """The command that starts a trainer, to which the arguments of a checkpoint are appended."""

    words: tuple[str, ...]
    without: frozenset[str] = frozenset()
    """Arguments that it does not take."""

    @property
    def has_config(self) -> bool:
        """Whether ``paddleformers-cli`` reads a file, which ``name=value`` overrides."""
        at = next((n for n, word in enumerate(self.words) if word.rpartition("/")[2] == _CLI), None)
        return at is not None and any(word.endswith(_CONFIG) for word in self.words[at + 2 : at + 3])

    def given(self) -> Mapping[str, str]:
        """Its own arguments, by name."""
        if self.has_config:
            pairs = (word.partition("=") for word in self.words if not word.startswith("-"))
            return {name: value for name, mark, value in pairs if mark}
        return dict(_options(self.words))

    def check(self, arguments: Arguments, topology: Topology, library: str) -> None:
        """Refuse arguments of its own that contradict those of a checkpoint, or that only ``resume`` can know."""
        given, problems = self.given(), []
        if "resume_from_checkpoint" in given:
            problems.append("--resume_from_checkpoint: which checkpoint, and where, is what resume finds out")
        for name, value in _expected(arguments, topology, library).items():
            if name in given and not _is(given[name], value, name):
                problems.append(f"--{name} {given[name]}, and the checkpoint needs {_text(value) or 'none'}")
        if problems:
            raise UsageError(
                f"COMMAND contradicts the job of {topology}: {'; '.join(problems)}; leave out of COMMAND what resume "
                "appends, or give resume the topology that is meant"
            )

    def starting_from(self, arguments: Arguments, topology: Topology, library: str) -> tuple[str, ...]:
        """The words with the arguments of a checkpoint that they do not have yet."""
        given = self.given()
        if self.has_config:  # which may have other values than the defaults, that arguments leave out
            arguments = {**_expected(arguments, topology, library), **arguments}
        added = {
            name: value for name, value in arguments.items() if name not in given and name not in self.without
        }
        if self.has_config:
            return (*self.words, *(f"{name}={_in_yaml(value)}" for name, value in added.items()))
        return (
            *self.words,
            *(word for name, value in added.items() for word in (f"--{name}", _text(value))),
        )


def _expected(arguments: Arguments, topology: Topology, library: str) -> Arguments:
    """Arguments that decide how ranks read their files, also those at their default."""
    sharded = {} if "sharding" in arguments else {"sharding": ""}
    own = {name: value for name, value in arguments.items() if name not in _OF_SAVING}
    own.pop("resume_from_checkpoint", None)
    return {**sizes_of_axes(topology, library), **unprinted(arguments), **sharded, **own}


def _is(given: str, value: str | int | bool, name: str) -> bool:
    """Whether a text means a value, as the trainers read it."""
    if isinstance(value, bool):
        return (given.lower() in _TRUE) is value
    if given == "-1" and isinstance(
        value, int
    ):  # the ranks that are left; of other axes, that they are not used
        return value == 1 or name.startswith("sharding_parallel_")
    if name == "sharding_parallel_config":
        return str(value) in given.split()
    return given.strip("\"'").lower() == str(value).lower()


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_yaml(value: str | int | bool) -> str:
    """A value as YAML reads it.

    >>> _in_yaml(""), _in_yaml("stage1"), _in_yaml("/a b"), _in_yaml(True)
    ('""', 'stage1', '"/a b"', 'true')
    """
    text = _text(value)
    return text if not isinstance(value, str) or _PLAIN.fullmatch(text) else json.dumps(text)
