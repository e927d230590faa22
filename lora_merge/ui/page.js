"use strict";
// The page of `lora-merge ui`. It fills in forms; what they mean is decided by the program. Names of files and texts of
// reports are a stranger's: they are set as text, never as HTML.

const WAIT = 80; // ms from the last change of the form to its preview
const POLL = 400; // ms between two looks at the queue while it works
const STYLES = { green: "good", yellow: "warn", red: "bad" };
const PART = { min: 0, max: 2, step: 0.05 };
const STRENGTH = { min: -2, max: 2, step: 0.05 };

const byId = (id) => document.getElementById(id);
const state = { forms: {}, form: null, entries: [], output: "", pictures: false, adapters: [], rows: [], base: null, product: null, aside: [], other: null, options: {}, parts: null, components: {}, files: null, preview: null, named: false };
let turn = 0; // of previews, so that a late answer is dropped
let timer = 0;

function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

async function call(name, values = {}) {
  const answer = await fetch(`api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values) });
  if (answer.status !== 200 && answer.status !== 422) throw new Error(`the program answers ${answer.status}`);
  return answer.json();
}

function say(text) { byId("said").textContent = ""; byId("said").textContent = text; }

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = 0;
  while (bytes >= 1024 && n < units.length - 1) { bytes /= 1024; n += 1; }
  return `${n && bytes < 100 ? bytes.toFixed(bytes < 10 ? 2 : 1) : Math.round(bytes)} ${units[n]}`;
}

const time = (s) => (s < 1 ? "less than a second" : s < 90 ? `about ${Math.round(s)} s` : `about ${Math.round(s / 60)} min`);
const nameOf = (path) => path.split(/[\\/]/).pop();
const stem = (path) => nameOf(path).replace(/\.(safetensors|sft|gguf|ckpt|pt|pth|bin)$/i, "");

function errorBox(error) {
  return h("div", { class: "error", role: "alert" }, h("p", { class: "bad" }, error.what), h("p", { class: "place" }, error.where), h("p", { class: "fix" }, error.fix));
}

// Fields.

let fields = 0;
function field(name, control, help = "", place = "") {
  const id = `field-${(fields += 1)}`;
  control.id = id;
  if (help) control.setAttribute("aria-describedby", `${id}-help`);
  return h("div", { class: "field" }, h("label", { class: "name", for: id }, name), control, place ? remark(place) : null, help ? h("p", { class: "help", id: `${id}-help` }, help) : null);
}

const remark = (place) => h("div", { class: "remark", "data-place": place }); // what is wrong there, or that it fits

const offered = (entry, kind) => kind === "any" || entry.kinds.includes(kind);

function chooser(kind, chosen, change, empty) {
  const list = state.entries.filter((entry) => offered(entry, kind));
  const groups = new Map();
  for (const entry of list) groups.set(entry.group, [...(groups.get(entry.group) || []), h("option", { value: entry.path, selected: entry.path === chosen }, `${entry.label} · ${size(entry.bytes)}`)]);
  const boxes = [...groups].map(([label, options]) => h("optgroup", { label }, ...options));
  return h("select", { onchange: (event) => change(event.target.value) }, h("option", { value: "" }, list.length ? empty : "nothing is in the folders of this page"), ...boxes);
}

function slider(name, value, limits, change, label) {
  const range = h("input", { type: "range", min: String(limits.min), max: String(limits.max), step: String(limits.step), "aria-label": label || name });
  const number = h("input", { type: "number", step: "any", "aria-label": `${label || name}, as a number` });
  const set = (v) => { range.value = v; number.value = v; };
  set(value);
  range.addEventListener("input", () => { number.value = range.value; change(Number(range.value)); });
  number.addEventListener("input", () => { if (number.value !== "") { range.value = number.value; change(Number(number.value)); } });
  const row = h("div", { class: "slider" }, h("span", { class: "name" }, name), range, number);
  row.set = set;
  return row;
}

function optionField(option) {
  const value = state.options[option.name] ?? "";
  const change = (event) => { state.options[option.name] = event.target.value; if (option.name === "method") draw(); else changed(); };
  const name = option.name.replaceAll("_", " ");
  if (option.kind === "switch" || option.fixed) {
    const usual = option.default ? `default: ${option.kind === "switch" ? (option.default === "true" ? "yes" : "no") : option.default}` : "default";
    const words = option.kind === "switch" ? [["true", "yes"], ["false", "no"]] : option.words.map((word) => [word, word]);
    const rest = words.filter(([word]) => word !== option.default);
    return field(name, h("select", { name: option.name, onchange: change }, ...[["", usual], ...rest].map(([word, text]) => h("option", { value: word, selected: word === value }, text))), option.help, option.name);
  }
  const props = { name: option.name, oninput: change, placeholder: option.default || "", autocomplete: "off", spellcheck: "false" };
  if (option.lines) {
    const area = h("textarea", { ...props, placeholder: "one a line" });
    area.value = value;
    return field(name, area, option.help, option.name);
  }
  const input = h("input", { ...props, type: "text", ...(option.words.length ? { list: `words-${option.name}` } : {}), ...(["number", "whole"].includes(option.kind) ? { inputmode: "decimal" } : {}) });
  input.value = value;
  const box = field(name, input, option.help, option.name);
  if (option.words.length) box.append(h("datalist", { id: `words-${option.name}` }, ...option.words.map((word) => h("option", { value: word }))));
  return box;
}

function taken(option) {
  const method = state.options.method || "sum";
  const numbers = new Set(Object.values(state.form.methods).flat());
  return option.name === "seed" || !numbers.has(option.name) || (state.form.methods[method] || []).includes(option.name);
}

const singular = (form) => form.inputs.split(",")[0].replace(/s$/, "");

function adapterBox(adapter, place) {
  const form = state.form;
  const many = form.most > 1;
  const name = many ? `${singular(form)} ${place + 1}` : form.inputs;
  const choice = chooser(form.of, adapter.path, (path) => { adapter.path = path; drawParts(); changed(); }, "choose…");
  choice.setAttribute("aria-label", name);
  const box = h("fieldset", {}, h("legend", {}, name), choice, remark(`adapters.${place}`));
  if (form.strengths) box.append(slider("strength", adapter.strength, STRENGTH, (v) => { adapter.strength = v; changed(); }, `strength of ${name}`));
  if (form.parts) { adapter.slot = h("div", {}); adapter.name = name; box.append(adapter.slot); }
  if (many && state.adapters.length > form.places) {
    box.append(h("div", { class: "row" }, h("button", { type: "button", "aria-label": `remove ${name}`, onclick: () => { state.adapters.splice(place, 1); draw(); byId("add")?.focus(); } }, "Remove")));
  }
  return box;
}

function drawParts() {
  for (const adapter of state.adapters) {
    if (!adapter.slot) continue;
    if (adapter.path) adapter.slot.replaceChildren(partsBox(adapter, adapter.name));
    else adapter.slot.replaceChildren();
  }
}

function partsBox(adapter, name) {
  const box = h("details", { open: adapter.open, ontoggle: (event) => { adapter.open = event.target.open; } }, h("summary", {}, "Strength by part and block"));
  for (const part of Object.keys(state.components[adapter.path] || {}).filter(Boolean)) {
    box.append(slider(part, adapter.parts[part] ?? 1, PART, (v) => { adapter.parts[part] = v; changed(); }, `${part} of ${name}`));
  }
  const order = Object.values(state.parts?.lists || {}).reduce((a, b) => (b.length > a.length ? b : a), []);
  if (order.length) {
    const presets = state.parts.presets;
    const sliders = {};
    const select = h("select", { onchange: () => {
      adapter.preset = select.value;
      if (presets[select.value]) for (const block of order) { adapter.blocks[block] = presets[select.value][block]; }
      if (!select.value) adapter.blocks = {};
      for (const block of order) sliders[block].set(adapter.blocks[block] ?? 1);
      changed();
    } }, ...[["", "none: all blocks as they are"], ...Object.keys(presets).map((preset) => [preset, preset]), ["*", "as set below"]].map(([value, text]) => h("option", { value, selected: value === (adapter.preset || "") }, text)));
    box.append(field("Block weights", select, "A preset, or a weight for each block."));
    const grid = h("div", { class: "blocks" });
    for (const block of order) {
      sliders[block] = slider(block, adapter.blocks[block] ?? 1, PART, (v) => { adapter.blocks[block] = v; adapter.preset = "*"; select.value = "*"; changed(); }, `block ${block} of ${name}`);
      grid.append(sliders[block]);
    }
    box.append(h("details", {}, h("summary", {}, `${order.length} blocks`), grid));
  }
  const others = h("input", { type: "text", placeholder: "te=0.5, IN04-IN08=0", autocomplete: "off", spellcheck: "false", oninput: (event) => { adapter.others = event.target.value; changed(); } });
  others.value = adapter.others || "";
  box.append(field("Other parts", others, "Parts, blocks or re:REGEX with a factor each."));
  adapter.order = order;
  return box;
}

function fresh(path = "") { return { path, strength: 1, parts: {}, blocks: {}, preset: "", others: "", open: false }; }

function draw() {
  const form = state.form;
  fields = 0;
  const focused = document.activeElement?.closest("#fields") ? document.activeElement.id || document.activeElement.getAttribute("aria-label") : "";
  while (state.adapters.length < form.places) state.adapters.push(fresh());
  if (state.adapters.length > form.most) state.adapters.length = form.most;
  const boxes = [];
  if (form.product) boxes.push(field(form.product, chooser("any", state.product, (path) => { state.product = path; changed(); }, "choose…"), "", "product"));
  if (form.base) {
    boxes.push(field(form.base, chooser("base", state.base, (path) => { state.base = path; loadParts(); changed(); }, form.base_needed ? "choose…" : "none"), "", "base"));
  }
  boxes.push(...state.adapters.map(adapterBox));
  if (form.help) boxes.push(h("p", { class: "field help" }, form.help));
  if (state.adapters.length < form.most) boxes.push(h("div", { class: "row field" }, h("button", { type: "button", id: "add", onclick: () => { state.adapters.push(fresh()); draw(); } }, `Add ${/^[AEIOU]/.test(form.inputs) ? "an" : "a"} ${singular(form).toLowerCase()}`)));
  const shown = form.options.filter(taken);
  boxes.push(h("div", { class: "grid" }, ...shown.filter((option) => option.main).map(optionField)));
  if (form.writes) {
    const output = h("input", { type: "text", name: "output", autocomplete: "off", spellcheck: "false", oninput: (event) => { state.name = event.target.value; state.named = event.target.value !== ""; changed(); } });
    if (!state.named) state.name = suggestion();
    output.value = state.name;
    boxes.push(field("Output name", output, `Below ${state.output}. Without an ending it gets .safetensors.`, "output"));
    const overwrite = h("input", { type: "checkbox", name: "overwrite", checked: state.overwrite === true, onchange: (event) => { state.overwrite = event.target.checked; changed(); } });
    boxes.push(h("label", { class: "check" }, overwrite, state.overwriteHelp));
  }
  const rest = shown.filter((option) => !option.main);
  if (rest.length) boxes.push(h("details", { open: state.more === true, ontoggle: (event) => { state.more = event.target.open; } }, h("summary", {}, "More options"), h("div", { class: "grid" }, ...rest.map(optionField))));
  byId("fields").replaceChildren(...boxes);
  drawParts();
  showRemarks();
  if (focused) (byId(focused) || byId("fields").querySelector(`[aria-label="${CSS.escape(focused)}"]`))?.focus();
  byId("about").textContent = form.about;
  byId("run").textContent = form.title;
  byId("copy-jobs").hidden = !form.writes || Boolean(form.product); // what a recipe names is no job of a jobs file
  changed();
}

function suggestion() {
  const form = state.form;
  const adapters = state.adapters.map((adapter) => adapter.path).filter(Boolean);
  const first = { merge: state.base, unmerge: state.base, replay: state.product }[form.command] ?? (form.product || form.least === 0 ? "" : adapters[0]);
  if (!first) return "";
  const root = state.output.replace(/[\\/]$/, "");
  const lora = form.command === "extract" ? state.entries.find((entry) => entry.kinds.join() === "adapter" && entry.path.endsWith(entry.label)) : null;
  const near = lora ? lora.path.slice(0, -lora.label.length) : first.slice(0, first.length - nameOf(first).length);
  const folder = near.startsWith(`${root}/`) || near.startsWith(`${root}\\`) ? near.slice(root.length + 1) : "";
  const names = { merge: [state.base, ...adapters].map((path) => stem(path)).join("+"), combine: adapters.length > 1 ? adapters.map(stem).join("+") : "", unmerge: `${stem(first)}-without`, extract: `${stem(adapters[0] || "")}-lora`, replay: `${stem(first)}-again` };
  return folder + (names[form.command] || `${stem(first)}-${form.command}${form.command.endsWith("e") ? "d" : "ed"}`).slice(0, 150);
}

async function loadParts() {
  const base = state.base;
  state.parts = null;
  if (!base) return;
  const parts = await call("parts", { path: base });
  if (state.base === base && !parts.error) { state.parts = parts; drawParts(); }
}

function values() {
  const adapters = state.adapters.map((adapter) => {
    const parts = {};
    if (state.form.parts) {
      for (const [part, factor] of Object.entries(adapter.parts)) if (factor !== 1) parts[part] = factor;
      if (adapter.preset === "*") parts.lbw = adapter.order.map((block) => adapter.blocks[block] ?? 1).join(",");
      else if (adapter.preset) parts.lbw = adapter.preset;
    }
    return { path: adapter.path, strength: adapter.strength, strength_for: parts, parts: state.form.parts ? adapter.others : "" };
  });
  const names = new Set(state.form.options.filter(taken).map((option) => option.name));
  const options = Object.fromEntries(Object.entries(state.options).filter(([name]) => names.has(name)));
  return { command: state.form.command, base: state.form.base ? state.base || "" : "", product: state.form.product ? state.product || "" : "", adapters, options, output: state.name || "", overwrite: state.overwrite === true };
}

// The preview.

function changed() {
  const input = byId("fields").querySelector("[name=output]");
  if (input && !state.named) { state.name = suggestion(); input.value = state.name; }
  byId("plan").dataset.state = "stale";
  if (missing()) byId("run").disabled = true;
  clearTimeout(timer);
  timer = setTimeout(look, WAIT);
}

async function look() {
  clearTimeout(timer);
  const mine = (turn += 1);
  const filled = values();
  const paths = JSON.stringify([filled.product, filled.base, filled.adapters.map((adapter) => adapter.path)]);
  if (!filled.base && !filled.product && !filled.adapters.some((adapter) => adapter.path)) { state.files = null; showFiles([]); showPlan({}, filled); return; }
  try {
    if (paths !== state.files) { // first what they are, as soon as they are chosen
      const { files } = await call("files", filled);
      if (mine !== turn) return;
      state.files = paths;
      showFiles(files);
    }
    const preview = missing() ? {} : await call("preview", filled);
    if (mine !== turn) return;
    showPlan(preview, filled);
  } catch (error) { if (mine === turn) lost(error); }
}

function showFiles(files) {
  byId("files").replaceChildren(...files.filter((file) => !file.error).map(fileCard));
  state.rows = files;
  const before = JSON.stringify(state.components);
  state.components = Object.fromEntries(files.map((file) => [file.path, file.components || {}]));
  if (JSON.stringify(state.components) !== before) drawParts();
}

function facts(rows) {
  return h("dl", { class: "facts" }, ...rows.flatMap(([name, value, style]) => [h("dt", {}, name), h("dd", { class: style || "" }, value)]));
}

function missing() {
  const { product, base, base_needed: needed, inputs, least, writes } = state.form;
  if (product && !state.product) return product;
  if (needed && !state.base) return base;
  if (state.adapters.filter((adapter) => adapter.path).length < least) return inputs;
  const open = state.form.options.find((option) => option.required && taken(option) && !(state.options[option.name] || "").trim());
  return open ? title(open) : writes && !(state.name || "").trim() ? "Output name" : "";
}

const title = (option) => option.name[0].toUpperCase() + option.name.slice(1).replaceAll("_", " ");

function showPlan(preview, filled) {
  state.preview = preview;
  const plan = byId("plan");
  const disk = preview.plan?.disk;
  const full = disk && !disk.enough ? { what: "the disk is too full", where: `${size(disk.needed)} are written, ${size(disk.free)} are free`, fix: "delete files there, or start the page with another --output-folder" } : null;
  const error = preview.error || full;
  const bare = error && state.form.places > 0 && !filled.adapters.some((adapter) => adapter.path);
  const empty = missing() || (bare ? state.form.inputs : "");
  byId("run").disabled = Boolean(empty || error);
  for (const [id, name] of [["copy-command", "command"], ["copy-jobs", "jobs"]]) byId(id).disabled = !preview[name];
  plan.dataset.state = empty ? "empty" : error ? "error" : "ready";
  let summary = "";
  plan.replaceChildren();
  state.error = empty ? null : error;
  if (empty) {
    summary = `Still to choose: ${empty}.`;
    if (!filled.product && !filled.base && !filled.adapters.some((adapter) => adapter.path)) plan.append(h("p", { class: "help" }, "Choose files: what they are and what will be written is shown here."));
  } else if (error) {
    const place = placeOf(preview.at) || placeOf(Object.entries(chosen()).find(([, path]) => rowOf(path)?.error)?.[0]);
    if (place) summary = `Still to correct: ${place.closest(".field, fieldset").querySelector("label, legend").textContent}.`;
    else plan.append(errorBox(error));
  } else if (preview.plan) {
    const row = preview.plan;
    const took = row.seconds === null ? "known after the first run" : time(row.seconds);
    const done = row.status === "done";
    summary = done ? "It is there already, by the same recipe." : `Writes ${size(row.bytes)}; memory for weights: at most ${size(row.memory)}; time: ${took}.`;
    const rows = [["writes", done ? "nothing: it is there already, by the same recipe" : size(row.bytes)], ["to", row.output]];
    if (!done) rows.push(["memory", `at most ${size(row.memory)} for weights`]);
    if (!done && row.disk) rows.push(["disk", `${size(row.disk.needed)} of ${size(row.disk.free)} free`]);
    if (!done) rows.push(["time", took + (row.measured || row.seconds === null ? "" : ", from the speed of the disk")]);
    plan.append(facts(rows));
  } else plan.append(h("p", { class: "help" }, "Nothing is written."));
  byId("summary").textContent = summary;
  showRemarks();
}

// What is wrong is shown once: at the field with the wrong value, else in the plan.

const placeOf = (name) => (name ? byId("fields").querySelector(`[data-place="${name}"]`) : null);

const chosen = () => ({ product: state.product, base: state.base, ...Object.fromEntries(state.adapters.map((adapter, n) => [`adapters.${n}`, adapter.path])) });
const rowOf = (path) => (path ? state.rows.find((row) => row.path === path) : null);

function showRemarks() {
  const paths = chosen();
  for (const slot of byId("fields").querySelectorAll("[data-place]")) {
    const place = slot.dataset.place;
    const file = rowOf(paths[place]);
    const error = file?.error || (state.error && place === state.preview.at ? state.error : null);
    const fit = file?.fits ? `fits: ${file.matched} of ${file.total} modules match` : file?.matched ? `${file.matched} of ${file.total} modules match: ${file.why}` : file?.why || "";
    const text = error ? JSON.stringify(error) : fit;
    if ((slot.dataset.text || "") === text) continue; // announced once
    slot.dataset.text = text;
    slot.previousElementSibling.setAttribute("aria-invalid", String(Boolean(error)));
    slot.replaceChildren(...(error ? [errorBox(error)] : fit ? [h("p", { class: file.fits ? "good" : file.matched ? "warn" : "bad" }, fit)] : []));
    if (error && slot.closest("details")) slot.closest("details").open = true;
  }
}

function fileCard(file) {
  const card = h("div", { class: "card" }, h("h3", {}, nameOf(file.path)));
  if (file.verdict) card.append(h("p", {}, file.verdict));
  if (file.triggers?.length) card.append(h("p", {}, `trigger words: ${file.triggers.join(", ")}`));
  if (file.text) card.append(h("details", {}, h("summary", {}, `all about this ${file.kind === "adapter" ? "adapter" : "file"}`), h("pre", {}, file.text)));
  return card;
}

function lost(error) {
  byId("plan").replaceChildren(errorBox({ what: "the program does not answer", where: String(error.message || error), fix: "start lora-merge ui again, and open the address that it prints" }));
  byId("run").disabled = true;
}

// The queue.

const rows = new Map();
let polling = false;

async function run(event) {
  event.preventDefault();
  if (byId("run").disabled) return;
  const answer = await call("run", values());
  if (answer.error) { showPlan(answer, values()); return; }
  say("added to the queue");
  state.started = answer.number;
  watch();
}

async function watch() {
  if (polling) return;
  polling = true;
  try {
    for (;;) {
      const { runs } = await call("queue");
      runs.forEach(showRun);
      byId("empty").hidden = runs.length > 0;
      if (!runs.some((one) => one.state === "waiting" || one.state === "running")) break;
      await new Promise((done) => setTimeout(done, POLL));
    }
  } catch (error) { lost(error); } finally { polling = false; }
}

function showRun(one) {
  let row = rows.get(one.number);
  if (!row) {
    const title = h("h3", {}, one.title);
    row = { state: h("span", {}), bar: h("progress", { "aria-label": one.title }), body: h("div", {}), was: "" };
    row.cancel = h("button", { type: "button", "aria-label": `cancel ${one.title}`, onclick: async () => { await call("cancel", { number: one.number }); watch(); } }, "Cancel");
    row.item = h("li", { "data-number": String(one.number) }, h("div", { class: "row" }, title, row.state, row.cancel), row.bar, row.body);
    byId("runs").prepend(row.item);
    rows.set(one.number, row);
    if (one.number === state.started) row.item.scrollIntoView({ block: "nearest" });
  }
  const stages = { load: "opening", fetch: "downloading", merge: "merging", make: "computing", flush: "writing", prove: "verifying", look: "measuring" };
  row.state.textContent = one.state === "running" ? `${stages[one.stage] || "planning"}${one.total ? ` ${Math.floor((100 * one.done) / one.total)} %` : ""}` : one.state + (one.state === "done" ? ` in ${one.seconds.toFixed(1)} s` : "");
  row.state.className = { done: "good", failed: "bad" }[one.state] || "";
  row.item.dataset.state = one.state;
  const open = one.state === "waiting" || one.state === "running";
  row.cancel.hidden = !open;
  row.bar.hidden = one.state !== "running";
  if (one.total) { row.bar.max = one.total; row.bar.value = Math.min(one.done, one.total); } else row.bar.removeAttribute("value");
  if (open || row.was === one.state) return;
  if (row.was !== one.state) say(`${one.title}: ${one.state}`);
  row.was = one.state;
  const parts = [];
  if (one.error) parts.push(errorBox(one.error));
  if (one.facts.length) parts.push(h("details", { open: true }, h("summary", {}, "Report"), facts(one.facts.map(([name, value, style], n) => [n && one.facts[n - 1][0] === name ? "" : name, value, STYLES[style.split(" ").pop()]]))));
  if (one.text) parts.push(h("details", { open: true }, h("summary", {}, "Report"), h("pre", {}, one.text)));
  if (one.page) parts.push(reportFrame(one));
  else if (one.pictured) parts.push(h("p", { class: "help" }, "Its page with pictures needs Plotly: pip install plotly, then start lora-merge ui again."));
  row.body.replaceChildren(...parts);
  if (one.output) { state.files = null; refresh(); }
}

function reportFrame(one) {
  return h("details", { ontoggle: (event) => {
    if (event.target.open && !event.target.querySelector("iframe")) {
      const wait = h("p", { class: "help" }, "The pictures are drawn…");
      event.target.append(wait, h("iframe", { src: `report/${one.number}`, sandbox: "allow-scripts", title: `Report with pictures: ${one.title}`, onload: () => wait.remove() }));
    }
  } }, h("summary", {}, "Report with pictures"));
}

// The library, and dropped files.

async function refresh() {
  const library = await call("library");
  if (JSON.stringify(library.entries) === JSON.stringify(state.entries)) return;
  state.entries = library.entries;
  draw();
}

async function take(file) {
  const dropped = byId("dropped");
  dropped.replaceChildren();
  say(`looking for ${file.name}`);
  let { path, error } = await call("find", { name: file.name, size: file.size });
  if (!path && !error) {
    dropped.replaceChildren(h("p", { class: "help" }, `copying ${file.name} (${size(file.size)})…`));
    const answer = await fetch(`api/upload?name=${encodeURIComponent(file.name)}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file });
    ({ path, error } = await answer.json());
  }
  dropped.replaceChildren(...(error ? [errorBox(error)] : []));
  if (error) return;
  await refresh();
  choose(path);
}

function choose(path) {
  const entry = state.entries.find((one) => one.path === path);
  if (state.form.product && !state.product) { state.product = path; draw(); return; }
  const asBase = state.form.of !== "base" && entry?.kinds.length === 1 && entry.kinds[0] === "base";
  if (asBase && state.form.base) { state.base = path; loadParts(); } else {
    const free = state.adapters.find((adapter) => !adapter.path);
    if (free) free.path = path;
    else if (state.adapters.length < state.form.most) state.adapters.push(fresh(path));
    else state.adapters[state.adapters.length - 1].path = path;
  }
  draw();
  say(`${nameOf(path)} is chosen`);
}

async function copy(name, what) {
  if (byId("plan").dataset.state === "stale") await look();
  const text = state.preview?.[name];
  if (!text) return;
  try { await navigator.clipboard.writeText(text); say(`${what} is copied`); } catch { say(`${what} is below the plan`); }
  byId("plan").querySelector(".copied")?.remove();
  byId("plan").append(h("div", { class: "copied" }, h("p", { class: "help" }, `${what}:`), h("pre", { tabindex: "0" }, text)));
}

function select(command) {
  // What was chosen goes from form to form, but between those for new files and those about a finished file.
  if (state.form && (state.form.places === 0) !== (state.forms[command].places === 0)) {
    const chosen = { base: state.base, product: state.product, adapters: state.adapters, aside: state.aside };
    Object.assign(state, state.other || { base: null, product: null, adapters: [], aside: [] }, { other: chosen });
    loadParts();
  }
  state.form = state.forms[command];
  state.named = false;
  state.error = null;
  for (const button of byId("commands").children) button.setAttribute("aria-current", String(button.dataset.command === command));
  // Files that the lists of this form do not offer are put aside for the next one that does.
  const every = [...state.adapters, ...state.aside].filter((adapter) => adapter.path);
  const fits = (adapter) => state.entries.some((entry) => entry.path === adapter.path && offered(entry, state.form.of));
  state.adapters = every.filter(fits);
  state.aside = every.filter((adapter) => !fits(adapter));
  state.options = state.form.filled ??= {}; // each form has options of its own
  draw();
}

async function start() {
  const given = await call("start");
  if (given.error) { byId("plan").replaceChildren(errorBox(given.error)); return; }
  state.forms = Object.fromEntries(given.forms.map((form) => [form.command, form]));
  Object.assign(state, { entries: given.entries, output: given.output, pictures: given.pictures, overwriteHelp: given.overwrite });
  byId("where").textContent = `${given.version} · ${given.folders.join(" · ")}`;
  byId("commands").replaceChildren(...given.forms.map((form) => h("button", { type: "button", "data-command": form.command, title: form.about, onclick: () => select(form.command) }, form.title)));
  byId("form").addEventListener("submit", run);
  byId("copy-command").addEventListener("click", () => copy("command", "The command"));
  byId("copy-jobs").addEventListener("click", () => copy("jobs", "The jobs file"));
  byId("file").addEventListener("change", (event) => { for (const file of event.target.files) take(file); event.target.value = ""; });
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("over"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("over"));
  document.addEventListener("drop", async (event) => { event.preventDefault(); document.body.classList.remove("over"); for (const file of event.dataTransfer.files) await take(file); });
  select("merge");
  await look();
  await watch();
  document.documentElement.dataset.ready = "yes";
}

start().catch(lost);
