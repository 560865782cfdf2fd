"use strict";
// The page of explore looks up what Python computed, at the nearest point of its grid. It evaluates no formula.

/** The place of the value that is nearest by its ratio: the page has no values between. */
function nearest(values, wanted) {
  const off = value => Math.abs(Math.log(value / Math.max(wanted, 0.5)));
  return values.reduce((best, value, place) => off(value) < off(values[best]) ? place : best, 0);
}

const split = {};
/** The value of a column at a point; null where it has none. */
function valueAt(data, column, point) {
  const cell = (split[column] ??= data.columns[column].split(" "))[point];
  return cell === "-" ? null : Number(cell);
}

/** All figures of a format, a GPU (their places), a batch and a context (places on the grid). */
function figuresAt(data, format, gpu, batch, context) {
  const chosen = data.formats[format], point = batch * data.contexts.length + context, value = column => valueAt(data, column, point);
  const step = columns => ({
    flops: value(columns.flops), bytes: value(columns.bytes), floor_s: value(columns.floor_s[gpu]), limit: columns.limits[gpu][point],
  });
  const prefill = step(chosen.prefill), decode = step(chosen.decode);
  return { prefill, decode, weight_bytes: chosen.weight_bytes, cache_bytes: value(chosen.cache_bytes), needs_bytes: value(chosen.needs_bytes[gpu]) };
}

/** The formats of weights in which a decode step fits. */
function fittingFormats(data, gpu, batch, context) {
  const fitting = data.formats.filter(format => format.decode.limits[gpu][batch * data.contexts.length + context] !== "-");
  return fitting.map(format => format.quant === "none" ? data.dtype : format.quant);
}

/** The largest batch of the grid whose decode step fits, in whatever pieces free memory is; 0 if none does. */
function largestBatch(data, format, gpu, context) {
  const limits = data.formats[format].decode.limits[gpu], width = data.contexts.length;
  return data.batches.findLast((_, batch) => "mc".includes(limits[batch * width + context])) ?? 0;
}

const LIMITS = {
  m: "memory", c: "compute", M: "memory, close", C: "compute, close", p: "memory, in chunks", q: "compute, in chunks", "-": "does not fit",
};
const plain = value => value >= 100 ? Math.round(value).toString() : value.toPrecision(3);
function scaled(value, unit) {
  if (value === null) return "-";
  const prefixes = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [0, "n"]];
  const [size, prefix] = prefixes.find(([size]) => value >= 0.9995 * size);
  return `${plain(value / (size || 1e-9))} ${prefix}${unit}`;
}

if (typeof document !== "undefined") {
  const data = JSON.parse(document.querySelector("#data").textContent), select = selector => document.querySelector(selector);
  const made = (tag, properties, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const fill = (selector, rows) => select(selector).replaceChildren(...rows.map(row =>
    made("tr", {}, ...row.map((text, place) => made("td", { className: place ? "n" : "" }, text)))));
  const shape = (parent, tag, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
    element.textContent = text;
    parent.append(element);
  };

  /** The settings of the address, at the nearest points of the grid: a link shows the same view. */
  const settings = () => {
    const given = { b: 1, c: 512, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
    const named = (items, key, name) => Math.max(0, items.findIndex(item => item[key] === name));
    return {
      batch: nearest(data.batches, Number(given.b) || 1), context: nearest(data.contexts, Number(given.c) || 1),
      format: named(data.formats, "quant", given.q), gpu: named(data.gpus, "name", given.g),
    };
  };
  const change = changed => {
    const { batch, context, format, gpu } = { ...settings(), ...changed };
    const kept = { b: data.batches[batch], c: data.contexts[context], q: data.formats[format].quant, g: data.gpus[gpu].name };
    history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    update();
  };
  const controls = { batch: data.batches, context: data.contexts, format: data.formats, gpu: data.gpus };

  function drawRoofline(now, shown) {
    const svg = select("#roofline"), gpu = data.gpus[now.gpu], ridge = gpu.flops_per_s / gpu.bytes_per_s;
    const [left, right, top, bottom] = [56, 630, 12, 340], xs = [0.3, 3e4], ys = [gpu.bytes_per_s / 10, 3 * gpu.flops_per_s];
    const share = (value, [low, high]) => Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
    const x = value => left + (right - left) * share(value, xs), y = value => bottom - (bottom - top) * share(value, ys);
    svg.replaceChildren();
    shape(svg, "rect", { x: left, y: top, width: x(ridge) - left, height: bottom - top, class: "memory" });
    shape(svg, "rect", { x: x(ridge), y: top, width: right - x(ridge), height: bottom - top, class: "compute" });
    shape(svg, "path", { class: "ceiling", d: `M ${x(xs[0])} ${y(xs[0] * gpu.bytes_per_s)} L ${x(ridge)} ${y(gpu.flops_per_s)} H ${right}` });
    for (let value = 1; value <= 1e4; value *= 10) shape(svg, "text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, value);
    for (let value = 10 ** Math.ceil(Math.log10(ys[0])); value < ys[1]; value *= 10)
      shape(svg, "text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, scaled(value, "").replace(/\.0+ /, " "));
    shape(svg, "text", { x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "model FLOPs per model byte");
    shape(svg, "text", { x: right - 4, y: y(gpu.flops_per_s) - 12, "text-anchor": "end" }, `${gpu.dtype} ${scaled(gpu.flops_per_s, "FLOP/s")}`);
    shape(svg, "text", { x: left + 6, y: top + 16 }, scaled(gpu.bytes_per_s, "B/s"));
    for (const phase of ["prefill", "decode"]) {
      const { flops, bytes, floor_s } = shown[phase];
      if (floor_s === null) continue;
      const [across, up] = [x(flops / bytes), y(flops / floor_s)], end = across > right - 90;
      shape(svg, "circle", { cx: across, cy: up, r: 6, class: phase });
      shape(svg, "text", { x: across + (end ? -10 : 10), y: up + 16, "text-anchor": end ? "end" : "start" }, phase);
    }
  }

  function drawMap(now) {
    const limits = data.formats[now.format].decode.limits[now.gpu], width = data.contexts.length;
    const rows = data.batches.map((batch, row) => made("tr", {}, made("th", { scope: "row" }, batch), ...data.contexts.map((context, column) => {
      const letter = limits[row * width + column], here = row === now.batch && column === now.context;
      const title = `decode ${batch} x ${context}: ${LIMITS[letter]}`;
      const cell = made("td", { className: `${LIMITS[letter].replace(", ", " ").replace("does not fit", "full")}${here ? " here" : ""}`, title });
      cell.addEventListener("click", () => change({ batch: row, context: column }));
      return cell;
    })));
    const heads = data.contexts.map((context, column) => made("th", { scope: "col" }, column % 4 ? "" : context >= 1024 ? `${Math.round(context / 1024)}k` : context));
    select("#map").replaceChildren(...rows.reverse(), made("tr", {}, made("th"), ...heads));
  }

  function update() {
    const now = settings(), gpu = data.gpus[now.gpu], batch = data.batches[now.batch], context = data.contexts[now.context];
    const figures = place => figuresAt(data, now.format, place, now.batch, now.context), shown = figures(now.gpu);
    const rate = (tokens, seconds) => seconds === null ? "-" : plain(tokens / seconds);
    for (const name of Object.keys(controls)) select(`#${name}`).value = now[name];
    select("#batch-is").textContent = batch;
    select("#context-is").textContent = context.toLocaleString("en");
    fill("#figures tbody", [["prefill", batch * context], ["decode", batch]].map(([phase, tokens]) => {
      const { flops, bytes, floor_s, limit } = shown[phase], intensity = flops === null ? "-" : plain(flops / bytes);
      return [phase, scaled(flops, "FLOP"), scaled(bytes, "B"), intensity, scaled(floor_s, "s"), rate(tokens, floor_s), LIMITS[limit]];
    }));
    fill("#memory tbody", [
      ["weights", scaled(shown.weight_bytes, "B")], ["KV cache after the decode step", scaled(shown.cache_bytes, "B")],
      ["all tensors of the decode step", scaled(shown.needs_bytes, "B")],
      ["the same with an 8-bit KV cache", scaled(shown.needs_bytes - shown.cache_bytes * (data.dtype === "float32" ? 0.75 : 0.5), "B")],
      [`free memory of ${gpu.name}`, scaled(gpu.room_bytes, "B")],
      ["weights with which this batch fits", fittingFormats(data, now.gpu, now.batch, now.context).join(", ") || "none"],
      ["largest batch of this page that fits at once", largestBatch(data, now.format, now.gpu, now.context) || "none"],
    ]);
    fill("#gpus tbody", data.gpus.map((card, place) => {
      const { prefill, decode } = figures(place), most = largestBatch(data, now.format, place, now.context) || "none";
      return [card.name, scaled(prefill.floor_s, "s"), scaled(decode.floor_s, "s"), rate(batch, decode.floor_s), most, LIMITS[decode.limit]];
    }));
    drawRoofline(now, shown);
    drawMap(now);
  }

  for (const [name, items] of Object.entries(controls)) {
    const control = select(`#${name}`);
    if (control.type === "range") control.max = items.length - 1;
    else control.append(...items.map((item, place) => new Option(item.name ?? (item.quant === "none" ? data.dtype : item.quant), place)));
    control.addEventListener("input", () => change({ [name]: Number(control.value) }));
  }
  addEventListener("hashchange", update);
  update();
}
