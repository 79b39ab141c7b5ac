"""A step in microbatches, its forward pass in layers, and its loops over layers cut where stages may end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from autopar.cost_model.fusion import memory_traffic
from autopar.errors import PlanError, UnsplitWarning, warn
from autopar.ir.graph import Block, Equation, LeafCut, Phase, StepGraph, Value
from autopar.ir.mesh import Cluster, DeviceKind, XlaBackend
from autopar.ir.method import Method
from autopar.ir.program import PlacedStep
from autopar.ir.rule import Rule
from autopar.ir.schedule import ScheduleName
from autopar.ir.units import count_text
from autopar.passes.batch import BatchAnalysis, analyse_batch
from autopar.passes.intra_op.lifetimes import equation_seconds
from autopar.passes.intra_op.limits import batch_factors, sequence_factors
from autopar.passes.intra_op.stage import Stage
from autopar.passes.intra_op.traffic import KnownTraffic
from autopar.passes.layers import cluster_layers, default_num_layers, heavy_equations
from autopar.passes.microbatch import split_batch
from autopar.passes.pipeline import place
from autopar.passes.recompute import leaner_blocks, recompute
from autopar.passes.residuals import repeated
from autopar.passes.rules.table import rule_of
from autopar.passes.spans import Spans
from autopar.passes.split_backward import split_loops
from autopar.passes.stacks import Stacks, cut_leaves, find_stacks, loop_bounds
from autopar.tracing.build import gradient_inside

MAX_LAYERS = 16

_Microbatches = tuple[StepGraph, dict[int, Rule]]


@dataclasses.dataclass(frozen=True, eq=False)
class Layered:
    """A step graph with its rules and the layers of its forward pass."""

    analysis: BatchAnalysis
    step: StepGraph
    rules: Mapping[int, Rule]  # by equation id
    layers: tuple[int, ...]  # by forward equation that is placed
    num_layers: int
    traffic: KnownTraffic = dataclasses.field(default_factory=KnownTraffic)  # of its programs and others

    @property
    def forward(self) -> tuple[Equation, ...]:
        """The forward equations that are placed, in order."""
        return self.step.forward

    @functools.cached_property
    def finest(self) -> PlacedStep:
        """With each layer as a stage of its own."""
        return self.placed(range(1, self.num_layers))

    @functools.cached_property
    def repeated(self) -> Mapping[Value, Equation]:
        """By value of the forward pass: what makes it again in a backward program of its own."""
        return repeated(self.step, self.rules)

    @functools.cached_property
    def examples(self) -> Mapping[int, frozenset[int]]:
        """The factors of its equations that carry examples."""
        return batch_factors(self.step, self.rules)

    @functools.cached_property
    def sequences(self) -> Mapping[int, frozenset[int]]:
        """The factors of its equations along which the elements of an example lie in the batch."""
        return sequence_factors(self.step, self.rules)

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans of its layers."""
        return Spans(self.finest)

    @functools.cached_property
    def _placed(self) -> dict[Hashable, PlacedStep]:
        return {}

    @functools.cached_property
    def _stages(self) -> dict[Hashable, Stage]:
        return {}

    def stage(self, placed: PlacedStep, index: int, xla: XlaBackend) -> Stage:
        """One stage of programs of this step, in which no input lies anywhere yet: the same for all methods."""
        key = (placed, index, xla)
        if key not in self._stages:
            self._stages[key] = Stage(placed, index, self.rules, {}, xla, self.traffic)
        return self._stages[key]

    def placed(self, cuts: Sequence[int], weights_apart: bool = False) -> PlacedStep:
        """Programs of the pipeline whose stages begin at the layers 0, *cuts; gradients of parameters apart or not."""
        key = (*cuts, weights_apart)
        if key not in self._placed:
            self._placed[key] = self._place(cuts, weights_apart)
        return self._placed[key]

    def _place(self, cuts: Sequence[int], weights_apart: bool) -> PlacedStep:
        stage_of_layer = np.zeros(self.num_layers, int)
        for cut in cuts:
            stage_of_layer[cut:] += 1
        stages = {eqn.id: int(stage_of_layer[layer]) for eqn, layer in zip(self.forward, self.layers, strict=True)}
        heavy = (lambda eqn: self.rules[eqn.id].products > 0) if weights_apart else None
        return place(self.step, stages, len(cuts) + 1, {}, heavy, self.repeated)

    def recomputing(self, blocks: Sequence[Block]) -> Layered:
        """It with these blocks of the forward pass computed again in the backward pass."""
        if not blocks:
            return self
        step, repeats = recompute(self.step, blocks)
        new = {e.id: e for e in step.equations if e.id not in self.rules}
        rules = {id_: self.rules[repeats[id_]] if id_ in repeats else rule_of(eqn) for id_, eqn in new.items()}
        return dataclasses.replace(self, step=step, rules={**self.rules, **rules})

    def leaner(self, kind: DeviceKind) -> list[tuple[Block, ...]]:
        """Blocks to compute again, so that less and less is kept; none where that saves little.

        `kind`: of the devices, whose speeds say what is computed again soonest.
        """
        step, rules = self.step, self.rules

        def times() -> Callable[[Equation], float]:
            read = {v for eqn in step.equations if eqn.phase is not Phase.FORWARD for v in eqn.values}
            traffic = memory_traffic(step.forward, rules, (), read, xla=kind.xla)

            def seconds(eqn: Equation) -> float:
                shared, launches = equation_seconds(eqn, rules[eqn.id], traffic[eqn.id], kind)
                return shared + launches * kind.launch_overhead

            return seconds

        return leaner_blocks(step, self.layers, lambda eqn: rules[eqn.id].products, times)

    def recomputing_at(self, spans: Sequence[tuple[int, int]], blocks: Sequence[Sequence[Block]]) -> Layered:
        """It with what lies in each of these spans of layers of its blocks computed again."""
        parts = []
        for span, some in zip(spans, blocks, strict=True):
            start, stop = np.searchsorted(self.layers, span).tolist()
            parts += [part for block in some if (part := block.within(start, stop)).start < part.stop]
        return self.recomputing(parts)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """What all layerings of one analysis have in common: the step with no loop cut."""

    steps: dict[int, _Microbatches] = dataclasses.field(default_factory=dict)  # by number of microbatches
    layered: dict[tuple[int, int], Layered] = dataclasses.field(default_factory=dict)  # by that and that of layers
    traffic: KnownTraffic = dataclasses.field(default_factory=KnownTraffic)


class Layering:
    """Cuts one traced step into layers, for any number of microbatches."""

    def __init__(
        self, analysis: BatchAnalysis, cluster: Cluster, method: Method, num_layers: int | None,
        like: Layering | None = None,
    ) -> None:  # fmt: skip
        """`like`: another layering of the same analysis, with which it shares what both need."""
        self.analysis, self.cluster, self.method, self.num_layers = analysis, cluster, method, num_layers
        self.graph = analysis.graph
        # Decorated methods would keep this and its graphs for ever.
        self._known_layers = functools.cache(self._layered)
        self._whole: _Whole = _Whole() if like is None else like._whole
        self._warn_of_whole_loops = functools.cache(self._warn_of_loops)

    def layered(self, m: int, pipelined: bool) -> Layered:
        """The step in microbatches, with its forward pass in layers; its loops cut if it may become a pipeline."""
        return self._known_layers(m, pipelined and self.cuts_loops)

    @property
    def cuts_loops(self) -> bool:
        """Whether loops are cut between the stages of a pipeline."""
        return self.cluster.num_devices > 1 and self._finest is not self.analysis

    def _layered(self, m: int, is_cut: bool) -> Layered:
        self.analysis.check(m)
        analysis = self._finest if is_cut else self.analysis
        if analysis.most_microbatches % m:
            if analysis is not self.analysis:
                self._warn_of_whole_loops()
            analysis = self.analysis  # the parts of a loop hand on partial sums that the loop as a whole sums
        step, rules = self.in_microbatches(analysis, m)
        forward = step.forward

        def flops(eqn: Equation) -> float:
            return rules[eqn.id].products

        wanted = self.method.num_stages or 1
        if wanted == 1 and (self.cluster.num_devices == 1 or not (forward or self.method.stages)):
            return self._in_layers(analysis, step, rules, 1)
        is_heavy = heavy_equations(np.array([flops(e) for e in forward]))
        heavy = int(is_heavy.sum())
        if wanted > max(1, heavy):
            raise PlanError(self._too_many_stages(wanted, [forward[i] for i in np.flatnonzero(is_heavy)], step, rules))
        if self.method.stages is not None:
            number = sum(stage.num_layers for stage in self.method.stages)
            if number > max(1, heavy):
                raise PlanError(
                    f"method {self.method.name!r}: its stages have {count_text(number, 'layer')}, and each needs a "
                    f"heavy operation, of which the forward pass of {self.graph.name} has only {heavy}."
                    f"{self._other_gradients(step, rules)}"
                )
        else:
            stages = wanted if wanted > 1 else len(self.cluster.hosts)
            number = self.num_layers or max(wanted, default_num_layers(forward, flops, MAX_LAYERS, stages))
            number = min(number, max(1, heavy))
        return self._in_layers(analysis, step, rules, number)

    def _in_layers(self, analysis: BatchAnalysis, step: StepGraph, rules: Mapping[int, Rule], number: int) -> Layered:
        """The step in so many layers, of about the same work each."""
        known = self._whole.layered if analysis is self.analysis else {}
        key = (step.num_microbatches, number)
        if key not in known:
            layers: tuple[int, ...] = (0,) * len(step.forward)
            if number > 1:
                layers = cluster_layers(
                    step.forward, number, lambda eqn: rules[eqn.id].products, lambda v: v in step.batched
                )
            known[key] = Layered(analysis, step, rules, layers, number, self._whole.traffic)
        return known[key]

    def joined(self, layered: Layered, cuts: Sequence[int]) -> Layered:
        """A step whose loops are cut with its stages as layers, and loops cut only where one ends."""
        m = layered.step.num_microbatches
        stage = np.searchsorted(cuts, layered.layers, side="right")
        at = list(zip(layered.forward, map(int, stage), strict=True))
        analysis = self.cut(self.stacks.leaf_cuts(loop_bounds(at, self.stacks)))
        step, rules = self.in_microbatches(analysis, m)
        # Pieces in one stage begin with the first of the finer ones.
        stage_of = {eqn.origin: s for eqn, s in reversed(at)}
        stages, latest = [], 0
        for eqn in step.forward:
            latest = max(latest, stage_of.get(eqn.origin, latest))
            stages.append(latest)
        return Layered(analysis, step, rules, tuple(stages), len(cuts) + 1, self._whole.traffic)

    @property
    def _layers_of_method(self) -> int | None:
        if self.method.stages is not None:
            return sum(stage.num_layers for stage in self.method.stages)
        return self.method.num_stages

    @functools.cached_property
    def stacks(self) -> Stacks:
        """The loops that stages may share."""
        return find_stacks(self.analysis, len(self.cluster.hosts), self.num_layers or self._layers_of_method)

    @functools.cached_property
    def _finest(self) -> BatchAnalysis:
        """With loops over layers cut wherever a stage may end."""
        return self.cut(self.stacks.leaf_cuts(self.stacks.loops))

    def cut(self, cuts: Mapping[int, LeafCut], whole: frozenset[int] = frozenset()) -> BatchAnalysis:
        """The analysis of the graph with these argument leaves in pieces, others whole."""
        if not cuts:
            return self.analysis
        return self._cut(self.analysis, cuts, whole)

    def _cut(
        self, analysis: BatchAnalysis, cuts: Mapping[int, LeafCut], whole: frozenset[int] = frozenset()
    ) -> BatchAnalysis:
        return analyse_batch(cut_leaves(analysis, cuts, whole), self._batch_axes, rule_of)

    @property
    def _batch_axes(self) -> dict[Value, int]:
        return {v: state.batch.dim for v in self.graph.inputs if (state := self.analysis.states[v]).batch is not None}

    def placed(self, layered: Layered, cuts: Sequence[int], schedule: ScheduleName) -> tuple[Layered, PlacedStep]:
        """The programs of the stages that begin at `cuts`, and what they are of.

        Zero-bubble has gradients of parameters apart, and those of loops in loops of their own.
        """
        if schedule != "zero-bubble" or not len(cuts):  # one stage waits for no other
            return layered, layered.placed(cuts)
        if self._apart is not self.analysis:
            cut, m = layered.analysis.graph.input_cuts, layered.step.num_microbatches
            analysis = self._cut(self._apart, cut) if cut else self._apart
            if analysis.most_microbatches % m == 0:
                step, rules = self.in_microbatches(analysis, m)
                whole = dataclasses.replace(layered, analysis=analysis, step=step, rules=rules)
                layered = whole.recomputing(layered.step.recomputed)
        return layered, layered.placed(cuts, weights_apart=True)

    @functools.cached_property
    def _apart(self) -> BatchAnalysis:
        """Of the graph with loops in two."""
        graph = split_loops(self.graph, rule_of)
        return self.analysis if graph is self.graph else analyse_batch(graph, self._batch_axes, rule_of)

    def in_microbatches(self, analysis: BatchAnalysis, m: int) -> _Microbatches:
        """The step in microbatches, and the rules of its equations."""
        known = self._whole.steps if analysis is self.analysis else {}
        if m not in known:
            step = split_batch(analysis, m)
            known[m] = step, {eqn.id: rule_of(eqn) for eqn in step.equations}
        return known[m]

    def _warn_of_loops(self) -> None:
        """Say why loops over layers are not cut between stages."""
        couplings = self._finest.couplings
        reason = f": {couplings[0].reason} at {couplings[0].equation.source or 'an unknown line'}" if couplings else ""
        lines = dict.fromkeys(e.source for e in self.graph.equations if e.id in self.stacks.loops)
        warn(
            f"{self.graph.name}: the loop over layers at {', '.join(lines)} is not cut between stages where there are "
            f"several microbatches{reason}. Its parts would have to hand on a sum over the batch. Let the loop do "
            "nothing to what it carries of it (an auxiliary loss) but add to it, or return that for each layer and sum "
            "it after the loop.",
            UnsplitWarning,
        )

    def _too_many_stages(
        self, wanted: int, heavy: Sequence[Equation], step: StepGraph, rules: Mapping[int, Rule]
    ) -> str:
        lines = dict.fromkeys(f"{e.primitive.name} at {e.source or 'an unknown line'}" for e in heavy)
        loops = any(rules[e.id].kernels for e in heavy)
        hint = " A loop is cut between stages only if it is a jax.lax.scan over stacked parameters." if loops else ""
        few = max(1, len(heavy))
        return (
            f"num_stages={wanted}: each stage needs a heavy operation (a product of matrices, a convolution, a part of "
            f"a loop over layers), of which the forward pass of {self.graph.name} has only {len(heavy)}"
            + (f" ({', '.join(lines)})" if lines else "")
            + f".{self._other_gradients(step, rules)} Use at most {count_text(few, 'stage')}, or method='auto'.{hint}"
        )

    def _other_gradients(self, step: StepGraph, rules: Mapping[int, Rule]) -> str:
        """Why its forward pass does so little: gradients inside of loops, or after the first gradient computation."""
        traced = {e.origin[0]: e for e in self.graph.equations}
        inside: dict[str, None] = {}
        later: dict[str, None] = {}
        for eqn in step.equations:
            before = traced.get(eqn.origin[0], eqn)
            line = eqn.source or "an unknown line"
            if before.phase is Phase.UPDATE and (gradient := gradient_inside(eqn.params)) is not None:
                inside[f"{gradient} in the {eqn.primitive.name} at {line}"] = None
            elif before.phase is Phase.FORWARD and eqn.phase is Phase.BACKWARD and rules[eqn.id].products:
                later[line] = None
        text = ""
        if inside:
            text += (
                f" {self.graph.name} has several gradient computations, a round each: at {', '.join(inside)}. What a "
                "loop's body differentiates is no forward pass of the step."
            )
        if later:
            lines = [*itertools.islice(later, _MOST_LINES), *[".."] * (len(later) > _MOST_LINES)]
            text += (
                f" {self.graph.name} has several gradient computations: what those after the first compute forward, at "
                f"{', '.join(lines)}, follows its backward pass."
            )
        return text


_MOST_LINES = 4  # that a message names
