"""Every primitive of JAX has a rule that is tested, or a reason why it has none; docs/primitives.md says which."""

from __future__ import annotations

import jax
import pytest

from autopar.passes.rules.omitted import OMITTED
from autopar.passes.rules.table import has_rule
from autopar.tracing.build import CALLS, LINEAR_SOLVE, SHARD_MAP
from tests.passes.rules.document import DOCUMENT, ELSEWHERE, document, rules_of_cases
from tests.passes.rules.primitives import primitives_of_jax


def test_every_primitive_of_jax_has_a_rule_or_a_reason() -> None:
    known = primitives_of_jax()
    assert {"add", "scan", "ragged_dot_general", "random_bits", "psum", "pallas_call"} <= known.keys()
    explained = {*OMITTED, *CALLS, LINEAR_SOLVE, SHARD_MAP} - {"custom_partitioning"}  # one of both, as its user says
    assert {name for name in known if not has_rule(name)} - explained == set()
    assert {name for name in known if has_rule(name)} & explained == set()


def test_every_rule_is_tested() -> None:
    known = primitives_of_jax()
    assert {name for name in known if has_rule(name)} - rules_of_cases().keys() - ELSEWHERE.keys() == set()


def test_the_document_is_fresh() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    if f"; jax {jax.__version__}." not in text:
        pytest.skip("written by another version of jax")
    assert text == document(), "docs/primitives.md is stale: run make docs"
