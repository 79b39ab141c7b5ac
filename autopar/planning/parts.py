"""Parts of the search beside its neighbours that it can do without: `Method.without` names them."""

from __future__ import annotations

import enum


class Part(enum.StrEnum):
    """A bound, a shortcut or a correction of capacity; `python -m benchmarks.ablation` shows what each brings."""

    BOUND_OF_PIPELINES = "bound_of_pipelines"
    """Pipelines are left out that only compute longer than the best plan takes."""

    BOUND_IN_ANY_MEMORY = "bound_in_any_memory"
    """A stage is first bounded by what it costs whatever memory that takes."""

    BOUND_OF_MEMORY = "bound_of_memory"
    """All devices as one stage are left out with numbers of microbatches that are known not to fit."""

    BOUND_OF_PRICE = "bound_of_price"
    """A pipeline that needs more memory than the solver counted is given up if it is no quicker than the best plan."""

    OVERHEADS = "overheads"
    """What like layers were found to send on a mesh counts for layers that were not asked for."""

    FEW_SHAPES_FIRST = "few_shapes_first"
    """Groups of devices are chosen with few logical shapes, and other shapes are tried for the chosen ones."""

    JOINED_LOOPS = "joined_loops"
    """Loops over layers are cut where a stage ends, and nowhere else."""

    MORE_RECOMPUTED = "more_recomputed"
    """Stages that do not fit as they are compute more of the forward pass again."""

    LESS_MEMORY = "less_memory"
    """A stage that needs more memory than the solver counted is solved again with less, and with some of it back."""

    RESHARD_AFTER_FORWARD = "reshard_after_forward"
    """A stage that needs more memory than there is gathers its parameters again in the backward pass."""

    KNOWN_SOLUTIONS = "known_solutions"
    """A stage takes over the solution of another one with the same numbers."""

    TIED_START = "tied_start"
    """A stage is solved from where alike equations choose alike."""

    HIDDEN_COLLECTIVES = "hidden_collectives"
    """For the solver, collectives in rounds of loops cost less where kernels run beside them."""
