"""The order of kernels: against all orders of small programs, and by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from autopar.cost_model.order import Combining, Live, ProgramKernels, held_by, live

SUM = Combining("sum", True)


def most(told: ProgramKernels, found: Live) -> int:
    return max(held_by(found.ranges, told.sizes, found.order))


def least(told: ProgramKernels) -> int:
    """Of all orders in which each kernel comes after what it needs."""
    maker = {b: i for i, kernel in enumerate(told.kernels) for b in kernel.makes}
    best = None
    for order in itertools.permutations(range(len(told.kernels))):
        position = {i: p for p, i in enumerate(order)}
        needs = ((maker[b], i) for i in order for b in told.kernels[i].reads if b in maker)
        if any(position[first] > position[then] for first, then in needs):
            continue
        now, here = 0, 0
        for p, i in enumerate(order):
            kernel = told.kernels[i]
            now += sum(told.sizes[b] for b in kernel.makes)
            here = max(here, now + kernel.held)
            for b in {*kernel.reads, *kernel.makes}:
                later = any(b in told.kernels[k].reads for k in order[p + 1 :])
                if not later and b not in told.leaving:
                    now -= told.sizes[b]
        best = here if best is None else min(best, here)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(20))
def test_no_order_holds_less_than_the_best_and_most_hold_hardly_more(seed: int) -> None:
    draw = random.Random(seed)
    told = ProgramKernels()
    for i in range(6):
        reads = [k for k in range(i) if draw.random() < 0.5]
        told.run(reads, [(i, draw.randint(1, 9))], held=draw.randint(0, 3))
    told.leave(5)
    assert least(told) <= most(told, live(told)) <= 1.5 * least(told)


def test_what_frees_most_comes_first() -> None:
    """Each chain ends in one byte: one after the other they need 8 + 1, side by side 16."""
    told = ProgramKernels()
    for k in range(2):
        told.run([], [(("large", k), 8)])
    for k in range(2):
        told.run([("large", k)], [(("small", k), 1)])
    told.run([("small", 0), ("small", 1)], [("result", 1)])
    told.leave("result")
    assert most(told, live(told)) == 8 + 1 + 1


def test_a_fused_value_holds_what_it_is_computed_from() -> None:
    told = ProgramKernels()
    told.run([], [("x", 4)])
    told.fuse("y", told.buffers(["x"]))
    told.run([], [("other", 2)])
    told.run(["y", "other"], [("result", 1)])
    told.leave("result")
    found = live(told)
    assert [len(kernel.reads) for kernel in found.order] == [0, 0, 2]
    assert most(told, found) == 4 + 2 + 1


def test_a_result_in_an_operands_place_is_no_second_buffer() -> None:
    told = ProgramKernels()
    told.run([], [("zeros", 8)])
    told.run(["zeros"], [("filled", 8)], aliases={"filled": "zeros"})
    told.run(["filled"], [("result", 1)])
    assert most(told, live(told)) == 8 + 1


def test_a_loop_begins_with_zeros_in_the_place_of_what_its_rounds_fill() -> None:
    told = ProgramKernels()
    told.run([], [("carry", 4)])
    told.run_rounds(["carry"], [("last", 4), ("stack", 16)], {0: "carry", 1: None}, held=2)
    assert len(told.kernels) == 3
    assert most(told, live(told)) == 4 + 16 + 2


def gradients(layers: int, keys: Sequence[str] = ()) -> ProgramKernels:
    """A cotangent goes through layers, each with 1000 bytes of residuals; gradients of 400 bytes are summed."""
    told = ProgramKernels()
    told.run([], [(("cotangent", 0), 100)])
    for k in range(layers):
        how = Combining(keys[k], True) if keys else SUM
        told.run([("cotangent", k)], [(("residual", k), 1000)], seconds=1e-5)
        told.run([("cotangent", k), ("residual", k)], [(("cotangent", k + 1), 100)], seconds=1e-5)
        told.run([("cotangent", k), ("residual", k)], [(("gradient", k), 400)], seconds=1e-5)
        told.run(
            [("gradient", k)],
            [(("sum", k), 400)],
            aliases={("sum", k): ("gradient", k)},
            collective=how,
        )
        told.leave(("sum", k))
    told.leave(("cotangent", layers))
    return told


def test_collectives_that_are_hidden_have_an_end_of_their_own() -> None:
    """Between a gather's start and its end there is what runs beside it, and what is gathered is there."""
    told = ProgramKernels()
    told.run([], [("weight", 100)], collective=Combining("gather", False), seconds=1e-5)
    told.run([], [("x", 30)], seconds=1e-5)
    told.run(["weight", "x"], [("y", 1)], seconds=1e-5)
    told.leave("y")
    found = live(told, hides_latency=True)
    assert [kernel.makes for kernel in found.order] == [(0,), (1,), (), (2,)]
    assert most(told, found) == 131


def test_a_sum_in_the_place_of_its_partial_sum_needs_no_second_buffer_until_its_end() -> None:
    told = ProgramKernels()
    told.run([], [("partial sum", 100)], seconds=1e-5)
    told.run(["partial sum"], [("sum", 100)], aliases={"sum": "partial sum"}, collective=SUM, seconds=1e-5)
    told.run(["sum"], [("y", 1)], seconds=1e-5)
    assert most(told, live(told, hides_latency=True)) == 101


def test_what_is_part_of_a_kernel_runs_with_it() -> None:
    """The loss reads logits that the cotangent needs, too, and nothing later."""
    for part in ("softmax", None):
        told = ProgramKernels()
        told.run([], [("logits", 1000)])
        told.run(["logits"], [("loss", 4)], part_of=part)
        told.run(["logits"], [("cotangent", 100)], part_of=part)
        told.run(["cotangent", "loss"], [("later", 1)], part_of=part)
        told.leave("later")
        kernels = live(told).order
        assert len(kernels) == (2 if part else 4)
        assert len(kernels[1].makes) == (3 if part else 1)


def test_what_needs_the_rest_of_a_kernel_by_way_of_another_is_no_part_of_it() -> None:
    told = ProgramKernels()
    told.run([], [("x", 1)])
    told.run(["x"], [("y", 1)], part_of="kernel")
    told.run(["y"], [("product", 1)])
    told.run(["x", "product"], [("z", 1)], part_of="kernel")
    assert len(live(told).order) == 4


def test_a_kernel_can_wait_for_what_does_not_need_it() -> None:
    """A weight is narrowed for one product by the kernel that updates it, once the gradient is summed."""
    told = ProgramKernels()
    told.run(["weight"], [("narrow", 1)], part_of="weight")
    told.run([], [("gradient", 2)])
    told.run(["gradient"], [("sum", 2)])
    told.run(["narrow"], [("product", 1)])
    told.run(["weight", "sum"], [("updated", 2)], part_of="weight")
    told.leave("product")
    told.leave("updated")
    kernels = live(told).order
    assert [set(kernel.makes) for kernel in kernels] == [{1}, {2}, {0, 4}, {3}]


def test_results_in_the_places_of_arguments_do_not_choose_the_order() -> None:
    """What is between is held three times where all results are made last, as counted results want it."""
    for elsewhere in (False, True):
        told = ProgramKernels()
        told.run([], [("seed", 1)])
        for k in range(3):
            told.run(["seed"], [(("between", k), 10)])
            told.run([("between", k)], [(("new", k), 40)])
            told.leave(("new", k))
        if elsewhere:
            told.lie_elsewhere(told.leaving)
        found = live(told)
        held = {b: at for b, at in found.ranges.items() if b not in told.elsewhere}
        assert max(held_by(held, told.sizes, found.order)) == (10 + 1 if elsewhere else 10 + 3 * 40)


def test_an_elementwise_result_takes_the_place_of_an_operand_that_nothing_needs_later() -> None:
    for reads_again in (False, True):
        told = ProgramKernels()
        told.run([], [("x", 8)])
        told.run([], [("small", 2)])
        told.run(["x", "small"], [("y", 8)], in_place=["small", "x"])
        told.run(["y", "x"] if reads_again else ["y"], [("result", 1)])
        told.leave("result")
        assert most(told, live(told)) == (8 + 8 + 2 if reads_again else 8 + 2)


def test_sums_of_more_than_the_threshold_are_several() -> None:
    told = gradients(4)
    assert sum(kernel.collective is not None for kernel in live(told, combined=800).order) == 2
    assert sum(kernel.collective is not None for kernel in live(told, combined=300).order) == 4


def test_contiguous_sums_lie_beside_their_operands() -> None:
    """Operands are copied into one array, which is summed: both are live at once. Other collectives copy nothing."""
    for how, contiguous in itertools.product((SUM, Combining("gather", False)), (False, True)):
        told = ProgramKernels()
        for k in range(4):
            told.run([], [(("part", k), 100)])
            told.run([("part", k)], [(("sum", k), 100)], aliases={("sum", k): ("part", k)}, collective=how)
            told.leave(("sum", k))
        expected = 800 if contiguous and how is SUM else 400
        assert most(told, live(told, combined=400, contiguous=contiguous)) == expected


def test_a_sum_that_needs_another_is_not_made_one_with_it() -> None:
    told = ProgramKernels()
    told.run([], [("x", 1)])
    told.run(["x"], [("first", 1)], collective=SUM)
    told.run(["first"], [("y", 1)])
    told.run(["y"], [("second", 1)], collective=SUM)
    told.leave("second")
    assert len(live(told, combined=100).order) == 4
