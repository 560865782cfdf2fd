"use strict";
const data = JSON.parse(document.querySelector("#data").textContent);
const OPERATIONS = {
  "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b,
  "//": (a, b) => Math.floor(a / b), "**": (a, b) => a ** b, min: Math.min, max: Math.max,
  ">": (a, b) => a > b, ">=": (a, b) => a >= b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, "==": (a, b) => a === b,
  or: (a, b) => a || b, and: (a, b) => a && b, not: a => !a, where: (condition, a, b) => condition ? a : b,
};
const GROUP_COLORS = {
  attention: "var(--pink)", attention_proj: "var(--blue)", mlp: "var(--vermilion)", experts: "var(--wine)",
  lm_head: "var(--green)", state: "var(--amber)", embedding: "var(--sky)",
};
const SVG = "http://www.w3.org/2000/svg";
const select = selector => document.querySelector(selector);

function evaluate(tree, symbols) {
  if (typeof tree === "string") return symbols[tree];
  if (!Array.isArray(tree)) return tree;
  return OPERATIONS[tree[0]](...tree.slice(1).map(argument => evaluate(argument, symbols)));
}

function peak(gpu, dtype, own) {
  for (const name of [dtype, own, "float32"]) if (gpu.flops_per_s[name]) return gpu.flops_per_s[name];
  return Math.max(...Object.values(gpu.flops_per_s));
}

/** The work of a step: FLOPs, bytes and least seconds, in all and by group of operators. */
function count(precision, gpu, symbols, kvShare) {
  const groups = {};
  const sum = { flops: 0, bytes: 0, compute_s: 0, memory_s: 0 };
  for (const operator of precision.operators) {
    const flops = evaluate(operator.flops, symbols);
    const bytes = evaluate(operator.weight_bytes, symbols) + kvShare * evaluate(operator.kv_bytes, symbols)
      + evaluate(operator.other_bytes, symbols);
    const compute_s = flops / peak(gpu, operator.dtype, precision.dtype), memory_s = bytes / gpu.bytes_per_s;
    const group = groups[operator.group] ??= { flops: 0, bytes: 0, seconds: 0 };
    group.flops += flops; group.bytes += bytes; group.seconds += Math.max(compute_s, memory_s);
    sum.flops += flops; sum.bytes += bytes;
    if (compute_s > memory_s) sum.compute_s += compute_s; else sum.memory_s += memory_s;
  }
  const floor_s = sum.compute_s + sum.memory_s;
  return { ...sum, floor_s, groups, bound: sum.compute_s > sum.memory_s ? "compute" : "memory" };
}

function cacheBytes(precision, batch, tokens, kvShare) {
  return kvShare * batch * precision.cache.reduce(
    (sum, layer) => sum + layer.bytes_per_token * (layer.window ? Math.min(tokens, layer.window) : tokens), 0);
}

function largestBatch(precision, gpu, tokens, kvShare) {
  const room = (gpu.memory_bytes ?? Infinity) - precision.weight_bytes, each = cacheBytes(precision, 1, tokens, kvShare);
  return room < 0 ? 0 : each ? Math.floor(room / each) : Infinity;
}

function sizes(least, most) {
  const values = [];
  for (let value = least; value < most; value *= 2) values.push(value, ...(value > 2 && value * 1.5 < most ? [value * 1.5] : []));
  return [...values, most];
}
const BATCHES = sizes(1, 1024), LENGTHS = sizes(16, data.max_positions);

function scaled(value, unit) {
  if (!Number.isFinite(value)) return "-";
  const prefixes = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "u"], [1e-9, "n"]];
  const [size, prefix] = prefixes.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${(value / size).toPrecision(3).replace(/e\+\d+$/, "")} ${prefix}${unit}`;
}
const plain = value => value >= 100 ? Math.round(value).toString() : value.toPrecision(3);
const rate = value => `${plain(value)} tok/s`;
const percent = share => `${Math.round(100 * share)} %`;

// State: the controls, which the address remembers.
const DEFAULTS = { b: "1", p: "512", c: "512", q: data.precisions[0].quant, kv: "1", g: data.gpus[0].name };
function state() {
  const given = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, given.get(name) ?? value]));
}
const nearest = (values, wanted) => values.reduce((best, value, place) =>
  Math.abs(Math.log(value / wanted)) < Math.abs(Math.log(values[best] / wanted)) ? place : best, 0);

function element(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function drawRoofline(gpu, precision, steps, measured) {
  const svg = select("#roofline"), [width, height, left, bottom] = [640, 400, 56, 40];
  svg.replaceChildren();
  const own = peak(gpu, precision.dtype, precision.dtype), ridge = own / gpu.bytes_per_s;
  const xs = [0.3, 3e4], top = 4 * Math.max(...Object.values(gpu.flops_per_s)), ys = [gpu.bytes_per_s * xs[0] / 20, top];
  const x = value => left + (width - left - 10) * Math.log(value / xs[0]) / Math.log(xs[1] / xs[0]);
  const y = value => height - bottom - (height - bottom - 10) * Math.log(value / ys[0]) / Math.log(ys[1] / ys[0]);
  const inside = value => Math.min(Math.max(value, xs[0]), xs[1]);
  element(svg, "rect", { x: left, y: 10, width: x(ridge) - left, height: height - bottom - 10, class: "memory" });
  element(svg, "rect", { x: x(ridge), y: 10, width: width - 10 - x(ridge), height: height - bottom - 10, class: "compute" });
  element(svg, "text", { x: left + 6, y: 26 }, "memory-bound");
  element(svg, "text", { x: width - 16, y: 26, "text-anchor": "end" }, "compute-bound");
  for (let value = 1; value <= 1e4; value *= 10)
    element(svg, "text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, value);
  for (let value = 10 ** Math.ceil(Math.log10(ys[0])); value < ys[1]; value *= 10)
    element(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, scaled(value, "").replace(".00", ""));
  element(svg, "text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "model FLOPs per model byte");
  const rates = [...new Set(Object.values(gpu.flops_per_s))];
  for (const rate of rates) {
    const bend = inside(rate / gpu.bytes_per_s);
    const path = `M ${x(xs[0])} ${y(xs[0] * gpu.bytes_per_s)} L ${x(bend)} ${y(rate)} L ${x(xs[1])} ${y(rate)}`;
    const names = Object.keys(gpu.flops_per_s).filter(name => gpu.flops_per_s[name] === rate).join(", ");
    element(svg, "path", { d: path, class: rate === own ? "roof own" : "roof" });
    element(svg, "text", { x: x(xs[1]) - 4, y: y(rate) - 5, "text-anchor": "end", class: "small" },
      `${names}: ${scaled(rate, "FLOP/s")}`);
  }
  element(svg, "text", { x: x(ridge) + 4, y: height - bottom - 6, class: "small" }, `ridge ${ridge.toPrecision(3)}`);
  for (const [phase, step] of Object.entries(steps)) {
    for (const [name, group] of Object.entries(step.groups)) {
      if (!group.flops || !group.bytes) continue;
      const at = { cx: x(inside(group.flops / group.bytes)), cy: y(group.flops / group.seconds) };
      const dot = element(svg, "circle", { ...at, r: 2 + 14 * Math.sqrt(group.seconds / step.floor_s), class: "group" });
      dot.style.fill = GROUP_COLORS[name] ?? "var(--grey)";
      element(dot, "title", {}, `${phase}: ${name.replace("_", " ")}, ${percent(group.seconds / step.floor_s)} of the floor`);
    }
    const at = [x(inside(step.flops / step.bytes)), y(step.flops / step.floor_s)];
    const mark = phase === "prefill" ? `M ${at[0]} ${at[1] - 7} l 7 12 h -14 z` : `M ${at[0] - 6} ${at[1]} a 6 6 0 1 0 12 0 a 6 6 0 1 0 -12 0`;
    element(svg, "path", { d: mark, class: `step ${phase}` });
    element(svg, "text", { x: at[0] + 10, y: at[1] + 14, class: `label ${phase}` }, phase);
  }
  for (const cell of measured) {
    const mark = element(svg, "text", { x: x(inside(cell.intensity)), y: y(cell.flops) + 5, "text-anchor": "middle", class: `star ${cell.phase}` }, "★");
    element(mark, "title", {}, `measured: ${cell.phase} ${cell.batch} x ${cell.phase === "prefill" ? cell.query : cell.context}, ${scaled(cell.seconds, "s")}`);
  }
}

function drawBars(steps) {
  const box = select("#bars");
  box.replaceChildren();
  const groups = [...new Set(Object.values(steps).flatMap(step => Object.keys(step.groups)))];
  select("#keys").replaceChildren(...groups.filter(group => Object.values(steps).some(step => step.groups[group].seconds > 0.005 * step.floor_s)).map(group => {
    const item = document.createElement("li"), key = document.createElement("span");
    key.className = "key"; key.style.background = GROUP_COLORS[group] ?? "var(--grey)";
    item.append(key, ` ${group.replace("_", " ")}`);
    return item;
  }));
  for (const [phase, step] of Object.entries(steps)) {
    const name = document.createElement("div"), bar = document.createElement("div"), total = document.createElement("div");
    name.textContent = phase; total.textContent = scaled(step.floor_s, "s");
    bar.className = "bar"; bar.setAttribute("role", "img");
    let left = 0;
    const words = [];
    for (const [group, part] of Object.entries(step.groups).sort((a, b) => b[1].seconds - a[1].seconds)) {
      const share = part.seconds / step.floor_s, span = document.createElement("span");
      words.push(`${group.replace("_", " ")} ${percent(share)}`);
      span.style.cssText = `left: ${100 * left}%; width: ${100 * share}%; background: ${GROUP_COLORS[group] ?? "var(--grey)"}`;
      span.title = words.at(-1);
      bar.append(span);
      left += share;
    }
    bar.setAttribute("aria-label", words.join(", "));
    box.append(name, bar, total);
  }
}

function drawMap(precision, gpu, batch, context, kvShare) {
  const table = select("#map"), batches = BATCHES.filter(value => Number.isInteger(Math.log2(value))).reverse();
  const lengths = LENGTHS.filter(value => Number.isInteger(Math.log2(value)) || value === data.max_positions);
  const here = [batches[nearest(batches, batch)], lengths[nearest(lengths, context)]];
  const body = document.createElement("tbody");
  for (const rows of batches) {
    const line = body.insertRow();
    line.append(Object.assign(document.createElement("th"), { textContent: rows }));
    for (const tokens of lengths) {
      const cell = line.insertCell();
      const fits = precision.weight_bytes + cacheBytes(precision, rows, tokens + 1, kvShare) <= (gpu.memory_bytes ?? Infinity);
      const bound = fits ? count(precision, gpu, { batch: rows, query: 1, context: tokens }, kvShare).bound : "no room";
      cell.className = `${bound.replace(" ", "-")}${rows === here[0] && tokens === here[1] ? " here" : ""}`;
      cell.textContent = bound === "no room" ? "" : bound[0];
      cell.title = `decode ${rows} x ${tokens}: ${bound}`;
    }
  }
  const foot = body.insertRow();
  foot.append(document.createElement("th"), ...lengths.map(tokens => Object.assign(document.createElement("th"), { textContent: tokens })));
  table.replaceChildren(body);
}

function fillTable(selector, rows) {
  const body = select(`${selector} tbody`);
  body.replaceChildren(...rows.map(entries => {
    const line = document.createElement("tr");
    for (const [text, value] of entries) {
      const cell = line.insertCell();
      cell.textContent = text;
      if (value !== undefined) { cell.className = "n"; cell.dataset.value = value; }
    }
    return line;
  }));
}

function update() {
  const now = state();
  const precision = data.precisions.find(item => item.quant === now.q) ?? data.precisions[0];
  const gpu = data.gpus.find(item => item.name === now.g) ?? data.gpus[0];
  const [batch, prompt, context] = [Number(now.b), Number(now.p), Number(now.c)], kvShare = Number(now.kv);
  const of = card => ({
    prefill: count(precision, card, { batch, query: prompt, context: 0 }, kvShare),
    decode: count(precision, card, { batch, query: 1, context }, kvShare),
  });
  const steps = of(gpu), tokens = { prefill: batch * prompt, decode: batch };
  select("#batch").value = nearest(BATCHES, batch); select("#batch-is").textContent = batch;
  select("#prompt").value = nearest(LENGTHS, prompt); select("#prompt-is").textContent = prompt;
  select("#context").value = nearest(LENGTHS, context); select("#context-is").textContent = context;
  select("#precision").value = precision.quant; select("#gpu").value = gpu.name; select("#kv").value = now.kv;
  const live = cacheBytes(precision, batch, context + 1, kvShare);
  const blocks = cacheBytes(precision, batch, 16 * Math.ceil((context + 1) / 16), kvShare);
  const needs = precision.weight_bytes + live, room = gpu.memory_bytes ?? Infinity, fits = needs <= room;
  const most = largestBatch(precision, gpu, context + 1, kvShare);
  fillTable("#figures", Object.entries(steps).map(([phase, step]) => [
    [phase], [scaled(step.flops, "FLOP"), step.flops], [scaled(step.bytes, "B"), step.bytes],
    [plain(step.flops / step.bytes), step.flops / step.bytes], [scaled(step.floor_s, "s"), step.floor_s],
    fits ? [rate(tokens[phase] / step.floor_s), tokens[phase] / step.floor_s] : [`no room; at most batch ${most}`, NaN],
    [step.bound],
  ]));
  fillTable("#memory", [
    [["weights"], [scaled(precision.weight_bytes, "B"), precision.weight_bytes]],
    [["KV cache, live tokens"], [scaled(live, "B"), live]],
    [["KV cache, in blocks of 16 tokens"], [scaled(blocks, "B"), blocks]],
    [["together"], [scaled(needs, "B"), needs]],
    [[`memory of ${gpu.name}`], [gpu.memory_bytes ? scaled(gpu.memory_bytes, "B") : "-", gpu.memory_bytes ?? NaN]],
    [["largest batch at this context"], [Number.isFinite(most) ? most : "-", most]],
  ]);
  fillTable("#gpus", data.gpus.map(card => {
    const { prefill, decode } = of(card), cardMost = largestBatch(precision, card, context + 1, kvShare);
    const cardFits = needs <= (card.memory_bytes ?? Infinity);
    return [[card.name], [scaled(prefill.floor_s, "s"), prefill.floor_s], [scaled(decode.floor_s, "s"), decode.floor_s],
      cardFits ? [rate(batch / decode.floor_s), batch / decode.floor_s] : ["no room", NaN],
      [Number.isFinite(cardMost) ? cardMost : "-", cardMost], [decode.bound]];
  }));
  drawRoofline(gpu, precision, steps, data.measured);
  drawBars(steps);
  drawMap(precision, gpu, batch, context, kvShare);
}

function change(name, value) {
  const now = { ...state(), [name]: value };
  history.replaceState(null, "", `#${new URLSearchParams(now)}`);
  update();
}

for (const [id, name, values] of [["batch", "b", BATCHES], ["prompt", "p", LENGTHS], ["context", "c", LENGTHS]]) {
  const slider = select(`#${id}`);
  slider.max = values.length - 1;
  slider.addEventListener("input", () => change(name, values[slider.value]));
}
for (const [id, name, options] of [
  ["precision", "q", data.precisions.map(item => [item.quant, item.quant === "none" ? item.dtype : item.quant])],
  ["gpu", "g", data.gpus.map(item => [item.name, item.name])],
  ["kv", "kv", [["1", "as the model"], ["0.5", "half the bytes"], ["0.25", "a quarter of the bytes"]]],
]) {
  const choice = select(`#${id}`);
  choice.append(...options.map(([value, text]) => new Option(text, value)));
  choice.addEventListener("change", () => change(name, choice.value));
}
addEventListener("hashchange", update);
update();
