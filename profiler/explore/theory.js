"use strict";
// The theory of the page: expressions, work, floors and room, without the document. Whole numbers are BigInt where the
// symbols are, so that FLOPs and bytes are exact; symbols that are plain numbers are faster.

/** Operands of two kinds become plain numbers, as NumPy's integers become floats. */
const alike = operation => (a, b) => typeof a === typeof b ? operation(a, b) : operation(Number(a), Number(b));
const OPERATIONS = {
  "+": alike((a, b) => a + b), "-": alike((a, b) => a - b), "*": alike((a, b) => a * b),
  "/": (a, b) => Number(a) / Number(b), "**": alike((a, b) => a ** b),
  "//": alike((a, b) => typeof a === "bigint" ? a / b : Math.floor(a / b)),
  min: (a, b) => a < b ? a : b, max: (a, b) => a > b ? a : b,
  ">": (a, b) => a > b, ">=": (a, b) => a >= b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, "==": (a, b) => a == b,
  or: (a, b) => a || b, and: (a, b) => a && b, not: a => !a, where: (condition, a, b) => condition ? a : b,
};
const add = OPERATIONS["+"];

/** A function of the symbols; an `exact` one takes and gives BigInt. */
function compiled(tree, exact) {
  if (typeof tree === "string") return symbols => symbols[tree];
  if (!Array.isArray(tree)) {
    const value = exact && Number.isInteger(tree) ? BigInt(tree) : tree;
    return () => value;
  }
  const operation = OPERATIONS[tree[0]], [a, b, c] = tree.slice(1).map(argument => compiled(argument, exact));
  if (c) return symbols => operation(a(symbols), b(symbols), c(symbols));
  if (b) return symbols => operation(a(symbols), b(symbols));
  return symbols => operation(a(symbols));
}

const FUNCTIONS = new WeakMap();
/** The value of an expression; an expression is compiled once. */
function evaluate(owner, name, symbols) {
  const exact = typeof symbols.batch === "bigint", key = exact ? `${name} exact` : name;
  let functions = FUNCTIONS.get(owner);
  if (!functions) FUNCTIONS.set(owner, functions = {});
  return (functions[key] ??= compiled(owner[name], exact))(symbols);
}

/** Bytes of the KV cache with `bits` per element in place of the model's own. */
const narrowed = (bytes, entry, bits) => bits === entry.kv_bits ? bytes
  : typeof bytes === "bigint" ? bytes * BigInt(bits) / BigInt(entry.kv_bits) : bytes * bits / entry.kv_bits;

/** The work of a step by operator, and in all. No token is shared, and one logit is asked for, unless symbols say so. */
function stepWork(entry, given, bits) {
  const [zero, one] = typeof given.batch === "bigint" ? [0n, 1n] : [0, 1], symbols = { shared: zero, asked: one, ...given };
  let flops = zero, bytes = zero;
  const operators = entry.operators.map(operator => {
    const own = {
      group: operator.group, dtype: operator.dtype, flops: evaluate(operator, "flops", symbols),
      bytes: add(add(evaluate(operator, "weight_bytes", symbols),
        narrowed(evaluate(operator, "kv_bytes", symbols), entry, bits)), evaluate(operator, "other_bytes", symbols)),
    };
    flops = add(flops, own.flops); bytes = add(bytes, own.bytes);
    return own;
  });
  const collectives = entry.collectives.map(item => (
    { count: item.count, busBytes: item.bus_share * Number(evaluate(item, "link_bytes", symbols)) }));
  return { flops, bytes, operators, collectives };
}

/** The dtype whose peak bounds `dtype` on a GPU, for a model of dtype `own`. */
const ratedDtype = (gpu, dtype, own) =>
  [dtype, own, own === "bfloat16" ? "float16" : own, "float32"].find(name => gpu.flops_per_s[name]);
const peak = (gpu, dtype, own) => gpu.flops_per_s[ratedDtype(gpu, dtype, own)] ?? Math.max(...Object.values(gpu.flops_per_s));

/** The least seconds of a step: by roof, by group of operators, and in all. No collective overlaps an operator. */
function floorOf(work, entry, gpu, link) {
  const seconds = { compute: 0, memory: 0, link: 0 }, groups = {};
  for (const operator of work.operators) {
    const flops = Number(operator.flops), bytes = Number(operator.bytes);
    const compute = flops / peak(gpu, operator.dtype, entry.dtype), memory = bytes / gpu.bytes_per_s;
    seconds[compute > memory ? "compute" : "memory"] += Math.max(compute, memory);
    const group = groups[operator.group] ??= { flops: 0, bytes: 0, seconds: 0 };
    group.flops += flops; group.bytes += bytes; group.seconds += Math.max(compute, memory);
  }
  for (const item of work.collectives) seconds.link += item.count * link.alpha_s + item.busBytes / link.bus_bytes_per_s;
  if (seconds.link) groups.collective = { flops: 0, bytes: 0, seconds: seconds.link };
  const bound = Object.keys(seconds).reduce((best, roof) => seconds[roof] > seconds[best] ? roof : best, "memory");
  return { ...seconds, total: seconds.compute + seconds.memory + seconds.link, groups, bound };
}

/** Bytes of the KV cache of `batch` sequences of `tokens` each, the first `shared` of which are kept once. */
const stateBytes = (entry, batch) => typeof batch === "bigint" ? batch * BigInt(entry.state_bytes) : batch * entry.state_bytes;
const cacheBytes = (entry, batch, tokens, bits, shared = batch - batch) => stateBytes(entry, batch)
  + narrowed(evaluate(entry, "cache_bytes", { batch, tokens, shared }) - stateBytes(entry, batch), entry, bits);

/** Weights, a KV cache of `tokens`, and the workspace of the prefill of `query` of them, whose first `shared` are cached. */
const neededBytes = (entry, gpu, batch, query, tokens, bits, shared = 0) => entry.weight_bytes + cacheBytes(entry, batch, tokens, bits, shared)
  + evaluate(entry, gpu.fuses_grouped_heads ? "workspace_bytes" : "unfused_workspace_bytes", { batch, query: query - shared, tokens, shared });

/** The bytes with which that prefill runs, in whatever pieces free memory is. */
const safeBytes = (entry, gpu, batch, query, tokens, bits, shared = 0) => neededBytes(entry, gpu, batch, query, tokens, bits, shared)
  + evaluate(entry, "fragmentation_bytes", { batch, query: query - shared, tokens, shared });

const fits = (entry, gpu, batch, query, tokens, bits, shared) =>
  neededBytes(entry, gpu, batch, query, tokens, bits, shared) <= (gpu.room_bytes ?? Infinity);

/** Whether it fits, in whatever pieces free memory is. */
const isSafe = (entry, gpu, batch, query, tokens, bits, shared) =>
  safeBytes(entry, gpu, batch, query, tokens, bits, shared) <= (gpu.room_bytes ?? Infinity);

const MOST_BATCH = 2 ** 24;
/** The largest batch that fits, in whatever pieces free memory is; 0 if none does, Infinity without a limit. */
function largestBatch(entry, gpu, query, tokens, bits, shared) {
  if (isSafe(entry, gpu, MOST_BATCH, query, tokens, bits, shared)) return Infinity;
  let [low, high] = [0, MOST_BATCH];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (isSafe(entry, gpu, middle, query, tokens, bits, shared)) low = middle; else high = middle;
  }
  return low;
}
