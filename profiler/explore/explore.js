// The page: controls, tables and pictures of what theory.js computes.
const data = JSON.parse(document.querySelector("#data").textContent);
const GROUP_COLORS = {
  attention: "var(--pink)", attention_proj: "var(--blue)", mlp: "var(--vermilion)", experts: "var(--wine)",
  lm_head: "var(--green)", state: "var(--amber)", embedding: "var(--sky)", collective: "var(--ink)",
};
const SVG = "http://www.w3.org/2000/svg";
const BLOCK_TOKENS = 16;
const select = selector => document.querySelector(selector);
const contexts = [...new Set(data.lengths.map(length => Math.min(length, data.max_positions - 1)))];
const prefixes = [0, ...contexts], drafts = [...Array(17).keys()];

function scaled(value, unit) {
  if (!Number.isFinite(value)) return "-";
  const prefixes = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "u"], [1e-9, "n"]];
  const [size, prefix] = prefixes.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return `${plain(value / size)} ${prefix}${unit}`;
}
const plain = value => value >= 100 ? Math.round(value).toString() : value.toPrecision(3);
const percent = share => `${Math.round(100 * share)} %`;
const words = group => group.replace("_", " ");
/** The place of the value that is nearest by its ratio; 0 counts as a half. */
const nearest = (values, wanted) => {
  const off = value => Math.abs(Math.log((value || 0.5) / (wanted || 0.5)));
  return values.reduce((best, value, place) => off(value) < off(values[best]) ? place : best, 0);
};

// The address remembers the settings, so that a link shows the same view.
const first = data.entries[0];
const DEFAULTS = {
  b: 1, x: 0, v: 0, p: Math.min(512, data.max_positions), c: Math.min(512, data.max_positions - 1), q: first.quant,
  kv: first.kv_bits, t: 1, g: data.gpus[0].name, l: data.links[0]?.name ?? "",
};
if (data.run) {
  const cell = data.run.cells.find(cell => cell.phase === "decode") ?? data.run.cells[0];
  if (cell) Object.assign(DEFAULTS, { b: cell.batch, c: cell.phase === "decode" ? cell.length : DEFAULTS.c });
  DEFAULTS.p = data.run.cells.find(cell => cell.phase === "prefill")?.length ?? DEFAULTS.p;
  if (data.entries.some(entry => entry.quant === data.run.quant)) DEFAULTS.q = data.run.quant;
}

/** What the address asks for, and the settings that are possible. */
function settings() {
  const given = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) }, notes = [];
  const number = (name, what, least, most) => {
    const value = Math.round(Number(given[name]));
    if (value >= least && value <= most) return value;
    const used = Number.isNaN(value) ? DEFAULTS[name] : Math.min(Math.max(value, least), most);
    notes.push(`${what} ${given[name]} is not possible: it is ${least} to ${most.toLocaleString("en")}. Shown: ${used.toLocaleString("en")}.`);
    return used;
  };
  const named = (items, key, value, what) => {
    const found = items.find(item => String(item[key]) === String(value));
    if (!found && items.length) notes.push(`${what} ${value} is not on this page. Shown: ${items[0][key]}.`);
    return found ?? items[0];
  };
  const batch = number("b", "batch", 1, 2 ** 20), prompt = number("p", "prompt", 1, data.max_positions);
  const context = number("c", "context", 0, data.max_positions - 1);
  const prefix = number("x", "prefix", 0, Math.min(prompt - 1, context)), verified = number("v", "drafts", 0, data.max_positions - context - 1);
  const whole = named(data.entries, "quant", given.q, "precision"), gpu = named(data.gpus, "name", given.g, "GPU");
  const shares = data.entries.filter(entry => entry.quant === whole.quant);
  const entry = named(shares, "ranks", given.t, `${whole.quant === "none" ? whole.dtype : whole.quant} weights: tensor parallel`);
  const link = named(data.links.filter(link => link.ranks === entry.ranks), "name", given.l, "link");
  const rated = ratedDtype(gpu, entry.dtype, entry.dtype);
  if (rated !== entry.dtype) notes.push(`${gpu.name} has no ${entry.dtype} roof; its floor is that of ${rated}.`);
  const bits = number("kv", "KV cache bits", 1, entry.kv_bits);
  return { batch, prompt, context, prefix, verified, tokens: context + 1 + verified, entry, gpu, link, bits, notes };
}

/** The settings as the figures of both steps. */
function figures(now) {
  const { batch, prompt, context, prefix, verified, tokens, entry, gpu, link, bits } = now;
  const whole = BigInt(batch), shared = BigInt(prefix), asked = BigInt(1 + verified);
  const decode = { batch: whole, query: 1n, context: BigInt(context), shared }, one = stepWork(entry, decode, bits);
  const work = {
    prefill: stepWork(entry, { batch: whole, query: BigInt(prompt) - shared, context: shared, shared }, bits),
    decode: verified ? stepWork(entry, { ...decode, query: asked, asked }, bits) : one,
  };
  const floors = gpu => Object.fromEntries(Object.entries(work).map(([phase, step]) => [phase, floorOf(step, entry, gpu, link)]));
  const live = cacheBytes(entry, batch, tokens, bits, prefix);
  const allocated = cacheBytes(entry, batch, BLOCK_TOKENS * Math.ceil(tokens / BLOCK_TOKENS), bits, prefix);
  return {
    work, floors, live, allocated, oneToken: floorOf(one, entry, gpu, link).total,
    needs: neededBytes(entry, gpu, batch, context, tokens, bits, prefix), safe: safeBytes(entry, gpu, batch, context, tokens, bits, prefix),
    tokens: { prefill: batch * (prompt - prefix), decode: batch * (1 + verified) },
    fits: fits(entry, gpu, batch, context, tokens, bits, prefix), most: largestBatch(entry, gpu, context, tokens, bits, prefix),
    prefillFits: fits(entry, gpu, batch, prompt, prompt, bits, prefix), prefillMost: largestBatch(entry, gpu, prompt, prompt, bits, prefix),
  };
}

const several = (entry, gpu) => entry.ranks > 1 ? `${entry.ranks} x ${gpu.name}` : gpu.name;
const isRun = now => data.run && now.gpu.name === data.run.gpu && now.entry.quant === data.run.quant
  && now.entry.ranks === 1 && now.bits === now.entry.kv_bits && !now.prefix && !now.verified;
const ofRun = (cells, phase, now) => cells.find(cell => cell.phase === phase && cell.batch === now.batch
  && cell.length === (phase === "prefill" ? now.prompt : now.context));

/** One line on what would fit, in the order of the least change. */
function advice(now, shown) {
  const { batch, context, prefix, tokens, entry, gpu, bits } = now, ways = [];
  if (shown.fits) return isSafe(entry, gpu, batch, context, tokens, bits, prefix) ? ""
    : `Tight: the tensors fit, but the step runs out of memory if free memory on ${gpu.name} is in pieces. Room for ${scaled(shown.safe, "B")} is enough.`;
  const fit = (other, card, width) => isSafe(other, card, batch, context, tokens, width, prefix);
  const name = other => other.quant === "none" ? other.dtype : other.quant;
  if (shown.most) ways.push(`batch ${shown.most}`);
  for (const width of [8, 4]) if (width < bits && fit(entry, gpu, width)) { ways.push(`a KV cache of ${width} bits`); break; }
  const packed = data.entries.find(other => other.ranks === entry.ranks && fit(other, gpu, Math.min(bits, other.kv_bits)));
  if (packed) ways.push(`${name(packed)} weights`);
  const share = data.entries.find(other => other.quant === entry.quant && other.ranks > entry.ranks && fit(other, gpu, bits));
  if (share) ways.push(several(share, gpu));
  const card = data.gpus.find(card => fit(entry, card, bits));
  if (card) ways.push(several(entry, card));
  const needs = `This needs ${scaled(shown.needs, "B")}; ${gpu.name} has room for ${scaled(gpu.room_bytes, "B")}.`;
  if (ways.length) return `${needs} What fits: ${ways.join(", or ")}.`;
  return `${needs} Nothing on this page fits it; use a shorter context, a smaller batch or a larger GPU (--gpu).`;
}

function html(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A row of a table; [text, value] is a figure with its unrounded value. */
function row(entries) {
  return html("tr", {}, ...entries.map(entry => {
    if (!Array.isArray(entry)) return html("td", {}, entry);
    const cell = html("td", { className: "n", title: String(entry[1]) }, entry[0]);
    cell.dataset.value = entry[1];
    return cell;
  }));
}
/** Fill a table; cells that do not change stay, since laying out and drawing new ones costs a frame. */
function fillTable(selector, rows) {
  const body = select(`${selector} tbody`);
  rows.map(row).forEach((made, place) => {
    const old = body.rows[place];
    if (old?.cells.length !== made.cells.length) return old ? old.replaceWith(made) : body.append(made);
    [...made.cells].forEach((cell, column) => old.cells[column].isEqualNode(cell) || old.cells[column].replaceWith(cell));
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}
const mark = text => html("span", { className: `mark ${text}` }, text);
const rate = (tokens, seconds) => [`${plain(tokens / seconds)} tok/s`, tokens / seconds];

/** What a shared prefix and verified drafts mean for the figures. */
function remarks({ batch, prefix, verified }, shown, floors) {
  const lines = [], cost = floors.decode.total / shown.oneToken;
  if (prefix && batch > 1) lines.push("A step is counted as if it read the shared prefix once for all sequences; plain attention kernels read it once for each.");
  if (verified) lines.push(`The decode step verifies ${verified} drafts per sequence, and has ${plain(cost)} times the floor of one token. `
    + (cost > verified + 1 ? "It does not pay, even if all are accepted." : `It pays from ${plain(cost - 1)} accepted drafts per step on, without the cost of drafting. Its tok/s are those if all are accepted.`));
  return lines;
}

function drawTables(now, shown) {
  const { batch, context, prefix, tokens, entry, gpu, bits } = now, floors = shown.floors(gpu);
  const room = { prefill: [shown.prefillFits, shown.prefillMost], decode: [shown.fits, shown.most] };
  fillTable("#figures", Object.entries(shown.work).map(([phase, work]) => [
    phase, [scaled(Number(work.flops), "FLOP"), work.flops], [scaled(Number(work.bytes), "B"), work.bytes],
    [plain(Number(work.flops) / Number(work.bytes)), Number(work.flops) / Number(work.bytes)],
    [scaled(floors[phase].total, "s"), floors[phase].total],
    room[phase][0] ? rate(shown.tokens[phase], floors[phase].total) : [`batch ${room[phase][1]}`, NaN],
    room[phase][0] ? floors[phase].bound : "no room",
  ]));
  select("#counted").textContent = entry.ranks > 1 ? `counted, one of ${entry.ranks} ranks` : "counted";
  select("#bounded").replaceChildren("bound by ", mark(gpu.source), ...(entry.ranks > 1 ? [" and ", mark("published"), " link"] : []));
  const figure = value => [scaled(value, "B"), value];
  fillTable("#memory", [
    [entry.ranks > 1 ? "weights of one rank" : "weights", figure(entry.weight_bytes), mark("counted")],
    ["KV cache, logical (live tokens)", figure(shown.live), mark("counted")],
    [`KV cache, allocated (blocks of ${BLOCK_TOKENS} tokens)`, figure(shown.allocated), mark("counted")],
    ["weights, logical KV cache and workspace", figure(shown.needs), mark("counted")],
    ["the same if free memory is in pieces, at most", figure(shown.safe), mark("counted")],
    [`room on ${gpu.name}`, gpu.room_bytes ? figure(gpu.room_bytes) : ["-", NaN], mark(gpu.source)],
    [`largest batch at ${tokens} tokens`, [Number.isFinite(shown.most) ? shown.most : "-", shown.most], mark("counted")],
  ]);
  fillTable("#gpus", data.gpus.map(card => {
    const { prefill, decode } = shown.floors(card), most = largestBatch(entry, card, context, tokens, bits, prefix);
    return [html("span", {}, several(entry, card), " ", mark(card.source)), [scaled(prefill.total, "s"), prefill.total], [scaled(decode.total, "s"), decode.total],
      fits(entry, card, batch, context, tokens, bits, prefix) ? rate(shown.tokens.decode, decode.total) : ["no room", NaN],
      [Number.isFinite(most) ? most : "-", most], decode.bound];
  }));
  select("#advice").textContent = advice(now, shown);
  select("#notes").replaceChildren(...[...now.notes, ...remarks(now, shown, floors)].map(note => html("li", {}, note)));
  if (data.run) drawRun(now, shown, floors);
}

function drawRun(now, shown, floors) {
  const rows = [];
  for (const phase of isRun(now) ? Object.keys(floors) : []) {
    const cell = ofRun(data.run.cells, phase, now), step = ofRun(data.run.forecasts, phase, now);
    const line = (name, seconds, interval) => rows.push([phase, mark(name), [scaled(seconds, "s"), seconds], interval,
      rate(shown.tokens[phase], seconds), [plain(seconds / floors[phase].total), seconds / floors[phase].total]]);
    if (cell) line("measured", cell.seconds, "");
    else if (step) line("forecast", step.seconds,
      `${scaled(step.low_s, "s")} to ${scaled(step.high_s, "s")}${step.between ? "" : ", beyond the measured cells"}`);
    else rows.push([phase, "not measured, and too far from what was for a forecast"]);
  }
  if (!rows.length) rows.push([`choose ${data.run.gpu}, ${data.run.quant === "none" ? "unquantised" : data.run.quant} weights and the model's KV cache on one device`]);
  fillTable("#run", rows);
  for (const line of select("#run tbody").rows) if (line.cells.length < 6) line.lastChild.colSpan = 7 - line.cells.length;
}

function shape(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

let chartWidth = 640;
const CHART = { height: 400, left: 60, bottom: 40, top: 10, right: 10 };

/** Positions on the chart of a FLOP/byte and of a FLOP/s. */
function axes(gpu) {
  const { height, left, bottom, top, right } = CHART;
  const xs = [0.3, 3e4], ys = [gpu.bytes_per_s * xs[0] / 20, 4 * Math.max(...Object.values(gpu.flops_per_s))];
  const share = (value, [low, high]) => Math.log(Math.min(Math.max(value, low), high) / low) / Math.log(high / low);
  return { xs, ys, x: value => left + (chartWidth - left - right) * share(value, xs), y: value => height - bottom - (height - bottom - top) * share(value, ys) };
}

let roofsKey = "";
/** The roofs are drawn again when their GPU, dtype or width changes; the sliders move only what lies under them. */
function drawRoofs({ gpu, entry }, { xs, ys, x, y }) {
  const key = [gpu.name, entry.dtype, chartWidth].join(), { height, left, bottom, top, right } = CHART, width = chartWidth;
  if (key === roofsKey) return;
  roofsKey = key;
  select("#roofline").setAttribute("viewBox", `0 0 ${width} ${height}`);
  const svg = select("#roofs");
  svg.replaceChildren();
  const own = peak(gpu, entry.dtype, entry.dtype), ridge = own / gpu.bytes_per_s;
  shape(svg, "rect", { x: left, y: top, width: x(ridge) - left, height: height - bottom - top, class: "memory" });
  shape(svg, "rect", { x: x(ridge), y: top, width: width - right - x(ridge), height: height - bottom - top, class: "compute" });
  shape(svg, "text", { x: left + 6, y: 26 }, "memory-bound");
  shape(svg, "text", { x: width - 16, y: 26, "text-anchor": "end" }, "compute-bound");
  for (let value = 1; value <= 1e4; value *= 10)
    shape(svg, "text", { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }, value);
  for (let power = Math.ceil(Math.log10(ys[0])); 10 ** power < ys[1]; power++)
    shape(svg, "text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, `${10 ** (power - 3 * Math.floor(power / 3))} ${["", "k", "M", "G", "T", "P"][Math.floor(power / 3)]}`);
  shape(svg, "text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "model FLOPs per model byte");
  shape(svg, "text", { x: 11, y: (height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(height - bottom) / 2})` }, "FLOP/s");
  const named = rate => Object.keys(gpu.flops_per_s).filter(name => gpu.flops_per_s[name] === rate).join(", ");
  const ceilings = [
    ...[...new Set(Object.values(gpu.flops_per_s))].map(rate => [rate, named(rate), rate === own ? "roof own" : "roof"]),
    ...Object.entries(gpu.sustained).map(([name, rate]) => [rate, `${name}, sustained`, "roof sustained"]),
  ];
  let above = Infinity;
  for (const [rate, name, kind] of ceilings.sort(([a], [b]) => a - b)) {
    shape(svg, "path", {
      d: `M ${x(xs[0])} ${y(xs[0] * gpu.bytes_per_s)} L ${x(rate / gpu.bytes_per_s)} ${y(rate)} L ${x(xs[1])} ${y(rate)}`,
      class: kind,
    });
    above = Math.min(y(rate) - 4, above - 11);
    shape(svg, "text", { x: x(xs[1]) - 4, y: above, "text-anchor": "end", class: "small" }, `${name}: ${scaled(rate, name.startsWith("int") ? "OP/s" : "FLOP/s")}`);
  }
  shape(svg, "text", { x: x(ridge) + 4, y: height - bottom - 6, class: "small" }, `ridge ${ridge.toPrecision(3)} FLOP/byte`);
}

function drawRoofline(now, shown) {
  const { gpu } = now, floors = shown.floors(gpu), places = axes(gpu), { x, y } = places;
  drawRoofs(now, places);
  const svg = select("#steps");
  svg.replaceChildren();
  for (const [phase, floor] of Object.entries(floors)) {
    const work = shown.work[phase], intensity = Number(work.flops) / Number(work.bytes);
    for (const [name, group] of Object.entries(floor.groups)) {
      if (!group.flops || !group.bytes) continue;
      const share = group.seconds / floor.total;
      const dot = shape(svg, "circle", { cx: x(group.flops / group.bytes), cy: y(group.flops / group.seconds), r: 2 + 14 * Math.sqrt(share), class: "group" });
      dot.style.fill = GROUP_COLORS[name] ?? "var(--grey)";
      shape(dot, "title", {}, `${phase}: ${words(name)}, ${percent(share)} of the floor`);
    }
    const [across, up] = [x(intensity), y(Number(work.flops) / floor.total)];
    shape(svg, "path", {
      class: `step ${phase}`,
      d: phase === "prefill" ? `M ${across} ${up - 7} l 7 12 h -14 z` : `M ${across - 6} ${up} a 6 6 0 1 0 12 0 a 6 6 0 1 0 -12 0`,
    });
    const isRight = across > chartWidth - 120;
    shape(svg, "text", { x: across + (isRight ? -10 : 10), y: up + 16, "text-anchor": isRight ? "end" : "start", class: `label ${phase}` }, phase);
    const step = isRun(now) && !ofRun(data.run.cells, phase, now) && ofRun(data.run.forecasts, phase, now);
    if (step) {
      const flops = Number(work.flops);
      shape(svg, "path", { class: `forecast ${phase}`, d: `M ${across - 5} ${y(flops / step.low_s)} h 10 m -5 0 V ${y(flops / step.high_s)} m -5 0 h 10` });
      shape(svg, "path", { class: `forecast ${phase}`, d: `M ${across} ${y(flops / step.seconds) - 5} l 5 5 l -5 5 l -5 -5 z` });
    }
  }
  if (!data.run || gpu.name !== data.run.gpu) return;
  for (const cell of data.run.cells) {
    const star = shape(svg, "text", { x: x(cell.intensity), y: y(cell.flops) + 5, "text-anchor": "middle", class: `star ${cell.phase}` }, "★");
    shape(star, "title", {}, `measured: ${cell.phase} ${cell.batch} x ${cell.length}, ${scaled(cell.seconds, "s")}`);
  }
}

function drawBars(floors) {
  const shares = Object.values(floors).flatMap(floor => Object.entries(floor.groups).map(([group, part]) => [group, part.seconds / floor.total]));
  const groups = [...new Set(shares.filter(([, share]) => share > 0.005).map(([group]) => group))];
  const color = group => GROUP_COLORS[group] ?? "var(--grey)";
  select("#keys").replaceChildren(...groups.map(group => {
    const key = html("span", { className: "key" });
    key.style.background = color(group);
    return html("li", {}, key, ` ${words(group)}`);
  }));
  select("#bars").replaceChildren(...Object.entries(floors).flatMap(([phase, floor]) => {
    const bar = html("div", { className: "bar", role: "img" }), parts = [];
    let left = 0;
    for (const [group, part] of Object.entries(floor.groups).sort((a, b) => b[1].seconds - a[1].seconds)) {
      const share = part.seconds / floor.total, piece = html("span", { title: `${words(group)} ${percent(share)}` });
      piece.style.cssText = `left: ${100 * left}%; width: ${100 * share}%; background: ${color(group)}`;
      parts.push(piece.title);
      bar.append(piece);
      left += share;
    }
    bar.ariaLabel = `${phase}: ${parts.join(", ")}`;
    return [html("div", {}, phase), bar, html("div", {}, scaled(floor.total, "s"))];
  }));
}

const isPower = value => Number.isInteger(Math.log2(value));
const mapBatches = data.batches.filter(isPower).reverse(), mapContexts = contexts.filter(value => isPower(value) || value === contexts.at(-1));
let mapKey = "";
/** The map is drawn again when its model, GPU or link changes; the sliders move only its cursor. */
function drawMap(now) {
  const { prefix, verified, entry, gpu, link, bits } = now, query = 1 + verified;
  const key = [data.entries.indexOf(entry), gpu.name, link?.name, bits, prefix, verified].join();
  const table = select("#map");
  if (key !== mapKey) {
    mapKey = key;
    const rows = mapBatches.map(batch => html("tr", {}, html("th", { scope: "row" }, batch), ...mapContexts.map(context => {
      const shared = Math.min(prefix, context), room = fits(entry, gpu, batch, context, context + query, bits, shared);
      const bound = room ? floorOf(stepWork(entry, { batch, query, context, shared, asked: query }, bits), entry, gpu, link).bound : "no room";
      const cell = html("td", { className: bound.replace(" ", "-"), title: `decode ${batch} x ${context}: ${bound}` }, room ? bound[0] : "");
      cell.addEventListener("click", () => change({ b: batch, c: context }));
      return cell;
    })));
    rows.push(html("tr", {}, html("th", {}, ""), ...mapContexts.map(context => html("th", { scope: "col" }, context >= 1024 ? `${Math.round(context / 1024)}k` : context))));
    table.replaceChildren(html("tbody", {}, ...rows));
  }
  table.querySelector(".here")?.classList.remove("here");
  table.rows[nearest(mapBatches, now.batch)].cells[1 + nearest(mapContexts, now.context)].classList.add("here");
}

function drawControls(now) {
  for (const [id, values, value] of [["batch", data.batches, now.batch], ["prompt", data.lengths, now.prompt], ["context", contexts, now.context], ["prefix", prefixes, now.prefix], ["drafts", drafts, now.verified]]) {
    select(`#${id}`).value = nearest(values, value);
    select(`#${id}`).setAttribute("aria-valuetext", value);
    select(`#${id}-is`).textContent = value.toLocaleString("en");
  }
  const { entry, gpu, link, bits } = now;
  select("#precision").value = entry.quant; select("#gpu").value = gpu.name; select("#kv").value = bits;
  select("#ranks").value = entry.ranks;
  for (const option of select("#ranks").options)
    option.disabled = !data.entries.some(other => other.quant === entry.quant && other.ranks === Number(option.value));
  select("#link").value = link?.name ?? ""; select("#link").disabled = entry.ranks === 1;
}

function update() {
  const now = settings(), shown = figures(now);
  drawControls(now);
  drawTables(now, shown);
  drawRoofline(now, shown);
  drawBars(shown.floors(now.gpu));
  drawMap(now);
}

function change(changed) {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  history.replaceState(null, "", `#${new URLSearchParams({ ...DEFAULTS, ...given, ...changed })}`);
  update();
}

for (const [id, name, values] of [["batch", "b", data.batches], ["prompt", "p", data.lengths], ["context", "c", contexts], ["prefix", "x", prefixes], ["drafts", "v", drafts]]) {
  const slider = select(`#${id}`);
  slider.max = values.length - 1;
  slider.addEventListener("input", () => change({ [name]: values[slider.value] }));
}
const unique = values => [...new Set(values)];
for (const [id, name, options] of [
  ["precision", "q", unique(data.entries.map(entry => entry.quant)).map(quant => [quant, quant === "none" ? first.dtype : quant])],
  ["gpu", "g", data.gpus.map(gpu => [gpu.name, `${gpu.name} (${gpu.source})`])],
  ["kv", "kv", [first.kv_bits, 8, 4].filter((bits, place) => !place || bits < first.kv_bits).map((bits, place) => [bits, `${bits} bits${place ? "" : ", as the model"}`])],
  ["ranks", "t", unique(data.entries.map(entry => entry.ranks)).map(ranks => [ranks, ranks === 1 ? "1 GPU" : `${ranks} GPUs`])],
  ["link", "l", unique(data.links.map(link => link.name)).map(link => [link, link])],
]) {
  const choice = select(`#${id}`);
  choice.append(...options.map(([value, text]) => new Option(text, value)));
  choice.addEventListener("change", () => change(name === "q" ? { q: choice.value, t: data.entries.some(entry => entry.quant === choice.value && entry.ranks === settings().entry.ranks) ? settings().entry.ranks : 1 } : { [name]: choice.value }));
}
addEventListener("hashchange", update);
function resized() {
  const width = Math.min(640, Math.max(360, select("#roofline").clientWidth));
  if (width !== chartWidth) { chartWidth = width; update(); }
}
addEventListener("resize", resized);
update();
resized();
