"""What every converter is asked for: cases of the corpus and drawn jobs, each to two other topologies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from tests.conftest import REPO, case_directory
from tests.lab.draws.chance import draw
from tests.lab.draws.check import Draw
from tests.lab.draws.files import memory_of
from tests.lab.job import Job, Topology, described
from tests.lab.laboratory import Laboratory
from tests.parity.lab import LabError
from tests.parity.tensors import Tensor

ONE, TP2, PP2, SH2, SH4 = (
    Topology(),
    Topology(tp=2),
    Topology(pp=2),
    Topology(sharding=2),
    Topology(sharding=4),
)
FOLDER = REPO / ".peers"
FAMILIES = ("llama", "qwen2", "qwen3", "ernie4_5", "phi3", "qwen3_moe", "deepseek_v3", "glm4_moe")
MOST_RANKS = 4
OF_TOPOLOGY = (
    "sequence_parallel",
    "sharding_comm_buffer_size_MB",
    "pp_sharding_comm_overlap",
    "hybrid_parallel_topo_order",
)
"""Arguments of a drawn job that go with its degrees."""


def drawn() -> Iterator[Draw]:
    """The draws from number 0 on of plain training in bfloat16, whose three topologies differ and are small."""
    for number in count():
        one = draw(number, FAMILIES, small=True)
        job, places = one.source, [of.topology for of in (one.source, one.target, one.third)]
        special = job.lora or job.head or job.optimizer or job.frozen or job.precision != "bfloat16"
        usual = not (special or job.by_rank or job.strategy in ("stage2", "stage3"))
        if usual and len(set(places)) == 3 and all(place.ranks <= MOST_RANKS for place in places):
            yield one


DRAWN = {f"drawn/{one.number}": one for one in islice(drawn(), 6)}
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
    **{name: (one.target.topology, one.third.topology) for name, one in DRAWN.items()},
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
        arguments = {name: value for name, value in self.job.arguments.items() if name not in OF_TOPOLOGY}
        if topology.tp > 1 and (topology.ep > 1 or "sequence_parallel" in self.job.arguments):
            arguments["sequence_parallel"] = True
        strategy = "stage1v2" if topology.sharding > 1 else "unsaid"
        ema = self.job.ema and topology.ranks > 1 and self.job.format != "flex"
        return replace(self.job, topology=topology, strategy=strategy, arguments=arguments, ema=ema)


def case_of(name: str, lab: Laboratory) -> Case:
    """Unpack a case of the corpus, or run a drawn job."""
    if name not in DRAWN:
        folder, job = case_directory(name), described()[name]
    else:
        folder, job = FOLDER / name / "job", DRAWN[name].source
        if words := lab.run(job, folder):
            raise LabError(f"{name}: the trainer refuses the drawn job: {words}")
    return Case(name, folder, job, memory_of(folder, job))
