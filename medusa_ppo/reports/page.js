"use strict";
(() => {
  const root = document.documentElement;
  const page = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const grid = page.grid;

  // A browser may refuse storage, e.g. for a page opened from disk; the page works without it.
  const remember = (store, key, value) => { try { store().setItem(key, value); } catch { return; } };
  const recall = (store, key) => { try { return store().getItem(key); } catch { return null; } };
  const local = () => window.localStorage, session = () => window.sessionStorage;

  // Theme: the system's, until the button says otherwise.
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const themeButton = document.getElementById("theme");
  const setTheme = (name) => {
    if (name === "light" || name === "dark") root.dataset.theme = name;
    themeButton.setAttribute("aria-pressed", String(isDark()));
  };
  setTheme(recall(local, "medusa-theme"));
  themeButton.addEventListener("click", () => {
    const name = isDark() ? "light" : "dark";
    setTheme(name);
    remember(local, "medusa-theme", name);
  });

  // The same words for numbers as wording.py.
  const comma = (value, digits = 0) => value.toLocaleString("en-US", { maximumFractionDigits: digits });
  const plain = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 999.5) return size < 1e9 ? comma(value) : value.toPrecision(3);
    return size >= 1e-4 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  };
  const seconds = (value) => value < 10 ? `${Number(value.toPrecision(2))} s` : value < 120 ? `${value.toFixed(0)} s` : value < 7200 ? `${(value / 60).toFixed(0)} min` : `${(value / 3600).toFixed(1)} h`;
  const words = {
    length: (v) => v.toFixed(2), ratio: (v) => `×${v.toFixed(2)}`, signed: (v) => v.toFixed(2),
    percent: (v) => `${(100 * v).toFixed(Math.abs(v) < 0.0995 && v ? 1 : 0)} %`, whole: (v) => comma(v), plain, seconds,
  };

  // One cursor for all charts: the step under the pointer is marked in each of them.
  const cursors = new Map();
  const cursorOf = (plot) => {
    let line = cursors.get(plot);
    if (!line) {
      line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      line.setAttribute("class", "cursor");
      line.setAttribute("y1", "0");
      line.setAttribute("y2", plot.getAttribute("height"));
      plot.append(line);
      cursors.set(plot, line);
    }
    return line;
  };
  const plots = [...document.querySelectorAll(".plot:not(.still)")];
  const hide = () => {
    tip.hidden = true;
    for (const line of cursors.values()) line.style.display = "none";
  };
  const stepsOf = (column) => {
    const first = grid.first + column * grid.width, last = Math.min(first + grid.width - 1, grid.last);
    return first === last ? `step ${comma(first)}` : `steps ${comma(first)} to ${comma(last)}`;
  };
  const tipRow = (series, column) => {
    const row = document.createElement("div"), dot = document.createElement("i"), value = document.createElement("b");
    row.className = `t-${series.tone}`;
    const say = words[series.format], mean = series.mean[column];
    const low = series.low ? series.low[column] : mean, high = series.high ? series.high[column] : mean;
    value.textContent = low === high ? say(mean) : `${say(mean)} (${say(low)} to ${say(high)})`;
    row.append(dot, series.name, value);
    return row;
  };
  const showAt = (plot, column, x, y) => {
    const series = (page.charts[plot.dataset.chart] || []).filter((item) => item.mean[column] !== null);
    for (const each of plots) {
      const line = cursorOf(each), at = `${(100 * (column + 0.5)) / grid.count}%`;
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      line.style.display = "";
    }
    const head = document.createElement("b");
    head.textContent = stepsOf(column) + (series.length ? "" : ": not measured");
    tip.replaceChildren(head, ...series.map((item) => tipRow(item, column)));
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    const left = x + 16 + width > innerWidth ? Math.max(6, x - 16 - width) : x + 16;
    tip.style.transform = `translate(${left}px, ${Math.max(6, Math.min(y - height / 2, innerHeight - height - 6))}px)`;
    plot.dataset.column = column;
  };
  const clamp = (column) => Math.max(0, Math.min(grid.count - 1, column));
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      showAt(plot, clamp(Math.floor(((event.clientX - box.left) / box.width) * grid.count)), event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (move === undefined) return;
      event.preventDefault();
      const box = plot.getBoundingClientRect(), column = clamp((plot.dataset.column === undefined ? -1 : Number(plot.dataset.column)) + move);
      showAt(plot, column, box.left + (box.width * (column + 0.5)) / grid.count, box.top + box.height / 2);
    });
  }

  // A click on a column's name sorts its table; cells without a value stay at the end.
  const sortBy = (table, index, ascending) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, at) => at === index ? head.setAttribute("aria-sort", ascending ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    const value = (row) => row.cells[index].dataset.v === undefined ? null : Number(row.cells[index].dataset.v);
    const rows = [...body.rows].sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === null || y === null) return (x === null) - (y === null);
      return ascending ? x - y : y - x;
    });
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      sortBy(table, index, ascending);
      remember(session, "medusa-sort", JSON.stringify([index, ascending]));
    }));
  }

  // While the run is going on, the page reloads itself; what was unfolded and sorted stays so.
  const refresh = Number(document.body.dataset.refresh);
  const details = [...document.querySelectorAll("details[id]")];
  if (refresh) {
    const live = document.getElementById("live");
    const open = JSON.parse(recall(session, "medusa-open") || "[]");
    for (const item of details) item.open = open.includes(item.id) || item.open;
    const sorted = JSON.parse(recall(session, "medusa-sort") || "null"), table = document.getElementById("versions");
    if (sorted && table) sortBy(table, sorted[0], sorted[1]);
    const paused = recall(session, "medusa-paused") === "yes";
    live.setAttribute("aria-pressed", String(!paused));
    live.addEventListener("click", () => {
      const on = live.getAttribute("aria-pressed") !== "true";
      live.setAttribute("aria-pressed", String(on));
      remember(session, "medusa-paused", on ? "no" : "yes");
    });
    setInterval(() => {
      if (live.getAttribute("aria-pressed") !== "true" || document.hidden || !tip.hidden) return;
      remember(session, "medusa-open", JSON.stringify(details.filter((item) => item.open).map((item) => item.id)));
      location.reload();
    }, refresh * 1000);
  }

  // A print shows what is folded on the screen.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const item of folded) item.open = true;
  });
  addEventListener("afterprint", () => { for (const item of folded) item.open = false; });
})();
