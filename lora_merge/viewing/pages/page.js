"use strict";
const content = JSON.parse(document.getElementById("content").textContent);
const main = document.getElementById("main");
const drawn = []; // functions that draw the pictures again, in the colours of the theme

function element(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function number(value, unit) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (unit === "%") return (100 * value).toLocaleString("en", { maximumSignificantDigits: 4 }) + " %";
  if (unit === "s") return value.toLocaleString("en", { maximumFractionDigits: 2 }) + " s";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? value.toExponential(3) : value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function section(title, ...children) {
  const id = "s" + main.children.length;
  const made = element("section", title ? { "aria-labelledby": id } : {}, title ? element("h2", { id }, title) : null, ...children);
  main.append(made);
  return made;
}

function facts(rows) {
  return element("div", { class: "scroll" }, element("table", { class: "facts" }, element("tbody", {},
    ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value))))));
}

function cell(value, column, first) {
  if (value && typeof value === "object" && "href" in value) return element("td", {}, element("a", { href: value.href }, value.text));
  const made = element(first ? "th" : "td", { class: column.numeric ? "number" : null, scope: first ? "row" : null }, number(value, column.unit));
  if (column.bar && typeof value === "number" && column.most) {
    made.append(element("span", { class: "bar", "aria-hidden": "true", style: `width:${Math.max(0, Math.min(100, 100 * value / column.most))}%` }));
  }
  return made;
}

function table(found) {
  const body = element("tbody");
  const columns = found.columns.map((column, at) => ({ ...column, numeric: found.rows.some((row) => typeof row[at] === "number"), most: Math.max(0, ...found.rows.map((row) => typeof row[at] === "number" ? row[at] : 0)) }));
  let sorted = -1, down = false;
  const fill = () => {
    const rows = [...found.rows];
    if (sorted >= 0) {
      const key = (row) => { const value = row[sorted]; return value && typeof value === "object" ? value.text : value; };
      rows.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true })) * (down ? -1 : 1);
      });
    }
    body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((value, at) => cell(value, columns[at], !at)))));
  };
  const heads = columns.map((column, at) => {
    const head = element("th", { scope: "col", class: column.numeric ? "number" : null });
    head.append(element("button", { type: "button", title: "Sort by this column", on: { click: () => {
      down = sorted === at ? !down : false;
      sorted = at;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      fill();
    } } }, column.title));
    return head;
  });
  fill();
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {}, found.caption ? element("caption", {}, found.caption) : null, element("thead", {}, element("tr", {}, ...heads)), body));
}

function layout(extra) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, hoverlabel: { align: "left" }, ...extra,
  };
}

function picture(height, label, draw) {
  const plot = element("div", { class: "plot", role: "img", "aria-label": label, style: `height:${height}px` });
  drawn.push(() => draw(plot));
  return plot;
}

const still = { displayModeBar: false, responsive: true };

function bars(found) {
  const names = found.rows.map((row) => row[0]), values = found.rows.map((row) => row[1]);
  return picture(40 + 30 * names.length, found.title, (plot) => Plotly.react(plot, [{
    type: "bar", orientation: "h", y: names, x: values, marker: { color: colour("--accent") }, text: values.map((v) => number(v, found.unit)),
    textposition: "auto", insidetextfont: { color: colour("--paper") }, cliponaxis: false, hoverinfo: "y+text",
  }], layout({ yaxis: { automargin: true, autorange: "reversed" }, xaxis: { visible: false, rangemode: "tozero" } }), still));
}

function stages(found) {
  return picture(110, found.title, (plot) => Plotly.react(plot, found.rows.map(([name, seconds]) => ({
    type: "bar", orientation: "h", name, y: [""], x: [seconds], hovertemplate: `${name}: ${number(seconds, "s")}<extra></extra>`,
  })), layout({ barmode: "stack", showlegend: true, legend: { orientation: "h", traceorder: "normal" }, xaxis: { title: { text: "seconds" }, gridcolor: colour("--line"), automargin: true }, yaxis: { visible: false } }), still));
}

const LONGEST = 28; // letters of a label at a picture; a cell tells the whole name

function label(text, most) {
  return escaped(text.length > most ? "…" + text.slice(1 - most) : text);
}

function escaped(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function heatMap(found) {
  const made = section(found.title);
  const detail = element("div", { class: "detail", "aria-live": "polite" });
  const choice = element("select", { "aria-label": "Number that the colours show" }, ...found.metrics.map((metric, at) => element("option", { value: at }, metric.title)));
  made.append(element("div", { class: "row" }, element("p", {}, found.help), choice));
  const at = new Map(found.cells.map((one) => [one.row + "|" + one.column, one]));
  const show = (one) => {
    const of = element("h3", {}, `${found.rows[one.row]} · ${found.columns[one.column]}`);
    detail.replaceChildren(of, table({ columns: [{ title: "weight" }, ...found.metrics], rows: one.names.map((name) => [name, ...found.metrics.map((metric) => found.weights[name][metric.key])]) }));
    const pictures = element("div", { class: "pair" });
    for (const name of one.names.slice(0, 4)) {
      const { spectrum, histogram } = found.weights[name];
      if (spectrum) pictures.append(line(name, "singular values", spectrum.map((_, i) => i + 1), spectrum));
      if (histogram) pictures.append(line(name, "elements of ΔW, in units of their root mean square", histogram.centres, histogram.counts, "bar"));
    }
    detail.append(pictures);
    if (one.count > one.names.length) detail.append(element("p", {}, `… and ${one.count - one.names.length} more`));
  };
  const line = (name, title, x, y, type) => {
    const plot = element("div", { style: "height:220px", role: "img", "aria-label": `${title} of ${name}` });
    requestAnimationFrame(() => Plotly.newPlot(plot, [{ type: type || "scatter", mode: "lines+markers", x, y, marker: { color: colour("--accent") } }],
      layout({ margin: { l: 40, r: 8, t: 30, b: 30 }, title: { text: escaped(title), font: { size: 12 } }, yaxis: { gridcolor: colour("--line"), rangemode: "tozero" }, xaxis: { gridcolor: colour("--line") } }), still));
    return element("div", {}, element("p", {}, name), plot);
  };
  let cursor = null; // the cell that the keyboard is at
  const frame = () => cursor ? [{ type: "rect", x0: cursor.column - 0.5, x1: cursor.column + 0.5, y0: cursor.row - 0.5, y1: cursor.row + 0.5, line: { color: colour("--ink"), width: 3 } }] : [];
  const said = element("div", { class: "unseen", "aria-live": "polite" });
  const go = (plot, one) => {
    cursor = one;
    Plotly.relayout(plot, { shapes: frame() });
    if (!one) return;
    Plotly.Fx.hover(plot, [{ curveNumber: 0, pointNumber: [one.row, one.column] }]);
    said.textContent = `${found.rows[one.row]}, ${found.columns[one.column]}: ${found.metrics.map((m) => `${m.title} ${number(one.values[m.key], m.unit)}`).join(", ")}`;
  };
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const key = (plot, event) => {
    if ((event.key === "Enter" || event.key === " ") && cursor) show(cursor);
    else if (event.key === "Escape") { go(plot, null); Plotly.Fx.unhover(plot); }
    else if (event.key in steps) {
      const [down, right] = steps[event.key];
      for (let row = cursor.row + down, column = cursor.column + right; row in found.rows && column in found.columns; row += down, column += right) {
        if (at.has(row + "|" + column)) { go(plot, at.get(row + "|" + column)); break; }
      }
    } else return;
    event.preventDefault();
  };
  const draw = (plot) => {
    const metric = found.metrics[Number(choice.value)];
    const z = found.rows.map((_, r) => found.columns.map((_, c) => at.get(r + "|" + c)?.values[metric.key] ?? null));
    const text = found.rows.map((row, r) => found.columns.map((column, c) => {
      const one = at.get(r + "|" + c);
      if (!one) return "";
      const numbers = found.metrics.map((m) => `${escaped(m.title)}: ${number(one.values[m.key], m.unit)}`).join("<br>");
      return `<b>${escaped(row)} · ${escaped(column)}</b><br>${escaped(one.names[0])}${one.count > 1 ? ` and ${one.count - 1} more` : ""}<br>${numbers}`;
    }));
    const narrow = innerWidth < 600;
    const dark = document.documentElement.dataset.theme === "dark";
    Plotly.react(plot, [{
      type: "heatmap", z, x: found.columns.map((_, i) => i), y: found.rows.map((_, i) => i), text, hoverinfo: "text", xgap: 1, ygap: 1,
      ...(metric.unit === "cosine" ? { zmin: -1, zmax: 1, zmid: 0 } : {}),
      colorscale: metric.unit === "cosine" ? [[0, "#d6762a"], [0.5, dark ? "#3a3d42" : "#f2f2f2"], [1, "#3486d0"]] : dark ? [[0, "#1d2b45"], [0.5, "#3f74d1"], [1, "#d7e6ff"]] : [[0, "#edf2fc"], [0.5, "#6c97e8"], [1, "#12316f"]],
      colorbar: { ...(narrow ? { orientation: "h", y: -0.02, yanchor: "top", len: 0.6, x: 0, xanchor: "left" } : {}), thickness: 10, outlinewidth: 0, tickformat: metric.unit === "%" ? ".2~p" : "" },
    }], layout({
      shapes: frame(),
      xaxis: { tickvals: found.columns.map((_, i) => i), ticktext: found.columns.map((name) => label(name, LONGEST)), side: "top", automargin: true, tickangle: -40, ticklabeloverflow: "allow", showgrid: false, zeroline: false },
      yaxis: { tickvals: found.rows.map((_, i) => i), ticktext: found.rows.map((name) => label(name, narrow ? 18 : 2 * LONGEST)), autorange: "reversed", automargin: true, showgrid: false, zeroline: false },
    }), still);
    if (!plot.dataset.bound) {
      plot.dataset.bound = "1";
      plot.addEventListener("focus", () => go(plot, cursor || found.cells[0]));
      plot.addEventListener("keydown", (event) => key(plot, event));
      plot.on("plotly_click", (event) => { const [p] = event.points; const one = at.get(p.y + "|" + p.x); if (one) show(one); });
    }
  };
  const above = 40 + 5 * Math.min(LONGEST, Math.max(...found.columns.map((name) => name.length)));
  const plot = picture(Math.max(200, above + 60 + 20 * found.rows.length), `${found.title}. Arrow keys move from cell to cell, Enter shows the weights of one.`, draw);
  plot.setAttribute("role", "application");
  plot.tabIndex = 0;
  plot.style.minWidth = `${190 + 15 * found.columns.length}px`; // a phone scrolls
  choice.addEventListener("change", () => draw(plot));
  const list = element("details", {}, element("summary", {}, "The same as a table; a button shows the weights of a cell"));
  list.addEventListener("toggle", () => {
    if (!list.open || list.children.length > 1) return;
    const rows = found.cells.map((one) => element("tr", {}, element("td", {}, element("button", { type: "button", on: { click: () => show(one) } }, found.rows[one.row])),
      element("td", {}, found.columns[one.column]), ...found.metrics.map((m) => element("td", { class: "number" }, number(one.values[m.key], m.unit)))));
    list.append(element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("thead", {}, element("tr", {},
      ...["block", "layer", ...found.metrics.map((m) => m.title)].map((t) => element("th", { scope: "col" }, t)))), element("tbody", {}, ...rows))));
  });
  made.append(element("div", { class: "scroll" }, plot), said, list, detail);
}

function commands(found) {
  return found.map(({ label, text }) => {
    const button = element("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        const area = element("textarea", {}, text);
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
    });
    return element("div", {}, element("p", {}, label), element("div", { class: "command" }, element("code", { tabindex: "0" }, text), button));
  });
}

function build() {
  document.getElementById("kind").textContent = content.kind;
  document.getElementById("title").textContent = content.title;
  document.getElementById("footer").textContent = content.footer;
  main.replaceChildren();
  if (content.image) section("Preview", element("img", { src: content.image, alt: `Preview picture of ${content.title}`, class: "preview" }));
  if (content.summary.length) section("Summary", facts(content.summary));
  if (content.warnings.length) section("Warnings", element("ul", {}, ...content.warnings.map((text) => element("li", {}, text)))).classList.add("warn");
  for (const found of content.heat_maps) heatMap(found);
  for (const found of content.bars) section(found.title, bars(found), element("details", {}, element("summary", {}, "As a table"), table({ columns: [{ title: found.of }, { title: found.title, unit: found.unit }], rows: found.rows })));
  for (const found of content.tables) section(found.title, table(found));
  for (const found of content.stages) section(found.title, stages(found), element("details", {}, element("summary", {}, "As a table"), table({ columns: [{ title: "stage" }, { title: "seconds", unit: "s" }], rows: found.rows })));
  if (content.commands.length) section("Commands", ...commands(content.commands));
  if (content.notes.length) section("Notes", element("ul", {}, ...content.notes.map((text) => element("li", {}, text)))).classList.add("notes");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = name === "dark" ? "Light" : "Dark";
  if (window.Plotly) drawn.forEach((draw) => draw());
}

async function start() {
  const asked = new URLSearchParams(location.search).get("theme");
  theme(asked || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  build();
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent.trim()), (letter) => letter.charCodeAt(0));
  const code = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(element("script", {}, code));
  drawn.forEach((draw) => draw());
  document.documentElement.dataset.ready = "yes";
}

start();
