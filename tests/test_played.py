"""The simulated time of a step, held against playing the very list of instructions that a worker plays."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from autopar.compiling.program_sources import instructions_of
from autopar.ir.instructions import Copy, Register, Run
from autopar.ir.mesh import Cluster
from autopar.planning.pricing import Played, Prices
from autopar.recipes import gpipe, megatron, pipeline
from benchmarks.models import gpt, shared
from tests.planned import Planned, analysis_of, cluster_of, plan_analysis

_OPTIMIZER = shared.make_optimizer(1e-3, 1, 10)
METHODS: dict[str, Any] = {
    "gpipe 2": pipeline([(2, (2,)), (2, (2,))], 8, "gpipe"),
    "gpipe 4": gpipe(4, 6),
    "1f1b 2": pipeline([(2, (2,)), (2, (2,))], 8, "1f1b"),
    "1f1b 4": megatron(1, 1, 4, 6),
    "uneven": pipeline([(1, (1,)), (3, (2,)), (1, (1,))], 6, "1f1b"),
    "interleaved": megatron(1, 2, 2, 4, 2),
    "zero-bubble": pipeline([(1, (1,))] * 4, 6, "zero-bubble"),
}


def planned(method: Any, cluster: Cluster) -> Planned:
    config = gpt.GPTConfig(64, 8, 4, width=16, num_heads=4)
    return plan_analysis(analysis_of(gpt, config, 24, _OPTIMIZER), cluster, method, None)


def seconds_of_list(of: Planned, played: Played) -> float:
    """Until the last microbatch's last program has ended.

    Programs start as soon as their devices are free and what they read is there; transfers as soon as their link is.
    """
    lowered = of.lowered
    devices: dict[Any, float] = defaultdict(float)
    links: dict[tuple[int, int], float] = defaultdict(float)
    ready: dict[Register, float] = defaultdict(float)
    last = 0.0
    for instruction in instructions_of(lowered, of.plan.schedule, frozenset()).instructions:
        if isinstance(instruction, Run):
            mesh, cost = lowered.programs[instruction.program].mesh, played.costs[instruction.program]
            start = max([devices[mesh.devices], *(ready[register] for register in instruction.inputs)])
            end = devices[mesh.devices] = start + cost.start + cost.seconds
            ready.update(dict.fromkeys(instruction.outputs, end))
            if instruction.phase.in_loop:
                last = max(last, end)
        elif isinstance(instruction, Copy):
            link = instruction.stage, instruction.to
            start = max(links[link], ready[instruction.source])
            links[link] = ready[instruction.target] = start + lowered.crossings[instruction.crossing].plan.seconds
    return last


CASES = [
    pytest.param(name, network, marks=[] if at % 2 == number else [pytest.mark.slow], id=f"{name}, {links} links")
    for at, name in enumerate(METHODS)
    for number, (links, network) in enumerate({"quick": 1e12, "slow": 1e6}.items())
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "network"), CASES)
def test_the_microbatches_take_as_long_as_their_instructions(name: str, network: float) -> None:
    cluster = cluster_of(4, 1, network=network) if "4" in name else cluster_of(1, 4, link=network)
    of = planned(METHODS[name], cluster)
    played = Prices(cluster).play(of.lowered, of.plan.schedule)
    assert played.timeline.makespan == pytest.approx(of.plan.step_time)
    loop = max(event.end for event in played.timeline.events if event.phase.in_loop)
    assert loop == pytest.approx(seconds_of_list(of, played), rel=1e-3)
