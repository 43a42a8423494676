/** The scene over time: clips, one after the other, for a split and a memory limit. */
import { MemoryTimeline, homesOf, type Home, type SceneData, type Split } from "./data";

export type Kind =
  | "intro"
  | "load"
  | "forward"
  | "backward"
  | "accumulate"
  | "refuse"
  | "fits"
  | "eject"
  | "split"
  | "deal"
  | "update"
  | "zero"
  | "stop"
  | "rest";

export interface Clip {
  kind: Kind;
  /** 0: all samples in one pass; 1: in micro-batches. */
  act: 0 | 1;
  step: number;
  /** The micro-batch, or -1. */
  part: number;
  from: number;
  to: number;
}

export interface Story {
  data: SceneData;
  split: Split;
  limit: number;
  /** The memory of each act. */
  timelines: readonly [MemoryTimeline, MemoryTimeline];
  /** The places of the samples. */
  homes: Home[];
  gaps: readonly [number, number];
  clips: Clip[];
  /** Where each part of the story begins, for jumping. */
  chapters: { at: number; name: string }[];
  end: number;
  /** When the batch is in micro-batches for the first time. */
  splitAt: number;
}

export const NUM_STEPS = 3;
const FIRST = [0.85, 1.2, 1.3, 0.95];
const SECOND = [0.55, 0.7, 0.75, 0.6];
/** Seconds of all micro-batches of steps 2 and 3. */
const LATER_STEPS = [4.5, 3.4];

/** Seconds of the four phases of a micro-batch. */
function paceOf(step: number, part: number, parts: number): number[] {
  if (step > 0) return [0.24, 0.26, 0.28, 0.22].map((share) => (share * (LATER_STEPS[step - 1] ?? 3)) / Math.max(2, parts));
  if (part === 0) return FIRST;
  if (part === 1) return SECOND;
  return [0.45, 0.5, 0.55, 0.5].map((seconds) => seconds * Math.min(1, 3 / parts + 0.25));
}

/** The clip in which memory runs out: which micro-batch and phase. */
export function refusal(timeline: MemoryTimeline): { part: number; kind: "forward" | "backward" | "update" } | null {
  const { split, refusedAt } = timeline;
  if (refusedAt < 0) return null;
  if (refusedAt >= split.update) return { part: split.sizes.length - 1, kind: "update" };
  const part = split.forward.findLastIndex((moment) => moment <= refusedAt);
  return { part, kind: refusedAt < (split.backward[part] ?? 0) ? "forward" : "backward" };
}

export function storyOf(data: SceneData, split: Split, limit: number): Story {
  const unsplit = data.splits[0]!;
  const parts = split.sizes.length;
  const timelines = [new MemoryTimeline(unsplit, data.state, limit), new MemoryTimeline(split, data.state, limit)] as const;
  const clips: Clip[] = [];
  let length = 0;
  const clip = (kind: Kind, seconds: number, act: 0 | 1, step = 0, part = -1) => {
    clips.push({ kind, act, step, part, from: length, to: length + seconds });
    length += seconds;
  };
  const chapters: Story["chapters"] = [];

  if (parts > 1) {
    chapters.push({ at: 0, name: "64 at once" });
    clip("intro", 1.1, 0);
    clip("load", 1.35, 0, 0, 0);
    const refused = refusal(timelines[0]);
    clip("forward", 1.5, 0, 0, 0);
    if (refused?.kind !== "forward") clip("backward", 1.5, 0, 0, 0);
    clip(refused ? "refuse" : "fits", 1.9, 0, 0, 0);
    clip("eject", 1.05, 0, 0, 0);
  }
  const splitAt = length;
  chapters.push({ at: length, name: parts > 1 ? `${parts} micro-batches` : "64 at once" });
  clip(parts > 1 ? "split" : "intro", 1.5, 1);

  const refused = refusal(timelines[1]);
  for (let step = 0; step < NUM_STEPS; step++) {
    if (step) {
      chapters.push({ at: length, name: `step ${step + 1}` });
      clip("deal", [0, 0.8, 0.6][step] ?? 0.6, 1, step);
    }
    for (let part = 0; part < parts; part++) {
      const [load = 0, forward = 0, backward = 0, accumulate = 0] = paceOf(step, part, parts);
      clip("load", load, 1, step, part);
      clip("forward", forward, 1, step, part);
      if (refused?.part === part && refused.kind === "forward") break;
      clip("backward", backward, 1, step, part);
      if (refused?.part === part && refused.kind === "backward") break;
      clip("accumulate", accumulate, 1, step, part);
    }
    if (refused) break;
    clip("update", [1.7, 1.0, 0.9][step] ?? 1, 1, step);
    clip("zero", [0.7, 0.4, 0.4][step] ?? 0.4, 1, step);
  }
  if (refused) {
    clip("refuse", 1.9, 1, 0, refused.part);
    clip("stop", 1.6, 1, 0, refused.part);
  } else clip("rest", 2.2, 1, NUM_STEPS - 1);
  return { data, split, limit, timelines, ...homesOf(split.sizes), clips, chapters, end: length, splitAt };
}

export function clipAt(story: Story, time: number): Clip {
  return story.clips.find((one) => time < one.to) ?? story.clips.at(-1)!;
}
