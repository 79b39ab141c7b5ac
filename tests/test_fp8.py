"""Products in 8 bits as Flax writes them: the scales of the steps before, and histories in the place of gradients."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops

import autopar
from autopar import recipes

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, TIME = 64, 32, 4, 2, 16, 12
HISTORIES = "_overwrite_with_gradient"


class Block(nn.Module):
    """A transformer layer."""

    operation: Any

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        def dense(features: Any, name: str) -> Any:
            return nn.DenseGeneral(features, use_bias=False, dot_general_cls=self.operation, name=name)

        y = nn.LayerNorm()(x)
        q, k, v = (dense((HEADS, WIDTH // HEADS), name)(y) for name in "qkv")
        x = x + dense(WIDTH, "o")(nn.dot_product_attention(q, k, v).reshape(x.shape))
        y = nn.gelu(dense(4 * WIDTH, "up")(nn.LayerNorm()(x)))
        return x + dense(WIDTH, "down")(y), None


class Model(nn.Module):
    """A language model."""

    operation: Any
    scan: bool
    remat: bool

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        block: Any = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        if self.scan:
            axes: Any = {"params": 0, HISTORIES: 0}
            x, _ = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)(self.operation)(
                x, None
            )
        else:
            for _ in range(LAYERS):
                x, _ = block(self.operation)(x)
        return nn.Dense(VOCABULARY)(x)


def _step(model: Model) -> Any:
    def step(state: Any, tokens: Any) -> Any:
        def loss(variables: Any) -> Any:
            logits: Any = model.apply(variables, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, g = jax.value_and_grad(loss)(state)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], g["params"])
        return {"params": new, HISTORIES: g[HISTORIES]}, value

    return step


def _relative(found: Any, expected: Any, before: Any) -> float:
    """How far the change of a tree is from what is expected, beside what it is."""
    apart = [
        (np.asarray(a) - np.asarray(b), np.asarray(b) - np.asarray(c))
        for a, b, c in zip(*map(jax.tree.leaves, (found, expected, before)), strict=True)
    ]
    off, whole = (np.sqrt(sum(float((x[k] ** 2).sum()) for x in apart)) for k in (0, 1))
    return float(off / whole)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("scan", "remat"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("method", [recipes.zero(3, 2), recipes.megatron(2, 2, 2, 2)], ids=lambda m: m.name)
def test_histories_of_all_examples_in_microbatches(scan: bool, remat: bool, method: Any) -> None:
    """A sum in another order may round a number in 8 bits to the next, an eighth away: numbers agree within that."""
    model = Model(fp8_ops.Fp8DirectDotGeneralOp, scan, remat)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TIME)).astype(np.int32)
    state: Any = jax.jit(model.init)(jax.random.key(0), tokens)
    step = _step(model)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    assert parallel.plan(state, tokens).num_microbatches == 2
    found, got = autopar.gather(parallel(state, tokens))
    expected, value = jax.jit(step)(state, tokens)
    assert float(got) == pytest.approx(float(value), rel=1e-3)
    assert _relative(found["params"], expected["params"], state["params"]) < 0.1
    assert _relative(found[HISTORIES], expected[HISTORIES], state[HISTORIES]) < 0.1


def test_products_are_priced_in_8_bits() -> None:
    """Those whose operands come in 8 bits: XLA computes products of what was only rounded to 8 bits in 16."""
    times = []
    for operation in (None, fp8_ops.Fp8DirectDotGeneralOp):
        kernel = nn.Dense(8192, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=operation)
        x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
        variables = jax.eval_shape(kernel.init, jax.random.key(0), x)
        cluster = autopar.load_preset("dgx-h100", devices_per_host=1)
        step = autopar.parallelize(kernel.apply, cluster=cluster, batch_axes=(None, 0))
        plan = step.plan(variables, x)
        times.append(plan.step_time)
    assert 1.2 < times[0] / times[1] < 2.0
