"""All programs: `python -m benchmarks.public.programs` lists them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence

import jax.numpy as jnp

from benchmarks.public import equinox_models, haiku_models, linen_models, linen_vision, nnx_models
from benchmarks.public.program import Build, Program, Sizes, Variant

# As large as public examples' smaller sizes, with a batch that a GPU is not idle with.
LARGE = Sizes(width=512, heads=8, hidden=2048, vocabulary=8192, length=256, batch_size=16, image=128)
# For tests, of models that do without much.
TINY = Sizes(
    width=16, heads=4, hidden=32, vocabulary=32, length=8, batch_size=4, image=32, dtype=jnp.float32
)  # fmt: skip
_WIDE = dataclasses.replace(LARGE, dtype=jnp.float32)
_POINTS = dataclasses.replace(LARGE, batch_size=4096, vocabulary=128, dtype=jnp.float32)
_FILTERS = dataclasses.replace(LARGE, width=64, batch_size=32, vocabulary=1000)
_PIXELS = dataclasses.replace(LARGE, batch_size=64, vocabulary=1000)


def _hugging_face() -> list[tuple[str, Build, Sizes, Sequence[Variant]]]:
    if importlib.util.find_spec("transformers") is None:
        return []  # the extra hugging-face is not there
    from benchmarks.public import hugging_face_models

    return [
        ("bert", hugging_face_models.bert, LARGE, [*_deep(2, 8, 24), Variant(8, checkpoint=True)]),
        ("gpt2", hugging_face_models.gpt2, LARGE, [*_deep(2, 8), Variant(8, evaluation=True)]),
        ("llama", hugging_face_models.llama, LARGE, _deep(2, 8, 24)),
        ("bart", hugging_face_models.bart, LARGE, _deep(2, 8)),
    ]


def _deep(*layers: int, checkpoint: bool = False, scan: bool = False, evaluation: bool = False) -> list[Variant]:
    return [Variant(n, checkpoint, scan, evaluation) for n in layers]


@functools.cache
def programs() -> list[Program]:
    """Every framework's."""
    models: dict[str, list[tuple[str, Build, Sizes, Sequence[Variant]]]] = {
        "linen": [
            (
                "language model", linen_models.language_model, LARGE,
                [*_deep(2, 8, 24), *_deep(2, 8, 24, checkpoint=True), *_deep(2, 24, evaluation=True)],
            ),
            ("translator", linen_models.translator, LARGE, _deep(2, 8, 24)),
            (
                "decoder", linen_models.decoder, LARGE,
                [*_deep(2, 8, 24, 48), Variant(8, checkpoint=True), *_deep(2, 8, 24, scan=True),
                 Variant(8, checkpoint=True, scan=True)],
            ),
            (
                "vision transformer", linen_vision.vision_transformer, _PIXELS,
                [*_deep(2, 8), Variant(8, evaluation=True)],
            ),
            ("resnet", linen_vision.resnet, _FILTERS, [*_deep(2, 8, 24), Variant(8, evaluation=True)]),
            ("residual mlp", linen_vision.residual_mlp, _POINTS, [*_deep(2, 8, 24), *_deep(2, 24, evaluation=True)]),
        ],
        "nnx": [
            (
                "gemma", nnx_models.gemma, LARGE,
                [*_deep(2, 8, 24), *_deep(2, 8, checkpoint=True), *_deep(2, 8, evaluation=True)],
            ),
        ],
        "equinox": [
            ("mixer", equinox_models.mixer, _PIXELS, [*_deep(2, 8, 24), Variant(8, checkpoint=True)]),
            ("vision transformer", equinox_models.vision_transformer, _PIXELS, _deep(2, 8)),
            (
                "language model", equinox_models.language_model, _WIDE,
                [*_deep(8, 24, scan=True), Variant(8, True, scan=True), Variant(8, scan=True, evaluation=True)],
            ),
        ],
        "haiku": [
            ("language model", haiku_models.language_model, _WIDE, [*_deep(2, 8, 24), Variant(8, checkpoint=True)]),
            (
                "resnet", haiku_models.resnet, dataclasses.replace(_FILTERS, dtype=jnp.float32),
                [*_deep(4, 8), Variant(4, evaluation=True)],
            ),
        ],
        "hugging face": _hugging_face(),
    }  # fmt: skip
    return [
        Program(framework, model, variant, sizes, build)
        for framework, each in models.items()
        for model, build, sizes, variants in each
        for variant in variants
    ]


def tiny(program: Program) -> Program:
    """The same with two layers (a resnet of `hk.nets` has one a group) of small arrays."""
    return dataclasses.replace(program, sizes=TINY, variant=dataclasses.replace(program.variant, layers=2))


if __name__ == "__main__":
    print(*(program.name for program in programs()), sep="\n")
