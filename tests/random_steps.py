"""Random small train steps: a chain of products, elementwise operations, reductions and changes of layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BATCH = 16
SIZES = (8, 16)  # divisible by every mesh axis of the tests

Link = Callable[[Any, Sequence[Any]], Any]  # (array, weights) -> array
_UNARY = (jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu)


@dataclasses.dataclass(frozen=True)
class RandomStep:
    step: Callable[[list[Any], Any], tuple[list[Any], Any, Any]]  # (weights, x) -> (weights, loss, an array by example)
    weights: list[Any]
    x: Any  # examples along axis 0


class _Chain:
    """The links so far, the shape that they lead to, and where in it the examples lie."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.shape = [BATCH, int(random.choice(SIZES))]
        self.first = tuple(self.shape)
        self.batch = 0
        self.links: list[Link] = []
        self.weights: list[Any] = []

    def weight(self, *shape: int) -> int:
        self.weights.append((self.random.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32))
        return len(self.weights) - 1

    def feature(self) -> int:
        """A random dimension that is not the examples'."""
        return int(self.random.choice([d for d in range(len(self.shape)) if d != self.batch]))

    # The links.

    def product(self) -> None:
        d, size = self.feature(), int(self.random.choice(SIZES))
        w = self.weight(self.shape[d], size)
        self.links.append(lambda h, ws: jnp.moveaxis(jnp.tensordot(h, ws[w], ((d,), (0,))), -1, d))
        self.shape[d] = size

    def unary(self) -> None:
        function = _UNARY[self.random.integers(len(_UNARY))]
        self.links.append(lambda h, ws: function(h))

    def bias(self) -> None:
        d, rank = self.feature(), len(self.shape)
        w = self.weight(self.shape[d])
        self.links.append(lambda h, ws: h + jnp.expand_dims(ws[w], [i for i in range(rank) if i != d]))

    def scale(self) -> None:
        batch = self.batch
        w = self.weight(*(size for i, size in enumerate(self.shape) if i != batch))
        self.links.append(lambda h, ws: h * jnp.expand_dims(ws[w], batch))

    def normalise(self) -> None:
        d = self.feature()
        self.links.append(lambda h, ws: (h - h.mean(d, keepdims=True)) * jax.lax.rsqrt(h.var(d, keepdims=True) + 0.1))

    def softmax(self) -> None:
        d = self.feature()
        self.links.append(lambda h, ws: 2 * jax.nn.softmax(h, d))

    def largest(self) -> None:
        # Without its gradient: that divides by how many elements equal the maximum, and where XLA computes an element
        # twice with different rounding, none does. `jax.jit` alone gives NaN then.
        d = self.feature()
        self.links.append(lambda h, ws: h - 0.5 * jax.lax.stop_gradient(h.max(d, keepdims=True)))

    def cumulative(self) -> None:
        d = self.feature()
        self.links.append(lambda h, ws: 0.3 * jnp.cumsum(h, d))

    def flip(self) -> None:
        d = self.feature()
        self.links.append(lambda h, ws: jnp.flip(h, d))

    def swap_halves(self) -> None:
        d = self.feature()

        def swap(h: Any, ws: Sequence[Any]) -> Any:
            low, high = jnp.split(h, 2, d)
            return jnp.concatenate([high, 0.5 * low], d)

        self.links.append(swap)

    def transpose(self) -> None:
        order = self.random.permutation(len(self.shape)).tolist()
        self.links.append(lambda h, ws: h.transpose(order))
        self.shape = [self.shape[i] for i in order]
        self.batch = order.index(self.batch)

    def fold(self) -> None:
        """Splits a dimension in two, or merges two."""
        d = self.feature()
        if len(self.shape) == 2:
            self.shape[d : d + 1] = [4, self.shape[d] // 4]
            self.batch += self.batch > d
            self.links.append(lambda h, ws: h.reshape(*h.shape[:d], 4, h.shape[d] // 4, *h.shape[d + 1 :]))
        elif d + 1 < len(self.shape) and d + 1 != self.batch:
            self.shape[d : d + 2] = [self.shape[d] * self.shape[d + 1]]
            self.batch -= self.batch > d
            self.links.append(lambda h, ws: h.reshape(*h.shape[:d], h.shape[d] * h.shape[d + 1], *h.shape[d + 2 :]))

    def attend(self) -> None:
        if len(self.shape) != 3:
            return
        batch, d = self.batch, self.feature()
        e = 3 - batch - d

        def attend(h: Any, ws: Sequence[Any]) -> Any:
            moved = jnp.transpose(h, (batch, e, d))
            scores = jnp.tanh(jnp.einsum("bed,bzd->bez", moved, moved) / moved.shape[-1])
            back = ((batch, e, d).index(i) for i in range(3))
            return jnp.transpose(jnp.einsum("bez,bzd->bed", scores, moved), tuple(back))

        self.links.append(attend)

    def spatial(self) -> tuple[int, int] | None:
        """A channel dimension and one to slide windows over."""
        if len(self.shape) != 3:
            return None
        d = self.feature()
        return d, 3 - self.batch - d

    def convolve(self) -> None:
        if (found := self.spatial()) is None:
            return
        (d, e), batch = found, self.batch
        stride, taps = int(self.random.integers(1, 3)), int(self.random.integers(1, 5))
        if self.shape[e] % 4:
            stride = 1
        channels = int(self.random.choice(SIZES))
        w = self.weight(taps * self.shape[d], channels)
        names = "".join({batch: "N", d: "C", e: "W"}[i] for i in range(3))

        def convolve(h: Any, ws: Sequence[Any]) -> Any:
            kernel = ws[w].reshape(taps, -1, channels)
            return jax.lax.conv_general_dilated(h, kernel, (stride,), "SAME", dimension_numbers=(names, "WIO", names))

        self.links.append(convolve)
        self.shape[d], self.shape[e] = channels, self.shape[e] // stride

    def pool(self) -> None:
        if (found := self.spatial()) is None:
            return
        window = tuple(3 if i == found[1] else 1 for i in range(3))
        stride = (1, 1, 1)
        if self.random.random() < 0.5:
            self.links.append(lambda h, ws: jax.lax.reduce_window(h, 0.0, jax.lax.add, window, stride, "SAME") / 3)
        else:
            self.links.append(lambda h, ws: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, window, stride, "SAME"))


_LINKS = (
    _Chain.product, _Chain.product, _Chain.unary, _Chain.bias, _Chain.scale, _Chain.normalise, _Chain.softmax,
    _Chain.largest, _Chain.cumulative, _Chain.flip, _Chain.swap_halves, _Chain.transpose, _Chain.fold, _Chain.attend,
    _Chain.convolve, _Chain.pool,
)  # fmt: skip


def random_step(random: np.random.Generator) -> RandomStep:
    """A loss of a random chain, its gradient and an SGD update."""
    chain = _Chain(random)
    chain.product()
    if random.random() < 0.5:
        chain.fold()  # links between two features of an example need both
    for _ in range(random.integers(2, 7)):
        _LINKS[random.integers(len(_LINKS))](chain)
    links, batch = tuple(chain.links), chain.batch
    mean, decay = random.random() < 0.5, random.random() < 0.3

    def loss(weights: list[Any], x: Any) -> tuple[Any, Any]:
        h = x
        for link in links:
            h = link(h, weights)
        value = jnp.mean(h**2) if mean else jnp.sum(jnp.sin(h)) / 64
        if decay:
            value += 0.01 * sum(jnp.sum(w**2) for w in weights)
        return value, jnp.sum(jnp.moveaxis(h, batch, 0), range(1, h.ndim))

    def step(weights: list[Any], x: Any) -> tuple[list[Any], Any, Any]:
        (value, by_example), grads = jax.value_and_grad(loss, has_aux=True)(weights, x)
        return [w - g for w, g in zip(weights, grads, strict=True)], value, by_example

    return RandomStep(step, chain.weights, random.standard_normal(chain.first).astype(np.float32))
