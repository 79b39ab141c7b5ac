"""Windows in pieces: convolutions with both gradients and reductions over windows, spatial dimensions with halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.ir.graph import Equation, Literal
from autopar.ir.mesh import Patches
from autopar.passes.rules.table import rule_of
from tests.passes.rules.cases import floats
from tests.passes.rules.harness import apply, check_linear, check_pieces, equations_of

Function = Callable[..., Any]
Shape = tuple[int, ...]


def convolution(*strides: int, padding: Any = "SAME", **options: Any) -> Function:
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, padding, **options)


NHWC = ("NHWC", "HWIO", "NHWC")
# With the shapes of array and kernel.
CONVOLUTIONS: dict[str, tuple[Function, Shape, Shape]] = {
    "images": (convolution(1, 1, dimension_numbers=NHWC), (2, 8, 6, 4), (3, 3, 4, 2)),
    "strided": (convolution(2, padding=[(3, 3)]), (2, 4, 16), (2, 4, 7)),
    "strided, narrower": (convolution(2), (2, 4, 8), (2, 4, 1)),
    "patches": (convolution(2, 2, padding="VALID"), (2, 2, 8, 8), (4, 2, 2, 2)),
    "dilated": (convolution(1, rhs_dilation=(2,)), (2, 2, 8), (4, 2, 3)),
    "transposed": (convolution(1, padding=[(2, 1)], lhs_dilation=(2,)), (2, 2, 4), (4, 2, 3)),
    "wide": (convolution(1), (2, 2, 8), (2, 2, 7)),  # over several pieces
    "causal": (convolution(1, padding=[(3, 0)]), (2, 2, 8), (2, 2, 4)),
    "cropped": (convolution(1, padding=[(-1, 3)]), (2, 2, 8), (2, 2, 3)),
    "grouped": (convolution(1, feature_group_count=2), (2, 8, 8), (8, 4, 3)),
    "depthwise": (convolution(2, feature_group_count=4), (4, 4, 8), (8, 1, 4)),
    "grouped by the batch": (convolution(1, batch_group_count=2), (4, 2, 6), (4, 2, 3)),
}


def equation_of(name: str, fun: Function, *args: Any) -> Equation:
    (equation,) = (eqn for eqn in equations_of(fun, *args) if eqn.primitive.name == name)
    return equation


def forward_and_gradients(name: str) -> list[Equation]:
    """A convolution, the gradient of its array and that of its kernel: three convolutions."""
    fun, *shapes = CONVOLUTIONS[name]
    x, kernel = (floats(*shape) for shape in shapes)
    g = fun(x, kernel)
    return [
        equation_of("conv_general_dilated", f, *args)
        for f, *args in (
            (fun, x, kernel),
            (lambda g, kernel: jax.linear_transpose(lambda x: fun(x, kernel), x)(g), g, kernel),
            (lambda x, g: jax.linear_transpose(lambda k: fun(x, k), kernel)(g), x, g),
        )
    ]


def numbers(equation: Equation) -> list[Any]:
    return [floats(*operand.shape, seed=i) for i, operand in enumerate(equation.inputs)]


BY_DEFAULT = ("images", "depthwise", "wide")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.slow) for name in CONVOLUTIONS]
)
def test_convolutions_and_their_gradients(name: str) -> None:
    for equation in forward_and_gradients(name):
        application = apply(equation, numbers(equation))
        assert check_pieces(application) >= 4
        assert check_linear(application) == 2


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_forward_and_both_gradients_do_the_same_work(name: str) -> None:
    work = [rule.flops * rule.points() for rule in map(rule_of, forward_and_gradients(name))]
    assert work == pytest.approx([work[0]] * 3)


def test_convolutions_are_told_from_products_of_matrices() -> None:
    x, w = floats(2, 8, 8, 3), floats(3, 3, 3, 4)
    [convolution] = equations_of(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME",
                                 dimension_numbers=("NHWC", "HWIO", "NHWC")), x, w)  # fmt: skip
    [product] = equations_of(jnp.dot, floats(4, 3), floats(3, 5))
    # 22 of the 24 pairs of a window and one of its places along a side of 8 meet an element.
    for equation, expected in ((convolution, Patches(9, (22 / 8) ** 2)), (product, None)):
        sides = rule_of(equation).sides
        assert sides is not None
        assert sides.patches == expected


def test_how_the_windows_of_gradients_lie() -> None:
    """Of 2 x 2 patches of an 8 x 8 image: 4 x 4 results, dilated for the image's, the windows of the kernel's."""
    found = [rule_of(each).sides for each in forward_and_gradients("patches")]
    assert [sides and sides.patches for sides in found] == [Patches(4, 1.0), Patches(4, 4.0, 4), Patches(16, 1.0)]


def test_padding_and_holes_are_no_work() -> None:
    # Windows of 3 over 8 elements with one of padding on either side meet 3 * 8 - 2 elements; 2 features in, 4 out.
    (rule,) = map(rule_of, equations_of(convolution(1), floats(5, 2, 8), floats(4, 2, 3)))
    assert rule.flops * rule.points() == pytest.approx(2 * 5 * 2 * 4 * 22)


def test_spatial_dimensions_that_drift_stay_whole() -> None:
    """Without padding 8 elements give 6 windows: their pieces would reach ever farther."""
    (rule,) = map(rule_of, equations_of(convolution(1, padding="VALID"), floats(2, 2, 8), floats(2, 2, 3)))
    assert not rule.halos


def test_disjoint_windows_borrow_nothing() -> None:
    for equation in forward_and_gradients("patches"):
        rule = rule_of(equation)
        assert not rule.halos
        assert sum(size == 4 for f, size in enumerate(rule.factors) if f not in rule.whole) >= 2


POOLS: dict[str, tuple[Function, Shape]] = {
    "max": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3), (1, 2, 2), [(0, 0), (1, 1), (0, 1)]), (2, 8, 8)),
    "min": (lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (2, 2), "VALID"), (8, 6)),
    "sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), (4, 8)),
    "sum of every other": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (1,), [(2, 2)], window_dilation=(2,)), (8,)),
    "sum between holes": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (1,), [(1, 2)], base_dilation=(2,)), (8,)),
    "own": (lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, (3,), (1,), "SAME"), (8,)),
    "max of integers": (
        lambda x: lax.reduce_window(x.astype(jnp.int32), -(2**31), lax.max, (3,), (1,), "SAME"), (8,)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("max", "own") else pytest.mark.slow) for name in POOLS]
)
def test_reductions_over_windows(name: str) -> None:
    fun, shape = POOLS[name]
    equation = next(eqn for eqn in equations_of(fun, floats(*shape)) if eqn.primitive.name.startswith("reduce_window"))
    x = (9 * floats(*shape)).astype(equation.inputs[0].dtype)
    rest = [jnp.asarray(operand.value) for operand in equation.inputs[1:] if isinstance(operand, Literal)]
    application = apply(equation, [x - 20, *rest])  # a maximum is below zero
    assert check_pieces(application) > 0
    check_linear(application)


def test_gradients_of_pooling() -> None:
    pool, shape = POOLS["max"]
    x = floats(*shape)
    first = equation_of("select_and_scatter_add", jax.grad(lambda x: pool(x).sum()), x)
    second = equation_of("select_and_gather_add", lambda x: jax.jvp(pool, (x,), (x,))[1], x)
    for equation in (first, second):
        rule = rule_of(equation)
        assert len({halo.factor for halo in rule.halos}) == 2
        gradients, x = numbers(equation)
        application = apply(equation, [gradients, x - 20])
        assert check_pieces(application) >= 5
        assert check_linear(application) == 1
