/**
 * The planner, once a step has been traced: the same arithmetic as src/anybatch, on the same whole numbers.
 *
 * A step is some thousands of pieces of memory that come and go in a fixed order; the size of each is a line `a + b m`
 * in the micro-batch size `m`. What tensors hold is a running sum of them. What the allocator takes from the device is
 * more, and no line: its rounding, its segments and its holes are replayed. A test compares a thousand plans with
 * Python's, number by number. All numbers here are bytes below 2^53, so none is ever rounded.
 */

/** What `anybatch guide record memory_planner` writes. */
export interface PlannerData {
  models: { name: string; sequence_lengths: number[]; precisions: string[]; ranks: boolean }[];
  devices: { name: string; memory_bytes: number }[];
  headroom: number;
  context_bytes: number;
  communicator_bytes: number;
  workspace_bytes: number;
  categories: string[];
  phases: string[];
  operations: string[];
  kinds: [constant: number, slope: number, category: number, phase: number, operation: number][];
  variants: VariantData[];
}

export interface VariantData {
  model: string;
  sequence_length: number;
  precision: string;
  optimizer: string;
  checkpointing: boolean;
  several: boolean;
  num_parameters: number;
  num_pieces: [number, number];
  num_moves: [number, number];
  pieces: number[];
  moves: number[];
}

/** What a step holds: src/anybatch/memory/trace.py, MemoryEnvelope. */
export interface Envelope {
  /** `n` where piece number `n - 1` is taken, `-n` where it is let go. */
  events: Int32Array;
  constant: Float64Array;
  slope: Float64Array;
  /** Number of its kind, for each piece. */
  kind: Int32Array;
  /** What is held after an event is a line too. These are the lines of the upper hull, by rising slope: the peak. */
  hull: { constant: number; slope: number }[];
  /** The allocator after the first events, as many as take and let go the same at every size. */
  start: Allocator;
  numAlike: number;
}

export interface Peak {
  bytes: number;
  /** In the order of the recording's categories. */
  held: number[];
  phase: string;
  operation: string;
}

export interface Budget {
  name: string;
  total: number;
  headroom: number;
  outside: number;
  workspace: number;
  usable: number;
}

export type Binding = "tensors" | "allocator" | "optimizer step" | "batch";

export interface Plan {
  variant: VariantData;
  budget: Budget;
  effective: number;
  ranks: number;
  /** The largest micro-batch size that keeps the headroom; 0 if not even one sample fits. */
  largest: number;
  /** The size to take: the share in even parts no larger than that. */
  size: number;
  steps: number;
  peak: Peak;
  reserved: number;
  binds: Binding;
  /** Largest size whose tensors alone would fit. */
  largestOfTensors: number | null;
  /** Tensors' peak with one sample more than the largest. */
  oneMore: number;
}

export interface Wish {
  budget: Budget;
  effective: number;
  ranks: number;
}

/** Numbers that were packed: `0, back, length` stands for `length` numbers copied from `back` places before. */
export function unpacked(numbers: readonly number[]): number[] {
  const out: number[] = [];
  for (let place = 0; place < numbers.length; place++) {
    const number = numbers[place]!;
    if (number !== 0) {
      out.push(number);
      continue;
    }
    const back = numbers[++place]!;
    for (let left = numbers[++place]!; left > 0; left--) out.push(out[out.length - back]!);
  }
  return out;
}

/** The steps of a variant: every one but the first, and the first. */
export function envelopes(data: PlannerData, variant: VariantData): [steady: Envelope, first: Envelope] {
  const pieces = unpacked(variant.pieces);
  const moves = unpacked(variant.moves);
  const [numPieces] = variant.num_pieces;
  const [numMoves] = variant.num_moves;
  return [
    envelope(data, pieces.slice(0, numPieces), moves.slice(0, numMoves)),
    envelope(data, pieces.slice(numPieces), moves.slice(numMoves)),
  ];
}

function envelope(data: PlannerData, pieces: number[], moves: number[]): Envelope {
  const events: number[] = [];
  const held: number[] = [];
  let taken = 0;
  for (const move of moves) {
    if (move < 0) events.push(-held.splice(held.length + move, 1)[0]!);
    else for (let count = 0; count < move; count++) events.push(held[held.push(++taken) - 1]!);
  }
  const kinds = pieces.map((number) => data.kinds[number - 1]!);
  const constant = Float64Array.from(kinds, (kind) => kind[0]);
  const slope = Float64Array.from(kinds, (kind) => kind[1]);
  const differing = events.findIndex((event) => slope[Math.abs(event) - 1] !== 0);
  const numAlike = differing < 0 ? events.length : differing;
  const start = new Allocator(Infinity);
  const all = Int32Array.from(events);
  run(start, all.subarray(0, numAlike), constant);
  return {
    events: all,
    constant,
    slope,
    kind: Int32Array.from(pieces, (number) => number - 1),
    hull: upperHull(events, constant, slope),
    start,
    numAlike,
  };
}

/** Of the running sums, all that may be highest at some m >= 1, and few others. */
function upperHull(events: readonly number[], constant: Float64Array, slope: Float64Array): Envelope["hull"] {
  const best = new Map<number, number>();
  let [held, rise] = [0, 0];
  for (const event of events) {
    const piece = Math.abs(event) - 1;
    held += Math.sign(event) * constant[piece]!;
    rise += Math.sign(event) * slope[piece]!;
    if (held > (best.get(rise) ?? -Infinity)) best.set(rise, held);
  }
  const hull: Envelope["hull"] = [];
  for (const [own, start] of [...best].sort(([a], [b]) => a - b)) {
    // whatever a steeper line is above at m = 1 already, it is above for good
    while (hull.length && hull.at(-1)!.constant + hull.at(-1)!.slope <= start + own) hull.pop();
    hull.push({ constant: start, slope: own });
  }
  return hull;
}

/** Bytes of each piece at micro-batch size `m`. */
export function sizes(one: Envelope, m: number): Float64Array {
  return one.constant.map((constant, number) => constant + one.slope[number]! * m);
}

/** The most that is held at once, and the first event after which it is. */
function highest(one: Envelope, m: number): { bytes: number; event: number } {
  const own = sizes(one, m);
  let [held, bytes, event] = [0, -Infinity, 0];
  for (let at = 0; at < one.events.length; at++) {
    const number = one.events[at]!;
    held += number > 0 ? own[number - 1]! : -own[-number - 1]!;
    if (held > bytes) [bytes, event] = [held, at];
  }
  return { bytes, event };
}

export function peakBytes(one: Envelope, m: number): number {
  let most = 0;
  for (const line of one.hull) most = Math.max(most, line.constant + line.slope * m);
  return most;
}

/** The moment at which most is held, and what is held then. */
export function peakOf(data: PlannerData, one: Envelope, m: number): Peak {
  const { bytes, event } = highest(one, m);
  const own = sizes(one, m);
  const held = data.categories.map(() => 0);
  for (const number of one.events.subarray(0, event + 1)) {
    const piece = Math.abs(number) - 1;
    held[data.kinds[one.kind[piece]!]![2]]! += number > 0 ? own[piece]! : -own[piece]!;
  }
  const [, , , phase, operation] = data.kinds[one.kind[Math.abs(one.events[event]!) - 1]!]!;
  return { bytes, held, phase: data.phases[phase]!, operation: data.operations[operation]! };
}

/** The largest micro-batch size whose tensors fit; null for no limit. */
export function largestOfTensors(one: Envelope, budget: number): number | null {
  if (peakBytes(one, 1) > budget) return 0;
  if (!one.hull.some((line) => line.slope > 0)) return null;
  let [fits, tooLarge] = [1, 2];
  while (peakBytes(one, tooLarge) <= budget) [fits, tooLarge] = [tooLarge, 2 * tooLarge];
  return halved(fits, tooLarge, (m) => peakBytes(one, m) <= budget);
}

/** The last that fits, where `low` does and `high` does not. */
function halved(low: number, high: number, fits: (m: number) => boolean): number {
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

/** The largest micro-batch size that the allocator can serve: src/anybatch/planner/cost/caching_allocator.py. */
export function largestThatFits(one: Envelope, limit: number): number | null {
  const fits = (m: number) => replay(one, m, limit).fits;
  const most = largestOfTensors(one, limit);
  if (most === null) return fits(1) ? null : 0;
  if (most === 0 || fits(most)) return most;
  return halved(0, most, fits);
}

const MEBIBYTE = 2 ** 20;
const ROUNDING = 512;
const LARGEST_SMALL = MEBIBYTE;
const SMALL_SEGMENT = 2 * MEBIBYTE;
const LARGE_SEGMENT = 20 * MEBIBYTE;
const OWN_SEGMENT_FROM = 10 * MEBIBYTE;

interface Block {
  small: boolean;
  address: number;
  size: number;
  taken: boolean;
  before: Block | null;
  after: Block | null;
}

export interface Replay {
  reserved: number;
  fits: boolean;
}

/** What CUDA's caching allocator takes from a device that has `limit` bytes to give. */
export function replay(one: Envelope, m: number, limit = Infinity): Replay {
  // where there was room for all of them, the first events went as they always go
  const short = one.start.peak > limit;
  const allocator = short ? new Allocator(limit) : one.start.copied(limit);
  const fits = run(allocator, short ? one.events : one.events.subarray(one.numAlike), sizes(one, m));
  return { reserved: allocator.peak, fits };
}

/** Take and let go; false if there is no memory for it. */
function run(allocator: Allocator, events: Int32Array, own: Float64Array): boolean {
  for (const event of events) {
    const number = Math.abs(event) - 1;
    if (own[number]! <= 0) continue;
    if (event < 0) allocator.letGo(number);
    else if (!allocator.take(number, own[number]!)) return false;
  }
  return true;
}

class Allocator {
  peak = 0;
  #reserved = 0;
  #next = 0;
  /** Free blocks, sorted by size and then address. */
  #free: Record<"small" | "large", Block[]> = { small: [], large: [] };
  #taken = new Map<number, Block>();
  #limit: number;

  constructor(limit: number) {
    this.#limit = limit;
  }

  /** The same state, for a device with another limit. */
  copied(limit: number): Allocator {
    const copy = new Allocator(limit);
    const twins = new Map<Block, Block>();
    const twin = (block: Block): Block => {
      const found = twins.get(block) ?? { ...block };
      twins.set(block, found);
      return found;
    };
    for (const name of ["small", "large"] as const) copy.#free[name] = this.#free[name].map(twin);
    copy.#taken = new Map([...this.#taken].map(([number, block]) => [number, twin(block)]));
    for (const own of twins.values()) {
      own.before &&= twin(own.before); // every neighbour is free or taken, so it has a twin
      own.after &&= twin(own.after);
    }
    [copy.peak, copy.#reserved, copy.#next] = [this.peak, this.#reserved, this.#next];
    return copy;
  }

  take(number: number, bytes: number): boolean {
    const size = Math.ceil(Math.max(bytes, 1) / ROUNDING) * ROUNDING;
    const small = size <= LARGEST_SMALL;
    let block = this.#bestFit(small, size) ?? this.#segment(small, size);
    if (!block) {
      this.#handBack();
      block = this.#segment(small, size);
    }
    if (!block) return false;
    const rest = block.size - size;
    if (small ? rest >= ROUNDING : rest > LARGEST_SMALL) this.#put(split(block, size));
    block.taken = true;
    this.#taken.set(number, block);
    return true;
  }

  letGo(number: number): void {
    const block = this.#taken.get(number)!;
    this.#taken.delete(number);
    block.taken = false;
    this.#put(this.#joined(block));
  }

  /** The smallest free block that is large enough, the lowest of several. */
  #bestFit(small: boolean, size: number): Block | undefined {
    const free = this.#list(small);
    return free.splice(placeOf(free, size, -1), 1)[0];
  }

  #segment(small: boolean, size: number): Block | null {
    const bytes = small ? SMALL_SEGMENT : size < OWN_SEGMENT_FROM ? LARGE_SEGMENT : Math.ceil(size / SMALL_SEGMENT) * SMALL_SEGMENT;
    if (this.#reserved + bytes > this.#limit) return null;
    this.#reserved += bytes;
    this.peak = Math.max(this.peak, this.#reserved);
    const block: Block = { small, address: this.#next, size: bytes, taken: false, before: null, after: null };
    this.#next += bytes;
    return block;
  }

  /** Give the device all segments that are wholly free. */
  #handBack(): void {
    for (const name of ["small", "large"] as const) {
      this.#free[name] = this.#free[name].filter((block) => {
        const whole = !block.before && !block.after;
        if (whole) this.#reserved -= block.size;
        return !whole;
      });
    }
  }

  #joined(block: Block): Block {
    for (const other of [block.before, block.after]) {
      if (!other || other.taken) continue;
      const free = this.#list(other.small);
      free.splice(placeOf(free, other.size, other.address), 1);
      const [lower, upper] = other.address < block.address ? [other, block] : [block, other];
      block.size = lower.size + upper.size;
      [block.before, block.after] = [lower.before, upper.after];
      block.address = lower.address;
      if (block.before) block.before.after = block;
      if (block.after) block.after.before = block;
    }
    return block;
  }

  #put(block: Block): void {
    const free = this.#list(block.small);
    free.splice(placeOf(free, block.size, block.address), 0, block);
  }

  #list(small: boolean): Block[] {
    return this.#free[small ? "small" : "large"];
  }
}

/** The first place in a list of free blocks that is not before a block of this size and address. */
function placeOf(free: readonly Block[], size: number, address: number): number {
  let [low, high] = [0, free.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    const one = free[middle]!;
    if (one.size < size || (one.size === size && one.address < address)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Cut a block down to `size`; the rest lies above it. */
function split(block: Block, size: number): Block {
  const rest: Block = { small: block.small, address: block.address + size, size: block.size - size, taken: false, before: block, after: block.after };
  if (block.after) block.after.before = rest;
  block.after = rest;
  block.size = size;
  return rest;
}

/** The memory that a step may take: src/anybatch/planner/budget.py. */
export function budgetOf(data: PlannerData, name: string, total: number, ranks: number, headroom: number): Budget {
  const outside = data.context_bytes + (ranks > 1 ? data.communicator_bytes : 0);
  const workspace = data.workspace_bytes;
  return { name, total, headroom, outside, workspace, usable: Math.trunc(total * (1 - headroom)) - outside - workspace };
}

/** The size that cuts a share into as few parts as `limit` allows, and those as equal as can be. */
export function evenSize(share: number, limit: number): number {
  return Math.ceil(share / Math.ceil(share / Math.max(1, limit)));
}

/** What fits: src/anybatch/planner/proposals/rank.py, fit_of. */
export function plan(data: PlannerData, variant: VariantData, both: [Envelope, Envelope], wish: Wish): Plan {
  const [steady, first] = both;
  const { usable } = wish.budget;
  const share = Math.ceil(wish.effective / wish.ranks);
  const found = usable > 0 ? smaller(largestThatFits(steady, usable), largestThatFits(first, usable)) : 0;
  const largest = found === null ? share : Math.min(share, found);
  const size = evenSize(share, Math.max(1, largest));
  const held = (m: number) => Math.max(peakBytes(steady, m), peakBytes(first, m));
  const envelopeOf = peakBytes(steady, size) >= peakBytes(first, size) ? steady : first;
  let reserved = Math.max(...both.map((one) => replay(one, size).reserved));
  if (largest) reserved = Math.max(held(size), Math.min(reserved, usable));
  return {
    variant,
    ...wish,
    largest,
    size,
    steps: Math.ceil(share / size),
    peak: peakOf(data, envelopeOf, size),
    reserved,
    binds: binding(data, both, largest, usable, share),
    largestOfTensors: largestOfTensors(envelopeOf, usable),
    oneMore: peakBytes(envelopeOf, largest + 1),
  };
}

/** What the next larger micro-batch size would not fit for. */
function binding(data: PlannerData, [steady, first]: [Envelope, Envelope], size: number, usable: number, share: number): Binding {
  if (size >= share) return "batch";
  const [later, earlier] = [peakBytes(steady, size + 1), peakBytes(first, size + 1)];
  if (Math.max(later, earlier) <= usable) return "allocator";
  return peakOf(data, later >= earlier ? steady : first, size + 1).phase === "update" ? "optimizer step" : "tensors";
}

function smaller(one: number | null, other: number | null): number | null {
  if (one === null || other === null) return one ?? other;
  return Math.min(one, other);
}

/** What the device's memory is held for, in the order it is stacked: tensors by category, and what is beside them. */
export const ORDER = ["weights", "buffers", "optimizer", "gradients", "inputs", "activations", "temporaries"];
export function byPurpose(data: PlannerData, one: Plan): [name: string, bytes: number][] {
  const held: [string, number][] = ORDER.map((name) => [name, one.peak.held[data.categories.indexOf(name)]!]);
  held.push(["allocator", one.reserved - one.peak.bytes], ["libraries", one.budget.outside + one.budget.workspace]);
  return held.filter(([, bytes]) => bytes !== 0);
}
