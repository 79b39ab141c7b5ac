"""Rematerialisation: what of the forward pass the backward pass computes again instead of keeping it.

The forward pass is cut into blocks, as many as make the least of what they hand on and what one of them has inside.
What a block hands to another one is kept; what only the backward pass reads of the rest, the block's *residuals*, is
kept or computed again: from what is kept of the block and from what other blocks hand to it, behind a fence, so that
no compiler finds it to be the same (as `jax.checkpoint` does; Chen et al. 2016). The fence has a cotangent, too, so
that it opens when the backward pass gets there. Where the step itself uses `jax.checkpoint`, that stays.

Which residuals are kept, where not all of them are, is an integer program: least time for the second computation, with
at most so many bytes kept (what Korthikanti et al. 2022 call selective recomputation, by hand for transformers).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

from autopar.ir.graph import Block, Equation, Operand, Phase, StepGraph, Value
from autopar.passes.layers import FlopsFn, Ints, cluster_layers, heavy_equations
from autopar.tracing.build import barrier

_TOGETHER = (2, 3, 4, 6, 8)  # layers that are a block
_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # of a layer, each a block
_FEW_PARTS = 4  # where there is one layer only
_LEAST_FREED = 0.4  # of what is kept for the backward pass: if all of it is less, it is not worth looking for
_LEAST_STEP = 0.2  # of the same, between one choice of what is kept and the next
_KEPT = (0.6, 0.3)  # of a block's residuals, at most, where the best of them are kept
_RESOLUTION = 1_000_000  # steps into which the integer program divides the time of a block
_WORK_SECONDS = 1.0  # its limit; it takes milliseconds


@dataclasses.dataclass(frozen=True)
class Rematerialization:
    """What it takes to compute a block's residuals again."""

    equations: tuple[int, ...]  # by number
    residuals: tuple[Value, ...]  # that are not kept
    sources: tuple[Value, ...]  # what they are computed from, of all that varies with the examples


class Forward:
    """The forward pass of a step, as its backward pass reads it."""

    def __init__(self, step: StepGraph) -> None:
        self.step, self.equations = step, step.forward
        self.varying = varying = step.batched - step.partial
        self.rematerialization = functools.cache(self._rematerialization)  # decorated, it would keep this for ever
        self.place = {v: (i, k) for i, e in enumerate(self.equations) for k, v in enumerate(e.outputs) if v in varying}
        self.sources = varying - {step.microbatch}
        self.last_reader = {v: i for i, e in enumerate(self.equations) for v in e.values}
        # What is kept whoever else reads it, what the step itself begins to compute again from included.
        self.lasting = {*step.keep, *step.accumulate, *(v for v in step.outputs if isinstance(v, Value))}
        for eqn in step.equations:
            if not eqn.phase.in_loop or (eqn.phase is Phase.BACKWARD and eqn.primitive is barrier()):
                self.lasting.update(eqn.values)
        self.read = dict.fromkeys(
            v for e in step.equations if e.phase is Phase.BACKWARD for v in e.values if v in self.place
        )

    def is_residual(self, v: Value, block: Block) -> bool:
        """Whether a block makes it, and hands it to no other."""
        return (
            v in self.place
            and block.start <= self.place[v][0] < block.stop
            and v not in self.lasting
            and self.last_reader.get(v, -1) < block.stop
        )

    def _rematerialization(self, block: Block) -> Rematerialization:
        """What it takes to compute a block again."""

        def is_lost(v: Value) -> bool:
            return self.is_residual(v, block) and self.place[v] not in block.saved

        residuals = [v for v in self.read if is_lost(v)]
        equations: set[int] = set()
        sources: dict[Value, None] = {}
        todo = residuals[:]
        while todo:
            number = self.place[todo.pop()][0]
            if number not in equations:
                equations.add(number)
                for v in self.equations[number].values:
                    if is_lost(v):
                        todo.append(v)
                    elif v in self.sources:
                        sources[v] = None
        return Rematerialization(tuple(sorted(equations)), tuple(residuals), tuple(sorted(sources, key=lambda v: v.id)))

    def with_residuals(self, blocks: Iterable[Block]) -> list[Block]:
        """Those that have any that are not kept."""
        return [block for block in blocks if self.rematerialization(block).residuals]

    def kept_bytes(self, blocks: Iterable[Block]) -> int:
        """What the forward pass makes and the backward pass reads, bytes of whole values."""
        kept = dict(self.read)
        for block in blocks:
            plan = self.rematerialization(block)
            for v in plan.residuals:
                kept.pop(v)
            kept.update((v, None) for v in plan.sources if v in self.place)
        return sum(v.nbytes for v in kept)


def _places(forward: Forward, plans: Sequence[Rematerialization]) -> tuple[dict[int, int], dict[int, Value]]:
    """By number of a plan: the place in the backward pass before which it runs, and a cotangent that is there by then.

    Without such a cotangent no other block has been through the backward pass.
    """
    block_of = {v: number for number, plan in enumerate(plans) for v in plan.residuals}
    backward = [e for e in forward.step.equations if e.phase is Phase.BACKWARD]
    made_at = {v: at for at, eqn in enumerate(backward) for v in eqn.outputs if v in forward.varying}
    first: dict[int, int] = {}  # the place in the backward pass before which a block is computed again
    tie: dict[int, Value] = {}  # a cotangent that is there by then
    for at, eqn in enumerate(backward):
        for number in {block_of[v]: None for v in eqn.values if v in block_of}:
            first.setdefault(number, at)
            there = (v for v in eqn.values if made_at.get(v, len(backward)) < first[number])
            if number not in tie and (cotangent := next(there, None)) is not None:
                tie[number] = cotangent
    return first, tie


def recompute(step: StepGraph, blocks: Sequence[Block]) -> tuple[StepGraph, dict[int, int]]:
    """The step with these blocks computed again in the backward pass, each where one of its residuals is read first.

    Also returns which equation each new one repeats, by id; those that repeat none are fences.
    """
    forward = Forward(step)
    plans = [forward.rematerialization(block) for block in blocks]
    first, tie = _places(forward, plans)

    next_value, next_id = step.next_value_id, 1 + max(e.id for e in step.equations)
    equations: list[Equation] = []
    repeats: dict[int, int] = {}
    batched = set(step.batched)
    renamed: dict[Operand, Value] = {}  # a residual -> what it is when computed again; a cotangent -> behind its fence

    def add(like: Equation, inputs: Sequence[Operand]) -> tuple[Value, ...]:
        nonlocal next_value, next_id
        outputs = tuple(dataclasses.replace(v, id=next_value + k) for k, v in enumerate(like.outputs))
        equations.append(
            dataclasses.replace(like, id=next_id, inputs=tuple(inputs), outputs=outputs, phase=Phase.BACKWARD)
        )
        batched.update(new for new, old in zip(outputs, like.outputs, strict=True) if old in step.batched)
        next_value, next_id = next_value + len(outputs), next_id + 1
        return outputs

    def add_rematerialized(number: int, source: str) -> None:
        plan = plans[number]
        fenced = (*plan.sources, *((tie[number],) if number in tie else ()))
        fence = Equation(0, barrier(), {}, fenced, fenced, Phase.BACKWARD, source)
        now: dict[Operand, Value] = dict(zip(fenced, add(fence, [renamed.get(v, v) for v in fenced]), strict=True))
        renamed.update((v, now[v]) for v in fenced[len(plan.sources) :])
        for at in plan.equations:
            eqn = forward.equations[at]
            outputs = add(eqn, [now.get(v, v) for v in eqn.inputs])
            repeats[equations[-1].id] = eqn.id
            now.update((v, new) for v, new in zip(eqn.outputs, outputs, strict=True) if v not in plan.sources)
        renamed.update((v, now[v]) for v in plan.residuals)

    # What comes from nothing has no fence, without which it is computed once.
    fenced = {n: at for n, at in first.items() if plans[n].sources or n in tie}
    starts = {at: [n for n in fenced if fenced[n] == at] for at in fenced.values()}
    at = -1
    for eqn in step.equations:
        if eqn.phase is not Phase.BACKWARD:
            equations.append(eqn)
            continue
        at += 1
        for number in starts.get(at, ()):
            add_rematerialized(number, eqn.source)
        if any(v in renamed for v in eqn.values):
            eqn = dataclasses.replace(eqn, inputs=tuple(renamed.get(v, v) for v in eqn.inputs))
        equations.append(eqn)
    step = dataclasses.replace(step, equations=tuple(equations), batched=frozenset(batched), recomputed=tuple(blocks))
    return step, repeats


def leaner_blocks(
    step: StepGraph, layers: Sequence[int], flops: FlopsFn, seconds: Callable[[], Callable[[Equation], float]]
) -> list[tuple[Block, ...]]:
    """Blocks to compute again, for ever less memory: the best of their residuals kept, then fewer, then none.

    `layers`: by forward equation; a block is some of them, or lies in one. `seconds` is called if any blocks are worth
    it. Only what frees much of what is kept without.
    """
    forward = Forward(step)
    whole = forward.kept_bytes(())
    enough = (1 - _LEAST_FREED) * whole

    def blocks_of(together: int, parts: int) -> tuple[list[Block], int, int]:
        """The blocks, the bytes that are kept, and those that one block has besides."""
        candidates = forward.with_residuals(_cut(step, np.array(layers) // together, parts, flops))
        # What the backward pass begins with need not be computed again: it is all there at that time.
        _, tie = _places(forward, [forward.rematerialization(block) for block in candidates])
        tied = [block for number, block in enumerate(candidates) if number in tie]
        inside = max((sum(v.nbytes for v in forward.rematerialization(block).residuals) for block in tied), default=0)
        return tied, forward.kept_bytes(tied), inside

    num_layers = layers[-1] + 1 if layers else 0
    blocks, kept, inside = blocks_of(1, 1 if num_layers > 1 else _FEW_PARTS)
    if kept >= enough:
        return []
    least = kept + inside
    ways = [(together, 1) for together in _TOGETHER if together < num_layers] + [(1, parts) for parts in _PARTS]
    for together, parts in ways:
        some, kept, inside = blocks_of(together, parts)
        if kept + inside < least:
            blocks, least = some, kept + inside
        if parts > 1 and kept >= least:
            break  # the smaller the blocks, the more is handed on
    if least >= (1 - _LEAST_STEP) * whole:
        return []
    times = seconds()
    leaner: list[tuple[Block, ...]] = []
    kept = whole
    for share in _KEPT:
        known: dict[Hashable, Block] = {}
        some = []
        for block in blocks:
            signature = _signature(forward, block)
            if signature not in known:
                saved = best_saved(forward, block, share, times)
                known[signature] = dataclasses.replace(block, saved=saved).moved(-block.start)
            some.append(known[signature].moved(block.start))
        some = forward.with_residuals(some)
        left = forward.kept_bytes(some)
        if kept - left >= _LEAST_STEP * whole and left - forward.kept_bytes(blocks) >= _LEAST_STEP * whole:
            leaner.append(tuple(some))
            kept = left
    return [*leaner, tuple(blocks)]


def _cut(step: StepGraph, layers: Ints, parts: int, flops: FlopsFn) -> list[Block]:
    """Each layer in so many parts, or as many as it has heavy equations, where little is handed on."""
    blocks: list[Block] = []
    if not len(layers):
        return blocks
    for start, stop in itertools.pairwise(np.searchsorted(layers, np.arange(layers[-1] + 2)).tolist()):
        if parts == 1:
            blocks.append(Block(start, stop))
            continue
        inside = step.forward[start:stop]
        heavy = int(heavy_equations(np.array([flops(eqn) for eqn in inside])).sum())
        part = cluster_layers(inside, max(1, min(parts, heavy)), flops, lambda v: v in step.batched)
        bounds = np.searchsorted(part, np.arange(part[-1] + 2)).tolist()
        blocks += [Block(start + a, start + b) for a, b in itertools.pairwise(bounds)]
    return blocks


def _signature(forward: Forward, block: Block) -> Hashable:
    """Equal for blocks of which the same is best kept."""
    inside = forward.equations[block.start : block.stop]

    def operand(v: Operand) -> Hashable:
        at = forward.place.get(v) if isinstance(v, Value) else None
        return None if at is None or at[0] < block.start else (at[0] - block.start, at[1])

    return tuple(
        (eqn.signature, tuple(map(operand, eqn.inputs)),
         tuple((v in forward.read, forward.is_residual(v, block)) for v in eqn.outputs))
        for eqn in inside
    )  # fmt: skip


def best_saved(
    forward: Forward, block: Block, share: float, seconds: Callable[[Equation], float]
) -> tuple[tuple[int, int], ...]:
    """What to keep of a block's residuals, and of what leads to them, so that the rest is computed again soonest.

    Minimise the seconds of the equations that run again, where every residual is kept or its equation runs again, and
    so is every operand of those; at most such a share of the residuals' bytes is kept.
    """
    from ortools.sat.python import cp_model  # slow to import

    plan = forward.rematerialization(block)
    model = cp_model.CpModel()
    runs = {at: model.new_bool_var(f"runs_{at}") for at in plan.equations}
    values = [v for at in plan.equations for v in forward.equations[at].outputs if forward.is_residual(v, block)]
    kept = {v: model.new_bool_var(f"kept_{v.id}") for v in values}
    for v in plan.residuals:
        model.add_bool_or(kept[v], runs[forward.place[v][0]])
    for at in plan.equations:
        for v in forward.equations[at].values:
            if v in kept:
                model.add_bool_or(kept[v], runs[forward.place[v][0]], ~runs[at])
    model.add(sum(v.nbytes * kept[v] for v in values) <= int(share * sum(v.nbytes for v in plan.residuals)))
    times = {at: seconds(forward.equations[at]) for at in plan.equations}
    unit = (sum(times.values()) or 1.0) / _RESOLUTION
    model.minimize(sum((1 + round(times[at] / unit)) * runs[at] for at in plan.equations))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2  # its relaxation is nearly tight: a quarter of the time
    solver.parameters.max_deterministic_time = _WORK_SECONDS
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ()
    return tuple(sorted(forward.place[v] for v in values if solver.boolean_value(kept[v])))
