/** The chapters of the page, in order. A chapter is one file here and one entry below; `deeper` parts fold out at its end. */
import type { Component } from "svelte";

/** A part of the page with its own address, such as `#words`. Its script loads when the part is near the screen. */
export interface Part {
  id: string;
  title: string;
  load: () => Promise<{ default: Component }>;
}

export interface Chapter extends Part {
  number: number;
  /** Parts that are collapsed at the end of the chapter. */
  deeper: Part[];
}

const sizeFold = (name: keyof typeof import("./batch_size/folds")) => async () => ({ default: (await import("./batch_size/folds"))[name] });

const ENTRIES: (Part & { deeper?: Part[] })[] = [
  {
    id: "gpu-memory",
    title: "Why a batch does not fit",
    load: () => import("./GpuMemory.svelte"),
    deeper: [
      { id: "planner", title: "A plan for real models and GPUs", load: () => import("./Planner.svelte") },
      { id: "out-of-memory", title: "Running out of memory, and predicting it from two small steps", load: () => import("./OutOfMemory.svelte") },
    ],
  },
  {
    id: "split",
    title: "Split, accumulate, update",
    load: () => import("./SplitSum.svelte"),
    deeper: [
      { id: "words", title: "Vocabulary: eight terms for the parts of a step", load: () => import("./Words.svelte") },
      { id: "one-batch", title: "One batch split four ways, and three mistakes", load: () => import("./OneBatch.svelte") },
    ],
  },
  {
    id: "loop",
    title: "The full loop",
    load: () => import("./FullLoop.svelte"),
    deeper: [
      { id: "walk", title: "Other loops, line by line: DDP, anybatch, and nine programs from scratch", load: () => import("./WalkThrough.svelte") },
      { id: "log", title: "An engine step, replayed from its log", load: () => import("./EngineLog.svelte") },
    ],
  },
  { id: "mathematics", title: "Why the sum is exact", load: () => import("./Mathematics.svelte") },
  {
    id: "memory",
    title: "Memory: savings and cost",
    load: () => import("./MemoryComparison.svelte"),
    deeper: [{ id: "copy", title: "The cost, to the byte: gradients that stay", load: () => import("./GradientCopy.svelte") }],
  },
  {
    id: "claims",
    title: "Claims, measured",
    load: () => import("./Claims.svelte"),
    deeper: [
      { id: "batch-norm", title: "BatchNorm: the layer that mixes samples", load: () => import("./BatchNorm.svelte") },
      { id: "exercises", title: "Exercises: find the bug", load: () => import("./Exercises.svelte") },
    ],
  },
  {
    id: "devices",
    title: "Several devices",
    load: () => import("./devices/Devices.svelte"),
    deeper: [
      { id: "who-holds", title: "Memory per rank: one device, replicas, sharded states, sharded weights", load: () => import("./devices/WhoHolds.svelte") },
      { id: "why-not-linear", title: "Why two ranks are not twice as fast", load: () => import("./devices/WhyNotLinear.svelte") },
      { id: "forecast", title: "Forecast: change the connection, the ranks, the micro-batches", load: () => import("./devices/Forecast.svelte") },
      { id: "said-of-devices", title: "Claims about several devices, measured", load: () => import("./devices/SaidOfDevices.svelte") },
    ],
  },
  {
    id: "batch-size",
    title: "How large should the batch be?",
    load: () => import("./batch_size/BatchSize.svelte"),
    deeper: [
      { id: "lengths", title: "Sequences of different lengths", load: sizeFold("Lengths") },
      { id: "noise", title: "Gradient noise, and when a larger batch helps", load: sizeFold("Noise") },
      { id: "strategies", title: "Small, accumulated and unsplit batches: variance and memory", load: sizeFold("Strategies") },
      { id: "sharpness", title: "Sharp and flat minima", load: sizeFold("Sharpness") },
      { id: "spikes", title: "Loss spikes and divergence", load: sizeFold("Spikes") },
      { id: "said-of-size", title: "Claims about batch size, measured", load: sizeFold("SaidOfSize") },
    ],
  },
  { id: "why-wrong", title: "Why is my loss wrong?", load: () => import("./why_wrong/WhyWrong.svelte") },
  {
    id: "playground",
    title: "Playground: try settings and mistakes",
    load: () => import("./Playground.svelte"),
    deeper: [{ id: "sources", title: "All recordings, and how to reproduce them", load: () => import("./Sources.svelte") }],
  },
];

export const chapters: Chapter[] = ENTRIES.map((entry, at) => ({ deeper: [], ...entry, number: at + 1 }));
export const parts: Part[] = chapters.flatMap((chapter) => [chapter, ...chapter.deeper]);
