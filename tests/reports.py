"""Plans to report on: small, one of each kind."""

from __future__ import annotations

import functools
import html.parser
import re
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar import recipes
from autopar.ir.method import Method
from autopar.ir.plan import Plan
from autopar.planned import Planned
from autopar.reporting.record import Details
from autopar.reporting.report import Report
from tests import models
from tests.planned import cluster_of

LAYERS = 4
METHODS: dict[str, tuple[Method, autopar.Cluster]] = {
    "one stage": (recipes.zero(2, 2), cluster_of(1, 4)),
    "one program": (recipes.megatron(2, 2, 1, 1), cluster_of(1, 4)),
    "pipeline": (recipes.megatron(1, 2, 4, 8), cluster_of(4, 2, network=1e8)),
    "gpipe": (recipes.gpipe(2, 4), cluster_of(2, 2)),
    "interleaved": (recipes.megatron(1, 1, 2, 4, chunks=2), cluster_of(1, 2)),
    "zero-bubble": (recipes.pipeline([(1, (1,))] * 4, 8, "zero-bubble"), cluster_of(1, 4)),
}
NAMES = list(METHODS)


def deep_loss(params: Any, batch: dict[str, Any]) -> Any:
    """An unrolled chain of blocks over whole numbers as tokens; the embedding is used again at the end."""
    x = params["embedding"][batch["tokens"]]
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    scores = x @ params["embedding"].T
    return -jax.nn.log_softmax(scores)[..., 0].mean()


def deep_params(width: int = 32) -> Any:
    """Shapes of the parameters."""
    f32 = jnp.float32
    layer = {
        "up": jax.ShapeDtypeStruct((width, 4 * width), f32),
        "down": jax.ShapeDtypeStruct((4 * width, width), f32),
    }
    return {"embedding": jax.ShapeDtypeStruct((64, width), f32), "layers": [layer] * LAYERS}


def step_and_args(name: str) -> tuple[autopar.Parallelized, tuple[Any, Any]]:
    """An Adam step under one of the methods."""
    method, cluster = METHODS[name]
    step = autopar.parallelize(models.adam(deep_loss), cluster=cluster, method=method, batch_axes=(None, 0))
    batch = {"tokens": jax.ShapeDtypeStruct((16, 8), jnp.int32)}
    return step, (models.adam_state(deep_params()), batch)


@functools.cache
def plan_of(name: str) -> Planned:
    """Its plan, which knows its step."""
    step, args = step_and_args(name)
    return step.plan(*args)


def from_file(plan: Plan) -> Plan:
    """As it is read from a file."""
    return Plan.from_json(plan.to_json())


def details_of(report: Report) -> Details:
    """Of a report that has some."""
    assert report.details is not None
    return report.details


class Page(html.parser.HTMLParser):
    """What stands in a page, with its nesting checked."""

    EMPTY = frozenset({"meta", "link", "input", "br", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.ids += [named["id"] or ""] if "id" in named else []
        self.addresses += [value or "" for key, value in attributes if key in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))
