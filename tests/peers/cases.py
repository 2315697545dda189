"""What every converter is asked for: cases of the corpus, each to two other topologies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conftest import case_directory
from tests.lab.draws.files import memory_of
from tests.lab.job import Job, Topology, described
from tests.parity.tensors import Tensor

ONE, TP2, PP2, SH2, SH4 = (
    Topology(),
    Topology(tp=2),
    Topology(pp=2),
    Topology(sharding=2),
    Topology(sharding=4),
)
CASES: Mapping[str, tuple[Topology, Topology]] = {
    "moe/moe_fc_single": (TP2, SH2),
    "dense/fc_sh2_s1v2": (SH4, TP2),
    "dense/fc_mp2pp2": (ONE, SH2),
    "small-flex/fc_moe_mp2sh2_s1v2_ema": (ONE, SH2),
    "dense/uc_sh2_s1v2": (ONE, TP2),
    "small-unified/uc_sh2_s1v1_tied": (ONE, PP2),
    "dense/sh2_s1v2_meta": (SH4, TP2),
    "moe/ep2_sh2_s1v2_meta_ema": (ONE, SH2),
    "dense/mp2": (ONE, PP2),
    "dense/sh2_s1v2": (ONE, SH4),
    "dense/sh2_s1v1_meta": (ONE, SH4),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint of a real job, and what the job had in memory as it wrote it."""

    name: str
    folder: Path
    job: Job
    memory: Mapping[str, Tensor]

    @property
    def checkpoint(self) -> Path:
        """What the job wrote; it is not to be changed."""
        return next(self.folder.glob("checkpoint-*"))

    def target(self, topology: Topology) -> Job:
        """The same job in another topology, that saves in the same format.

        The trainer keeps no average on one card; that of a FlexCheckpoint is not to be seen before the first step.
        """
        arguments = dict(self.job.arguments)
        if topology.tp == 1:
            arguments.pop("sequence_parallel", None)
        if topology.tp > 1 and topology.ep > 1:
            arguments["sequence_parallel"] = True
        strategy = "stage1v2" if topology.sharding > 1 else "unsaid"
        ema = self.job.ema and topology.ranks > 1 and self.job.format != "flex"
        return replace(self.job, topology=topology, strategy=strategy, arguments=arguments, ema=ema)


def case_of(name: str) -> Case:
    """Unpack a case of the corpus."""
    folder, job = case_directory(name), described()[name]
    return Case(name, folder, job, memory_of(folder, job))
