"""Steps run with their instructions timed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from autopar.errors import ArgumentError
from autopar.ir.instructions import Copy
from autopar.planning.details import played_timeline
from autopar.reporting.profile import Profile, Timeline, mean_of
from autopar.reporting.record import Copying, ReportRecord, TimelineSpan
from autopar.runtime.processes import Processes, this_job
from autopar.runtime.recorder import Recorder, Span
from autopar.runtime.wiring import Wiring

if TYPE_CHECKING:
    from autopar.executable import Executable


_WARM_UP = 2  # steps: the second is the first of the state that a step has returned


def profile_of(executable: Executable, args: tuple[Any, ...], kwargs: Mapping[str, Any], steps: int) -> Profile:
    """As `Executable.profile`."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"profile(steps={steps!r}): pass a whole number of 1 or more.")
    worker, job, plan = executable._worker, this_job(), executable.plan
    recorder = Recorder()
    recorded: list[tuple[float, list[Span]]] = []
    result: Any = None
    worker.recorder = recorder
    try:
        for number in range(_WARM_UP + steps):
            if number:
                args, kwargs = executable.next_arguments(args, kwargs, result)
            if job is not None:
                job.combined("", lambda _: "", "to begin a step together")
            recorder.begin()
            began = time.perf_counter()
            result = executable(*args, **kwargs)
            jax.block_until_ready(
                [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array) and x.addressable_shards]
            )
            seconds, spans = time.perf_counter() - began, recorder.ended()
            recorded.append((max([seconds, *(span.end for span in spans)]), spans))  # threads see ends a little late
    finally:
        worker.recorder = None
        recorder.close()
    told = [_of_job(job, seconds, spans, worker.wiring) for seconds, spans in recorded[_WARM_UP:]]
    groups = ReportRecord(plan, None).groups
    of_stage = {stage: k for k, group in enumerate(groups) for stage in group.stages}
    predicted = played_timeline(*plan.played())
    timelines = [_timeline(seconds, spans, of_stage, plan.num_microbatches) for seconds, spans in told]
    measured = mean_of([dataclasses.replace(each, num_groups=predicted.num_groups) for each in timelines])
    return Profile(plan, tuple(seconds for seconds, _ in told), measured, predicted, _payloads(worker.wiring), result)


def _of_job(job: Processes | None, seconds: float, spans: Sequence[Span], wiring: Wiring) -> tuple[float, list[Span]]:
    """Of all processes what each first of a stage has seen; the same on all of them."""
    if job is None:
        return seconds, [*spans]
    mine = [dataclasses.astuple(span) for span in spans if _is_first(job, span, wiring)]

    def merged(said: Sequence[str]) -> str:
        read = [json.loads(text) for text in said]
        return json.dumps([max(seconds for seconds, _ in read), [span for _, spans in read for span in spans]])

    seconds, told = json.loads(job.combined(json.dumps([seconds, mine]), merged, "to say how long its programs took"))
    return seconds, [Span(*span) for span in told]


def _is_first(job: Processes, span: Span, wiring: Wiring) -> bool:
    """Of the processes that have devices of a stage, or that receive a copy."""
    there = wiring.processes[span.stage if span.to is None else span.to]
    return bool(job.index == min(there))


def _timeline(seconds: float, spans: Sequence[Span], of_stage: Mapping[int, int], microbatches: int) -> Timeline:
    programs, copies = [], []
    for span in spans:  # in the same order for every step
        run = span.run if microbatches > 1 else -1
        if span.to is None:
            group = of_stage[span.stage]
            programs.append(TimelineSpan(group, span.stage, span.phase, run, span.start, span.end))
        else:
            copies.append(Copying(span.stage, span.to, "", run, span.start, span.end))
    return Timeline(seconds, len(set(of_stage.values())), tuple(programs), tuple(copies))


def _payloads(wiring: Wiring) -> dict[tuple[int, int], int]:
    """Bytes of the values that go from stage to stage in a step."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for copy in wiring.instructions.instructions:
        if isinstance(copy, Copy):
            sent = wiring.transfers[copy.crossing]
            found[copy.stage, copy.to] += math.prod(sent.shape) * sent.dtype.itemsize
    return dict(found)
