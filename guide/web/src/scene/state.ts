/** The picture at a moment: plain data, computed from the recording and the time alone, so that seeking is exact. */
import { formatNumber } from "../math/format";
import { BATCH, MIB, nameOf, NUM_BLOCKS, type Home, type Memory } from "./data";
import { bell, glide, mix, noise, overshoot, ramp, settle, smooth, windUp } from "./easing";
import { clipAt, NUM_STEPS, refusal, type Clip, type Kind, type Story } from "./story";

export type Phase = "forward" | "backward" | "accumulate" | "update";

export interface Digit extends Home {
  image: number;
  /** 0 at home, 1 in the GPU. */
  away: number;
  lift: number;
  turn: number;
  /** Whether its micro-batch has been accumulated. */
  done: number;
  /** Width factor while it is turned over. */
  flip: number;
  /** Its index within its micro-batch. */
  seat: number;
}

export interface Picture {
  time: number;
  clip: Clip;
  /** Progress within the clip. */
  progress: number;
  heading: string;
  detail: string;
  isBad: boolean;
  memory: Memory;
  peak: number;
  /** How red the GPU is. */
  red: number;
  shake: number;
  /** How far the outline of the unsplit batch's memory has grown. */
  outline: number;
  /** How far the unsplit batch's memory is drawn next to the split one's. */
  compared: number;
  gradient: number[];
  wanted: number[];
  wantedSeen: number;
  matches: number;
  /** The filled part of the sum's bar, in samples. */
  summed: number;
  weights: number[];
  before: number[];
  beforeSeen: number;
  flash: number;
  /** Losses drawn so far, with a fraction. */
  points: number;
  updates: number;
  digits: Digit[];
  gaps: readonly [number, number];
  /** How far micro-batches have moved apart. */
  apart: number;
  /** How far micro-batches are coloured. */
  tint: number;
  /** Number of samples that are in the GPU at the same time. */
  seats: number;
  phase: Phase | null;
  /** The line of code, from 1; 0 for none. */
  line: number;
  /** Whether the code has the lines of accumulation. */
  isSplit: boolean;
  /** Where a forward or backward is in the network: from 0 to 1, or null. */
  pulse: number | null;
  /** For each block, how active its backward is. */
  returning: number[];
}

export function pictureAt(story: Story, time: number): Picture {
  const clip = clipAt(story, time);
  const { kind, act, step, part } = clip;
  const p = ramp(time, clip.from, clip.to);
  const { data, split } = story;
  const timeline = story.timelines[act];
  const own = act === 0 ? data.splits[0]! : split;
  const parts = own.sizes.length;
  const isSplit = act === 1 && parts > 1;
  const refused = refusal(timeline);
  const [forward, backward, done] = [own.forward[part] ?? 0, own.backward[part] ?? 0, own.done[part] ?? 0];
  const stopsHere = refused !== null && refused.part === part && refused.kind === kind;
  const halt = timeline.refusedAt;

  let moment = -1.2;
  let scale = 1;
  if (kind === "load") moment = mix(part ? (own.done[part - 1] ?? 0) : -1.2, forward - (part ? 1.2 : 0.2), p);
  else if (kind === "forward") moment = mix(forward - (part ? 1.2 : 0.2), stopsHere ? halt + 1 : backward, 0.6 * smooth(p) + 0.4 * p);
  else if (kind === "backward") moment = mix(backward, stopsHere ? halt + 1 : done, 0.6 * smooth(p) + 0.4 * p);
  else if (kind === "accumulate" || kind === "fits") moment = done;
  else if (kind === "refuse" || kind === "stop") moment = halt + 1;
  else if (kind === "eject") {
    moment = refused ? halt + 1 : done;
    scale = 1 - smooth(ramp(p, 0, 0.6));
  } else if (kind === "update") moment = mix(own.update, own.zero, ramp(p, 0.3, 1));
  else if (kind === "zero") moment = mix(own.zero, own.end, smooth(ramp(p, 0, 0.7)));
  else if (kind === "rest") {
    moment = timeline.peakMoment;
    scale = glide(ramp(p, 0, 0.55));
  } else scale = 0;
  const memory = timeline.at(moment, { scale, exact: kind === "rest" });
  const peak = kind === "rest" ? own.peak : scale === 0 ? memory.total : Math.max(memory.total, timeline.peakBefore(Math.min(moment, halt < 0 ? moment : halt)));

  const offsets = own.sizes.map((_, at) => own.sizes.slice(0, at).reduce((a, b) => a + b, 0));
  const sums = own.sums[step] ?? [];
  let added = 0; // micro-batches in the sum, with a fraction
  let fade = 1;
  if (kind === "fits") added = smooth(ramp(p, 0, 0.3));
  else if (kind === "eject" && !refused) {
    added = 1;
    fade = 1 - smooth(ramp(p, 0, 0.6));
  } else if (["load", "forward", "backward", "refuse", "stop"].includes(kind)) added = Math.max(0, part);
  else if (kind === "accumulate") added = part + glide(ramp(p, 0.3, 0.85));
  else if (kind === "update") added = parts;
  else if (kind === "zero") {
    added = parts;
    fade = 1 - glide(ramp(p, 0, 0.8));
  } else if (kind === "rest") {
    added = parts;
    fade = glide(ramp(p, 0.1, 0.6));
  }
  const whole = Math.floor(added);
  const wanted = data.gradients[step] ?? [];
  const gradient = wanted.map((_, at) => {
    const low = whole > 0 ? (sums[whole - 1]?.[at] ?? 0) : 0;
    const high = whole < parts ? (sums[whole]?.[at] ?? low) : low;
    return mix(low, high, added - whole) * fade;
  });
  const summed = ((offsets[whole] ?? BATCH) + (added - whole) * (own.sizes[whole] ?? 0)) * fade;

  const moved = kind === "update" ? overshoot(ramp(p, 0.5, 0.9), 2.2) : kind === "zero" || kind === "rest" ? 1 : 0;
  const before = data.weights[step] ?? [];
  const after = data.weights[step + 1] ?? before;
  const hasStarted = act === 1;
  const points = hasStarted ? step + (kind === "update" ? ramp(p, 0.6, 1) : kind === "zero" || kind === "rest" ? 1 : 0) : 0;
  const sinceSplit = ramp(time, story.splitAt + 0.15, story.splitAt + 1.0);
  const { homes, gaps } = story;
  const going = kind === "forward" || kind === "backward";
  const reach = stopsHere ? p * stopAt(refused!.kind, halt, forward, backward, done) : p;

  const { heading, detail, isBad } = captionAt(story, clip, refused !== null);
  const bad = kind === "refuse" ? settle(ramp(p, 0.1, 0.22)) : kind === "stop" ? 1 : kind === "eject" && refused ? 1 - smooth(ramp(p, 0.1, 0.7)) : 0;
  return {
    time,
    clip,
    progress: p,
    heading,
    detail,
    isBad,
    memory,
    peak,
    red: bad,
    shake: kind === "refuse" ? Math.sin(ramp(p, 0.1, 0.5) * Math.PI * 6) * (1 - ramp(p, 0.1, 0.5)) ** 2 : 0,
    outline: outlineAt(story, time),
    compared: kind === "rest" && parts > 1 ? glide(ramp(p, 0.25, 0.75)) : 0,
    gradient,
    wanted: wanted.map((value, at) => (kind === "deal" ? mix(data.gradients[step - 1]?.[at] ?? value, value, glide(p)) : value)),
    wantedSeen: isSplit ? glide(ramp(time, story.splitAt + 0.4, story.splitAt + 1.5)) : 0,
    matches: !isSplit ? 0 : kind === "rest" ? ramp(p, 0.5, 0.7) : kind === "update" ? ramp(p, 0, 0.15) : kind === "zero" ? 1 - ramp(p, 0, 0.3) : 0,
    summed,
    weights: before.map((value, at) => mix(value, after[at] ?? value, moved)),
    before,
    beforeSeen: kind === "update" ? ramp(p, 0.45, 0.55) : kind === "zero" ? 1 - p : 0,
    flash: kind === "update" ? bell(ramp(p, 0.45, 1)) : 0,
    points,
    updates: Math.floor(points + 0.5),
    digits: digitsAt(story, clip, p, homes),
    gaps,
    apart: isSplit ? glide(sinceSplit) : 0,
    tint: isSplit ? smooth(ramp(time, story.splitAt + 0.5, story.splitAt + 1.2)) : 0,
    seats: kind === "eject" || act === 0 ? BATCH : (own.sizes[Math.max(0, part)] ?? BATCH),
    phase: phaseOf(kind, refused?.kind),
    line: lineOf(kind, p, isSplit, refused?.kind),
    isSplit,
    pulse: going ? (kind === "forward" ? reach : 1 - reach) : null,
    returning: kind === "backward" ? returningAt(own.returns[part] ?? [], done, moment) : Array.from({ length: NUM_BLOCKS }, () => 0),
  };
}

/** How far through a clip its refused allocation is. */
function stopAt(kind: "forward" | "backward" | "update", halt: number, forward: number, backward: number, done: number): number {
  return kind === "forward" ? ramp(halt, forward, backward) : ramp(halt, backward, done);
}

/** Each block's share of a backward: it rises when the backward enters the block, and falls when it leaves. */
function returningAt(entered: readonly number[], done: number, moment: number): number[] {
  return entered.map((from, block) => bell(ramp(moment, from, block ? (entered[block - 1] ?? done) : done)));
}

/** The outline of the unsplit batch's memory grows when it runs out, and stays. */
function outlineAt(story: Story, time: number): number {
  const refuse = story.clips.find(({ kind }) => kind === "refuse");
  if (!refuse || story.timelines[0].refusedAt < 0) return 0;
  return time < refuse.from ? 0 : glide(ramp(time, refuse.from + 0.3, refuse.from + 1.2));
}

function phaseOf(kind: Kind, refusedIn?: Phase | "forward" | "backward" | "update"): Phase | null {
  if (kind === "forward" || kind === "backward" || kind === "accumulate" || kind === "update") return kind;
  return kind === "refuse" || kind === "stop" ? (refusedIn ?? null) : null;
}

function lineOf(kind: Kind, p: number, isSplit: boolean, refusedIn?: string): number {
  if (kind === "refuse" || kind === "stop") return { forward: 2, backward: 3, update: 5 }[refusedIn ?? ""] ?? 0;
  if (kind === "accumulate") return isSplit && p >= 0.6 ? 4 : 3;
  return { load: 1, forward: 2, backward: 3, fits: 3, update: 5, zero: 6 }[kind as string] ?? 0;
}

function digitsAt(story: Story, clip: Clip, p: number, homes: readonly Home[]): Digit[] {
  const { kind, act, step, part } = clip;
  const spread = [0.35, 0.3, 0.2][step] ?? 0.2;
  const refused = story.timelines[act].refusedAt >= 0;
  const seen = new Map<number, number>();
  const sizes = story.split.sizes;
  return homes.map((home, sample) => {
    const seat = act === 0 ? sample : (seen.get(home.part) ?? 0);
    seen.set(home.part, seat + 1);
    const order = ((7 - home.column) * 8 + home.row) / BATCH;
    const isOut = act === 0 || home.part === part;
    let [away, lift, turn] = [0, 34, 0];
    if (isOut && kind === "load") {
      const near = act === 0 ? 1 - order : 1 - seat / (sizes[home.part] ?? 1);
      const start = act === 0 ? order * 0.42 : near * spread;
      away = windUp(ramp(p, start, start + (act === 0 ? 0.58 : 1 - spread)));
    } else if (isOut && ["forward", "backward", "refuse", "stop", "fits"].includes(kind)) away = 1;
    else if (isOut && kind === "accumulate") {
      const start = (seat / (sizes[home.part] ?? 1)) * spread * 0.7;
      away = 1 - glide(ramp(p, start, start + 0.65));
    } else if (kind === "eject") {
      const late = noise(sample) * 0.25;
      away = 1 - (refused ? overshoot(ramp(p, late, late + 0.75), 1.1) : glide(ramp(p, late, late + 0.75)));
      lift = refused ? 80 + 60 * noise(sample + 70) : 34;
      turn = refused ? (noise(sample + 140) - 0.5) * 2.2 * bell(ramp(p, late, late + 0.75)) : 0;
    }
    let done = 0;
    let [image, flip] = [step * BATCH + sample, 1];
    if (act === 1 && sizes.length > 1) {
      if (kind === "update" || kind === "zero" || kind === "rest") done = 1;
      else if (kind !== "split" && kind !== "deal" && part > home.part) done = 1;
      else if (kind === "accumulate" && isOut) done = smooth(ramp(p, 0.45, 0.9));
    }
    if (kind === "deal") {
      const start = (order + home.row * 0.02) * 0.5;
      const turned = ramp(p, start, start + 0.42);
      flip = Math.abs(Math.cos(Math.PI * smooth(turned)));
      if (turned < 0.5) image -= BATCH;
      done = turned < 0.5 && sizes.length > 1 ? 1 : 0;
    }
    return { ...home, image, away, lift, turn, done, flip, seat };
  });
}

interface Caption {
  heading: string;
  detail: string;
  isBad: boolean;
}

/** Bytes in MiB, with two decimals. */
export const mib = (bytes: number) => (bytes / MIB).toFixed(2);

function captionAt(story: Story, { kind, act, step, part }: Clip, refused: boolean): Caption {
  const { split, limit, data } = story;
  const sizes = act === 0 ? [BATCH] : split.sizes;
  const parts = sizes.length;
  const size = sizes[Math.max(0, part)] ?? BATCH;
  const needed = act === 0 ? data.splits[0]!.peak : split.peak;
  const caption = (heading: string, detail: string, isBad = false): Caption => ({ heading, detail, isBad });
  const where = `Micro-batch ${part + 1} of ${parts}.`;
  if (act === 0 && (kind === "intro" || kind === "load")) return caption("Train on 64 digits at once", "First without a split: one forward, one backward, one update.");
  if (kind === "intro") return caption("All 64 digits in one pass", "No accumulation.");
  if (kind === "refuse" || (kind === "eject" && refused)) {
    return caption("Out of memory", `${parts > 1 ? `Micro-batches of ${size} need` : "The whole step needs"} ${mib(needed)} MiB. The limit is ${(limit / MIB).toFixed(1)}.`, true);
  }
  if (kind === "stop") return caption("Still out of memory", parts > 1 ? "Choose smaller micro-batches, or raise the limit." : "Choose micro-batches, or raise the limit.", true);
  if (kind === "fits" || kind === "eject") return caption("All 64 fit", `This step needs ${mib(needed)} MiB. The limit is ${(limit / MIB).toFixed(1)}.`);
  if (kind === "split") return caption(`Split into ${parts} micro-batches`, `${counted(parts)} parts of ${listed(sizes)} digits, one after the other.`);
  if (kind === "update") return caption("Update the weights once", step ? `Step ${step + 1} of ${NUM_STEPS}.` : "With the gradient of all 64 digits.");
  if (kind === "zero") return caption("Clear the gradient", step ? `Step ${step + 1} of ${NUM_STEPS}.` : "Ready for the next 64 digits.");
  if (kind === "deal") return caption("The next 64 digits", `Step ${step + 1} of ${NUM_STEPS}.`);
  if (kind === "rest") return parts > 1 ? caption(`Same gradient as the full batch.\n${share(split.peak / data.splits[0]!.peak)} of its memory.`, "") : caption("Three updates", "Each with the gradient of 64 digits.");
  if (step) return caption(`Step ${step + 1}: the same again, faster`, parts > 1 ? where : "");
  if (parts === 1) return kind === "load" ? caption("Train on 64 digits at once", "") : wholePass(kind);
  if (kind === "load") return caption(part === parts - 1 ? `The last ${size} digits` : part ? `The next ${size} digits` : `The first ${size} digits`, where);
  if (kind === "forward") return caption("Forward: activations rise", part ? where : "Every layer keeps what the backward needs.");
  if (kind === "backward") return caption("Backward: activations are freed", part ? where : `The result is the gradient of ${size} digits.`);
  const summed = sizes.slice(0, part + 1).reduce((a, b) => a + b, 0);
  return part === parts - 1 ? caption("Accumulate: the sum is complete", "It is the gradient of all 64 digits.") : caption("Accumulate: the gradient stays", `${summed} of 64 digits are in the sum.`);
}

function wholePass(kind: Kind): Caption {
  if (kind === "forward") return { heading: "Forward: activations rise", detail: "The backward pass will need them.", isBad: false };
  return { heading: "Backward: activations are freed", detail: "The result is the gradient of 64 digits.", isBad: false };
}

function listed(sizes: readonly number[]): string {
  return new Set(sizes).size > 1 ? `${sizes.slice(0, -1).join(", ")} and ${sizes.at(-1)}` : `${sizes[0]}`;
}

const counted = (parts: number) => ["Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight"][parts] ?? `${parts}`;

/** A fraction in words, as "46%". */
export const share = (part: number) => `${formatNumber(100 * part, 2)}%`;

/** A sentence for the scene at a moment, for screen readers. */
export function spokenText(story: Story, picture: Picture): string {
  const words = `${picture.heading.replace("\n", " ")}. ${picture.detail}`.replace("..", ".").trim();
  return `${nameOf(story.split.sizes)}: ${words} Memory ${mib(picture.memory.total)} MiB.`;
}
