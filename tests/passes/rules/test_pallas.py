"""Pallas kernels: what of their grids can be cut, and that pieces compute the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention, layer_norm, rms_norm, softmax

import autopar
from autopar import recipes
from autopar.compiling import compiler
from autopar.ir.local import Compute
from autopar.ir.rule import Rule
from autopar.passes.rules.table import rule_of
from tests.h100 import h100_devices, needs_cuda_compiler
from tests.passes.rules.cases import floats
from tests.passes.rules.harness import check_pieces, equations_of, last_application
from tests.planned import plan_step
from tests.test_collectives_end_to_end import DEAR_LINKS

ROWS, COLUMNS = 8, 16


def normalised(x_ref: Any, scale_ref: Any, o_ref: Any) -> None:
    x = x_ref[...]
    o_ref[...] = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale_ref[...]


def norm(x: Any, scale: Any, block: int = 2, **options: Any) -> Any:
    """Rows in blocks, all with the same scale."""
    rows = pl.BlockSpec((block, COLUMNS), lambda i: (i, 0))
    return pl.pallas_call(
        options.pop("kernel", normalised), grid=(x.shape[0] // block,),
        in_specs=[rows, pl.BlockSpec((1, COLUMNS), lambda i: (0, 0))], out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, **options,
    )(x, scale)  # fmt: skip


def product(x: Any, y: Any, block: int = 4) -> Any:
    """Blocks of the result are met once for each block of what is summed."""

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    (rows, depth), columns = x.shape, y.shape[1]
    return pl.pallas_call(
        kernel, grid=(rows // block, columns // block, depth // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)), pl.BlockSpec((block, block), lambda i, j, k: (k, j))
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype), interpret=True,
    )(x, y)  # fmt: skip


def pallas_rule(function: Callable[..., Any], *args: Any) -> Rule:
    (equation,) = (e for e in equations_of(function, *args) if e.primitive.name == "pallas_call")
    return rule_of(equation)


def sizes_cut(rule: Rule) -> list[int]:
    """Of the factors that can be cut."""
    return sorted(rule.factors[f] for f in rule.splittable)


X, SCALE = floats(ROWS, COLUMNS), floats(1, COLUMNS)


def test_rows_are_cut_in_whole_blocks() -> None:
    rule = pallas_rule(norm, X, SCALE)
    assert sizes_cut(rule) == [ROWS // 2]
    assert not any(rule.inputs[1][0])
    assert check_pieces(last_application(norm, X, SCALE), exact=True) == 1


def test_what_is_summed_stays_whole() -> None:
    x, y = floats(8, 12), floats(12, 16)
    rule = pallas_rule(product, x, y)
    assert sizes_cut(rule) == [2, 4]
    (kernel,) = rule.kernels
    assert kernel.flops == 2 * 8 * 12 * 16
    assert check_pieces(last_application(product, x, y)) > 1


def test_examples_mapped_over_are_cut() -> None:
    mapped = jax.vmap(norm, (0, None))
    x = floats(4, ROWS, COLUMNS)
    assert sizes_cut(pallas_rule(mapped, x, SCALE)) == [4, ROWS // 2]
    assert check_pieces(last_application(mapped, x, SCALE), exact=True) > 1


def placed(x_ref: Any, scale_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * pl.program_id(0) + scale_ref[...]


def counted(x_ref: Any, scale_ref: Any, o_ref: Any) -> None:
    o_ref[...] = jnp.where(scale_ref[0, 0] > 0, x_ref[...] / pl.num_programs(0), x_ref[...])


def test_how_many_steps_there_are_is_known_to_pieces() -> None:
    """As a number in the kernel."""
    assert check_pieces(last_application(functools.partial(norm, kernel=counted), X, SCALE), exact=True) == 1


def test_kernels_that_ask_where_they_are_stay_whole() -> None:
    ask = functools.partial(norm, kernel=placed)
    assert sizes_cut(pallas_rule(ask, X, SCALE)) == []
    # The place among mapped examples is no place of the kernel's.
    assert sizes_cut(pallas_rule(jax.vmap(ask, (0, None)), floats(4, ROWS, COLUMNS), SCALE)) == [4]


def test_scratch_memory_may_be_read_in_the_next_step() -> None:
    def kernel(x_ref: Any, scale_ref: Any, o_ref: Any, kept_ref: Any) -> None:
        kept_ref[...] = x_ref[...]
        o_ref[...] = kept_ref[...] + scale_ref[...]

    scratch: dict[str, Any] = {"kernel": kernel, "scratch_shapes": [pltpu.VMEM((2, COLUMNS), jnp.float32)]}
    assert sizes_cut(pallas_rule(functools.partial(norm, **scratch), X, SCALE)) == []
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    assert sizes_cut(pallas_rule(functools.partial(norm, **scratch, compiler_params=parallel), X, SCALE)) == [4]


def test_other_indices_stay_whole() -> None:
    """Blocks that several steps share, blocks in reverse, and a last block that is not full."""

    def call(x: Any, index: Any, rows: int = ROWS) -> Any:
        def kernel(x_ref: Any, o_ref: Any) -> None:
            o_ref[...] = x_ref[...]

        spec = pl.BlockSpec((2, COLUMNS), index)
        return pl.pallas_call(
            kernel, grid=(math.ceil(rows / 2),), in_specs=[spec],
            out_specs=pl.BlockSpec((2, COLUMNS), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((rows, COLUMNS), x.dtype), interpret=True,
        )(x)  # fmt: skip

    assert sizes_cut(pallas_rule(lambda x: call(x, lambda i: (i, 0)), X)) == [4]
    assert sizes_cut(pallas_rule(lambda x: call(x, lambda i: (i // 2, 0)), X)) == []
    assert sizes_cut(pallas_rule(lambda x: call(x, lambda i: (3 - i, 0)), X)) == []
    assert sizes_cut(pallas_rule(lambda x: call(x, lambda i: (i, 0), rows=7), floats(7, COLUMNS))) == []


@pytest.mark.parametrize(
    ("spec", "cut"),
    [
        (pl.BlockSpec((2, COLUMNS), lambda i: (i, 0)), [4]),
        (pl.BlockSpec((2, COLUMNS), lambda i: (0, 0)), []),
        (pl.BlockSpec(memory_space=pl.ANY), []),
    ],
    ids=["alike", "one block", "all"],
)
def test_what_a_result_replaces_is_cut_as_it_is(spec: Any, cut: list[int]) -> None:
    def kernel(x_ref: Any, base_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    def replace(x: Any, base: Any) -> Any:
        rows = pl.BlockSpec((2, COLUMNS), lambda i: (i, 0))
        return pl.pallas_call(
            kernel, grid=(ROWS // 2,), in_specs=[rows, spec], out_specs=rows,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={1: 0}, interpret=True,
        )(x, base)  # fmt: skip

    assert sizes_cut(pallas_rule(replace, X, X + 1)) == cut
    if cut:
        assert check_pieces(last_application(replace, X, X + 1), exact=True) == 1


def test_work_under_a_condition() -> None:
    """What one of two branches computes counts by half."""

    def kernel(x_ref: Any, scale_ref: Any, o_ref: Any) -> None:
        @pl.when(scale_ref[0, 0] > 0)
        def _() -> None:
            o_ref[...] = x_ref[...] @ jnp.ones((COLUMNS, COLUMNS))

    (of_kernel,) = pallas_rule(functools.partial(norm, kernel=kernel), X, SCALE).kernels
    assert of_kernel.flops == 2 * ROWS * COLUMNS * COLUMNS / 2


def test_operands_fetched_before_stay_whole() -> None:
    """Rows picked by an operand that is read before the blocks are."""

    def kernel(which_ref: Any, x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + y_ref[...]

    def pick(which: Any, x: Any, y: Any) -> Any:
        own, picked = (
            pl.BlockSpec((2, COLUMNS), lambda i, which: (i, 0)),
            pl.BlockSpec((2, COLUMNS), lambda i, which: (which[0], 0)),
        )
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[own, picked], out_specs=own)
        return pl.pallas_call(
            kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(which, x, y)  # fmt: skip

    operands = jnp.asarray([1], jnp.int32), X, floats(ROWS, COLUMNS, seed=1)
    rule = pallas_rule(pick, *operands)
    assert sizes_cut(rule) == [4]
    assert not any(f in rule.splittable for dims in (rule.inputs[0], rule.inputs[2]) for dim in dims for f in dim)
    assert check_pieces(last_application(pick, *operands), exact=True) == 1


HEADS = floats(4, 8, 2, 16), floats(4, 8, 2, 16, seed=1), floats(4, 8, 2, 16, seed=2)
OF_JAX: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[int]]] = {
    "attention": (functools.partial(attention.mha, segment_ids=None, causal=True, interpret=True), HEADS, [2, 4]),
    "softmax": (functools.partial(softmax.softmax, interpret=True), (floats(4, 6, 16),), [4, 6]),
    "layer norm": (
        functools.partial(layer_norm.layer_norm, interpret=True),
        (floats(4, 6, 16), floats(16), floats(16)),
        [4, 6],
    ),
    "rms norm": (
        functools.partial(rms_norm.rms_norm, interpret=True),
        (floats(4, 6, 16), floats(16), floats(16)),
        [4, 6],
    ),
}


@pytest.mark.parametrize("name", OF_JAX)
def test_kernels_that_come_with_jax(name: str) -> None:
    """Examples, heads and rows are cut; the queries of a causal attention ask where they are."""
    function, operands, cut = OF_JAX[name]
    assert sizes_cut(pallas_rule(function, *operands)) == cut
    equations = equations_of(function, *operands)
    if len(equations) == 1:
        assert check_pieces(last_application(function, *operands)) > 0


@jax.custom_vjp
def norm_with_gradient(x: Any, scale: Any) -> Any:
    return norm(x, scale)


def plain(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


norm_with_gradient.defvjp(lambda *xs: (norm(*xs), xs), lambda xs, given: jax.vjp(plain, *xs)[1](given))


@pytest.mark.parametrize("method", [recipes.data_parallel(2), recipes.zero(3), recipes.auto()], ids=lambda m: m.name)
def test_a_step_with_a_kernel(method: Any) -> None:
    """In microbatches and over devices, without a warning: nothing is gathered for it."""

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean(jnp.tanh(norm_with_gradient(x @ params["w"], params["scale"])) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, x = {"w": floats(COLUMNS, COLUMNS), "scale": SCALE}, floats(64, COLUMNS, seed=3)
    actual = jax.tree.map(autopar.gather, autopar.parallelize(step, method=method)(params, x))
    for found, expected in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.jit(step)(params, x)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@needs_cuda_compiler
@pytest.mark.parametrize("name", ["attention", "layer norm", "rms norm"])
def test_kernels_for_h100(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device runs the kernel on its own examples; that of a scale's gradient goes through all of them."""
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    function: Any = {
        "attention": functools.partial(attention.mha, segment_ids=None, causal=True),
        "layer norm": layer_norm.layer_norm,
        "rms norm": rms_norm.rms_norm,
    }[name]

    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            h = x @ params["w"]
            if name == "attention":
                h = function(*[h.reshape(*h.shape[:2], 4, 32)] * 3)
            else:
                h = function(h, params["scale"], params["bias"])
            return jnp.mean(h**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {"w": floats(128, 128), "scale": floats(128), "bias": floats(128)}
    planned = plan_step(step, (params, floats(16, 128, 128)), DEAR_LINKS, recipes.data_parallel(), 1)
    sources: Any = planned.build(h100_devices(8))
    texts = [source.lower() for source in sources]
    assert "".join(text.as_text() for text in texts).count("__gpu$xla.gpu.triton") >= 2
    for text in texts:
        text.compile()
    calls = [op for local in planned.lowered.programs for op in local.ops if isinstance(op, Compute)]
    kernels = [op for op in calls if op.equation.primitive.name == "pallas_call"]
    cut = [op.operands[0] is not None and op.operands[0].axes == {"x"} for op in kernels]
    assert cut[0]
    assert name != "attention" or all(cut)


def _mosaic_blocks(x: Any) -> Any:
    """Twice what it is given, as Mosaic compiles a `pallas_call` for GPUs from Hopper on."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = 2 * x_ref[...]

    rows = pl.BlockSpec((64, x.shape[1]), lambda i: (i, 0))
    lanes = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel, grid=(x.shape[0] // 64,), in_specs=[rows], out_specs=rows, out_shape=out, compiler_params=lanes
    )(x)


def _mosaic_references(x: Any) -> Any:
    """The same, of a kernel that is given whole arrays and asks where it is."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        rows = pl.ds(64 * jax.lax.axis_index("rows"), 64)
        o_ref[rows, :] = 2 * x_ref[rows, :]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(kernel, out_shape=out, grid=(x.shape[0] // 64,), grid_names=("rows",))(x)


@needs_cuda_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the first form, and of a name in the second
@pytest.mark.parametrize("is_in_blocks", [True, False])
def test_mosaic_kernels_for_h100(is_in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut as those of any other kernel; what a kernel reads of a whole array by itself, nobody knows."""
    monkeypatch.setattr(compiler, "Worker", lambda sources, *_: sources)
    double = _mosaic_blocks if is_in_blocks else _mosaic_references

    def step(w: Any, x: Any) -> Any:
        loss = jnp.mean(double(x @ w) ** 2)
        return w - loss, loss

    planned = plan_step(step, (floats(128, 128), floats(1024, 128)), DEAR_LINKS, recipes.data_parallel(), 1)
    sources: Any = planned.build(h100_devices(8))
    (text,) = [source.lower() for source in sources]
    assert "mosaic_gpu" in text.as_text()
    rows = 128 if is_in_blocks else 1024
    assert f"f32[{rows},128]{{1,0}} custom-call" in text.compile().as_text()
