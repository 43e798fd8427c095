"""The report in a real browser: nothing goes wrong, and what one clicks, types and points at works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from xml.etree.ElementTree import tostring

import pytest
from reading_scale import write_study

from batchscout.orchestrator.output.comparison import Side
from batchscout.orchestrator.output.exports import WRITERS
from batchscout.orchestrator.output.loaded import load
from batchscout.orchestrator.output.recommendation import recommend
from batchscout.orchestrator.output.report.comparison import write_comparison
from batchscout.orchestrator.output.report.figures import figure_element
from batchscout.orchestrator.output.report.page import render_report, write_report
from batchscout.orchestrator.output.report.shell import page
from batchscout.orchestrator.output.report.training import RunCurves
from batchscout.orchestrator.stages.figures import Axis, Figure, Line, Mark, Series
from batchscout.orchestrator.study.state import Study
from tests.support.browser import Browser, chromium
from tests.support.example_study import add_trial, end_trial, example_config, example_recommendation, example_study
from tests.support.outcome import GOLDEN, RECORDED, kept_in
from tests.support.run_curves import example_curves, snapshot, steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine: apt-get install chromium"),
]

GOLDEN_RUNS = sorted(path.name for path in GOLDEN.iterdir())
IS_READY = "performance.getEntriesByName('ready').length > 0"
PHONE, A4, SCREEN = 390, 718, 1200


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Browser:
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    return browser


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study with all stages, whose runs have kept their steps and their noise."""
    file, config = tmp_path_factory.mktemp("example") / "report.html", example_config()
    file.write_text(render_report(config, example_study(config), example_recommendation(), example_curves()))
    return file


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study of 1,000 trials."""
    run_dir = tmp_path_factory.mktemp("many")
    write_study(run_dir, 1_000)
    return reported(run_dir, run_dir / "report.html")


def reported(run_dir: Path, file: Path) -> Path:
    config, study = kept_in(run_dir)
    write_report(file, config, study, recommend(config, study))
    return file


def show(tab: Browser, file: Path, width: int = SCREEN, **looks: bool) -> None:
    """Show the page in a window as high as the page is, so that all of it is seen, and wait for its script."""
    tab.errors.clear()
    tab.requests.clear()
    tab.show_as(width, 20_000, **looks)
    tab.open(file)
    if looks.get("script", True):
        tab.until(IS_READY)
        # Until what moved when charts took their places is where it stays.
        tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))")


def test_a_comparison_is_drawn_too(tab: Browser, tmp_path: Path) -> None:
    sides = []
    for run in ("quickstart", "every_end"):
        config, study = kept_in(GOLDEN / run)
        sides.append(Side(run, config, study, recommend(config, study)))
    write_comparison(tmp_path / "comparison.html", *sides)
    show(tab, tmp_path / "comparison.html")
    assert tab.evaluate("document.querySelectorAll('figure.chart').length") >= 1
    assert tab.errors == []


@pytest.mark.parametrize("run", [*GOLDEN_RUNS, "example"])
@pytest.mark.parametrize("dark", [False, True])
def test_every_chart_shows_something_and_nothing_goes_wrong(
    run: str, dark: bool, tab: Browser, example: Path, tmp_path: Path
) -> None:
    file = example if run == "example" else reported(GOLDEN / run, tmp_path / "report.html")
    show(tab, file, dark=dark)
    assert tab.evaluate("document.querySelectorAll('figure.chart').length") >= 4
    empty = "[...document.querySelectorAll('figure.chart')].filter(f => !f.querySelector('.picture svg circle, .picture svg path, .picture svg rect'))"
    assert tab.evaluate(f"{empty}.map(figure => figure.id)") == []
    assert tab.errors == []
    assert {*tab.requests} == {file.as_uri()}


def test_every_button_copies_the_lines_for_its_trainer(tab: Browser, example: Path) -> None:
    show(tab, example)
    names = tab.evaluate("[...document.querySelectorAll('[data-copies]')].map(button => button.textContent)")
    assert names == ["batchscout", *(name for name in WRITERS if name != "script")]
    for name in names:
        click(tab, f"[data-copies=lines-{name}]")
        tab.until(f"document.querySelector('.copied').textContent === 'copied for {name}'")
        lines = tab.evaluate(f"document.getElementById('lines-{name}').textContent")
        assert lines.strip()
        assert tab.evaluate("navigator.clipboard.readText()") == lines
    assert tab.errors == []


def click(tab: Browser, selector: str) -> None:
    """Click where a person would: in the middle of it."""
    x, y = tab.evaluate(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def column(tab: Browser, name: str, table: str) -> list[str]:
    found = f"[...document.querySelectorAll('{table} thead th')].findIndex(one => one.textContent === '{name}')"
    rows = f"[...document.querySelectorAll('{table} tbody tr')].filter(row => row.cells.length > 1)"
    return tab.evaluate(f"{rows}.map(row => row.cells[{found}].textContent)")


def test_a_table_sorts_by_numbers_both_ways_and_keeps_what_is_unknown_last(tab: Browser, tmp_path: Path) -> None:
    show(tab, reported(GOLDEN / "every_end", tmp_path / "report.html"))
    heads = tab.evaluate("[...document.querySelectorAll('#grid thead th')].map(one => one.textContent)")
    number = heads.index("val loss") + 1
    for falls in (False, True):
        click(tab, f"#grid thead th:nth-child({number}) button")
        shown = column(tab, "val loss", "#grid")
        known = [float(text.replace(",", "")) for text in shown if text != "-"]
        assert len(known) >= 3
        assert known == sorted(known, reverse=falls)
        assert shown[len(known) :] == ["-"] * (len(shown) - len(known))
        order = "descending" if falls else "ascending"
        assert tab.evaluate("document.querySelector('#grid [aria-sort]').ariaSort") == order
    assert tab.errors == []


def test_a_word_in_a_column_of_numbers_is_sorted_as_what_is_unknown(tab: Browser, tmp_path: Path) -> None:
    config = example_config(stages=[{"type": "throughput"}])
    known = Study(config.name)
    for name, scale in (("a", 30.0), ("b", None), ("c", 7.0), ("d", None), ("e", 12.0)):
        add_trial(known, config, f"throughput-{name}", gradient_accumulation_steps=2)
        end_trial(known, f"throughput-{name}", 1.0, {"tokens_per_second": 100.0, "noise_scale": scale})
    file = tmp_path / "report.html"
    write_report(file, config, known, None)
    show(tab, file)
    heads = tab.evaluate("[...document.querySelectorAll('#throughput thead th')].map(one => one.textContent)")
    (number,) = [place for place, head in enumerate(heads, 1) if head.startswith("noise scale")]
    for numbers in (["7.0", "12.0", "30.0"], ["30.0", "12.0", "7.0"]):
        click(tab, f"#throughput thead th:nth-child({number}) button")
        assert column(tab, heads[number - 1], "#throughput") == [*numbers, "not available", "not available"]


def test_a_long_table_is_folded_and_filters_all_its_rows(tab: Browser, many: Path) -> None:
    show(tab, many)
    assert not tab.evaluate("document.querySelector('#grid details.table').open")
    click(tab, "#grid details.table > summary")
    tab.until("document.querySelector('.filter input') !== null")
    assert len(column(tab, "trial", "#grid")) == 200
    click(tab, "#grid .more")
    assert len({*column(tab, "trial", "#grid")}) == 1_000
    click(tab, ".filter input")
    tab.call("Input.insertText", text="pruned 0.000999")
    tab.until("document.querySelector('.filter [role=status]').textContent === '1 of 1,000'")
    assert column(tab, "state", "#grid") == ["pruned"]
    assert tab.errors == []


def test_values_are_told_under_the_pointer_and_by_the_arrow_keys(tab: Browser, example: Path) -> None:
    show(tab, example)
    chart, tip = "#frontier-speed_by_memory", "document.querySelector('#frontier-speed_by_memory .tip')"
    x, y = tab.evaluate(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])(document.querySelector('{chart} svg .dot').getBoundingClientRect())"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = tab.evaluate(f"{tip}.innerText").splitlines()
    assert len(told) >= 3
    assert any(line.startswith("peak memory of a rank: ") and line.endswith("GiB") for line in told)
    assert any(line.startswith("tokens/s: ") for line in told)
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert tab.evaluate(f"{tip}.hidden")
    tab.evaluate(f"document.querySelector('{chart} .picture').focus()")
    seen = []
    for _ in range(3):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
        seen.append(tab.evaluate(f"{tip}.innerText"))
    assert len({*seen}) == 3
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
    assert tab.evaluate(f"{tip}.hidden")


def test_the_values_of_a_picture_are_had_as_a_table(tab: Browser, example: Path) -> None:
    """Every mark first, with all that is written at it, and then every cell."""
    show(tab, example)
    figure = "#train-surface"
    tab.evaluate(f"document.querySelector('{figure} .values').open = true")
    tab.until(f"document.querySelector('{figure} .values table') !== null")
    rows = tab.evaluate(
        f"[...document.querySelectorAll('{figure} .values tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    marks = tab.evaluate(
        f"[...document.querySelectorAll('{figure} [data-y]')].map(one => [one.dataset.x, one.dataset.y])"
    )
    assert [row[1:3] for row in rows[: len(marks)]] == marks
    assert "0.000106" in {row[2] for row in rows[: len(marks)]}
    assert len(rows) - len(marks) == tab.evaluate(f"document.querySelectorAll('{figure} .cell[data-name]').length") > 10
    assert all(len(row) == 1 for row in rows[len(marks) :])


@pytest.mark.parametrize(
    ("figure", "label", "more"),
    [("surface", "validation loss", True), ("differences", "label", True), ("batches", "P(best)", False)],
)
def test_what_is_written_at_a_mark_and_what_is_told_of_it_each_have_a_column_with_a_name(
    figure: str, label: str, more: bool, tab: Browser, tmp_path: Path
) -> None:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    show(tab, reported(tmp_path, tmp_path / "report.html"))
    tab.evaluate(f"document.querySelector('#train-{figure} .values').open = true")
    tab.until(f"document.querySelector('#train-{figure} .values table') !== null")
    rows = tab.evaluate(
        f"[...document.querySelectorAll('#train-{figure} .values tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    marks = tab.evaluate(
        f"[...document.querySelectorAll('#train-{figure} [data-y]')].map(one => [one.dataset.text, one.dataset.told, one.dataset.y])"
    )
    head, columns = rows[0], [*zip(*rows[1 : len(marks) + 1], strict=True)]
    assert all(head)
    assert [*columns[head.index(label)]] == [
        text if text != y else "" for text, _, y in ((text or "", told, y) for text, told, y in marks)
    ]
    assert ("more" in head) == more
    assert not more or [*columns[head.index("more")]] == [told or "" for _, told, _ in marks]


@pytest.mark.parametrize("width", [SCREEN, PHONE])
def test_what_is_told_of_a_mark_lies_inside_the_window(width: int, tab: Browser, example: Path) -> None:
    show(tab, example, width)
    for name in ("train-surface", "frontier-speed_by_memory", "time-timeline"):
        tab.evaluate(f"document.querySelector('#{name} .picture')?.focus()")
        for key in ("Home", "ArrowRight", "ArrowRight", "End"):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
            left, right = tab.evaluate(
                "(tip => [tip.left, tip.right])(document.querySelector('.tip:not([hidden])').getBoundingClientRect())"
            )
            assert left >= 0
            assert right <= width


def test_an_interval_without_an_upper_end_is_an_arrow_that_says_so(tab: Browser, tmp_path: Path) -> None:
    config, file = example_config(), tmp_path / "report.html"
    open_ended = [snapshot(20, 12.0), replace(snapshot(40, 12.0), noise_scale_high=None)]
    curves = [RunCurves("baseline", steps(300), open_ended)]
    file.write_text(render_report(config, example_study(config), example_recommendation(), curves))
    show(tab, file)
    figure = "#training-noise_curve"
    tab.evaluate(f"document.querySelector('{figure} .picture').focus()")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="End", code="End")
    assert "from 6 to no upper end" in tab.evaluate(f"document.querySelector('{figure} .tip').innerText")


def test_a_series_can_be_hidden(tab: Browser, example: Path) -> None:
    show(tab, example)
    chart = "#train-loss_by_train_seconds"
    dots = f"[...document.querySelectorAll('{chart} svg .dot')].filter(dot => getComputedStyle(dot).visibility === 'visible').length"
    before = tab.evaluate(dots)
    click(tab, f"{chart} .name text")
    assert 0 < tab.evaluate(dots) < before
    tab.evaluate(f"document.querySelector('{chart} .name').focus()")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter")
    assert tab.evaluate(dots) == before


@pytest.mark.parametrize("run", ["quickstart", "example"])
def test_nothing_is_cut_off_on_a_phone_or_on_paper(run: str, tab: Browser, example: Path, tmp_path: Path) -> None:
    file = example if run == "example" else reported(GOLDEN / run, tmp_path / "report.html")
    show(tab, file, PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE
    over = "[...document.querySelectorAll('figure .sheet')].filter(one => one.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.evaluate(f"{over}.length") == 0
    sizes = "[...document.querySelectorAll('figure svg text')].map(one => one.getScreenCTM().a * parseFloat(getComputedStyle(one).fontSize))"
    assert min(tab.evaluate(sizes)) >= 7.75, "pixels: a picture that would be smaller is to be moved sideways"
    cut = "[...document.querySelectorAll('.sheet')].filter(one => one.firstChild.viewBox.baseVal.width <= 540 && one.scrollWidth > one.clientWidth)"
    assert tab.evaluate(f"{cut}.length") == 0
    show(tab, file, A4)
    tab.call("Emulation.setEmulatedMedia", media="print")
    wide = "[...document.querySelectorAll('main *')].filter(one => one.clientWidth && one.getBoundingClientRect().right > innerWidth + 1)"
    assert tab.evaluate(f"{wide}.map(one => one.outerHTML.slice(0, 80))") == []


def test_without_scripts_every_picture_is_there(tab: Browser, example: Path) -> None:
    show(tab, example, script=False)
    document = tab.call("DOM.getDocument")["root"]["nodeId"]
    found = tab.call("DOM.querySelectorAll", nodeId=document, selector="figure.chart .picture svg")["nodeIds"]
    assert len(found) >= 12
    for node in found:
        assert tab.call("DOM.getBoxModel", nodeId=node)["model"]["height"] > 50
    assert tab.call("DOM.querySelectorAll", nodeId=document, selector=".script")["nodeIds"] == []


@pytest.mark.parametrize("run", [*GOLDEN_RUNS, "example", "recorded"])
@pytest.mark.parametrize("width", [SCREEN, PHONE])
def test_no_text_of_a_picture_lies_over_another_or_is_cut_off(
    run: str, width: int, tab: Browser, example: Path, tmp_path: Path
) -> None:
    """With the fonts of this machine; where there is none but DejaVu they are as wide as fonts get."""
    if run == "recorded":
        shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    folder = tmp_path if run == "recorded" else GOLDEN / run
    file = example if run == "example" else reported(folder, tmp_path / "report.html")
    show(tab, file, width)
    assert tab.evaluate("document.querySelectorAll('figure svg text').length") > 20
    assert tab.evaluate(COVERED) == []
    assert tab.evaluate(CUT_OFF) == []


@pytest.mark.parametrize("seed", range(8))
def test_no_text_lies_over_another_however_near_marks_lines_and_names_are(
    seed: int, tab: Browser, tmp_path: Path
) -> None:
    random = Random(seed)

    def axis(name: str) -> Axis:
        return Axis(f"{name}, some unit", log=random.random() < 0.5, zero=random.random() < 0.3)

    def mark() -> Mark:
        x, y = random.choice([1, 1.02, 3, 40]), random.choice([2.0, 2.001, 7])
        text = random.choice(["", "4", "5.0944", "out of memory"])
        return Mark(x, y, text, "chosen" if random.random() < 0.3 else "point", low=0.9 * y, high=1.1 * y)

    figures = [
        Figure(
            f"figure{number}",
            axis("x"),
            axis("y"),
            tuple(
                Series(random.choice(["", "none", "batch 128 (16 x 8), lr 0.00283"]) + str(i), tuple(mark() for _ in range(random.choice([2, 3, 20]))), i)
                for i in range(random.choice([1, 4, 12]))
            ),
            lines=tuple(Line(random.choice([1.01, 3, 38, 39, 40]), name, vertical=True) for name in ("headroom 5%", "limit 96 MiB", "knee")[: random.randrange(4)]),
            width=random.choice([540, 700]),
        )
        for number in range(6)
    ]  # fmt: skip
    body = (tostring(figure_element(figure, "made"), encoding="unicode", method="html") for figure in figures)
    (tmp_path / "made.html").write_text("".join(page("made", body)))
    show(tab, tmp_path / "made.html")
    assert tab.evaluate("document.querySelectorAll('figure svg').length") == len(figures)
    assert tab.evaluate(COVERED) == []
    assert tab.evaluate(CUT_OFF) == []


COVERED = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBBox()]).filter(([, box]) => box.width)
  return texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([, b]) =>
    Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x) > 0.5 && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 2
  ).map(([other]) => `${svg.closest('figure').id}: ${one} / ${other}`))
})"""
CUT_OFF = """[...document.querySelectorAll('figure svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(text => {
  const box = text.getBBox()
  return box.x < -1 || box.x + box.width > svg.viewBox.baseVal.width + 1 || box.y + box.height > svg.viewBox.baseVal.height + 1
}).map(text => `${svg.closest('figure').id}: ${text.textContent}`))"""


def test_what_the_colours_stand_for_is_seen_on_paper(tab: Browser, example: Path) -> None:
    """Printers leave backgrounds out."""
    show(tab, example)
    tab.call("Emulation.setEmulatedMedia", media="print")
    width = "[...document.querySelectorAll('.legend i')].map(key => parseFloat(getComputedStyle(key).borderLeftWidth))"
    found = tab.evaluate(width)
    assert found
    assert min(found) == 5


def test_whoever_hears_the_page_is_told_what_each_picture_and_control_is(tab: Browser, example: Path) -> None:
    show(tab, example)
    nodes = [node for node in tab.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    roles = {"image", "SvgRoot", "button", "searchbox", "navigation", "DisclosureTriangle", "group", "link"}
    roles -= {"group"}  # the marks of a chart, whose values the chart's own text tells
    nameless = [
        node["role"]["value"]
        for node in nodes
        if node["role"]["value"] in roles and not node.get("name", {}).get("value")
    ]
    assert nameless == []


def test_a_running_study_s_page_reloads_itself_and_stays_where_it_was(tab: Browser, tmp_path: Path) -> None:
    file, config = tmp_path / "report.html", example_config()
    write_report(file, config, Study(config.name), None, every=0.5)
    tab.show_as(SCREEN, 400)
    tab.open(file)
    assert "Has not begun" in tab.evaluate("document.body.innerText")
    tab.evaluate("scrollTo(0, 300)")
    write_report(file, config, example_study(config), None, every=None)
    tab.until("document.body && document.body.innerText.includes('Undetermined')")
    tab.until("Math.abs(scrollY - 300) < 50")
    assert tab.evaluate("document.documentElement.dataset.every") is None
    assert tab.errors == []


def test_a_running_study_s_page_keeps_its_tables_sorted_and_filtered(tab: Browser, tmp_path: Path) -> None:
    file, (config, known) = tmp_path / "report.html", kept_in(GOLDEN / "every_end")
    write_report(file, config, known, None, every=None)
    show(tab, file)
    trials = column(tab, "trial", "#grid")
    write_report(file, config, known, None, every=0.5)
    show(tab, file)
    click(tab, "#grid thead th:nth-child(1) button")
    click(tab, "#grid thead th:nth-child(1) button")
    click(tab, "#grid .filter input")
    tab.call("Input.insertText", text=trials[0])
    write_report(file, config, known, None, every=None)
    tab.evaluate("document.activeElement.blur()")
    tab.until(
        "document.documentElement?.dataset.every === undefined && document.querySelector('#grid .filter input') !== null"
    )
    assert tab.evaluate("document.querySelector('#grid .filter input').value") == trials[0]
    assert column(tab, "trial", "#grid") == [trials[0]]
    assert tab.evaluate("document.querySelector('#grid thead th').ariaSort") == "descending"
    assert tab.errors == []


@pytest.mark.parametrize("run", ["quickstart", "recorded"])
def test_the_answer_and_the_chart_of_the_choice_are_seen_at_once(run: str, tab: Browser, tmp_path: Path) -> None:
    folder = RECORDED if run == "recorded" else GOLDEN / run
    show(tab, reported(folder, tmp_path / "report.html"), 1280)
    ends = tab.evaluate(
        "['.answer', '#train-differences svg'].map(one => document.querySelector(one).getBoundingClientRect().bottom)"
    )
    assert max(ends) < 800, "pixels of a window of 1280 x 800"


def test_a_long_command_leaves_the_chart_beside_it_free(tab: Browser, tmp_path: Path) -> None:
    study = load(RECORDED)
    assert study.recommendation
    command = "batchscout run RUN_DIR/study.yaml --dir RUN_DIR" + 3 * " --set stages.train.max_runs=14"
    answer = replace(study.recommendation.answer, next=f"about 6 more runs:\n{command}")
    file = tmp_path / "report.html"
    write_report(file, study.config, study.replayed, replace(study.recommendation, answer=answer))
    show(tab, file, 1280)
    texts = (
        "[...document.querySelectorAll('.answer dd, .answer dd code')].map(one => one.getBoundingClientRect().right)"
    )
    chart = "document.querySelector('#train-differences').getBoundingClientRect().left"
    assert max(tab.evaluate(texts)) <= tab.evaluate(chart)
