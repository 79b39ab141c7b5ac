"""Train steps of every shape; those that draw random bits are in key_steps.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import moe
from tests.passes.step_case import (
    BATCH,
    CLASSES,
    TIME,
    WIDTH,
    Case,
    Cases,
    draw,
    examples,
    listed_in,
    logits,
    losses,
    on_examples,
    params,
    sgd,
    trained_on,
)

CASES: Cases = {}
case = listed_in(CASES)

# Losses.


@case
def mean_loss() -> Case:
    return on_examples(lambda p, b: losses(p, b).mean())


@case
def sum_loss() -> Case:
    return on_examples(lambda p, b: losses(p, b).sum())


@case
def masked_mean_loss() -> Case:
    return on_examples(lambda p, b: (losses(p, b) * b["mask"]).sum() / b["mask"].sum())


@case
def masked_mean_loss_with_a_floor() -> Case:
    return on_examples(lambda p, b: (losses(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1.0))


@case
def weights_that_sum_to_one() -> Case:
    return on_examples(lambda p, b: (losses(p, b) * (b["mask"] / b["mask"].sum())).sum())


@case
def centred_inputs() -> Case:
    return on_examples(lambda p, b: losses(p, {**b, "x": b["x"] - b["x"].mean(0)}).mean())


@case
def ignored_labels() -> Case:
    def loss(p: Any, b: Any) -> Any:
        valid = b["y"] != 0
        count = jnp.sum(valid)
        return jnp.where(valid, losses(p, b), 0).sum() / jnp.maximum(count, 1), count

    return Case(trained_on(loss, has_aux=True), params(), examples())


@case
def regularized_loss() -> Case:
    return on_examples(lambda p, b: losses(p, b).mean() + 0.01 * sum(jnp.sum(x * x) for x in jax.tree.leaves(p)))


@case
def auxiliary_outputs() -> Case:
    def loss(p: Any, b: Any) -> Any:
        each = losses(p, b)
        return each.mean(), {
            "each": each,  # concatenated
            "logits": logits(p, b["x"]),
            "correct": jnp.sum(jnp.argmax(logits(p, b["x"]), -1) == b["y"]),  # added
            "largest": each.max(),  # of the whole batch
            "norm": jnp.sqrt(jnp.sum(p["w"] ** 2)),  # free of the batch
            "examples": b["x"],  # passed through
            "one": jnp.ones(()),
        }

    return Case(trained_on(loss, has_aux=True), params(), examples())


@case
def running_scale() -> Case:
    """As products in 8 bits have it: what is largest now is the scale of the next step, and goes the gradient's way."""

    @jax.custom_vjp
    def scaled(x: Any, scale: Any) -> Any:
        return x / scale

    def forward(x: Any, scale: Any) -> Any:
        return x / scale, (scale, 0.5 * scale + 0.5 * jnp.max(jnp.abs(x)))

    scaled.defvjp(forward, lambda kept, g: (g / kept[0], jnp.maximum(kept[1], jnp.max(g))))

    def step(p: Any, b: Any) -> Any:
        def loss(w: Any, scale: Any) -> Any:
            return jnp.mean(jnp.tanh(scaled(b["x"], scale) @ w) ** 2)

        value, (g, scale) = jax.value_and_grad(loss, (0, 1))(p["w"], p["scale"])
        return {"w": p["w"] - 0.1 * g, "scale": scale}, value

    state = {"w": draw(WIDTH, WIDTH, seed=1), "scale": np.float32(2)}
    return Case(step, state, {"x": draw(BATCH, TIME, WIDTH, seed=2)}, batch_axes=(None, 0))


@case
def largest_of_merged_examples() -> Case:
    """Of examples within a dimension that times begin."""

    def loss(p: Any, b: Any) -> Any:
        hidden = jnp.tanh(b["x"].reshape(TIME * BATCH, WIDTH) @ p["w"])
        return jnp.mean(hidden**2), (hidden.max(), hidden.min(0), (hidden > 0.5).any(), jnp.isfinite(hidden).all())

    x = draw(TIME, BATCH, WIDTH, seed=3)
    return Case(trained_on(loss, has_aux=True), {"w": params()["w"]}, {"x": x}, batch_axes=(None, {"x": 1}))


@case
def accuracy_outside_the_gradient() -> Case:
    def step(p: Any, b: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: losses(p, b).mean())(p)
        accuracy = jnp.mean(jnp.argmax(logits(p, b["x"]), -1) == b["y"])
        return sgd(p, g), {"loss": value, "accuracy": accuracy}

    return Case(step, params(), examples())


@case
def metrics_of_the_new_parameters() -> Case:
    def step(p: Any, b: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: losses(p, b).mean())(p)
        p = sgd(p, g)
        return p, {"before": value, "norm": optax.tree.norm(p)}

    return Case(step, params(), examples())


@case
def loss_after_the_update() -> Case:
    def step(p: Any, b: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: losses(p, b).mean())(p)
        p = sgd(p, g)
        return p, {"before": value, "after": losses(p, b).mean()}

    return Case(step, params(), examples())


# Optimizers.


@case
def clipped_by_global_norm() -> Case:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def step(state: Any, b: Any) -> Any:
        value, g = jax.value_and_grad(lambda p: losses(p, b).mean())(state["params"])
        updates, opt = optimizer.update(g, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, (value, optax.tree.norm(g))

    return Case(step, {"params": params(), "opt": optimizer.init(params())}, examples())


@case
def skipped_if_not_finite() -> Case:
    def step(p: Any, b: Any) -> Any:
        scale = 2.0**10
        value, g = jax.value_and_grad(lambda p: losses(p, b).mean() * scale)(p)
        g = jax.tree.map(lambda x: x / scale, g)
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(g)]))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), sgd(p, g), p), value / scale

    return Case(step, params(), examples())


# Where the batch lies.


def recurrent(p: Any, xs: jax.Array) -> jax.Array:
    """(T, B, D) -> (T, B, D), unrolled."""
    h = jnp.zeros(xs.shape[1:])
    hs = []
    for t in range(TIME):
        h = jnp.tanh(xs[t] + h @ p["w"])
        hs.append(h)
    return jnp.stack(hs)


@case
def time_major() -> Case:
    def loss(p: Any, b: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(recurrent(p, b["x"]) @ p["v"], b["y"])
        return each.mean(), each

    labels = np.random.default_rng(3).integers(0, CLASSES, (TIME, BATCH)).astype(np.int32)
    batch = {"x": draw(TIME, BATCH, WIDTH), "y": labels}
    return Case(trained_on(loss, has_aux=True), params(), batch, batch_axes=(None, 1))


def tokens(*shape: int) -> dict[str, np.ndarray]:
    labels = np.random.default_rng(3).integers(0, CLASSES, shape).astype(np.int32)
    return {"x": draw(*shape, WIDTH), "y": labels}


def flat_loss(p: Any, b: Any) -> Any:
    """The first two axes merged into one and split again."""
    n, k = b["y"].shape
    flat = logits(p, b["x"].reshape(n * k, WIDTH))
    each = optax.softmax_cross_entropy_with_integer_labels(flat, b["y"].reshape(-1))
    return each.mean(), (each, flat.reshape(n, k, CLASSES))


@case
def batch_and_time_merged() -> Case:
    return Case(trained_on(flat_loss, has_aux=True), params(), tokens(BATCH, TIME))


@case
def time_and_batch_merged() -> Case:
    return Case(trained_on(flat_loss, has_aux=True), params(), tokens(TIME, BATCH), batch_axes=(None, 1))


@case
def groups_of_examples() -> Case:
    """(B,) -> (B/4, 4): legal microbatches are whole groups."""

    def loss(p: Any, b: Any) -> Any:
        grouped = logits(p, b["x"]).reshape(BATCH // 4, 4, CLASSES)
        balance = jax.nn.softmax(grouped, -1).mean(1)  # per group
        return losses(p, b).mean() + jnp.sum(balance**2), balance

    return Case(trained_on(loss, has_aux=True), params(), examples(), max_microbatches=2)


@case
def mixture_of_experts() -> Case:
    """The tokens of two examples compete for places in the experts; the auxiliary loss is a group's own."""
    config = moe.MoEConfig(CLASSES, TIME, 2, WIDTH, 2, num_experts=4, group_size=2 * TIME, mlp_factor=2)
    sizes = {"gate": (WIDTH, 4), "up": (4, WIDTH, 2 * WIDTH), "down": (4, 2 * WIDTH, WIDTH)}
    experts = {name: draw(*shape, seed=seed) for seed, (name, shape) in enumerate(sizes.items())}

    def loss(p: Any, b: Any) -> Any:
        mixed, auxiliary_loss = moe.mixture(config, p, b["x"])
        return jnp.mean(mixed**2) + auxiliary_loss

    return Case(trained_on(loss), experts, {"x": draw(BATCH, TIME, WIDTH, seed=3)}, max_microbatches=BATCH // 2)


@case
def position_table_of_batch_length() -> Case:
    def loss(p: Any, b: Any) -> Any:
        return jnp.mean((logits(p, b["x"]) * p["table"]) ** 2)

    return Case(trained_on(loss), {**params(), "table": draw(BATCH, CLASSES, seed=5)}, {"x": draw(BATCH, WIDTH)},
                batch_axes=(None, 0))  # fmt: skip


@case
def index_of_the_example() -> Case:
    def loss(p: Any, b: Any) -> Any:
        weight = jnp.arange(BATCH, dtype=jnp.float32)
        return jnp.mean(losses(p, b) * weight), weight * b["mask"]

    return Case(trained_on(loss, has_aux=True), params(), examples())


@case
def class_token() -> Case:
    def loss(p: Any, b: Any) -> Any:
        token = jnp.broadcast_to(p["token"], (BATCH, 1, WIDTH))
        xs = jnp.concatenate([token, b["x"][:, None]], 1) @ p["w"]
        return jnp.mean((xs[:, 0] - xs[:, 1]) ** 2)

    return Case(trained_on(loss), {"w": draw(WIDTH, WIDTH), "token": draw(WIDTH)}, {"x": draw(BATCH, WIDTH)})


@case
def captured_table() -> Case:
    table = jnp.asarray(draw(BATCH, seed=6))
    return on_examples(lambda p, b: jnp.mean(losses(p, b) * table))


@case
def transposed() -> Case:
    return on_examples(lambda p, b: jnp.mean((p["w"].T @ b["x"].T) ** 2))


@case
def gathered_rows() -> Case:
    """An embedding, tied to the output."""

    def loss(p: Any, b: Any) -> Any:
        h = jnp.tanh(p["emb"][b["x"]] @ p["w"])
        each = optax.softmax_cross_entropy_with_integer_labels(h @ p["emb"].T, b["y"])
        return each.mean()

    ids = np.random.default_rng(3).integers(0, CLASSES, (2, BATCH, TIME)).astype(np.int32)
    return Case(trained_on(loss), {"emb": draw(CLASSES, WIDTH), "w": draw(WIDTH, WIDTH)}, {"x": ids[0], "y": ids[1]})


# Ways to write a backward pass.


@case
def rematerialized() -> Case:
    return on_examples(lambda p, b: jax.checkpoint(losses)(p, b).mean())


@jax.custom_jvp
def softened(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


softened.defjvp(lambda xs, ts: (softened(*xs), ts[0] * jax.nn.sigmoid(xs[0])))


@case
def custom_jvp() -> Case:
    return on_examples(lambda p, b: jnp.mean(softened(b["x"] @ p["w"]) ** 2))


@jax.custom_vjp
def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
    """Straight-through."""
    return jnp.round(x @ w)


rounded.defvjp(lambda x, w: (rounded(x, w), (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@case
def custom_vjp() -> Case:
    return on_examples(lambda p, b: jnp.mean((rounded(b["x"], p["w"]) @ p["v"]) ** 2))


@case
def hand_written_backward_pass() -> Case:
    def step(p: Any, b: Any) -> Any:
        h = jnp.tanh(b["x"] @ p["w"])
        error = h @ p["v"] - jax.nn.one_hot(b["y"], CLASSES)
        g_v = h.T @ error / BATCH
        g_w = b["x"].T @ ((error @ p["v"].T) * (1 - h**2)) / BATCH
        return sgd(p, {"w": g_w, "v": g_v}), jnp.sum(error**2) / BATCH

    return Case(step, params(), examples())


@case
def clipped_per_example() -> Case:
    def step(p: Any, b: Any) -> Any:
        each, g = jax.vmap(jax.value_and_grad(lambda p, b: losses(p, jax.tree.map(lambda x: x[None], b)).sum()),
                           in_axes=(None, 0))(p, b)  # fmt: skip
        norms = jnp.sqrt(sum(jnp.sum(x * x, range(1, x.ndim)) for x in jax.tree.leaves(g)))
        scale = 1 / jnp.maximum(norms, 1.0)
        return sgd(p, jax.tree.map(lambda x: jnp.tensordot(scale, x, 1) / BATCH, g)), (each.mean(), norms)

    return Case(step, params(), examples())


@case
def two_losses() -> Case:
    def step(p: Any, b: Any) -> Any:
        first, g = jax.value_and_grad(lambda p: losses(p, b).mean())(p)
        second, h = jax.value_and_grad(lambda p: jnp.mean((b["x"] @ p["w"]) ** 2))(p)
        return sgd(sgd(p, g), h), (first, second)

    return Case(step, params(), examples())


@case
def forward_only() -> Case:
    return Case(lambda p, b: logits(p, b["x"]), params(), {"x": draw(BATCH, WIDTH)}, batch_axes=(None, 0))


# Steps whose examples are coupled.


@case
def scale_of_this_batch() -> Case:
    def loss(p: Any, b: Any) -> Any:
        hidden = b["x"] @ p["w"]
        return jnp.mean(jnp.tanh(hidden / jnp.max(jnp.abs(hidden))) ** 2)

    x = draw(BATCH, TIME, WIDTH, seed=2)
    return Case(trained_on(loss), {"w": params()["w"]}, {"x": x}, batch_axes=(None, 0), coupled="reduce_max")


@case
def batch_normalization() -> Case:
    def loss(p: Any, b: Any) -> Any:
        h = b["x"] @ p["w"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        return optax.softmax_cross_entropy_with_integer_labels(h @ p["v"], b["y"]).mean()

    return on_examples(loss, coupled="sub")


@case
def contrastive() -> Case:
    def loss(p: Any, b: Any) -> Any:
        a, c = b["x"] @ p["w"], jnp.tanh(b["x"]) @ p["w"]
        return optax.softmax_cross_entropy_with_integer_labels(a @ c.T, jnp.arange(BATCH)).mean()

    return on_examples(loss, coupled="dot_general")


@case
def sorted_examples() -> Case:
    return on_examples(lambda p, b: jnp.sum(jnp.sort(losses(p, b))[: BATCH // 2]), coupled="sort")


@case
def product_of_sums() -> Case:
    """An auxiliary loss over the whole batch."""
    return on_examples(
        lambda p, b: losses(p, b).mean() + jnp.sum(jax.nn.softmax(logits(p, b["x"]), -1).mean(0) ** 2), coupled="mul"
    )
