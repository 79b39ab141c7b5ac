"""What a sharding rule for a primitive of one's own is made of::

    from autopar import sharding_rules as rules

    @autopar.register_sharding_rule("scaled_rows")  # [rows, columns], [rows] -> [rows, columns]
    def scaled_rows(equation: rules.Equation) -> rules.Rule:
        factors = rules.Factors()
        rows, columns = factors.dims(equation.inputs[0].shape)
        return factors.rule([(rows, columns), (rows,)], [(rows, columns)])

A *factor* is a dimension of the loop nest that an equation is, or a part of one. A rule says which factors the
dimensions of each operand and result are made of (`DimMap`), which factors are reduced and how, in which sets of
operands the equation is linear, and, where binding the primitive to the pieces is not all, how a piece is computed
(`emit`, which is given a `Local`). The planner does the rest, over devices and over microbatches alike.
"""

from __future__ import annotations

from autopar.ir.graph import Equation, Literal, Value
from autopar.ir.rule import DimMap, Halo, Local, Rule, bind, emit_same
from autopar.passes.rules.building import Factors, RuleBuilder, linear_sets, local_shape, replicated
from autopar.passes.rules.table import find_fault, register_sharding_rule, rule_of

__all__ = [
    "DimMap",
    "Equation",
    "Factors",
    "Halo",
    "Literal",
    "Local",
    "Rule",
    "RuleBuilder",
    "Value",
    "bind",
    "emit_same",
    "find_fault",
    "linear_sets",
    "local_shape",
    "register_sharding_rule",
    "replicated",
    "rule_of",
]
