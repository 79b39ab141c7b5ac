"""A step compiled for given shapes: the caller's pytrees in and out of what the runtime plays."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autopar.compiling.origin import origin_of
from autopar.errors import NotFiniteError, PlanMismatchError, StateError
from autopar.ir.graph import Graph
from autopar.ir.pieces import Pieces
from autopar.ir.placed_examples import PlacedExamples
from autopar.runtime.callbacks import Callbacks
from autopar.runtime.checked import CheckedWorker, has
from autopar.runtime.feeding import DataShard
from autopar.runtime.gathering import whole_arrays
from autopar.runtime.placement import Home, absent, is_here
from autopar.runtime.processes import this_job
from autopar.runtime.source import compiler_options
from autopar.runtime.worker import Worker
from autopar.state import argument_like, pieces_of, uncommitted
from autopar.tracing.in_place import Renewed, renew
from autopar.tracing.static_leaf import IsStatic, flatten_arrays, has_static, unflatten_arrays
from autopar.tracing.trace import call_specs, configuration, leaf_specs

if TYPE_CHECKING:
    from autopar.planned import Planned
from autopar.profiling import profile_of
from autopar.reporting.profile import Profile

_called: list[weakref.ref[Executable]] = []  # the last one


def _note_called(executable: Executable) -> None:
    if executable.graph.carried:
        _called[:] = [weakref.ref(executable)]


def last_called() -> Executable | None:
    """The executable that has renewed a state last, but for calls that are as the one before."""
    return _called[0]() if _called else None


class HasExecutable(abc.ABC):
    """An executable, or what compiles one."""

    @abc.abstractmethod
    def executable_for(self, what: str) -> Executable:
        """The executable that has the state; raises PlanError, which says for `what`, where there is none."""


@dataclasses.dataclass(frozen=True, eq=False)
class Executable(HasExecutable):
    """A step compiled for given shapes."""

    plan: Planned
    _worker: Worker
    graph: Graph  # as traced
    _cut_graph: Graph  # .. with an input and a result for each piece of a leaf that is cut between stages
    _devices: tuple[jax.Device, ...]
    _is_static: IsStatic

    @property
    def cost(self) -> float:
        """Predicted seconds per step."""
        return self.plan.step_time

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that XLA has set aside per device for each program: arguments, results and temporaries."""
        return {name: arguments + besides for name, (arguments, besides) in self._bytes().items()}

    @property
    def temporaries(self) -> dict[str, int]:
        """Of these what is not there before: temporaries, and results that take the place of no argument."""
        return {name: besides for name, (_, besides) in self._bytes().items()}

    def _bytes(self) -> dict[str, tuple[int, int]]:
        bytes_of = {}
        for source, program in zip(self._worker.sources, self._worker.programs, strict=True):
            use = program.memory_analysis()
            besides = use.temp_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
            bytes_of[source.name] = int(use.argument_size_in_bytes), int(besides)
        return bytes_of

    @property
    def instruction_count(self) -> int:
        """Programs and transfers that the worker issues per step."""
        return self._worker.instruction_count

    @property
    def dispatch_seconds(self) -> float:
        """Host seconds that issuing the last step's instructions took.

        In a loop over a step that is one program, bringing NumPy examples to the devices is a part of it.
        """
        return self._worker.dispatch_seconds

    def as_text(self) -> dict[str, str]:
        """XLA's optimised HLO of each program, by name."""
        return {s.name: p.as_text() for s, p in zip(self._worker.sources, self._worker.programs, strict=True)}

    def executable_for(self, what: str) -> Executable:
        """Itself."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; static arguments are left out, as in `jax.stages.Compiled`.

        Raises:
          PlanMismatchError: the arguments have another structure or other shapes than those compiled for.
          StateError, StateLostError: see `autopar.errors`.
        """
        leaves, tree = flatten_arrays((args, kwargs), self._is_static)
        graph = self.graph
        if tree != graph.in_tree:
            raise PlanMismatchError(
                f"{graph.name} was compiled for arguments of structure {graph.in_tree}, called with {tree}."
            )
        for path, value, (shape, dtype) in zip(graph.input_paths, graph.inputs, leaf_specs(leaves), strict=True):
            if (value.shape, value.dtype) != (shape, dtype):
                raise PlanMismatchError(
                    f"{graph.name} was compiled for {path} of {value.dtype}{list(value.shape)}, called with "
                    f"{dtype}{list(shape)}. Compile it for these shapes, or call the parallelized function itself."
                )
        return renew(self._run(leaves), args, kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn(*args)` makes, each leaf born where the plan keeps it.

        XLA partitions `init_fn` by the shardings of its results, stage by stage; no device holds more than its own
        pieces and their temporaries.

        Raises:
          PlanError: the result of `init_fn` is no argument of the step.
        """
        tree: Any = None

        def make_leaves(*xs: Any) -> list[Any]:
            nonlocal tree
            leaves, tree = flatten_arrays(init_fn(*xs), self._is_static)
            return leaves

        leaves = jax.eval_shape(make_leaves, *args)
        first, structure = argument_like(self.graph, tree, leaves)
        homes = [self.home_of(first + i) for i in range(len(leaves))]
        cuts = {i: home.cut for i, home in enumerate(homes) if home.cut is not None}
        shardings = {(i, k): sharding for i, home in enumerate(homes) for k, sharding in enumerate(home.shardings)}
        by_mesh: dict[Any, list[tuple[int, int]]] = {}
        for piece, sharding in shardings.items():
            by_mesh.setdefault(getattr(sharding, "mesh", None), []).append(piece)
        placed: dict[tuple[int, int], Any] = {}
        for mesh, pieces in by_mesh.items():
            if mesh is not None and not is_here(mesh):
                apart = [(i, k) for i, k in pieces if i not in cuts and leaves[i].ndim == 0]
                for i, k in set(pieces) - set(apart):
                    placed[i, k] = absent(dataclasses.replace(homes[i], weak_type=leaves[i].weak_type).arrays[k])
                mesh, pieces = None, apart  # numbers are known to all processes: they are made here, too
            if not pieces:
                continue

            def make(*xs: Any, pieces: list[tuple[int, int]] = pieces) -> list[Any]:
                state = make_leaves(*xs)
                return [pieces_of(state[i], cuts[i])[k] if i in cuts else state[i] for i, k in pieces]

            wanted = None if mesh is None else [shardings[piece] for piece in pieces]
            # Ended here: a step's first program must not meet it on virtual CPU devices (see the worker).
            options = None if mesh is None else compiler_options(mesh.devices.flat)
            program = jax.jit(make, out_shardings=wanted, compiler_options=options)
            made = jax.block_until_ready(program(*jax.tree.map(uncommitted, args)))
            placed.update(zip(pieces, made, strict=True))
        return unflatten_arrays(
            structure,
            [
                Pieces(tuple(placed[i, k] for k in range(len(cuts[i].windows))), cuts[i]) if i in cuts else placed[i, 0]
                for i in range(len(leaves))
            ],
        )

    def profile(self, *args: Any, steps: int = 5, kernels: bool = False, **kwargs: Any) -> Profile:
        """Run so many steps, after two that warm up, with their instructions timed; what they took beside the plan.

        Each step is of the state that the one before returned, and waited for. State is given away as in calls:
        `result` of the profile is what the last one returned. Calls that are not profiled are not slower. Where
        programs are not waited for, as on GPUs, their ends are seen by threads that wait for what they make, some tens
        of microseconds late; with several processes a step is measured from when all have come to it. In a job of
        several processes all of them have to call this.

        With `kernels` as many steps run once more under JAX's profiler, for what kernels take by kind of operator.

        Raises:
          ArgumentError: `steps` is no number above 0.
          RuntimeError: with `kernels`, JAX's profiler is in use.
          PlanMismatchError, StateError, StateLostError: as a call.
        """
        return profile_of(self, args, kwargs, steps, kernels=kernels)

    def next_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the step that follows: those of a call, with the state that this returned in its place."""
        leaves, tree = flatten_arrays((args, dict(kwargs)), self._is_static)
        returned, _ = flatten_arrays(result, self._is_static)
        for output, at in self.graph.carried.items():
            if output < len(returned):  # else it is of an object that was changed in place
                leaves[at] = returned[output]
        following: tuple[tuple[Any, ...], dict[str, Any]] = unflatten_arrays(tree, leaves)
        return following

    @property
    def data_shard(self) -> DataShard:
        """Which part of each batch this process has to read: number `shard_index` of `shard_count` equal ones.

        As data loaders are told it: Grain's `ShardOptions(*step.data_shard)`, tf.data's `shard(count, index)`,
        PyTorch's `DistributedSampler(data, count, index)`. Not by the process: all stages of a pipeline share one.
        """
        return self._worker.rows.shard

    @property
    def input_shardings(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Where the arguments lie, as `(args, kwargs)` of a tuple for each leaf.

        Of state a sharding for each of its pieces (one, unless it is cut between stages; None: anywhere); of examples
        that of a microbatch on each stage that takes it.
        """
        feeds: dict[int, dict[Any, None]] = {}
        for at, _, _, array in self._worker.wiring.feeds.values():
            feeds.setdefault(at, {})[array.sharding] = None
        leaves = [
            tuple(feeds[pieces[0]]) if pieces[0] in feeds else self.home_of(i).shardings
            for i, pieces in enumerate(self._cut_graph.inputs_of)
        ]
        shardings: tuple[tuple[Any, ...], dict[str, Any]] = unflatten_arrays(self.graph.in_tree, leaves)
        return shardings

    @functools.cached_property
    def batch_axes(self) -> dict[int, int]:
        """Of the leaves of the arguments that hold examples and are read, by number."""
        axes = {at: batch.dim for at, batch, _, _ in self._worker.wiring.feeds.values()}
        return {i: axes[at[0]] for i, at in enumerate(self._cut_graph.inputs_of) if at[0] in axes}

    def place_examples(self, leaves: Mapping[int, np.ndarray[Any, Any]]) -> dict[int, PlacedExamples]:
        """Leaves of examples, whole or this process's part of them, where the step wants them; by number."""
        numbers = {i: self._cut_graph.inputs_of[i][0] for i in leaves}
        placed = self._worker.place_examples(self.graph.name, {numbers[i]: leaf for i, leaf in leaves.items()})
        return {i: placed[at] for i, at in numbers.items()}

    def home_of(self, leaf: int) -> Home:
        """Where a leaf of the arguments, by its number, lies."""
        value, cut = self.graph.inputs[leaf], self._cut_graph.input_cuts.get(leaf)
        pieces = [self._cut_graph.inputs[at] for at in self._cut_graph.inputs_of[leaf]]
        homes = [self._worker.wiring.homes.get(piece) for piece in pieces]
        shardings = tuple(None if home is None else home.sharding for home in homes)
        return Home(value.shape, value.dtype, value.weak_type, shardings, cut)

    def _run(self, leaves: Sequence[Any]) -> Any:
        _note_called(self)
        config: Any = jax.config
        if _looks_for_errors():
            results = self._run_checked(leaves, config.jax_debug_nans, config.jax_debug_infs)
        else:
            results = self._worker(self._inputs(leaves))
        cuts = self._cut_graph.output_cuts
        if cuts:
            results = [
                Pieces(tuple(results[k] for k in at), cuts[o]) if o in cuts else results[at[0]]
                for o, at in enumerate(self._cut_graph.outputs_of)
            ]
        tree = self.graph.out_tree
        if self.graph.callbacks:
            self._call_back(results[tree.num_leaves :])
        unflatten = unflatten_arrays if self._returns_static else jax.tree.unflatten
        return unflatten(tree, results[: tree.num_leaves])

    def _run_checked(self, leaves: Sequence[Any], nans: bool, infs: bool) -> Sequence[Any]:
        """One step whose results are looked at, and where they are not finite, what its programs make of what.

        What its programs hand to one another may have infinities, such as those of a mask, and even NaNs.

        Raises:
          NotFiniteError: a result has a NaN, or an infinity.
        """
        marks = [mark for mark, wanted in (("nan", nans), ("inf", infs)) if wanted]
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            if not marks:
                return self._worker(self._inputs(leaves))
            try:
                results = self._checked.look_for(marks, self._inputs(leaves))
                paths = zip(self._cut_graph.output_paths, results, strict=True)
                found = [[path, mark] for path, x in paths for mark in marks if has(mark, x)]
                path, mark = self._first_said(found[:1]) or ("", "")
                if not path:
                    return results
                why = self._why(mark, leaves)
            finally:
                self._checked.launches = {}
        raise NotFiniteError(f"invalid value ({mark}) encountered in {path} of {self.graph.name}{why}")

    @functools.cached_property
    def _checked(self) -> CheckedWorker:
        """What runs it where JAX is told to look for errors. It gives no state away; so there is memory for two."""
        worker = CheckedWorker(self._worker.all_sources, self._worker.wiring, this_job())
        worker.buffers = self._worker.buffers
        return worker

    def _first_said(self, mine: Sequence[Any]) -> Any:
        """Of what the processes of a job say, each at most one thing, the least, on all of them; None: nothing."""
        job, text = this_job(), json.dumps(mine[0]) if mine else ""
        said = text if job is None else job.combined(text, _least, f"to say whether {self.graph.name} is finite")
        return json.loads(said) if said else None

    def _why(self, mark: str, leaves: Sequence[Any]) -> str:
        """Where it comes from, on all processes: the first run of a program that is found to make it.

        They look at these runs one after the other, since those that share a program have to do so together.
        """
        plan, worker = self.plan.with_programs(), self._checked
        mine = {worker.position_of(launch): launch for launch in worker.launches[mark]}
        while (position := self._first_said(sorted(mine)[:1])) is not None:
            launch = mine.pop(position, None)
            origin = None if launch is None else origin_of(plan.made[1], plan.schedule, launch, mark)
            if found := self._first_said([f". It arises in {origin}."] if origin is not None else []):
                return str(found)
        given = [path for path, leaf in zip(self.graph.input_paths, leaves, strict=True) if _holds(mark, leaf)]
        names = f"{', '.join(given[:3])}{', ..' if len(given) > 3 else ''}"
        return self._first_said([f", which was called with such in {names}."] if given else []) or _NOWHERE

    def _call_back(self, values: Sequence[Any]) -> None:
        """On the process of the first device."""
        job, first = this_job(), self._devices[0].process_index
        if job is not None:
            apart = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array) and job.shares(x.sharding)}
            whole = whole_arrays(apart, job, {first})
            values = [whole.get(i, x) for i, x in enumerate(values)]
        if job is None or job.index == first:
            self._callbacks(values)

    @functools.cached_property
    def _returns_static(self) -> bool:
        return has_static(self.graph.out_tree)

    @functools.cached_property
    def _callbacks(self) -> Callbacks:
        return Callbacks(self.graph.callbacks, self._devices[0])

    def _inputs(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments' leaves, in the pieces that the plan cuts them into."""
        cuts = self._cut_graph.input_cuts
        if not cuts and not any(isinstance(leaf, Pieces) for leaf in leaves):
            return leaves
        pieces: list[Any] = []
        for i, leaf in enumerate(leaves):
            cut = cuts.get(i)
            if not isinstance(leaf, Pieces):
                pieces += [leaf] if cut is None else pieces_of(leaf, cut)
            elif leaf.cut == cut:
                pieces += leaf.pieces
            else:
                kept = "whole" if cut is None else f"in pieces {cut.bounds} of axis {cut.axis}"
                raise StateError(
                    f"{self.graph.input_paths[i]} lies in pieces {leaf.cut.bounds} of axis {leaf.cut.axis}, but the "
                    f"plan of {self.graph.name} keeps it {kept}. State is never moved silently: make the function "
                    "with follow=, or pass autopar.gather(state)."
                )
        return pieces


_NOWHERE = (
    ". No operator is known that made it of finite operands: sums over devices may overflow, or it may come from "
    "infinities that are meant, as those of a mask."
)


def _least(said: Sequence[str]) -> str:
    return min(filter(None, said), key=json.loads, default="")


def _holds(mark: str, leaf: Any) -> bool:
    """Whether a leaf of the arguments, which may be in pieces or placed ahead, has a NaN or an infinity."""
    parts: Sequence[Any] = [leaf]
    if isinstance(leaf, Pieces):
        parts = leaf.pieces
    elif isinstance(leaf, PlacedExamples):
        parts = [*leaf.arrays.values()]
    # Of each, whatever the others have: processes that share a piece look at it together.
    looked = [has(mark, part if isinstance(part, jax.Array) else np.asarray(part)) for part in parts]
    return any(looked)


@dataclasses.dataclass(frozen=True, eq=False)
class Steady:
    """Calls with the state that the last one left and arguments of the same shapes: nothing else has to be looked at.

    A training loop's calls are such. To look at thousands of leaves in Python takes longer than a small step.
    """

    executable: Executable
    structure: Any  # of the arguments, pieces of leaves apart
    others: Any  # the kinds of the leaves that are no state
    configuration: Any
    returned: Any  # the result's structure

    def serves(self, arguments: Any) -> Sequence[Any] | None:
        """The leaves of the arguments of such a call; None: it is none."""
        try:
            leaves = self.structure.flatten_up_to(arguments)  # sooner done than to flatten and compare
        except ValueError:
            return None
        worker = self.executable._worker
        serves = (
            not _looks_for_errors()
            and [_kind(leaves[at]) for at in worker.others] == self.others
            and worker.knows(leaves)
            and configuration() is self.configuration
        )
        return leaves if serves else None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.returned, self.executable._worker(leaves, known=True))


def _kind(leaf: Any) -> Any:
    """Equal for leaves that are to a step as one another; None: no array, or a tracer.

    Of NumPy's arrays as they are: what JAX makes of such a type is the same while its configuration is.
    """
    if type(leaf) is np.ndarray:
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.core.Tracer) or not jax.tree_util.all_leaves([leaf]):
        return None
    return call_specs([leaf])


def steady_calls(
    executable: Executable, leaves: Sequence[Any], arguments: Any
) -> Callable[[Any], Steady | None] | None:
    """From the result of a call with the state that the one before left: what serves those that follow.

    None where leaves are no arrays, or results have to be made of what programs return in another way than by putting
    them into the result's structure.
    """
    flat, structure = jax.tree.flatten(arguments)
    worker, graph = executable._worker, executable.graph
    inputs = executable._inputs(leaves)
    alike = len(flat) == len(inputs) and all(map(operator.is_, flat, inputs))
    if not alike or not worker.knows(flat) or graph.callbacks or executable._returns_static or _looks_for_errors():
        return None
    others = [_kind(flat[at]) for at in worker.others]

    def calls(result: Any) -> Steady | None:
        count = len(executable._cut_graph.outputs)
        returned: Any = jax.tree.structure(result)
        if isinstance(result, Renewed) or returned.num_leaves != count:
            return None
        return Steady(executable, structure, others, configuration(), returned)

    return calls


def _looks_for_errors() -> bool:
    config: Any = jax.config
    return bool(config.jax_debug_nans or config.jax_debug_infs or config.jax_disable_jit)
