"""Where the leaves of a step's state lie: whole on one device, in planned shardings, in pieces on several stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compiling.program_sources import device_mesh
from autopar.errors import PlanError
from autopar.ir.graph import Graph, LeafCut
from autopar.ir.pieces import Pieces
from autopar.ir.plan import Plan
from autopar.ir.sharding import Sharding
from autopar.planning.finisher import LeafHome
from autopar.runtime.gathering import whole_arrays
from autopar.runtime.placement import weakly_typed
from autopar.runtime.processes import this_job
from autopar.tracing.trace import matching_leaves, state_specs


def argument_like(graph: Graph, tree: Any, leaves: Sequence[Any]) -> tuple[int, Any]:
    """Index of the first leaf, and structure, of the argument that looks like the state that `init_fn` returns.

    The same paths to the same shapes will do: functions in the structure, such as the optimizer of Flax's `TrainState`,
    are others each time that `init_fn` makes them.
    """
    args_tree, _ = graph.in_tree.children()
    shapes = [(x.shape, x.dtype) for x in leaves]
    for same in (lambda child: child == tree, lambda child: _paths(child) == _paths(tree)):
        first = 0
        for child in args_tree.children():
            values = graph.inputs[first : first + child.num_leaves]
            alike = [(v.shape, v.dtype) for v in values] == shapes and graph.examples.isdisjoint(values)
            if alike and same(child):
                return first, child
            first += child.num_leaves
    raise PlanError(
        f"init: what init_fn returns, {tree} with {len(leaves)} leaves, has the structure and shapes of no argument of "
        f"{graph.name}."
    )


def _paths(tree: Any) -> list[Any]:
    leaves = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(leaves)]


def pieces_of(x: Any, cut: LeafCut) -> list[Any]:
    """A whole array in its pieces."""
    return [x[(slice(None),) * cut.axis + (slice(start, stop),)] for start, stop in cut.windows]


def uncommitted(x: Any) -> Any:
    """An array that no device is committed to, so that any mesh may use it."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))  # type: ignore[arg-type]
    return np.asarray(x) if isinstance(x, jax.Array) else x


def homes_of(
    plan: Plan, old: Graph, devices: Sequence[jax.Device], graph: Graph, leaves: Sequence[Any]
) -> dict[int, LeafHome]:
    """Where those argument leaves of `graph` lie that are state of a planned step `old`, by number.

    State is what lies on a mesh of the plan, and what looks like state of that step though it lies nowhere yet
    (shapes, numpy arrays). Examples are none.
    """
    matches = matching_leaves(
        graph.in_tree,
        state_specs(graph, graph.examples),
        old.in_tree.children()[0],
        [(v.shape, str(v.dtype)) for v in old.inputs],
    )
    alike = {mine: theirs for theirs, mine in matches.items()}
    meshes = [device_mesh(stage.mesh, devices) for stage in plan.stages]
    kept, cuts = plan.pieces, plan.leaf_cuts
    homes: dict[int, LeafHome] = {}
    for i, leaf in enumerate(leaves):
        if graph.inputs[i] in graph.examples:
            continue
        planned = kept[alike[i]] if i in alike else ()
        if planned and not planned[0].state:
            continue
        shardings = [getattr(x, "sharding", None) for x in (leaf.pieces if isinstance(leaf, Pieces) else (leaf,))]
        if not jnp.shape(leaf) and this_job() is not None:  # known to all processes, on a mesh to some of them only
            shardings = [None]
        at = tuple(
            (meshes.index(sharding.mesh), _sharding_of(sharding, len(leaf.shape)))
            for sharding in shardings
            if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh in meshes
        )
        if len(at) == len(shardings):
            homes[i] = LeafHome(at, leaf.cut if isinstance(leaf, Pieces) else None)
        elif planned:
            homes[i] = LeafHome(tuple((p.stage, p.sharding) for p in planned), cuts.get(alike[i]))
    return homes


def _sharding_of(sharding: jax.sharding.NamedSharding, rank: int) -> Sharding:
    dims = [() if d is None else ((d,) if isinstance(d, str) else tuple(d)) for d in sharding.spec]
    return Sharding(tuple(dims) + ((),) * (rank - len(dims)))


def _on_device(x: Any, device: jax.Device, like: Any) -> Any:
    """An array on a device, weakly typed where `like` is."""
    there = jax.device_put(x, device)
    return weakly_typed(there) if getattr(like, "weak_type", False) else there


def gather(tree: Any) -> Any:
    """A pytree whose arrays lie whole on the first device: what `jax.jit` accepts, whatever the plan was.

    In a job of several processes all of them have to call this, with the same tree; each gets the whole on its own
    first device.
    """
    job, device = this_job(), jax.local_devices()[0]

    if job is not None:
        leaves, structure = jax.tree.flatten(tree)
        # What lies on a mesh of a plan: to the others it does, too, whoever has its devices.
        apart = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array) and job.shares(x.sharding)}
        for i, x in whole_arrays(apart, job).items():
            leaves[i] = _on_device(x, device, leaves[i])
        tree = jax.tree.unflatten(structure, leaves)

    def whole(x: Any) -> Any:
        if isinstance(x, Pieces):
            return _on_device(np.asarray(x), device, x.pieces[0])
        return _on_device(uncommitted(x), device, x) if isinstance(x, jax.Array) else x

    return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, Pieces))
