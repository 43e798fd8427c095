// What a page can do where scripts run: charts with their values under the pointer and the arrow keys, tables that sort and
// filter, buttons that copy, and a look for a newer page while the study runs. Without it the page says the same.
"use strict"
{
  const colour = (number) => `var(--c${number})`
  const node = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties)
    made.append(...children)
    return made
  }
  const storage = (() => {
    try { return window.sessionStorage } catch { return undefined } // a browser may keep it from files
  })()

  // --- Charts

  const SYMBOLS = ["circle", "square", "triangle", "diamond", "triangle2"]
  const triangle2 = { draw: (context, size) => {
    const r = Math.sqrt(size / Math.PI) * 1.2
    context.moveTo(0, r); context.lineTo(-r, -r * .75); context.lineTo(r, -r * .75); context.closePath()
  } }
  const symbolOf = (number) => SYMBOLS[number % 5] === "triangle2" ? triangle2 : SYMBOLS[number % 5]
  const NEAR = 28 // pixels

  const numberText = (value) => {
    const size = Math.abs(value)
    return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toPrecision(4) : Number(value.toPrecision(5)).toLocaleString("en")
  }

  const readMark = ([x, y, interval, text = "", kind = "", xText = "", yText = "", told = ""], series) =>
    ({ x, y, low: interval?.[0], high: interval && (interval[1] ?? Infinity), text, kind, xText: xText || numberText(x), yText: yText || numberText(y), told, series })

  const isInterval = (mark) => mark.low !== undefined && mark.low < mark.high

  const endText = (end) => Number.isFinite(end) ? numberText(end) : "no upper end"

  function readChart(figure) {
    const values = JSON.parse(figure.querySelector("script").textContent)
    values.series.forEach((one, number) => { one.number = number; one.marks = one.marks.map((mark) => readMark(mark, one)) })
    values.cells = values.cells.map(([x1, x2, y1, y2, number, strength, told]) => ({ x1, x2, y1, y2, number, strength, told }))
    return values
  }

  function telling(chart, mark) {
    const lines = [mark.series.label, `${chart.x.label || "x"}: ${mark.xText}`, `${chart.y.label || "y"}: ${mark.yText}`]
    if (isInterval(mark)) lines.push(`from ${numberText(mark.low)} to ${endText(mark.high)}`)
    if (mark.text && mark.text !== mark.yText) lines.push(mark.text)
    return [...lines, mark.told].filter(Boolean)
  }

  // The texts of ticks come with the data; a narrow chart leaves some out.
  function thinned(ticks, scale, room) {
    let last = -Infinity
    return [...ticks].sort((a, b) => scale(a[0]) - scale(b[0])).filter(([value, text]) => {
      const at = scale(value), half = room(text) / 2
      if (at - half < last) return false
      last = at + half
      return true
    })
  }

  function marksOf(series, ends) {
    const look = { stroke: colour(series.colour), strokeWidth: series.bold ? 3 : 1.6, strokeDasharray: series.dashed ? "5 4" : undefined }
    const marks = series.marks, good = marks.filter((mark) => mark.kind !== "cross"), failed = marks.filter((mark) => mark.kind === "cross")
    const within = (value) => Math.min(Math.max(value, ends[0]), ends[1])
    const intervals = (some, markerEnd) =>
      Plot.ruleX(some, { x: "x", y1: (mark) => within(mark.low), y2: (mark) => within(mark.high), stroke: look.stroke, strokeWidth: 1.2, markerStart: "tick", markerEnd })
    return [
      series.joined && good.length > 1 && Plot.line(good, { x: "x", y: "y", ...look }),
      series.joined && good.length && failed.length && Plot.line([good.at(-1), ...failed], { x: "x", y: "y", stroke: look.stroke, strokeDasharray: "2 4" }),
      intervals(good.filter((mark) => isInterval(mark) && Number.isFinite(mark.high)), "tick"),
      intervals(good.filter((mark) => isInterval(mark) && !Number.isFinite(mark.high)), "arrow"),
      Plot.dot(good, { x: "x", y: "y", fill: look.stroke, r: marks.length > 60 ? 1.5 : 3, symbol: symbolOf(series.colour), ariaLabel: () => "value" }),
      Plot.dot(failed, { x: "x", y: "y", stroke: look.stroke, strokeWidth: 2, r: 5, symbol: "times" }),
      Plot.dot(marks.filter((mark) => mark.kind === "chosen"), { x: "x", y: "y", stroke: look.stroke, r: 8 }),
      Plot.text(marks.filter((mark) => mark.text), { x: "x", y: "y", text: "text", dy: -13, fill: "var(--muted)", stroke: "var(--paper)", strokeWidth: 3 }),
    ].filter(Boolean)
  }

  function placeOn(axis, from, to) {
    const flat = (value) => axis.log ? Math.log(value) : value
    const [low, high] = axis.ends.map(flat)
    return (value) => from + (flat(value) - low) / (high - low) * (to - from)
  }

  function drawn(chart, width, hidden, label) {
    const { x, y } = chart, textWidth = (text) => 6.6 * text.length
    const upright = chart.lines.filter((line) => line[2]), flat = chart.lines.filter((line) => !line[2])
    const left = Math.max(36, ...y.ticks.map(([, text]) => 10 + textWidth(text))), right = 20, bottom = 42, top = 28 + 13 * upright.length
    const height = Math.max(chart.height, top + bottom + 40)
    const toX = placeOn(x, left, width - right), toY = placeOn(y, height - bottom, top)
    const xTicks = thinned(x.ticks, toX, (text) => 12 + textWidth(text)), yTicks = thinned(y.ticks, toY, () => 14)
    // Each line's name has a row of its own, on the side where there is room.
    const names = upright.map(([at, text], row) =>
      Plot.text([at], { x: (value) => value, text: () => text, frameAnchor: "top", textAnchor: toX(at) > width / 2 ? "end" : "start", dy: -8 - 13 * row, fontWeight: 600 }))
    const picture = Plot.plot({
      width, height, marginLeft: left, marginRight: right, marginTop: top, marginBottom: bottom, ariaLabel: label,
      style: { background: "none", fontFamily: "inherit", fontSize: "11px", overflow: "visible" },
      x: { type: x.log ? "log" : "linear", domain: x.ends, axis: null },
      y: { type: y.log ? "log" : "linear", domain: y.ends, axis: null },
      color: { type: "identity" }, opacity: { type: "identity" }, symbol: { type: "identity" },
      marks: [
        Plot.ruleY(yTicks, { y: "0", stroke: "var(--rule)" }),
        Plot.ruleY([y.ends[0]], { stroke: "var(--muted)" }),
        Plot.rect(chart.cells, { x1: "x1", x2: "x2", y1: "y1", y2: "y2", fill: (cell) => colour(cell.number), fillOpacity: (cell) => cell.strength }),
        Plot.text(yTicks, { y: "0", text: "1", frameAnchor: "left", textAnchor: "end", dx: -7, fill: "var(--muted)", ariaLabel: "y ticks" }),
        Plot.text(xTicks, { x: "0", text: "1", frameAnchor: "bottom", dy: 15, fill: "var(--muted)", ariaLabel: "x ticks" }),
        Plot.text([x.label], { frameAnchor: "bottom", dy: 33 }),
        Plot.text([y.label], { frameAnchor: "top-left", dx: 2 - left, dy: 4 - top, lineAnchor: "top" }),
        Plot.ruleX(upright, { x: "0", stroke: "var(--ink)", strokeDasharray: "6 3" }),
        Plot.ruleY(flat, { y: "0", stroke: "var(--ink)", strokeDasharray: "6 3" }),
        Plot.text(flat, { y: "0", text: "1", frameAnchor: "right", textAnchor: "end", dy: -7, fontWeight: 600 }),
        ...names,
        ...chart.series.filter((one) => !hidden.has(one.number)).flatMap((one) => marksOf(one, y.ends)),
      ],
    })
    return { picture, atX: picture.scale("x").apply, atY: picture.scale("y").apply }
  }

  class Chart {
    constructor(figure) {
      this.figure = figure
      this.box = figure.querySelector(".picture")
      this.label = this.box.querySelector("svg").getAttribute("aria-label")
      this.chart = readChart(figure)
      this.hidden = new Set()
      this.tip = node("div", { className: "tip", hidden: true, role: "status" })
      this.ring = node("div", { className: "pointed", hidden: true })
      this.at = undefined
      this.box.tabIndex = 0
      this.box.setAttribute("role", "group")
      this.box.setAttribute("aria-label", `${this.label} The arrow keys go from value to value.`)
      this.box.addEventListener("pointermove", (event) => this.point(event))
      this.box.addEventListener("pointerdown", (event) => this.point(event))
      this.box.addEventListener("pointerleave", () => this.show(undefined))
      this.box.addEventListener("blur", () => this.show(undefined))
      this.box.addEventListener("keydown", (event) => this.key(event))
      this.addNames()
      this.addTable()
      new ResizeObserver(() => this.draw()).observe(figure)
    }

    draw() {
      const width = Math.round(Math.min(this.chart.width, this.figure.clientWidth))
      if (!width || width === this.width) return
      this.width = width
      this.redraw()
    }

    redraw() {
      Object.assign(this, drawn(this.chart, this.width, this.hidden, this.label))
      this.box.style.width = `${this.width}px`
      this.box.replaceChildren(this.picture, this.ring, this.tip)
      this.figure.dataset.drawn = "true"
      performance.mark("chart")
    }

    get marks() {
      return this.chart.series.filter((one) => !this.hidden.has(one.number)).flatMap((one) => one.marks)
    }

    point(event) {
      const box = this.picture.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top
      const far = (mark) => Math.hypot(this.atX(mark.x) - x, this.atY(mark.y) - y)
      const nearest = this.marks.reduce((best, mark) => best && far(best) <= far(mark) ? best : mark, undefined)
      if (nearest && far(nearest) <= NEAR) return this.show(nearest)
      const inside = (a, b, value) => Math.min(a, b) <= value && value <= Math.max(a, b)
      this.show(this.chart.cells.find((c) => inside(this.atX(c.x1), this.atX(c.x2), x) && inside(this.atY(c.y1), this.atY(c.y2), y)), x)
    }

    show(one, pointed) {
      this.at = one
      this.tip.hidden = !one
      this.ring.hidden = !one || one.x1 !== undefined
      if (!one) return
      const isCell = one.x1 !== undefined
      const x = isCell ? pointed ?? (this.atX(one.x1) + this.atX(one.x2)) / 2 : this.atX(one.x)
      const y = isCell ? Math.min(this.atY(one.y1), this.atY(one.y2)) : this.atY(one.y)
      this.tip.replaceChildren(...(isCell ? [one.told] : telling(this.chart, one)).map((line) => node("div", { textContent: line })))
      const rightHalf = x > this.width / 2
      Object.assign(this.tip.style, { left: rightHalf ? "" : `${x + 12}px`, right: rightHalf ? `${this.width - x + 12}px` : "", top: `${Math.max(0, y - 14)}px` })
      Object.assign(this.ring.style, { left: `${x - 8}px`, top: `${y - 8}px` })
    }

    key(event) {
      const all = this.marks.length ? this.marks : this.chart.cells, index = all.indexOf(this.at)
      const toSeries = (step) => {
        const shown = this.chart.series.filter((one) => !this.hidden.has(one.number) && one.marks.length)
        const next = shown[(shown.indexOf(this.at?.series) + step + shown.length) % shown.length]
        return next?.marks[0]
      }
      const moves = {
        ArrowRight: () => all[(index + 1) % all.length], ArrowLeft: () => all.at(index <= 0 ? -1 : index - 1),
        ArrowDown: () => toSeries(1), ArrowUp: () => toSeries(-1), Home: () => all[0], End: () => all.at(-1), Escape: () => undefined,
      }
      if (!(event.key in moves)) return
      event.preventDefault()
      this.show(moves[event.key]())
    }

    addNames() {
      const named = this.chart.series.filter((one) => one.label)
      if (named.length < 2) {
        if (named.length === 1) this.box.after(node("p", { className: "names" }, this.swatch(named[0]), named[0].label))
        return
      }
      const buttons = named.map((one) => {
        const button = node("button", { type: "button", title: "Show or hide" }, this.swatch(one), one.label)
        button.setAttribute("aria-pressed", "true")
        button.addEventListener("click", () => {
          const hide = !this.hidden.delete(one.number)
          if (hide) this.hidden.add(one.number)
          button.setAttribute("aria-pressed", String(!hide))
          this.redraw()
        })
        return button
      })
      this.box.after(node("p", { className: "names" }, ...buttons))
    }

    swatch(series) {
      return node("i", { className: `c${series.colour}${series.dashed ? " hollow" : ""}` })
    }

    addTable() {
      const details = node("details", { className: "values" }, node("summary", { textContent: "The values as a table" }))
      details.addEventListener("toggle", () => {
        if (!details.open || details.children.length > 1) return
        const { x, y } = this.chart
        const head = node("tr", {}, ...["", x.label, y.label, "from", "to", ""].map((text) => node("th", { textContent: text, scope: "col" })))
        const rows = this.chart.series.flatMap((one) => one.marks).map((m) => {
          const ends = isInterval(m) ? [numberText(m.low), endText(m.high)] : ["", ""]
          return node("tr", {}, ...[m.series.label, m.xText, m.yText, ...ends, m.text || m.told].map((text) => node("td", { textContent: text })))
        })
        const told = this.chart.cells.map((cell) => node("tr", {}, node("td", { textContent: cell.told, colSpan: 6 })))
        details.append(node("div", { className: "scroll" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows, ...told))))
      })
      this.figure.append(details)
    }
  }

  // --- Tables: what is written, and the rows that come as data, sorted and filtered as texts before rows are made of them.

  const PAGE = 200

  function sortKey(text) {
    const number = Number(text.replaceAll(",", "").replace(/ (min|s|h|[KMG]iB|B).*$/, ""))
    return text.trim() === "" || text === "-" || Number.isNaN(number) ? undefined : number
  }

  function compared(a, b) {
    const [x, y] = [sortKey(a), sortKey(b)]
    if (x !== undefined && y !== undefined) return x - y
    if (x !== undefined || y !== undefined) return x !== undefined ? -1 : 1 // what is not known comes last
    return a.localeCompare(b, "en", { numeric: true })
  }

  class Table {
    constructor(table) {
      this.table = table
      this.body = table.tBodies[0]
      const data = table.parentElement.querySelector("script.rows")
      this.rows = [...this.written(), ...(data ? JSON.parse(data.textContent).map((row) => this.fromData(row)) : [])]
      this.shown = PAGE
      this.order = undefined
      this.more = node("button", { type: "button", className: "more" })
      this.more.addEventListener("click", () => { this.shown += 5 * PAGE; this.fill() })
      table.parentElement.after(this.more)
      for (const [number, head] of [...table.tHead.rows[0].cells].entries()) {
        const button = node("button", { type: "button", title: "Sort" }, ...head.childNodes)
        button.addEventListener("click", () => this.sort(number, head))
        head.replaceChildren(button)
      }
      if (this.rows.length > 5) this.addFilter()
      this.fill()
    }

    written() {
      const found = []
      for (const row of this.body.rows) {
        if (row.cells.length === 1 && found.length) found.at(-1).made.push(row) // the explanation of the row above
        else found.push({ made: [row], texts: [...row.cells].map((cell) => cell.textContent) })
      }
      for (const row of found) row.all = row.made.map((one) => one.textContent).join(" ").toLowerCase()
      return found
    }

    fromData([id, role, state, explanation, best, ...cells]) {
      const texts = [id, state.replaceAll("_", " "), ...cells]
      return { texts, role, state, explanation, best, all: [...texts, role, explanation].join(" ").toLowerCase() }
    }

    make(row) {
      if (row.made) return row.made
      const [id, state, ...cells] = row.texts
      const name = node("td", {}, node("code", { textContent: id }), ...(row.role ? [node("small", { textContent: row.role })] : []))
      const numbers = cells.map((text) => node("td", { className: "number", textContent: text }))
      const first = node("tr", {}, name, node("td", {}, node("span", { className: `state ${row.state}`, textContent: state })), ...numbers)
      first.className = [row.best && "best", row.explanation && "explained"].filter(Boolean).join(" ")
      const reason = node("tr", {}, node("td", { className: "reason", colSpan: row.texts.length, textContent: row.explanation }))
      row.made = row.explanation ? [first, reason] : [first]
      return row.made
    }

    sort(number, head) {
      const falls = head.getAttribute("aria-sort") === "ascending"
      for (const one of this.table.tHead.rows[0].cells) one.removeAttribute("aria-sort")
      head.setAttribute("aria-sort", falls ? "descending" : "ascending")
      const text = (row) => row.texts[number] ?? ""
      this.order = (a, b) => {
        const unknown = [text(a), text(b)].map((t) => t === "-" || t === "")
        if (unknown[0] !== unknown[1]) return unknown[0] ? 1 : -1
        return falls ? compared(text(b), text(a)) : compared(text(a), text(b))
      }
      this.fill()
    }

    addFilter() {
      const input = node("input", { type: "search", placeholder: "Filter: every word must be in the row" })
      input.setAttribute("aria-label", "Filter the rows")
      this.count = node("span", { className: "muted" })
      this.count.setAttribute("role", "status")
      input.addEventListener("input", () => { this.words = input.value.toLowerCase().split(/\s+/).filter(Boolean); this.fill() })
      this.table.parentElement.before(node("p", { className: "filter" }, input, " ", this.count))
    }

    fill() {
      let rows = this.rows
      if (this.words?.length) rows = rows.filter((row) => this.words.every((word) => row.all.includes(word)))
      if (this.order) rows = [...rows].sort(this.order)
      this.body.replaceChildren(...rows.slice(0, this.shown).flatMap((row) => this.make(row)))
      const left = rows.length - this.shown
      this.more.hidden = left <= 0
      this.more.textContent = `Show ${Math.min(left, 5 * PAGE).toLocaleString("en")} of ${left.toLocaleString("en")} more`
      if (this.count) this.count.textContent = this.words?.length ? `${rows.length.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")}` : ""
    }
  }

  // --- Copying

  async function copy(text) {
    try { return await navigator.clipboard.writeText(text) } catch { // not every browser lets a file write there
      const area = node("textarea", { value: text, className: "off" })
      document.body.append(area)
      area.select()
      const done = document.execCommand("copy")
      area.remove()
      if (!done) throw new Error("copying was refused")
    }
  }

  function addCopying(button) {
    button.addEventListener("click", async () => {
      const lines = document.getElementById(button.dataset.copies), said = button.parentElement.querySelector(".copied")
      lines.closest("details").open = true
      try {
        await copy(lines.textContent)
        said.textContent = `copied for ${button.textContent}`
      } catch {
        getSelection().selectAllChildren(lines)
        said.textContent = "the browser refused: they are selected, press Ctrl-C"
      }
    })
  }

  // --- While the study runs: the newest page, at the same place, with the same parts open.

  const foldable = () => [...document.querySelectorAll("details:not(.values)")]

  function remember() {
    storage?.setItem(location.pathname, JSON.stringify({ y: scrollY, open: foldable().map((one) => one.open) }))
  }

  function goBack() {
    const kept = JSON.parse(storage?.getItem(location.pathname) ?? "null")
    storage?.removeItem(location.pathname)
    if (!kept) return
    const parts = foldable()
    if (parts.length === kept.open.length) parts.forEach((one, number) => { one.open = kept.open[number] })
    scrollTo(0, kept.y)
  }

  function lookForNewer(seconds) {
    const isBusy = () => document.hidden || !getSelection().isCollapsed || document.activeElement?.matches("input, .picture") || document.querySelector(".tip:not([hidden])")
    addEventListener("pagehide", remember)
    setInterval(() => { if (!isBusy()) location.reload() }, 1000 * seconds)
  }

  // --- Begin

  const isSeen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue
      isSeen.unobserve(entry.target)
      new Chart(entry.target)
    }
  }, { rootMargin: "400px" })
  document.documentElement.classList.add("script")
  for (const figure of document.querySelectorAll("figure.chart")) isSeen.observe(figure)
  for (const table of document.querySelectorAll("table.sortable")) {
    const fold = table.closest("details")
    if (!fold || fold.open) new Table(table)
    else fold.addEventListener("toggle", () => new Table(table), { once: true })
  }
  for (const button of document.querySelectorAll("[data-copies]")) addCopying(button)
  goBack()
  if (document.documentElement.dataset.every) lookForNewer(Number(document.documentElement.dataset.every))
}
