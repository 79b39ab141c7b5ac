"""What the ablation benchmark makes of its rows."""

from __future__ import annotations

import dataclasses

from benchmarks.ablation import Row, bars, brought

_WHOLE = Row("alpa", "small", "", 1.0, 10.0, "", {}, {}, {"elimination": 3, "start": 1})


def _without(part: str, seconds: float | None, planning: float, case: str = "small") -> Row:
    return dataclasses.replace(_WHOLE, case=case, without=part, seconds=seconds, planning=planning)


def test_what_a_part_brings() -> None:
    rows = [
        _WHOLE,
        dataclasses.replace(_WHOLE, case="large", planning=30.0),
        dataclasses.replace(_WHOLE, suite="growth", planning=1.0),
        _without("one_stage", 1.05, 10.0),  # steps are slower
        _without("one_stage", 0.99, 30.0, "large"),
        _without("finer_layers", None, 1.0),  # nothing is found
        _without("overheads", 1.0, 11.0),  # it takes longer to plan: 1 of 40 seconds
        _without("tied_start", 1.0, 10.5),  # less than 2 % longer
        _without("joined_loops", 1.0, 8.0),  # and even quicker
        dataclasses.replace(_without("known_solutions", 1.0, 1.5), suite="growth"),
    ]
    found = {each.part: each for each in brought(rows) if each.num_cases}
    assert {part for part, each in found.items() if each.is_nothing} == {"tied_start", "joined_loops"}
    one = found["one_stage"]
    assert (one.num_cases, one.num_changed, one.num_lost) == (2, 2, 0)
    assert (round(one.mean, 9), round(one.most, 9), round(one.least, 9)) == (0.02, 0.05, -0.01)
    assert (found["finer_layers"].num_lost, found["finer_layers"].num_changed) == (1, 1)
    assert found["overheads"].planning == 1.0 / 40.0
    assert found["known_solutions"].planning == 0.5 / 1.0  # of its suite
    judged = bars(rows)
    assert (judged["parts_that_bring_nothing"].value, judged["parts_that_bring_nothing"].holds) == (2, False)
    assert judged["solutions_by_elimination"].value == 0.75  # of 12 problems
    assert judged["solutions_by_elimination"].n == 12
