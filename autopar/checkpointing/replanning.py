"""At checkpoints: whether steps have become slower, and whether the job is to be started again under another plan."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import weakref
from typing import Any

from autopar.errors import UserError
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
            slowdown = self._pace.look(ended.number, self._pace.agreed(since.step_seconds(ended)))
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
    before, after = json.loads(decide() if job is None else job.from_first(decide))
    pays = bool(after < _PAYS * before)
    text = (
        f"on the cluster as it is now this plan takes {before:.4g} s a step, and the best that was found {after:.4g} s"
    )
    _say(f"{text}: {'the job is to be started again' if pays else 'the job goes on'}")
    return pays


def _replanned(slowdown: Slowdown, executable: Executable) -> str:
    """Predicted seconds of a step on the cluster as it is: by the plan that runs, and by the one that is found now."""
    planned = executable.plan
    hosts, network = slow_hosts.of_hosts(planned.cluster, slowdown.devices, slowdown.hosts, slowdown.parts)
    cluster = slow_hosts.with_slow(planned.cluster, slowdown.devices, slowdown.hosts, hosts, network)
    plan = dataclasses.replace(Plan(**planned.fields()), cluster=cluster)
    try:
        before = planned_for(planned.step, cluster, plan).step_time
        after = planned.on(cluster).step_time
    except UserError as error:  # nothing fits, say
        _say(f"no plan for the cluster as it is now: {error}")
        return json.dumps([0.0, 0.0])
    if after < _PAYS * before:
        slow_hosts.remember(hosts, network)
    return json.dumps([before, after])


def _say(text: str) -> None:
    """Once in a job."""
    job = this_job()
    if job is None or job.index == 0:
        sys.stderr.write(f"autopar: {text}\n")
        sys.stderr.flush()
