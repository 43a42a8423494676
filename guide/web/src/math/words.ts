/** A plan as `anybatch plan` prints it: src/anybatch/planner/plan.py, core/splitting.py, core/units.py. */
import type { Budget, Plan } from "./planner";

const BYTE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** The lines that `anybatch plan` prints, up to the bar; without times and the table of changes. */
export function planLines(one: Plan): string[] {
  const { variant, budget } = one;
  return [
    `${variant.model}: ${grouped(variant.num_parameters)} parameters, AdamW, ${variant.precision}`,
    `on ${one.ranks} x ${deviceLabel(budget)}, ${grouped(one.effective)} samples a step`,
    "",
    ...rows(one.largest > 0 ? rowsThatFit(one) : nothingFits(one)),
  ];
}

/** Used bytes of the device at the proposed size. */
export function usedBytes(one: Plan): number {
  return one.reserved + one.budget.outside + one.budget.workspace;
}

function rowsThatFit(one: Plan): [string, string][] {
  const { budget, peak } = one;
  const used = usedBytes(one);
  const left = 1 - used / budget.total;
  const kept = left >= budget.headroom ? "at least the" : "after the allocator's cache, which may use the";
  return [
    ["fits", `micro-batches of ${one.size}: ${geometry(one.effective, one.ranks, one.size)}`],
    ["peak", `${inBytes(peak.bytes)} in tensors, ${inBytes(used)} in all, ${moment(one)}`],
    ["left", `${fixed(100 * left, 0)}% of the device, ${kept} headroom of ${fixed(100 * budget.headroom, 0)}% (the default)`],
    ["largest", `${one.largest}${limitReason(one)}`],
  ];
}

/** The limit of the micro-batch size. */
export function limitReason(one: Plan): string {
  if (one.binds === "batch") return ", all samples of a rank";
  if (one.binds === "allocator") return `: by tensor sizes alone ${one.largestOfTensors} would fit, but the allocator rounds sizes up`;
  const what = one.binds === "optimizer step" ? "the optimizer's step" : "tensors";
  return `; one more would need ${inBytes(one.oneMore)} for ${what}, but ${inBytes(one.budget.usable)} are available`;
}

function nothingFits(one: Plan): [string, string][] {
  const usable = Math.max(0, one.budget.usable);
  return [
    ["fits", `nothing: one sample takes ${inBytes(one.peak.bytes)}, but ${inBytes(usable)} are available`],
    ["because", reasonNothingFits(one, usable)],
    ["peak", moment(one)],
  ];
}

/** The state or part that is too large alone, or the three largest parts. Names in the order of the recording: see `CATEGORIES`. */
function reasonNothingFits(one: Plan, usable: number): string {
  const parts = one.peak.held.map((bytes, at) => ({ bytes, name: CATEGORIES[at]! }));
  const sorted = [...parts].sort((a, b) => b.bytes - a.bytes || (a.name < b.name ? 1 : -1));
  const state = parts.filter(({ name, bytes }) => bytes && STATE.includes(name));
  const alone = sorted.filter(({ bytes }) => bytes > usable);
  const largest = alone.find(({ name }) => STATE.includes(name)) ?? alone[0];
  if (!STATE.includes(largest?.name ?? "") && state.reduce((sum, { bytes }) => sum + bytes, 0) > usable) {
    return `${state.map(({ name, bytes }) => `${name} (${inBytes(bytes)})`).join(" and ")} alone exceed it`;
  }
  if (largest) return `the ${largest.name} alone ${largest.name === "optimizer" ? "takes" : "take"} ${inBytes(largest.bytes)}`;
  return `no part alone is too large; ${sorted.slice(0, 3).map(({ name, bytes }) => `${name} ${inBytes(bytes)}`).join(", ")}`;
}

/** As memory/trace.py lists them; a test compares this with the recording. */
export const CATEGORIES = ["weights", "buffers", "inputs", "gradients", "optimizer", "activations", "temporaries"];
const STATE = ["weights", "buffers", "gradients", "optimizer"];

function moment({ peak }: Plan): string {
  const places: Record<string, string> = { setup: "before the step", update: "in the update" };
  const place = places[peak.phase] ?? `in the ${peak.phase}`;
  return peak.operation ? `${place}, at ${peak.operation}` : place;
}

function deviceLabel(budget: Budget): string {
  return budget.name ? `${budget.name} (${inBytes(budget.total)})` : inBytes(budget.total);
}

function rows(texts: [string, string][]): string[] {
  return texts.map(([name, text]) => name.padEnd(11) + text);
}

/** The split of a batch over ranks: `256 samples = 2 ranks x 8 micro-batches x 16`. */
export function geometry(samples: number, ranks: number, size: number): string {
  const shares = Array.from({ length: ranks }, (_, rank) => Math.floor(samples / ranks) + (rank < samples % ranks ? 1 : 0));
  const units = shares.map((share) => unitsOf(share, size));
  const largest = Math.max(0, ...units.flat());
  const steps = Math.max(...units.map((share) => share.length));
  const line =
    `${samples} sample${samples === 1 ? "" : "s"} = ${ranks} rank${ranks > 1 ? "s" : ""} x ` +
    `${steps} micro-batch${steps === 1 ? "" : "es"} x ${largest}`;
  const even = units.every((share) => share.length === steps && share.every((one) => one === largest));
  return even ? line : `${line}, ragged: ${ragged(units)}`;
}

function unitsOf(share: number, size: number): number[] {
  const rest = share % size;
  return [...Array<number>(Math.floor(share / size)).fill(size), ...(rest ? [rest] : [])];
}

function ragged(units: number[][]): string {
  return runs(units, (share) => share.join())
    .map(({ first, count, one }) => {
      const name = count === 1 ? `rank ${first}` : `ranks ${first}-${first + count - 1}`;
      const terms = runs(one, String).map((run) => (run.count > 1 ? `${run.count} x ${run.one}` : `${run.one}`));
      const text = terms.join(" + ") || "nothing";
      return units.length === 1 ? text : `${name}: ${text}`;
    })
    .join("; ");
}

/** Group equal neighbours. */
function runs<One>(ones: readonly One[], key: (one: One) => string): { one: One; first: number; count: number }[] {
  const found: { one: One; first: number; count: number }[] = [];
  ones.forEach((one, at) => {
    const last = found.at(-1);
    if (last && key(last.one) === key(one)) last.count += 1;
    else found.push({ one, first: at, count: 1 });
  });
  return found;
}

/** `1.23 GiB`: three significant digits. */
export function inBytes(bytes: number): string {
  let [value, power] = [bytes, 0];
  while (Number(exponential(value)) >= 1000 && power < BYTE_UNITS.length - 1) [value, power] = [value / 1024, power + 1];
  return `${power === 0 ? fixed(bytes, 0) : threeDigits(bytes / 1024 ** power)} ${BYTE_UNITS[power]}`;
}

function threeDigits(value: number): string {
  if (value === 0) return "0";
  const rounded = Number(exponential(value));
  if (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e6) return pythonExponent(exponential(value));
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded))));
  const [whole = "0", part] = fixed(rounded, digits).split(".");
  return part === undefined ? grouped(Number(whole)) : `${grouped(Number(whole))}.${part}`;
}

function pythonExponent(text: string): string {
  return text.replace(/e([+-])(\d)$/, "e$10$2");
}

/** Two digits after the point, and half to even as Python rounds: JavaScript rounds half up. */
function exponential(value: number): string {
  const rounded = value.toExponential(2);
  const exact = value.toExponential(40);
  const isHalf = /^-?\d\.\d{2}50*e/.test(exact);
  if (!isHalf) return rounded;
  const [mantissa = "", exponent = ""] = exact.split("e");
  const down = mantissa.slice(0, mantissa.indexOf(".") + 3);
  return Number(down.at(-1)) % 2 === 0 ? `${down}e${exponent}` : rounded;
}

/** A number with `digits` digits after the point, half to even. */
function fixed(value: number, digits: number): string {
  const exact = value.toFixed(40);
  const point = exact.indexOf(".");
  if (!/^50*$/.test(exact.slice(point + 1 + digits))) return value.toFixed(digits);
  const down = exact.slice(0, digits ? point + 1 + digits : point);
  return Number(down.at(-1)) % 2 === 0 ? down : value.toFixed(digits);
}

function grouped(value: number): string {
  return String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}
