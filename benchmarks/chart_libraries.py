"""Libraries that could draw the report's charts: their size, how fast they draw, and what they tell a screen reader.

    python benchmarks/chart_libraries.py [--device cpu|cuda] [--quick]

Each library, at the version named here, is taken from the npm registry (`npm` and a network are needed) and put into a page of its
own with the script that draws 12 charts of 6 lines with 200 points each; a headless Chromium, which must be installed, opens the
pages in turn. `size_bytes`: what each report would carry. `load_seconds`: until the library is there, `draw_seconds`: from then
until the charts are, both medians. `named_nodes`: what the accessibility tree has beside plain text, over all charts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from side_by_side import machine, options

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import Browser

NUM_ROUNDS = 5
PLAIN = {"RootWebArea", "generic", "none", "StaticText", "InlineTextBox", "Canvas"}


@dataclass(frozen=True)
class Library:
    files: Mapping[str, str]
    """The file of each npm package, at its version."""
    draws: str
    """JavaScript that draws the lines L, as [[x, y], ...] each, into the element `box`."""


LIBRARIES = {
    "uplot": Library(
        {"uplot@1.6.32": "dist/uPlot.iife.min.js"},
        "new uPlot({width: 540, height: 270, scales: {x: {time: false}}, series: [{}, ...L.map(() => ({stroke: '#07b'}))]}, "
        "[L[0].map(p => p[0]), ...L.map(l => l.map(p => p[1]))], box)",
    ),
    "observable_plot": Library(
        {"d3@7.9.2": "dist/d3.min.js", "@observablehq/plot@0.6.17": "dist/plot.umd.min.js"},
        "box.append(Plot.plot({width: 540, height: 270, ariaLabel: 'loss', marks: L.map(l => Plot.line(l))}))",
    ),
    "chart_js": Library(
        {"chart.js@4.6.1": "dist/chart.umd.min.js"},
        "new Chart(box.appendChild(document.createElement('canvas')), {type: 'scatter', options: {animation: false}, "
        "data: {datasets: L.map(l => ({showLine: true, data: l.map(p => ({x: p[0], y: p[1]}))}))}})",
    ),
    "echarts_common": Library(
        {"echarts@6.1.0": "dist/echarts.common.min.js"},
        "box.style = 'width: 540px; height: 270px'; echarts.init(box, null, {renderer: 'svg'}).setOption({animation: false, "
        "aria: {enabled: true}, tooltip: {}, xAxis: {type: 'value'}, yAxis: {}, series: L.map(l => ({type: 'line', data: l}))})",
    ),
    "vega_lite": Library(
        {
            "vega@6.4.0": "build/vega.min.js",
            "vega-lite@6.4.3": "build/vega-lite.min.js",
            "vega-embed@7.3.0": "build/vega-embed.min.js",
        },
        "await vegaEmbed(box, {width: 540, height: 270, mark: 'line', data: {values: L.flatMap((l, i) => l.map(p => ({x: p[0], y: "
        "p[1], i})))}, encoding: {x: {field: 'x', type: 'quantitative'}, y: {field: 'y', type: 'quantitative'}, "
        "color: {field: 'i', type: 'nominal'}}}, {renderer: 'svg', actions: false})",
    ),
    "plotly_basic": Library(
        {"plotly.js-basic-dist-min@4.1.1": "plotly-basic.min.js"},
        "await Plotly.newPlot(box, L.map(l => ({mode: 'lines', x: l.map(p => p[0]), y: l.map(p => p[1])})), "
        "{width: 540, height: 270})",
    ),
}
PAGE = """<!DOCTYPE html><meta charset="utf-8"><body><script>const began = performance.now()</script><script>%s</script><script>
const loaded = performance.now()
const L = [...Array(6).keys()].map(i => [...Array(200).keys()].map(k => [50 * k, 3 + .1 * i + .1 * Math.sin(k * i) + 10 / (k + 1)]))
async function draw() {
  for (let chart = 0; chart < 12; chart++) { const box = document.body.appendChild(document.createElement("div")); %s }
  document.body.getBoundingClientRect()
  window.times = [(loaded - began) / 1000, (performance.now() - loaded) / 1000]
}
draw()</script>"""


def main() -> None:
    chosen = options(__doc__)
    print(machine())
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        browser.show_as(1200)
        pages = {name: page_of(name, library, Path(folder)) for name, library in LIBRARIES.items()}
        rounds = [
            {name: opened(page, browser) for name, (page, _) in pages.items()}
            for _ in range(1 if chosen.quick else NUM_ROUNDS)
        ]
    found = {}
    for name, (_, size) in pages.items():
        load, draw, nodes = (statistics.median(one[name][i] for one in rounds) for i in range(3))
        found[name] = {"size_bytes": size, "load_seconds": load, "draw_seconds": draw, "named_nodes": nodes}
        print(
            f"{name:<16} {size / 1e3:>6.0f} kB, loads in {load:.3f} s, draws in {draw:.3f} s, {nodes:.0f} named nodes"
        )
    print(json.dumps(found))


def page_of(name: str, library: Library, folder: Path) -> tuple[Path, int]:
    """Return a page that draws with the library, and the library's size."""
    code = "\n".join(file_of(package, file, folder) for package, file in library.files.items())
    page = folder / f"{name}.html"
    page.write_text(PAGE % (code.replace("</script", "<\\/script"), library.draws))
    return page, len(code.encode())


def file_of(package: str, file: str, folder: Path) -> str:
    packed = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True, check=True
    )
    with tarfile.open(folder / packed.stdout.strip()) as archive:
        member = archive.extractfile(f"package/{file}")
        assert member is not None, (package, file)
        return member.read().decode()


def opened(page: Path, browser: Browser) -> tuple[float, float, int]:
    browser.open(page)
    browser.until("window.times !== undefined")
    load, draw = browser.evaluate("window.times")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [one for one in nodes if one["role"]["value"] not in PLAIN and one.get("name", {}).get("value")]
    return load, draw, len(named)


if __name__ == "__main__":
    main()
