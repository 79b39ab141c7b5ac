"""Reports opened in a real browser: nothing is wrong in the console, everything is drawn, search and click work."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from autopar.reporting.report import Report
from benchmarks.browser import PHONE, Opened, missing, opened
from tests.reports import LAYERS, from_file, plan_of, step_and_args

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}: apt-get install chromium chromium-driver"),
]
WIDTHS = (1280, PHONE)

# How many colours a figure shows: one that is not drawn has one at most.
COLOURS = """
    const found = new Set(), roots = [document.querySelector(arguments[0])];
    for (const root of roots) {
      for (const each of root.querySelectorAll("*")) if (each.shadowRoot) roots.push(each.shadowRoot);
      for (const canvas of root.querySelectorAll("canvas")) {
        if (!canvas.width || !canvas.height) continue;
        const copy = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
        copy.drawImage(canvas, 0, 0);
        const pixels = copy.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let k = 0; k < pixels.length; k += 4) if (pixels[k + 3] > 250) {
          found.add(`${pixels[k]},${pixels[k + 1]},${pixels[k + 2]}`);
        }
      }
    }
    return [...found];
"""
BLUE, ORANGE = "0,114,178", "230,159,0"


@pytest.fixture(scope="module", params=WIDTHS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path = tmp_path_factory.mktemp("report") / "report.html"
    plan_of("pipeline").report(explain=3, compare=True, against=plan_of("one stage")).save(path)
    with opened(path, request.param) as found:
        yield found


def test_it_opens_without_errors_and_fits_the_window(page: Opened) -> None:
    assert page.errors() == []
    assert page.overflow <= 0
    assert page.seconds < 3
    assert page.run("return performance.getEntriesByType('resource').filter((r) => !r.name.startsWith('data:'))") == []


@pytest.mark.parametrize("figure", ["#figure-timeline", "#figure-memory"])
def test_figures_are_drawn(page: Opened, figure: str) -> None:
    assert {BLUE, ORANGE} <= set(page.run(COLOURS, figure))


def test_every_part_is_there(page: Opened) -> None:
    parts = ("answer", "split", "splits", "peaks", "graph", "operators", "link-table", "leaves", "recipe-table", "diff")
    for part in parts:
        height = page.run("return document.getElementById(arguments[0]).getBoundingClientRect().height", part)
        assert height > 10, part
    assert page.run("return document.querySelectorAll('.node').length") >= LAYERS
    assert page.run("return document.querySelector('#trace').download.endsWith('.trace.json.gz')")


def test_leaves_are_searched(page: Opened) -> None:
    box = page.driver.find_element("id", "leaf-search")
    box.send_keys("state[1] [2] up")
    rows = page.run("return [...document.querySelectorAll('#leaf-found tr')].map((row) => row.cells[0].textContent)")
    assert rows == ["state[1]['layers'][2]['up']"]
    assert page.run("return document.querySelector('#leaf-rows').hidden")
    box.clear()
    page.run("document.querySelector('#leaf-search').dispatchEvent(new Event('input'))")
    assert not page.run("return document.querySelector('#leaf-rows').hidden")


def test_operators_are_searched_and_chosen_by_layer(page: Opened) -> None:
    shown = (
        "return [...document.querySelectorAll('details.op')].filter((op) => !op.hidden).map((op) => op.dataset.text)"
    )
    everything = page.run(shown)
    box = page.driver.find_element("id", "operator-search")
    box.send_keys("dot_general backward")
    found = page.run(shown)
    assert found
    assert len(found) < len(everything)
    assert all("dot_general" in text and "backward" in text for text in found)
    box.clear()
    page.run("document.querySelector('#operator-search').dispatchEvent(new Event('input'))")
    click(page, ".node")
    assert 0 < len(page.run(shown)) < len(everything)
    click(page, "#all-layers")
    assert page.run(shown) == everything


def test_one_click_says_why(page: Opened) -> None:
    operator = "details.op:has(.whys) > summary"
    assert not page.run("return document.querySelector('.whys').checkVisibility()")
    click(page, operator)
    assert page.run("return document.querySelector('.whys').checkVisibility()")
    assert page.run("return document.querySelector('.whys').rows.length") > 2
    assert page.overflow <= 0
    click(page, operator)


def test_the_timeline_is_zoomed(page: Opened) -> None:
    size = "const r = Bokeh.documents[0].get_model_by_name('timeline-range'); return r.end - r.start"
    whole = page.run(size)
    click(page, "[data-by=in]")
    assert page.run(size) == pytest.approx(whole / 2)
    click(page, "[data-by=right]")
    assert page.run(size) == pytest.approx(whole / 2)
    click(page, "[data-by=whole]")
    assert page.run(size) == pytest.approx(whole)


def test_memory_of_other_devices_is_shown(page: Opened) -> None:
    tops = "return [...Bokeh.documents[0].get_model_by_name('memory-source').data.top]"
    before = page.run(tops)
    others = "[data-group]:not([aria-pressed=true])"
    click(page, others)
    after = page.run(tops)
    assert after != before
    title = page.run("return document.querySelector('#memory-title').textContent")
    assert title == page.run(
        "return document.querySelector('[data-group][aria-pressed=true]').textContent.toLowerCase()"
    )
    assert {BLUE, ORANGE} & set(page.run(COLOURS, "#figure-memory"))
    assert page.errors() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_from_a_file_has_a_page_without_figures(tmp_path: pathlib.Path, width: int) -> None:
    Report(from_file(plan_of("pipeline"))).save(tmp_path / "report.html")
    with opened(tmp_path / "report.html", width, figures=False) as found:
        assert found.errors() == []
        assert found.overflow <= 0
        assert found.run("return document.querySelectorAll('#leaf-rows tr').length") > 0


@pytest.mark.parametrize("width", WIDTHS)
def test_a_profile_is_drawn_beside_its_prediction(tmp_path: pathlib.Path, width: int) -> None:
    step, (state, batch) = step_and_args("gpipe")
    state, batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (state, batch))
    step.compile(state, batch).profile(state, batch, steps=1).save(tmp_path / "profile.html")
    with opened(tmp_path / "profile.html", width) as found:
        assert found.errors() == []
        assert found.overflow <= 0
        for figure in ("#figure-measured", "#figure-predicted"):
            assert {BLUE, ORANGE} <= set(found.run(COLOURS, figure))
        size = "const r = Bokeh.documents[0].get_model_by_name('timeline-range'); return r.end - r.start"
        whole = found.run(size)
        click(found, "[data-by=in]")
        assert found.run(size) == pytest.approx(whole / 2)


def click(page: Opened, selector: str) -> None:
    element = page.driver.find_element("css selector", selector)
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()
