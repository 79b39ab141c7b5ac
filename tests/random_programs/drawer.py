"""Draws the links of a random program, and knows what arrays they make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

BATCH = 8
SIZES = (2, 4, 8)
MAX_SIZE = 1024  # elements of one array
MAX_RANK = 4

Env = list[Any]  # the arrays made so far
Link = Callable[[Env, dict[str, Any]], Any]  # (arrays, weights) -> array


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of an array while links are drawn."""

    shape: tuple[int, ...]
    batch: int | None  # the dimension where the examples lie, as far as the drawer knows
    integer: bool = False


class Drawer:
    """The links so far and the arrays that they make."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw_from = draw
        self.random = np.random.default_rng(draw(st.integers(0, 2**16)))  # numbers only
        features = self.one_of(SIZES)
        length = self.one_of(SIZES)
        self.batch = {
            "x": self.numbers(BATCH, features),
            "tokens": self.random.integers(0, 8, (BATCH, length)).astype(np.int32),
        }
        self.infos = [Info((BATCH, features), 0), Info((BATCH, length), 0, integer=True)]
        self.links: list[Link] = []
        self.kinds: list[str] = []
        self.weights: dict[str, Any] = {}

    # Drawing.

    def one_of(self, options: Sequence[Any]) -> Any:
        return self.draw_from(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return bool(self.draw_from(st.booleans()))

    def numbers(self, *shape: int) -> Any:
        return (self.random.standard_normal(shape) / 2).astype(np.float32)

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.numbers(*shape)
        return name

    def floats(self) -> int:
        """A random float array, the latest most often."""
        found = [i for i, info in enumerate(self.infos) if not info.integer]
        return found[-1] if len(found) == 1 or self.flag() else int(self.one_of(found))

    def integers(self) -> int:
        return int(self.one_of([i for i, info in enumerate(self.infos) if info.integer]))

    def dim(self, i: int) -> int:
        """A dimension, that of the examples seldom."""
        info = self.infos[i]
        others = [d for d in range(len(info.shape)) if d != info.batch]
        if not others or (info.batch is not None and self.draw_from(st.integers(0, 9)) == 9):
            return info.batch or 0
        return int(self.one_of(others))

    def add(self, kind: str, link: Link, batch: int | None, integer: bool = False) -> None:
        """A link, unless what it makes is too large."""
        specs = [jax.ShapeDtypeStruct(i.shape, jnp.int32 if i.integer else jnp.float32) for i in self.infos]
        made = jax.eval_shape(link, specs, self.weights)
        if math.prod(made.shape) > MAX_SIZE or len(made.shape) > MAX_RANK or 0 in made.shape:
            return
        if batch is not None and made.shape[batch] != BATCH:
            batch = None  # cut, or put together with something
        self.links.append(link)
        self.kinds.append(kind)
        self.infos.append(Info(tuple(made.shape), batch, integer))
