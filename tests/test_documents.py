"""The documents: their Python snippets run as they stand, their links lead somewhere, and the README stays short.

What the architecture page says of its step is what the nouns hold, and sample texts are what is printed.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.compiling.program_sources import instructions_of
from autopar.errors import UnsplitWarning
from autopar.ir.graph import Phase
from autopar.ir.instructions import Copy, Run
from autopar.ir.local import Reshard
from autopar.ir.plan import _OF_A_STEP
from autopar.ir.schedule import schedule_for
from autopar.passes.batch import Kind
from autopar.planning.finisher import Finisher

ROOT = Path(__file__).parent.parent
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
MOST_BYTES = 9_000  # of the README
LONG = ("docs/tutorial.md", "docs/how-to/products-in-8-bits.md")  # that run for long
COMPILING = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")  # how, in tests

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def snippets_of(page: Path, language: str = "python") -> list[str]:
    """What stands in fences of `python`; those of `py` are not run."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def words_of(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def names_after(code: str) -> dict[str, Any]:
    """What a snippet of a script `model.py` leaves behind, run here."""
    names: dict[str, Any] = {}
    exec(compile(code, "model.py", "exec"), names)
    return names


def links_of(page: Path) -> list[str]:
    """The relative targets of links, without what follows a #."""
    text = re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    targets = re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r"^\[[^]]+\]:\s*(\S+)", text, re.MULTILINE)
    paths = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    return [path for path in paths if path]


def test_readme_and_tutorial_have_snippets() -> None:
    assert snippets_of(README)
    assert snippets_of(TUTORIAL)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (name_of(page) in LONG), id=name_of(page))
        for page in DOCUMENTS
        if snippets_of(page)
    ],
)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """One after the other, in a process that imports JAX anew."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets_of(page))],
        cwd=tmp_path,  # where they save plans, reports and checkpoints
        env={"PYTHONPATH": str(ROOT), **{name: os.environ[name] for name in COMPILING if name in os.environ}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_readme_is_short() -> None:
    assert README.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in links_of(page) if not (page.parent / link).is_file()]
    assert not missing


def test_the_walk_says_what_the_nouns_hold() -> None:
    page = ROOT / "docs" / "architecture.md"
    text, (code,) = words_of(page.read_text(encoding="utf-8")), snippets_of(page)
    names = names_after(code.replace("print(step.plan(params, batch))", "planned = step.plan(params, batch)"))
    planned = names["planned"].with_programs()
    plan, lowered = planned.made

    def says(sentence: str) -> None:
        assert sentence in text, f"docs/architecture.md should say: {sentence}"

    graph, states = planned.step.graph, planned.step.analysis.states
    number = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    phases = {phase: number[n] for phase, n in Counter(eqn.phase for eqn in graph.equations).items()}
    says(
        f"Here it has {len(graph.equations)}: {phases[Phase.FORWARD]} of the phase *forward*, "
        f"{phases[Phase.BACKWARD]} *backward* and {phases[Phase.UPDATE]} *update*"
    )
    assert graph.carried == {0: 0, 1: 1}
    says("results 0 and 1, the new parameters, take the place of arguments 0 and 1")

    kinds = [states[v].kind for v in (*graph.inputs, *graph.outputs)]
    assert kinds == [Kind.FREE, Kind.FREE, Kind.BATCHED, Kind.BATCHED, Kind.FINAL, Kind.FINAL, Kind.PARTIAL]
    assert all(states[v].batch.dim == 0 for v in graph.inputs[2:])

    step = lowered.placed.step
    (examples,) = {v.shape[0] for v in step.feeds}
    says(f"in the sizes of one microbatch, {examples} examples")
    says(f"It lists {number[len(step.feeds)]} slices that the loop over microbatches is fed (of `x` and `y`)")
    says(f"and {number[len(step.accumulate)]} running sums")

    says("one axis `x` of size 2")
    assert [(s.layers, s.mesh.devices, s.mesh.shape, s.mesh.axes) for s in plan.stages] == [
        ((0, 1), (0, 1), (2,), ("x",)),
        ((1, 2), (2, 3), (2,), ("x",)),
    ]
    rows = schedule_for(plan.schedule, [s.mesh for s in plan.stages], plan.num_microbatches)
    says(
        f"for layer 0 on two devices with {number[rows.in_flight(0)]} microbatches in flight, and for layer 1 on two "
        f"devices with {number[rows.in_flight(1)]}"
    )
    *programs, last = [f"`{program.name}`" for program in lowered.placed.programs]
    says(f"Here they are {', '.join(programs)} and {last}.")

    finisher = Finisher(planned.step.analysis, planned.cluster)
    layered = finisher.layered(plan)
    problem = finisher.stages.problem(layered, lowered.placed, 0, plan.stages[0].mesh, rows=rows)
    (product,) = lowered.placed.programs[0].equations
    _, options = problem.parts[0, product.id, 0]
    says(f"For the product in `forward_0` there are {number[len(options.assignments)]}:")
    assert {leaf.path: str(leaf.sharding) for leaf in plan.leaves[:2]} == {
        "params['w1']": "[-,x]", "params['w2']": "[x,-]",
    }  # fmt: skip

    local = lowered.programs[1]
    assert local.program.name == "forward_1"
    (reshard,) = [op for op in local.ops if isinstance(op, Reshard)]
    assert [step.kind for step in reshard.steps] == ["all_reduce"]
    says("In `forward_1` each device multiplies 128 × 2048 by 2048 × 1024.")
    assert "%33:float32[128,1024] [-,-]+x = dot_general %31[-,x] %1[x,-]" in planned.as_text()["forward_1"]
    says("Two values cross between the stages")
    assert len(lowered.crossings) == 2

    donated = planned.step.donated
    counts = Counter(type(i) for i in instructions_of(lowered, plan.schedule, donated).instructions)
    says(f"here {counts[Run]} runs and {counts[Copy]} copies")


def test_the_warning_on_the_page_is_the_real_one() -> None:
    page = ROOT / "docs" / "how-to" / "slow-or-does-not-fit.md"
    code = snippets_of(page)[0].replace("plan = step.plan(params, batch)\n", "") + snippets_of(page, "py")[0]
    with pytest.warns(UnsplitWarning) as caught:
        names_after(code)
    (expected,) = [text for text in snippets_of(page, "text") if text.startswith("UnsplitWarning: ")]
    assert words_of(expected) == f"UnsplitWarning: {caught[0].message}"


def test_the_programs_on_the_page_are_the_plans_own() -> None:
    page = ROOT / "docs" / "how-to" / "read-a-plan.md"
    names = names_after(snippets_of(page)[0].replace("print(plan)", 'programs = plan.as_text()["forward_0"]'))
    (expected,) = [text for text in snippets_of(page, "text") if "dot_general" in text]
    printed = [line.strip() for line in names["programs"].splitlines()]
    assert "\n".join(line.strip() for line in expected.splitlines()) in "\n".join(printed)


def test_a_plan_without_its_step_knows_what_the_reference_lists_of_planned() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = re.search(r"autoclass:: Planned\n +:members: (.*)", page)
    assert listed is not None
    assert sorted(listed[1].split(", ")) == list(_OF_A_STEP)
    assert all(callable(getattr(autopar.Planned, name)) and name not in dir(autopar.Plan) for name in _OF_A_STEP)
