"""Plans that XLA finds to fit, for a cluster that need not be there.

What XLA sets aside for a stage beyond its prediction is withheld from the devices of the hosts on which the stage lies,
and the search runs again, until XLA finds that all stages fit, or nothing else does.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from autopar.errors import InfeasiblePlanError
from autopar.ir.mesh import Cluster
from autopar.ir.plan import Plan
from autopar.ir.units import bytes_text
from autopar.ir.verification import StageCheck, Verification
from autopar.planning.pricing import Prices
from autopar.reporting.progress import ProgramBar

_MOST_ROUNDS = 6

P = TypeVar("P", bound=Plan)
Search = Callable[[Cluster], Plan]  # raises InfeasiblePlanError
Verify = Callable[[P], Verification]


def plan_that_fits(
    cluster: Cluster, memory_limit: int | None, search: Search, priced: Callable[[Plan], P], verify: Verify[P]
) -> P:
    """The plan of the search whose every stage XLA finds to fit.

    `search` is given the cluster, or one whose devices have less memory; `priced` prices its plan on the cluster
    itself, and `verify` asks XLA.

    Raises:
      InfeasiblePlanError: the search finds nothing, or XLA finds none of its plans to fit.
      TargetError: as `Planned.verify_with_xla`.
    """
    prices = Prices(cluster, memory_limit)
    withheld: dict[int, int] = {}  # bytes of each device, by host
    met = ""
    for number in range(1, _MOST_ROUNDS + 1):
        try:
            with ProgramBar(f"search {number} for a plan", sys.stderr.isatty()):
                sought = search(_tightened(prices, withheld))
        except InfeasiblePlanError as error:
            if not withheld:
                raise
            raise InfeasiblePlanError(f"{met} With that withheld, nothing fits: {error}") from error
        plan = priced(sought)
        verdict = verify(plan)
        short = [stage for stage in verdict.stages if not stage.fits]
        if not short:
            before = f" {number} searches were needed: {met}" if met else ""
            notes = (*sought.notes, _note(verdict) + before)
            return dataclasses.replace(plan, notes=notes)
        met = _text(plan, short)
        for stage in short:
            for host in {cluster.host_of(device) for device in plan.stages[stage.stage].mesh.devices}:
                withheld[host] = max(withheld.get(host, 0), stage.found - stage.predicted)
    raise InfeasiblePlanError(
        f"{met} So it was with {_MOST_ROUNDS} plans, each made with what had been met withheld. Give the step more "
        "memory, or a memory_limit with a margin of your own."
    )


def checked(plan: P, verify: Verify[P]) -> P:
    """A plan whose places are fixed, if XLA finds that it fits.

    Raises:
      InfeasiblePlanError: it does not.
      TargetError: as `Planned.verify_with_xla`.
    """
    verdict = verify(plan)
    short = [stage for stage in verdict.stages if not stage.fits]
    if short:
        raise InfeasiblePlanError(
            f"{_text(plan, short)} Where everything lies was given, by a plan or by state that is there already: plan "
            "anew, by another method."
        )
    return dataclasses.replace(plan, notes=(*plan.notes, _note(verdict)))


def _note(verdict: Verification) -> str:
    return f"XLA ({verdict.target}, {verdict.versions}) finds that every stage fits."


def _text(plan: Plan, short: Sequence[StageCheck]) -> str:
    worst = max(short, key=lambda stage: stage.found - stage.capacity)
    return (
        f"XLA sets aside {bytes_text(worst.found)} on each device of stage {worst.stage} of {plan.function}, "
        f"{bytes_text(worst.found - worst.predicted)} more than predicted, of {bytes_text(worst.capacity)}."
    )


def _tightened(prices: Prices, withheld: Mapping[int, int]) -> Cluster:
    """The cluster, its devices with so much less memory to use."""
    hosts = list(prices.cluster.hosts)
    for number, nbytes in withheld.items():
        kind = hosts[number].kind
        usable = max(1, prices.usable(kind) - nbytes)
        kind = dataclasses.replace(kind, memory_reserve=kind.memory - usable)
        hosts[number] = dataclasses.replace(hosts[number], kind=kind)
    return dataclasses.replace(prices.cluster, hosts=tuple(hosts))
