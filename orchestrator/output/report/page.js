// What a page can do where scripts run: charts with their values under the pointer and the arrow keys, tables that sort and
// filter, buttons that copy, and a look for a newer page while the study runs. Without it the page says the same.
"use strict"
{
  const node = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties)
    made.append(...children)
    return made
  }
  const storage = (() => {
    try { return window.sessionStorage } catch { return undefined } // a browser may keep it from files
  })()

  // --- Charts: each is the SVG that the page came with, whose marks carry their values as data-x, data-y and so on.

  const NEAR = 28 // in units of the picture

  class Chart {
    constructor(figure) {
      this.box = figure.querySelector(".picture")
      this.svg = this.box.querySelector("svg")
      // The page tells what the titles say: the browser would show it a second time.
      for (const title of [...this.svg.querySelectorAll("title")]) {
        title.parentElement.dataset.name = title.textContent
        title.remove()
      }
      const [x, y] = ["x", "y"].map((axis) => this.svg.querySelector(`.label.${axis}`)?.textContent || axis)
      this.axes = { x, y }
      this.tip = node("div", { className: "tip", hidden: true, role: "status" })
      this.ring = document.createElementNS("http://www.w3.org/2000/svg", "circle")
      this.ring.setAttribute("class", "pointed")
      this.ring.setAttribute("r", 8)
      this.box.append(this.tip)
      this.box.tabIndex = 0
      this.box.setAttribute("role", "group")
      this.box.setAttribute("aria-label", `${this.svg.getAttribute("aria-label")} The arrow keys go from value to value.`)
      this.svg.setAttribute("role", "group")
      this.box.addEventListener("pointermove", (event) => this.point(event))
      this.box.addEventListener("pointerdown", (event) => this.point(event))
      this.box.addEventListener("pointerleave", () => this.show(undefined))
      this.box.addEventListener("blur", () => this.show(undefined))
      this.box.addEventListener("keydown", (event) => { if (event.target === this.box) this.key(event) })
      this.addNames()
      this.addTable(figure)
    }

    // Where all marks and cells lie is asked for once: the page may have a thousand of them.
    get all() {
      const found = [...this.svg.querySelectorAll("[data-y]"), ...this.svg.querySelectorAll(".cell[data-name]")].map((mark) => {
        const { x, y, width, height } = mark.getBBox()
        return { mark, series: mark.closest("g"), isCell: mark.matches(".cell"), left: x, top: y, x: x + width / 2, y: y + height / 2, width, height }
      })
      Object.defineProperty(this, "all", { value: found })
      return found
    }

    get shown() {
      const marks = this.all.filter((one) => !one.isCell && !one.series.matches(".off"))
      return marks.length ? marks : this.all.filter((one) => one.isCell)
    }

    point(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse())
      const far = (one) => Math.hypot(one.x - at.x, one.y - at.y)
      const nearest = this.shown.reduce((best, one) => best && far(best) <= far(one) ? best : one, undefined)
      if (nearest && !nearest.isCell && far(nearest) <= NEAR) return this.show(nearest)
      const inside = (one) => one.left <= at.x && at.x <= one.left + one.width && one.top <= at.y && at.y <= one.top + one.height
      this.show(this.all.find((one) => one.isCell && inside(one)), at.x)
    }

    telling({ mark, series, isCell }) {
      if (isCell) return [mark.dataset.name]
      const { x, y, low, high, text, told } = mark.dataset
      const written = text !== x && text !== y && text && [this.svg.dataset.beside, text].filter(Boolean).join(": ")
      return [series.dataset.name, `${this.axes.x}: ${x}`, `${this.axes.y}: ${y}`, low && `from ${low} to ${high}`, written, told].filter(Boolean)
    }

    show(one, x = one?.x) {
      this.at = one
      this.tip.hidden = !one
      this.ring.remove()
      if (!one) return
      if (!one.isCell) {
        this.ring.setAttribute("cx", one.x)
        this.ring.setAttribute("cy", one.y)
        this.svg.append(this.ring)
      }
      this.tip.replaceChildren(...this.telling(one).map((line) => node("div", { textContent: line })))
      const at = new DOMPoint(x, one.isCell ? one.top : one.y).matrixTransform(this.svg.getScreenCTM()), box = this.box.getBoundingClientRect()
      const left = at.x - box.left, width = this.tip.offsetWidth
      const beside = left > box.width / 2 ? left - 12 - width : left + 12
      Object.assign(this.tip.style, { left: `${Math.max(0, Math.min(beside, box.width - width))}px`, top: `${Math.max(0, at.y - box.top - 14)}px` })
    }

    key(event) {
      const all = this.shown, index = all.indexOf(this.at)
      const toSeries = (step) => {
        const names = [...new Set(all.map((one) => one.series))]
        const next = names[(names.indexOf(this.at?.series) + step + names.length) % names.length]
        return all.find((one) => one.series === next)
      }
      const moves = {
        ArrowRight: () => all[(index + 1) % all.length], ArrowLeft: () => all.at(index <= 0 ? -1 : index - 1),
        ArrowDown: () => toSeries(1), ArrowUp: () => toSeries(-1), Home: () => all[0], End: () => all.at(-1), Escape: () => undefined,
      }
      if (!(event.key in moves)) return
      event.preventDefault()
      const next = moves[event.key]()
      next?.mark.scrollIntoView({ block: "nearest", inline: "nearest" })
      this.show(next)
    }

    // The names at the right edge show and hide what they name.
    addNames() {
      const names = [...this.svg.querySelectorAll("g.name")]
      if (names.length < 2) return
      for (const name of names) {
        const series = [...this.svg.querySelectorAll("g.series")].filter((one) => one.dataset.name === name.textContent)
        name.setAttribute("role", "button")
        name.setAttribute("tabindex", 0)
        name.setAttribute("aria-pressed", "true")
        name.setAttribute("aria-label", `${name.textContent}: show or hide`)
        const toggle = () => {
          const hide = name.getAttribute("aria-pressed") === "true"
          name.setAttribute("aria-pressed", String(!hide))
          for (const one of series) one.classList.toggle("off", hide)
          this.show(undefined)
        }
        name.addEventListener("click", toggle)
        name.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return
          event.preventDefault()
          toggle()
        })
      }
    }

    addTable(figure) {
      const details = node("details", { className: "values" }, node("summary", { textContent: "The values as a table" }))
      details.addEventListener("toggle", () => {
        if (!details.open || details.children.length > 1) return
        const marks = this.all.filter((one) => !one.isCell).map(({ mark, series }) => {
          const { x, y, low, high, text, told } = mark.dataset
          return [series.dataset.name, x, y, low, high, text !== x && text !== y && text, told].map((one) => one || "")
        })
        const names = ["what", this.axes.x, this.axes.y, "from", "to", this.svg.dataset.beside || "label", "more"]
        const used = names.map((_, column) => marks.some((texts) => texts[column]))
        const cells = (tag, texts) => texts.filter((_, column) => used[column]).map((one) => node(tag, { textContent: one, ...(tag === "th" && { scope: "col" }) }))
        const head = node("tr", {}, ...cells("th", names))
        const rows = marks.map((texts) => node("tr", {}, ...cells("td", texts)))
        rows.push(...this.all.filter((one) => one.isCell).map(({ mark }) => node("tr", {}, node("td", { textContent: mark.dataset.name, colSpan: 7 }))))
        details.append(node("div", { className: "scroll" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows))))
      })
      figure.append(details)
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
    return a.localeCompare(b, "en", { numeric: true })
  }

  class Table {
    // kept: as what and by what it was sorted and filtered on the page before
    constructor(table, kept) {
      this.table = table
      this.body = table.tBodies[0]
      const data = table.parentElement.querySelector("script.rows")
      this.rows = [...this.written(), ...(data ? JSON.parse(data.textContent).map((row) => this.fromData(row)) : [])]
      this.shown = PAGE
      this.more = node("button", { type: "button", className: "more" })
      this.more.addEventListener("click", () => { this.shown += 5 * PAGE; this.fill() })
      table.parentElement.after(this.more)
      for (const [number, head] of [...table.tHead.rows[0].cells].entries()) {
        const button = node("button", { type: "button", title: "Sort" }, ...head.childNodes)
        button.addEventListener("click", () => this.sort(number, head, head.getAttribute("aria-sort") === "ascending"))
        head.replaceChildren(button)
        if (kept && kept.by === head.textContent) this.sort(number, head, kept.falls)
      }
      if (this.rows.length > 5) this.addFilter(kept?.words ?? "")
      this.fill()
    }

    get state() {
      return { by: this.by, falls: this.falls, words: this.input?.value ?? "" }
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

    sort(number, head, falls) {
      Object.assign(this, { by: head.textContent, falls })
      for (const one of this.table.tHead.rows[0].cells) one.removeAttribute("aria-sort")
      head.setAttribute("aria-sort", falls ? "descending" : "ascending")
      const text = (row) => row.texts[number] ?? ""
      const hasNumbers = this.rows.some((row) => sortKey(text(row)) !== undefined) // a word among them says that there is none
      this.order = (a, b) => {
        const unknown = [text(a), text(b)].map((t) => t === "-" || t === "" || (hasNumbers && sortKey(t) === undefined))
        if (unknown[0] !== unknown[1]) return unknown[0] ? 1 : -1
        return falls ? compared(text(b), text(a)) : compared(text(a), text(b))
      }
      this.fill()
    }

    addFilter(words) {
      const input = this.input = node("input", { type: "search", value: words, placeholder: "Filter: every word must be in the row" })
      input.setAttribute("aria-label", "Filter the rows")
      this.count = node("span", { className: "muted" })
      this.count.setAttribute("role", "status")
      const look = () => { this.words = input.value.toLowerCase().split(/\s+/).filter(Boolean) }
      look()
      input.addEventListener("input", () => { look(); this.fill() })
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

  // --- While the study runs: the newest page, at the same place, with the same parts open and its tables sorted and filtered alike.

  const kept = JSON.parse(storage?.getItem(location.pathname) ?? "null"), tables = { ...kept?.tables } // by their sections
  storage?.removeItem(location.pathname)

  const foldable = () => [...document.querySelectorAll("details:not(.values)")]

  function remember() {
    storage?.setItem(location.pathname, JSON.stringify({ y: scrollY, open: foldable().map((one) => one.open), tables: Object.fromEntries(Object.entries(tables).map(([name, one]) => [name, one.state ?? one])) }))
  }

  function goBack() {
    if (!kept) return
    const parts = foldable()
    if (parts.length === kept.open.length) parts.forEach((one, number) => { one.open = kept.open[number] })
    scrollTo(0, kept.y)
  }

  function lookForNewer(seconds) {
    const isBusy = () => document.hidden || !getSelection().isCollapsed || document.activeElement?.matches("input, .picture") || document.querySelector(".tip:not([hidden])")
    history.scrollRestoration = "manual" // goBack does it: by itself the browser looks for the same element, wherever that now stands
    addEventListener("pagehide", remember)
    setInterval(() => { if (!isBusy()) location.reload() }, 1000 * seconds)
  }

  // --- Begin

  document.documentElement.classList.add("script")
  for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure)
  for (const table of document.querySelectorAll("table.sortable")) {
    const fold = table.closest("details"), name = table.closest("section")?.id
    const make = () => { tables[name] = new Table(table, tables[name]) }
    if (!fold || fold.open) make()
    else fold.addEventListener("toggle", make, { once: true })
  }
  for (const button of document.querySelectorAll("[data-copies]")) addCopying(button)
  goBack()
  performance.mark("ready")
  if (document.documentElement.dataset.every) lookForNewer(Number(document.documentElement.dataset.every))
}
