"""Which kernels read and write what; against XLA's own fusion, for GPUs where its compiler for these is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.cost_model.fusion import live_until, memory_traffic, moved_values
from autopar.ir.graph import Value
from autopar.ir.mesh import XLA_FOR_GPUS, XlaBackend
from autopar.passes.rules.table import rule_of
from autopar.runtime.hlo_traffic import kernels_in_hlo
from autopar.tracing.trace import trace
from benchmarks.models import gpt, moe, wide_resnet
from tests.h100 import h100_devices, needs_cuda_compiler

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def moved(function: Callable[..., Any], *args: Any, xla: XlaBackend = XLA_FOR_GPUS) -> tuple[float, float]:
    """Bytes through memory, and the kernels that move them."""
    graph = trace(function, args, {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs, xla=xla)
    nbytes = launches = 0.0
    for eqn in graph.equations:
        rule = rules[eqn.id]
        if rule.kernels:
            nbytes += sum(n for kernel in rule.kernels for n, _ in kernel.traffic)
            launches += sum(kernel.times for kernel in rule.kernels)
        else:
            nbytes += sum(n for _, n in moved_values(eqn, traffic[eqn.id]))
            copied = [*zip(eqn.inputs, traffic[eqn.id].copied, strict=True)]
            nbytes += sum(2 * times * v.nbytes for v, times in copied if isinstance(v, Value))
            launches += traffic[eqn.id].launches + sum(traffic[eqn.id].copied)
    return nbytes, launches


def adam_of_one(p: Any, m: Any, v: Any, g: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


def layer_norm(x: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


# Arguments; reads and writes of (N, N) arrays, and kernels, of GPUs and where each kernel has a single output;
# statistics of rows are small.
CHAINS: dict[str, tuple[Callable[..., Any], int, tuple[int, int], tuple[int, int]]] = {
    "a chain is one kernel": (lambda x: jnp.tanh(x) * 2 + 1, 1, (2, 1), (2, 1)),
    "what is read twice is read once": (lambda x: jnp.tanh(x) + jnp.exp(x), 1, (2, 1), (2, 1)),
    "adam": (adam_of_one, 4, (7, 1), (10, 3)),
    "a product, then a chain": (lambda x: jnp.tanh(x @ x), 1, (4, 2), (4, 2)),
    "a softmax is one kernel": (lambda x: jax.nn.softmax(x), 1, (2, 1), (6, 4)),
    "a layer norm, too": (layer_norm, 1, (2, 1), (6, 4)),
    "sums of one array": (lambda x: (jnp.sum(x, -1), jnp.sum(jnp.exp(x), -1)), 1, (1, 1), (4, 3)),
    "a sum of a sum of rows": (lambda x: jnp.sum(x - jnp.sum(x, -1)[:, None], -1), 1, (1, 1), (4, 3)),
    "a sum of products": (lambda x: jnp.sum(x * x, -1), 1, (1, 1), (1, 1)),
    "a transpose is a view": (lambda x: jnp.tanh(x.T @ x), 1, (5, 2), (5, 2)),
    "a view of a result": (lambda x: (x @ x).T.reshape(-1), 1, (2, 1), (2, 1)),
    "a running sum is a kernel": (lambda x: jnp.tanh(jnp.cumsum(x, 0)), 1, (4, 2), (4, 2)),
}


@pytest.mark.parametrize("single_output", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, single_output: bool) -> None:
    function, arguments, *each = CHAINS[name]
    arrays, kernels = each[single_output]
    nbytes, launches = moved(function, *[SQUARE] * arguments, xla=XlaBackend(single_output=single_output))
    assert nbytes == pytest.approx(arrays * BYTES, rel=12 / N)
    assert launches == kernels


W = 192  # a multiple of 3, and its square too long for one step of a reduction
IN_PLACE: dict[str, tuple[Callable[..., Any], bool]] = {  # functions of a product; whether its place may be taken
    "elementwise": (lambda x: jnp.tanh(x) * x + 1.0, True),
    "with a bias": (lambda x: jnp.tanh(x + jnp.arange(W, dtype=x.dtype)), True),
    "reshaped": (lambda x: jnp.tanh(x.reshape(W * W)), True),
    "reshaped to other rows": (lambda x: jnp.tanh(x.reshape(2 * W // 3, 3 * W // 2)), True),
    "transposed": (lambda x: jnp.tanh(x.T), True),
    "with its columns' sums": (lambda x: (jnp.sum(x, 0), jnp.tanh(x)), True),
    "with a sum in two steps": (lambda x: (jnp.sum(x), jnp.tanh(x)), False),
    "with its rows' sums": (lambda x: (jnp.sum(x, -1), jnp.tanh(x)), True),  # one reduction, done before
    "softmax": (jax.nn.softmax, False),
    "layer norm": (layer_norm, False),
    "less its columns' means": (lambda x: x - x.mean(0, keepdims=True), False),
    "rolled": (lambda x: jnp.roll(x, 3, 1), False),
    "rotary": (lambda x: x * 2 + jnp.concatenate([-x[:, W // 2 :], x[:, : W // 2]], 1) * 3, False),
    "with its transpose": (lambda x: jnp.tanh(x + x.T), False),
    "reversed": (lambda x: jnp.tanh(x + x[::-1]), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_results_lie_where_operands_do_that_are_needed_element_by_element_alone(name: str) -> None:
    function, expected = IN_PLACE[name]

    def of_a_product(x: Any) -> Any:
        made = function(x @ x)
        return jax.tree.map(lambda y: jnp.tanh(y @ y) if y.shape == (W, W) else y, made)

    graph = trace(of_a_product, (jax.ShapeDtypeStruct((W, W), jnp.float32),), {}, name=name)
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs)
    product, *others = graph.equations
    assert product.primitive.name == "dot_general"
    made = {product.outputs[0]}
    taken = []
    for eqn in others:
        if eqn.primitive.name == "dot_general":
            break
        moved = traffic[eqn.id]
        taken += [v in made and may for v, may in zip(eqn.inputs, moved.in_place, strict=True) if any(moved.writes)]
        if any(not own for own in moved.writes):
            made.update(eqn.outputs if made.intersection(eqn.values) else ())
    assert any(taken) == expected


@needs_cuda_compiler
@pytest.mark.parametrize("name", [name for name, (_, taken) in IN_PLACE.items() if taken])
def test_where_results_may_lie_where_operands_do_xla_for_h100_lets_them(name: str) -> None:
    """The converse does not hold: XLA does so in more cases, in which the model makes room for both."""
    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    x = jax.ShapeDtypeStruct((W, W), jnp.float32, sharding=sharding)

    def temporaries(function: Callable[..., Any]) -> int:
        def between_products(x: Any, w: Any) -> Any:
            made = function(jax.lax.optimization_barrier(x @ w))
            return jax.tree.map(lambda y: jnp.tanh(y @ w.T) if y.shape == (W, W) else y, made)

        use = jax.jit(between_products).lower(x, x).compile().memory_analysis()
        assert use is not None
        return int(use.temp_size_in_bytes)

    function, _ = IN_PLACE[name]
    rotary, _ = IN_PLACE["rotary"]
    assert temporaries(rotary) - temporaries(function) > 4 * W * W // 2  # which needs a place of its own


def test_what_needs_a_finished_reduction_is_a_kernel_of_its_own() -> None:
    def function(x: Any) -> Any:
        return x - x.mean(0, keepdims=True)

    graph = trace(function, (SQUARE,), {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs)
    kernels = {traffic[eqn.id].kernel for eqn in graph.equations if any(traffic[eqn.id].writes)}
    assert len(kernels) == 2


def test_only_what_is_needed_is_read_of_a_table() -> None:
    table, rows = jax.ShapeDtypeStruct((1000, N), jnp.float32), jax.ShapeDtypeStruct((10,), jnp.int32)
    nbytes, _ = moved(lambda table, rows: jnp.tanh(table[rows]), table, rows)
    assert 2 * 40 * N <= nbytes < 4 * 40 * N
    nbytes, _ = moved(lambda table: table[5:15] * 2, table)
    assert nbytes == 2 * 40 * N


def test_a_body_moves_as_much_every_round() -> None:
    once, launches = moved(lambda x: jnp.tanh(x @ x), SQUARE)
    often, rounds = moved(lambda x: jax.lax.fori_loop(0, 7, lambda i, x: jnp.tanh(x @ x), x), SQUARE)
    assert often == pytest.approx(7 * once)
    assert rounds == 7 * launches


def test_lives_last_as_long_as_what_is_computed_from_them() -> None:
    def function(x: Any) -> Any:
        y = x @ x
        late = jnp.tanh(y).T  # fused into the last product's operand
        z = jnp.cos(x @ x.T)
        return z @ late

    graph = trace(function, (SQUARE,), {}, name="function")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs)
    last = live_until(graph.equations, rules, traffic, outputs)
    names = [eqn.primitive.name for eqn in graph.equations]
    first_product = graph.equations[names.index("dot_general")].outputs[0]
    assert last[first_product] == names.index("tanh")
    tanh = graph.equations[names.index("tanh")].outputs[0]
    assert last[tanh] == len(names) - 1
    assert last[outputs[0]] == len(names)


def _gpt() -> tuple[Any, Any, Any, int]:
    config = gpt.GPTConfig(2048, 256, 2, 512, 8, 0.0, jnp.bfloat16)
    return gpt, config, optax.adamw(1e-3), 8


STEPS: dict[str, Callable[[], tuple[Any, Any, Any, int]]] = {
    "gpt": _gpt,
    "moe": lambda: (
        moe,
        moe.MoEConfig(2048, 256, 2, 512, 8, 8, 512, dropout=0.0, dtype=jnp.bfloat16, remat=True),
        optax.adam(1e-3),
        8,
    ),
    "wide_resnet": lambda: (wide_resnet, wide_resnet.WideResNetConfig((2, 1), 160, 2), optax.sgd(0.1), 8),
}


@needs_cuda_compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gpt" else [pytest.mark.slow]) for n in STEPS])
def test_traffic_is_that_of_xlas_kernels_for_h100(name: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    model, config, optimizer, batch_size = STEPS[name]()
    step = model.make_train_step(config, optimizer)
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    batch = model.abstract_batch(config, batch_size)
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (state, batch))
    compiled = jax.jit(step, donate_argnums=0).lower(*there).compile()
    nbytes, launches = moved(step, state, batch)
    kernels = kernels_in_hlo(compiled.as_text() or "")
    assert nbytes == pytest.approx(sum(kernel.nbytes for kernel in kernels), rel=0.25)
    assert launches == pytest.approx(sum(kernel.times for kernel in kernels), rel=0.4)


def residual_step(layers: int) -> tuple[Callable[..., Any], Any]:
    """One step of momentum of residual blocks as they are written without checkpoints, and its arguments."""

    def forward(params: Any, x: Any) -> Any:
        for scale, up, down in params:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(wide, -1, keepdims=True)
            variance = jnp.mean(wide**2, -1, keepdims=True) - mean**2
            normed = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6) * scale).astype(x.dtype)
            x = x + jax.nn.gelu(normed @ up.astype(x.dtype)) @ down.astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, x: Any) -> Any:
        gradients = jax.grad(forward)(state[0], x)
        updates, moments = optimizer.update(gradients, state[1])
        return optax.apply_updates(state[0], updates), moments

    wide, narrow = 1024, 512
    block = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((narrow,), (narrow, wide), (wide, narrow))]
    params = [block] * layers
    return step, ((params, jax.eval_shape(optimizer.init, params)),
                  jax.ShapeDtypeStruct((8, 512, narrow), jnp.bfloat16))  # fmt: skip


def test_traffic_is_linear_in_the_depth() -> None:
    found = {layers: moved(step, *args) for layers in (2, 8, 32) for step, args in [residual_step(layers)]}
    few, more = ([(found[b][k] - found[a][k]) / (b - a) for k in (0, 1)] for a, b in ((2, 8), (8, 32)))
    assert more == pytest.approx(few, rel=0.02)


@needs_cuda_compiler
def test_traffic_of_any_depth_is_that_of_xlas_kernels_for_h100() -> None:
    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    ratios = []
    for layers in (2, 8):
        step, args = residual_step(layers)
        there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
        kernels = kernels_in_hlo(jax.jit(step, donate_argnums=0).lower(*there).compile().as_text() or "")
        wanted = sum(kernel.nbytes for kernel in kernels), sum(kernel.times for kernel in kernels)
        ratios.append([mine / xlas for mine, xlas in zip(moved(step, *args), wanted, strict=True)])
    assert ratios[0] == pytest.approx([1, 1], abs=0.2)
    assert ratios[1] == pytest.approx(ratios[0], rel=0.04)


@pytest.mark.parametrize("name", STEPS)
def test_traffic_is_that_of_xlas_kernels_for_cpus(name: str) -> None:
    model, config, optimizer, batch_size = STEPS[name]()
    if hasattr(config, "dtype"):  # there are no products of 16 bits
        config = dataclasses.replace(config, dtype=jnp.float32)
    step = model.make_train_step(config, optimizer)
    state = jax.eval_shape(model.make_init(config, optimizer), jax.random.key(0))
    batch = model.abstract_batch(config, batch_size)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    nbytes, launches = moved(step, state, batch, xla=XlaBackend(single_output=True))
    kernels = kernels_in_hlo(compiled.as_text() or "")
    assert nbytes == pytest.approx(sum(kernel.nbytes for kernel in kernels), rel=0.25)
    # A scatter is a loop over all that is scattered there, of a few kernels for each element.
    assert launches == pytest.approx(len(kernels), rel=0.4)


def filters_step(state: Any, x: Any) -> Any:
    """One step of momentum of a stack of convolutions of a few pixels, whose filters are most of what is moved."""

    def loss(filters: Any) -> Any:
        y = x
        for each in filters:
            y = jax.nn.relu(jax.lax.conv_general_dilated(y, each, (1, 1), "SAME", dimension_numbers=_CHANNELS_LAST))
        return jnp.mean(y**2)

    filters, moments = state
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(filters))
    return jax.tree.map(lambda w, m: w - 0.1 * m, filters, moments), moments


_CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


@needs_cuda_compiler
def test_filters_are_copied_as_by_xla_for_h100() -> None:
    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    filters = [jax.ShapeDtypeStruct((3, 3, 256, 256), jnp.float32, sharding=sharding)] * 4
    images = jax.ShapeDtypeStruct((2, 8, 8, 256), jnp.float32, sharding=sharding)
    args = ((filters, filters), images)
    compiled = jax.jit(filters_step, donate_argnums=0).lower(*args).compile()
    kernels = kernels_in_hlo(compiled.as_text() or "")
    nbytes, launches = moved(filters_step, *args)
    assert any(kernel.name.startswith("copy") for kernel in kernels)  # what this is about
    assert nbytes == pytest.approx(sum(kernel.nbytes for kernel in kernels), rel=0.1)
    assert launches == pytest.approx(sum(kernel.times for kernel in kernels), rel=0.15)


def normalised_gradient(x: Any, gradient: Any, mean: Any, scale: Any) -> Any:
    """The sums over examples and pixels that the gradient of a batch norm needs, each of another product, and it."""
    wide, centred = gradient.astype(jnp.float32), x.astype(jnp.float32) - mean
    scaled = wide * scale
    sums = [jnp.sum(each, (0, 1, 2)) for each in (wide, centred * wide, scaled)]
    return (scaled + centred * sums[1] + sums[2]).astype(jnp.bfloat16), sums


def _normalised(examples: int, channels: int, sharding: Any = None) -> tuple[Any, ...]:
    images = jax.ShapeDtypeStruct((examples, 12, 12, channels), jnp.bfloat16, sharding=sharding)
    return images, images, *[jax.ShapeDtypeStruct((channels,), jnp.float32, sharding=sharding)] * 2


@needs_cuda_compiler
@pytest.mark.parametrize("channels", [256, 2048])
@pytest.mark.parametrize("examples", [8, 24, 64])
def test_what_few_blocks_reduce_is_computed_before_as_by_xla_for_h100(examples: int, channels: int) -> None:
    """Up to 28 examples a column is reduced at once, by few blocks, which read broadcast operands slowly."""
    args = _normalised(examples, channels, jax.sharding.SingleDeviceSharding(h100_devices(1)[0]))
    kernels = kernels_in_hlo(jax.jit(normalised_gradient).lower(*args).compile().as_text() or "")
    nbytes, _ = moved(normalised_gradient, *args)
    assert nbytes == pytest.approx(sum(kernel.nbytes for kernel in kernels), rel=0.25)


def test_the_pieces_of_devices_say_what_goes_through_memory() -> None:
    args = _normalised(192, 2048)
    graph = trace(normalised_gradient, args, {}, name="gradient")
    rules = {eqn.id: rule_of(eqn) for eqn in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    values = [*graph.inputs, *(v for eqn in graph.equations for v in eqn.outputs)]
    pieces = {v: (24, *v.shape[1:]) for v in values if v.shape[:1] == (192,)}

    def products_in_memory(shapes: Any) -> int:
        traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs, shapes=shapes)
        products = [eqn for eqn in graph.equations if eqn.primitive.name == "mul"]
        return sum(any(traffic[eqn.id].writes) for eqn in products)

    assert products_in_memory({}) < products_in_memory(pieces)


def test_gradients_of_maxima_over_windows_are_kernels_of_their_own() -> None:
    """Also where each window begins one further, so that nothing is reduced: a loss that reads the array is beside."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            pooled = jax.lax.reduce_window(x @ w, -jnp.inf, jax.lax.max, (3, 3), (1, 1), "SAME")
            return (pooled**2).sum()

        return jax.value_and_grad(loss)(w)

    operands = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
    graph = trace(step, operands, {}, name="step")
    rules = {equation.id: rule_of(equation) for equation in graph.equations}
    outputs = [v for v in graph.outputs if isinstance(v, Value)]
    traffic = memory_traffic(graph.equations, rules, graph.inputs, outputs)
    (gradient,) = (e for e in graph.equations if rules[e.id].pooling == "gradient")
    assert traffic[gradient.id].launches == 2


@needs_cuda_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_maxima_over_windows_move_what_they_do_by_xla_for_h100(dtype: str) -> None:
    def pooled(x: Any) -> Any:
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: (pooled(x).astype(jnp.float32) ** 2).sum())(x)

    sharding = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    x = jax.ShapeDtypeStruct((32, 64, 64, 64), dtype, sharding=sharding)
    kernels = kernels_in_hlo(jax.jit(gradient).lower(x).compile().as_text() or "")
    nbytes, launches = moved(gradient, x)
    assert nbytes == pytest.approx(sum(kernel.nbytes for kernel in kernels), rel=0.2)
    assert abs(launches - sum(kernel.times for kernel in kernels)) <= 1
