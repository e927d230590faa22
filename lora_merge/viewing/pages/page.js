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
  if (unit === "%") {
    const often = value >= 10;
    return (often ? value : 100 * value).toLocaleString("en", { maximumSignificantDigits: 4 }) + (often ? " times" : " %");
  }
  if (unit === "B") return bytes(value);
  if (unit === "cosine") return (Math.round(1000 * value) / 1000 || 0).toFixed(3); // never −0
  if (unit === "s") return value.toLocaleString("en", { maximumFractionDigits: 2 }) + " s";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6 ? value.toExponential(3) : value.toLocaleString("en", { maximumSignificantDigits: 5 });
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${value.toLocaleString("en", { maximumFractionDigits: at ? 2 : 0 })} ${units[at]}`;
}

// What may be wider than the page: it is scrolled, also by the arrow keys where it is too wide.
function scrolling(name, ...children) {
  const made = element("div", { class: "scroll" }, ...children);
  new ResizeObserver(() => {
    const wide = made.scrollWidth > made.clientWidth + 1;
    for (const [key, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", name]]) {
      if (wide) made.setAttribute(key, value); else made.removeAttribute(key);
    }
  }).observe(made);
  return made;
}

function section(title, ...children) {
  const id = "s" + main.children.length;
  const made = element("section", title ? { "aria-labelledby": id } : {}, title ? element("h2", { id }, title) : null, ...children);
  main.append(made);
  return made;
}

function facts(rows) {
  return element("table", { class: "facts" }, element("caption", { class: "unseen" }, "Summary"), element("tbody", {},
    ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))));
}

function cell(value, column, first) {
  if (value && typeof value === "object") return element("td", { class: value.level || null }, value.href ? element("a", { href: value.href }, value.text) : value.text);
  const made = element(first ? "th" : "td", { class: column.numeric ? "number" : null, scope: first ? "row" : null }, number(value, column.unit));
  if (column.bar && value > 0) {
    made.append(element("span", { class: "bar", "aria-hidden": "true", style: `width:${Math.max(0, Math.min(100, 100 * value / column.most))}%` }));
  }
  return made;
}

const ROWS = 25; // of a table that are shown at once

function table(found) {
  const body = element("tbody");
  const columns = found.columns.map((column, at) => ({ ...column, numeric: found.rows.some((row) => typeof row[at] === "number"), most: column.longest ?? Math.max(0, ...found.rows.map((row) => typeof row[at] === "number" ? row[at] : 0)) }));
  let sorted = -1, down = false, all = found.rows.length <= ROWS + 5;
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
    body.replaceChildren(...rows.slice(0, all ? rows.length : ROWS).flatMap((row) => built.get(row) ?? lines(row)));
  };
  const built = new Map();
  const lines = (row) => {
    const made = element("tr", { class: found.marks?.[found.rows.indexOf(row)] || null }, ...row.map((value, at) => cell(value, columns[at], !at)));
    const detail = found.details?.[found.rows.indexOf(row)];
    if (!detail) return [made];
    const place = element("td", { colspan: columns.length }), opened = element("tr", { class: "opened", hidden: "" }, place);
    const button = element("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": `Numbers of ${columns[0].title} ${row[0]}`, on: { click: () => {
      if (!place.children.length) place.append(facts(detail.summary), ...detail.tables.flatMap((one) => [element("h3", {}, one.title), table(one)]));
      opened.hidden = !opened.hidden;
      button.setAttribute("aria-expanded", String(!opened.hidden));
    } } });
    made.firstChild.prepend(button);
    built.set(row, [made, opened]); // what is open stays so when the rows are sorted
    return [made, opened];
  };
  const heads = columns.map((column, at) => {
    const head = element("th", { scope: "col", class: column.numeric ? "number" : null });
    head.append(element("button", { type: "button", title: "Sort by this column", on: { click: () => {
      down = sorted === at ? !down : column.numeric && at > 0;
      sorted = at;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      fill();
    } } }, column.title));
    return head;
  });
  fill();
  const made = element("div", {}, scrolling(found.title, element("table", {}, element("caption", { class: "unseen" }, found.title), element("thead", {}, element("tr", {}, ...heads)), body)));
  if (!all) {
    const more = element("button", { type: "button", class: "more", on: { click: () => { all = true; fill(); more.remove(); } } }, `Show all ${number(found.rows.length)} rows`);
    made.append(more);
  }
  return made;
}

function layout(extra) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, hoverlabel: { align: "left", namelength: -1, font: { family: "system-ui, sans-serif", size: 12 } }, ...extra,
  };
}

function picture(height, label, draw) {
  const plot = element("div", { class: "plot", role: "img", "aria-label": label, style: `height:${height}px` });
  drawn.push(() => {
    draw(plot);
    for (const part of [...plot.children, document.getElementById("js-plotly-tester")]) part?.setAttribute("aria-hidden", "true"); // the label says it all
  });
  return plot;
}

const still = { displayModeBar: false, responsive: true };

function bars(found) {
  const names = found.rows.map((row) => row[0]), values = found.rows.map((row) => row[1]);
  const signed = found.unit === "cosine" || values.some((v) => v < 0), reach = 1.25 * (found.unit === "cosine" ? 1 : Math.max(...values.map(Math.abs))); // a cosine of 0.001 is no long bar
  return picture(24 + 26 * names.length, found.title, (plot) => Plotly.react(plot, [{
    type: "bar", orientation: "h", y: names.map((_, i) => i), x: values, text: values.map((v) => number(v, found.unit)),
    marker: { color: values.map((v) => signed ? SIGNS[v < 0 ? 0 : 1] : colour("--accent")) },
    textposition: signed ? "outside" : "auto", insidetextfont: { color: colour("--paper") }, outsidetextfont: { color: colour("--ink") }, cliponaxis: false,
    customdata: names.map(escaped), hovertemplate: "%{customdata}: %{text}<extra></extra>",
  }], layout({
    yaxis: { tickvals: names.map((_, i) => i), ticktext: names.map((name) => label(name, innerWidth < 600 ? 18 : 2 * LONGEST)), automargin: true, autorange: "reversed", zeroline: false, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" },
    xaxis: { visible: signed, showticklabels: false, showgrid: false, zerolinecolor: colour("--soft"), rangemode: "tozero", ...(signed ? { range: [-reach, reach] } : {}), fixedrange: true },
  }), still));
}

function curve(found) {
  return picture(260, found.title, (plot) => Plotly.react(plot, [{
    type: "scatter", mode: "lines+markers", x: found.rows.map((row) => row[0]), y: found.rows.map((row) => row[1]), text: found.rows.map((row) => number(row[1], found.unit)),
    line: { color: colour("--accent") }, marker: { color: colour("--accent"), size: 5 }, hovertemplate: `${escaped(found.of[0])} %{x}: %{text}<extra></extra>`,
  }], layout({
    margin: { l: 8, r: 8, t: 8, b: 8 }, xaxis: { title: { text: escaped(found.of[0]) }, gridcolor: colour("--line"), rangemode: "tozero", dtick: Math.ceil(found.rows.length / 12), automargin: true, fixedrange: true },
    yaxis: { title: { text: escaped(found.of[1]) }, gridcolor: colour("--line"), range: found.unit === "%" ? [0, 1.03] : undefined, tickformat: found.unit === "%" ? ".0%" : "", automargin: true, fixedrange: true },
  }), still));
}

function stages(found) {
  return picture(130, found.title, (plot) => Plotly.react(plot, found.rows.map(([name, seconds], at) => ({
    type: "bar", orientation: "h", name, y: [""], x: [seconds], marker: { color: STAGES[at % STAGES.length] }, hovertemplate: `${name}: ${number(seconds, "s")}<extra></extra>`,
  })), layout({ barmode: "stack", showlegend: true, legend: { orientation: "h", traceorder: "normal", x: 0, xanchor: "left", y: 1.05, yanchor: "bottom" }, xaxis: { ticksuffix: " s", gridcolor: colour("--line"), automargin: true, fixedrange: true }, yaxis: { visible: false, fixedrange: true } }), still));
}

const SIGNS = ["#d6762a", "#3486d0"]; // below and above zero
const STAGES = ["#3b74d8", "#d6762a", "#2f9e77", "#a35cc4", "#b8923a", "#7a8594"];

const LONGEST = 28; // letters of a label at a picture; a cell tells the whole name

function shortened(text, most) {
  return text.length > most ? "…" + text.slice(1 - most) : text;
}

function label(text, most) {
  return escaped(shortened(text, most));
}

function escaped(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Colours from zero, so that numbers which hardly differ look alike.
function fromZero(values) {
  const known = values.filter((value) => value !== null);
  return known.length && Math.min(...known) >= 0 ? { zmin: 0, zmax: Math.max(...known) || 1 } : {};
}

function heatMap(found) {
  const made = section(found.title);
  const detail = element("div", { class: "detail", hidden: "" });
  const choice = element("select", { "aria-label": "Number that the colours show" }, ...found.metrics.map((metric, at) => element("option", { value: at }, metric.title)));
  made.append(element("div", { class: "row" }, element("p", {}, found.help), choice));
  const at = new Map(found.cells.map((one) => [one.row + "|" + one.column, one]));
  const show = (one) => {
    const of = element("h3", { tabindex: "-1" }, `${found.rows[one.row]} · ${found.columns[one.column]}`);
    const title = `Weights of ${of.textContent}`;
    detail.hidden = false;
    detail.replaceChildren(of, table({ title, columns: [{ title: "weight" }, ...found.metrics], rows: one.names.map((name) => [name, ...found.metrics.map((metric) => found.weights[name][metric.key])]) }));
    if (one.count > one.names.length) detail.append(element("p", {}, `… and ${one.count - one.names.length} more`));
    const pictured = one.names.filter((name) => found.weights[name].spectrum || found.weights[name].histogram);
    if (!pictured.length) detail.append(element("p", {}, found.unpictured));
    else {
      const place = element("div", { class: "pair" });
      const which = element("select", { "aria-label": "Weight that the pictures show", on: { change: () => pictures(place, which.value) } }, ...pictured.map((name) => element("option", { value: name }, name)));
      detail.append(pictured.length > 1 ? which : element("p", { class: "name" }, pictured[0]), place);
      pictures(place, pictured[0]);
    }
    of.focus({ preventScroll: true });
    of.scrollIntoView({ block: "nearest" });
  };
  const pictures = (place, name) => {
    const { spectrum, histogram } = found.weights[name];
    place.replaceChildren();
    const each = (one, alone) => Object.entries(alone(one) ? { "": one } : one).filter(([, value]) => value);
    const values = spectrum ? each(spectrum, Array.isArray) : [], counts = histogram ? each(histogram, (one) => one.counts) : [];
    if (values.length) place.append(line(name, "singular values", `the largest ${values[0][1].length}`, values.map(([of, y]) => ({ of, x: y.map((_, i) => i + 1), y }))));
    if (counts.length) place.append(line(name, `elements of ${found.of}`, "of some rows: how many have which size, in units of their root mean square", counts.map(([of, one]) => ({ of, x: one.centres, y: one.counts })), "bar"));
    if (!values.length || !counts.length) place.append(element("p", {}, found.unpictured));
  };
  const line = (name, title, unit, series, type) => {
    const made = element("div", { class: "plot", style: "height:220px", role: "img", "aria-label": `${title} of ${name}` });
    const draw = () => made.isConnected && Plotly.react(made, series.map(({ of, x, y }, n) => ({ type: type || "scatter", mode: "lines+markers", name: of.toUpperCase(), x, y, marker: { color: n ? SIGNS[0] : colour("--accent") }, line: { color: n ? SIGNS[0] : colour("--accent") }, hovertemplate: `${of.toUpperCase()} %{x}: %{y}<extra></extra>` })),
      layout({ margin: { l: 44, r: 8, t: 8, b: 26 }, bargap: 0.08, showlegend: series.length > 1, legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "top" }, yaxis: { gridcolor: colour("--line"), zerolinecolor: colour("--line"), rangemode: "tozero", automargin: true }, xaxis: { gridcolor: colour("--line"), zerolinecolor: colour("--line") } }), still);
    drawn.push(draw);
    requestAnimationFrame(draw);
    return element("figure", {}, element("figcaption", {}, `${title} (${unit})`), made);
  };
  let cursor = null; // the cell that the keyboard is at
  const frame = () => cursor ? [{ type: "rect", x0: cursor.column - 0.5, x1: cursor.column + 0.5, y0: cursor.row - 0.5, y1: cursor.row + 0.5, line: { color: colour("--ink"), width: 3 } }] : [];
  const said = element("div", { class: "unseen", "aria-live": "polite" });
  const go = (plot, one) => {
    cursor = one;
    Plotly.relayout(plot, { shapes: frame() });
    if (!one) return;
    const { l, w } = plot._fullLayout._size, holder = plot.closest(".scroll"), wide = w / found.columns.length;
    const from = l + one.column * wide, room = holder.clientWidth - names.offsetWidth - wide; // of the cell, in what is scrolled
    holder.scrollLeft = Math.min(Math.max(holder.scrollLeft, from - room), from);
    Plotly.Fx.hover(plot, [{ curveNumber: 0, pointNumber: [one.row, one.column] }]);
    said.textContent = `${found.rows[one.row]}, ${found.columns[one.column]}: ${found.metrics.map((m) => `${m.title} ${number(one.values[m.key], m.unit)}`).join(", ")}`;
  };
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  // The next cell in a row or column; where there is none, the nearest one further in that direction.
  const beside = (down, right) => {
    const far = (one) => down * (one.row - cursor.row) + right * (one.column - cursor.column);
    const aside = (one) => Math.abs(right * (one.row - cursor.row) + down * (one.column - cursor.column));
    const ahead = found.cells.filter((one) => far(one) > 0);
    const straight = ahead.filter((one) => !aside(one));
    return (straight.length ? straight : ahead).sort((a, b) => far(a) - far(b) || aside(a) - aside(b))[0];
  };
  const key = (plot, event) => {
    if ((event.key === "Enter" || event.key === " ") && cursor) show(cursor);
    else if (event.key === "Escape") { go(plot, null); Plotly.Fx.unhover(plot); }
    else if (event.key in steps) {
      const next = beside(...steps[event.key]);
      if (next) go(plot, next);
    } else return;
    event.preventDefault();
  };
  // The names of the rows stay in view while the picture is scrolled; they stand where Plotly draws the rows.
  const names = element("div", { class: "rows", "aria-hidden": "true" }, ...found.rows.map((name) => element("span", { title: name }, shortened(name, innerWidth < 600 ? 18 : 2 * LONGEST))));
  const place = (plot) => {
    const { t, h } = plot._fullLayout._size;
    plot.parentNode.style.minWidth = `${names.offsetWidth + least}px`; // the names stay in view within it
    [...names.children].forEach((name, row) => { name.style.top = `${t + (row + 0.5) * h / found.rows.length}px`; });
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
      ...(metric.unit === "cosine" ? { zmin: -1, zmax: 1, zmid: 0 } : fromZero(z.flat())),
      colorscale: metric.unit === "cosine" ? [[0, SIGNS[0]], [0.5, dark ? "#4a4d53" : "#ececec"], [1, SIGNS[1]]] : dark ? [[0, "#24406f"], [0.5, "#4a80dd"], [1, "#d7e6ff"]] : [[0, "#d9e4fa"], [0.5, "#6390e4"], [1, "#12316f"]],
      colorbar: { ...(narrow ? { orientation: "h", y: -0.02, yanchor: "top", lenmode: "pixels", len: 160, x: 0, xanchor: "left" } : {}), thickness: 10, outlinewidth: 0, tickformat: metric.unit === "%" ? ".2~p" : "" },
    }], layout({
      shapes: frame(),
      xaxis: { tickvals: found.columns.map((_, i) => i), ticktext: found.columns.map((name) => label(name, LONGEST)), side: "top", automargin: true, tickangle: -40, ticklabeloverflow: "allow", showgrid: false, zeroline: false, fixedrange: true },
      yaxis: { showticklabels: false, ticks: "", autorange: "reversed", showgrid: false, zeroline: false, fixedrange: true },
    }), still);
    if (!plot.dataset.bound) {
      plot.dataset.bound = "1";
      plot.addEventListener("focus", () => go(plot, cursor || found.cells[0]));
      plot.addEventListener("keydown", (event) => key(plot, event));
      plot.on("plotly_afterplot", () => place(plot));
      place(plot);
      plot.on("plotly_click", (event) => { const [p] = event.points; const one = at.get(p.y + "|" + p.x); if (one) show(one); });
    }
  };
  const least = 60 + 23 * found.columns.length;
  const above = 40 + 5 * Math.min(LONGEST, Math.max(...found.columns.map((name) => name.length)));
  const plot = picture(Math.max(200, above + 60 + 20 * found.rows.length), `${found.title}. Arrow keys move from cell to cell, Enter shows the weights of one.`, draw);
  plot.setAttribute("role", "application");
  plot.tabIndex = 0;
  plot.style.minWidth = `${least}px`; // so that the slanting names of columns do not meet; a phone scrolls
  choice.addEventListener("change", () => draw(plot));
  const list = element("details", {}, element("summary", {}, "The same as a table; a button shows the weights of a cell"));
  list.addEventListener("toggle", () => {
    if (!list.open || list.children.length > 1) return;
    const rows = found.cells.map((one) => element("tr", {}, element("td", {}, element("button", { type: "button", on: { click: () => show(one) } }, found.rows[one.row])),
      element("td", {}, found.columns[one.column]), ...found.metrics.map((m) => element("td", { class: "number" }, number(one.values[m.key], m.unit)))));
    list.append(scrolling(found.title, element("table", {}, element("caption", { class: "unseen" }, found.title), element("thead", {}, element("tr", {},
      ...["block", "layer", ...found.metrics.map((m) => m.title)].map((t) => element("th", { scope: "col" }, t)))), element("tbody", {}, ...rows))));
  });
  made.append(scrolling(found.title, element("div", { class: "named" }, names, plot)), said, list, detail);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", {}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 2000);
}

function chips(found) {
  return element("div", { class: "chips" }, ...found.map(({ label, text }) => {
    const button = element("button", { type: "button", class: "chip", title: "Copy", "aria-label": `Copy ${label}: ${text}` }, text);
    button.addEventListener("click", () => copy(text, button));
    return element("span", {}, element("span", { class: "of" }, label), button);
  }));
}

function commands(found) {
  return found.map(({ label, text, lines }) => {
    const button = element("button", { type: "button", "aria-label": `Copy: ${label}` }, "Copy");
    button.addEventListener("click", () => copy(text, button));
    if (lines) return element("details", {}, element("summary", {}, label), element("div", { class: "command" }, element("pre", { tabindex: "0" }, text), button));
    return element("div", {}, element("p", {}, label), element("div", { class: "command" }, element("code", { tabindex: "0" }, text), button));
  });
}

function build() {
  document.getElementById("kind").textContent = content.kind;
  document.getElementById("title").textContent = content.title;
  document.getElementById("footer").textContent = content.footer;
  main.replaceChildren();
  if (content.verdict.text) section("", element("p", {}, element("span", { "aria-hidden": "true" }, { good: "✓ ", warning: "! ", bad: "✗ " }[content.verdict.level]), content.verdict.text)).classList.add("verdict", content.verdict.level);
  if (content.chips.length) section("To copy", chips(content.chips));
  const image = content.image ? element("img", { src: content.image, alt: `Preview picture of ${content.title}`, class: "preview" }) : null;
  if (content.summary.length) section("Summary", element("div", { class: image ? "beside" : null }, facts(content.summary), image));
  const warnings = content.warnings.filter((text) => !(content.verdict.text || "").includes(text));
  if (warnings.length) section("Warnings", element("ul", {}, ...warnings.map((text) => element("li", {}, text)))).classList.add("warn");
  for (const found of content.tables.filter((one) => one.first)) section(found.title, table(found));
  for (const found of content.heat_maps) heatMap(found);
  for (const found of content.curves) section(found.title, curve(found), element("details", {}, element("summary", {}, "As a table"), table({ title: found.title, columns: [{ title: found.of[0] }, { title: found.of[1], unit: found.unit }], rows: found.rows })));
  for (const found of content.bars) section(found.title, bars(found), element("details", {}, element("summary", {}, "As a table"), table({ title: found.title, columns: [{ title: found.of }, { title: found.title, unit: found.unit }], rows: found.rows })));
  for (const found of content.tables.filter((one) => !one.first)) section(found.title, table(found));
  for (const found of content.stages) section(found.title, stages(found), element("details", {}, element("summary", {}, "As a table"), table({ title: found.title, columns: [{ title: "stage" }, { title: "time", unit: "s" }], rows: found.rows })));
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
