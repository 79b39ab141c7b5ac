"""At checkpoints: whether steps have become slower, and whether the job is to be started again under another plan."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import weakref
from typing import Any

from autopar.executable import Executable, last_called
from autopar.ir.plan import Plan
from autopar.planned import planned_for
from autopar.planning import slow_hosts
from autopar.runtime.pace import Pace, Slowdown
from autopar.runtime.processes import this_job
from autopar.runtime.spent import Since, wait_for

_PAYS = 0.95  # of the seconds of a step as it is: a plan that takes less is worth a start


class Replanning:
    """Of the program whose checkpoints these are; each process of a job has one."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._since: Since | None = None  # the last checkpoint
        self._ended: Since | None = None  # when the steps had that are saved now
        self._executable: weakref.ref[Executable] | None = None  # that the pace is of
        self._pace: Pace | None = None

    def steps_end(self, state: Any, step: int) -> None:
        """Before a checkpoint."""
        wait_for(state)
        self._ended = Since.now(step)

    def pays(self) -> bool:
        """After a checkpoint: whether the job is to end, so that it is started again under another plan.

        The same on all processes.
        """
        since, ended, executable = self._since, self._ended, last_called()
        assert ended is not None, "steps end before a checkpoint"
        slowdown = None
        if executable is not None and (self._executable is None or self._executable() is not executable):
            self._executable = weakref.ref(executable)  # the steps until now were compiled, or others
            self._pace = Pace(executable.graph.name, executable._devices, self._slower, this_job())
        elif executable is not None and self._pace is not None and since is not None and ended.number > since.number:
            slowdown = self._pace.look(ended.number, *self._pace.agreed(since.step_seconds(ended)))
        if slowdown is None or executable is None:
            return False
        _say(str(slowdown))
        return bool(slowdown.parts) and not slowdown.is_first and _is_quicker(slowdown, executable)

    def goes_on(self, step: int) -> None:
        """The next steps are made now."""
        self._since = Since.now(step)


def _is_quicker(slowdown: Slowdown, executable: Executable) -> bool:
    """Whether another plan is, on the cluster as it is; what is slow is remembered then."""
    job = this_job()
    decide = functools.partial(_replanned, slowdown, executable)
    pays, text = json.loads(decide() if job is None else job.from_first(decide))
    _say(text)
    return bool(pays)


def _replanned(slowdown: Slowdown, executable: Executable) -> str:
    """Whether another plan takes less on the cluster as it is, and what is to be said of it; never raises."""
    try:
        pays, text = _compared(slowdown, executable)
    except Exception as error:  # nothing fits, a file cannot be written, ..: no reason to end a job
        pays, text = False, f"the job goes on under its plan: {error}"
    return json.dumps([pays, text])


def _compared(slowdown: Slowdown, executable: Executable) -> tuple[bool, str]:
    planned = executable.plan
    if planned.planner is None:
        return False, "the job goes on: its plan, or the cluster that it is for, was given to it"
    hosts, network = slow_hosts.of_hosts(planned.cluster, slowdown.devices, slowdown.hosts, slowdown.parts)
    cluster = slow_hosts.with_slow(planned.cluster, slowdown.devices, slowdown.hosts, hosts, network)
    plan = dataclasses.replace(Plan(**planned.fields()), cluster=cluster)
    before, after = planned_for(planned.step, cluster, plan).step_time, planned.planner(cluster).step_time
    text = f"on the cluster as it is now this plan takes {before:.4g} s a step, the best that was found {after:.4g} s"
    if after >= _PAYS * before:
        return False, f"{text}: the job goes on"
    slow_hosts.remember(hosts, network)
    return True, f"{text}: the job is to be started again"


def _say(text: str) -> None:
    """Once in a job."""
    job = this_job()
    if job is None or job.index == 0:
        sys.stderr.write(f"autopar: {text}\n")
        sys.stderr.flush()
