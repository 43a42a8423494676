/** The chapters of the page, in their order. A chapter is one file here and one entry below; what goes deeper is a fold at its end. */
import type { Component } from "svelte";

/** A part of the page with an address of its own: `#words`. Its script comes when it is near the screen. */
export interface Part {
  id: string;
  title: string;
  load: () => Promise<{ default: Component }>;
}

export interface Chapter extends Part {
  number: number;
  /** Parts that are folded away at the end of the chapter, until somebody asks for them. */
  deeper: Part[];
}

const ENTRIES: (Part & { deeper?: Part[] })[] = [
  {
    id: "gpu-memory",
    title: "Why a batch does not fit",
    load: () => import("./GpuMemory.svelte"),
    deeper: [
      { id: "planner", title: "A plan for real models and GPUs", load: () => import("./Planner.svelte") },
      { id: "out-of-memory", title: "Out of memory, really, and foretold from two small steps", load: () => import("./OutOfMemory.svelte") },
    ],
  },
  {
    id: "split",
    title: "Split, accumulate, update",
    load: () => import("./SplitSum.svelte"),
    deeper: [
      { id: "words", title: "The words: eight names for parts of a step", load: () => import("./Words.svelte") },
      { id: "one-batch", title: "One batch, four ways, and three mistakes", load: () => import("./OneBatch.svelte") },
    ],
  },
  {
    id: "loop",
    title: "The full loop",
    load: () => import("./FullLoop.svelte"),
    deeper: [
      { id: "walk", title: "Other loops, line by line: DDP, anybatch, and nine from scratch", load: () => import("./WalkThrough.svelte") },
      { id: "log", title: "A step of the engine, from its own log", load: () => import("./EngineLog.svelte") },
    ],
  },
  { id: "mathematics", title: "Why the sum is exact", load: () => import("./Mathematics.svelte") },
  {
    id: "memory",
    title: "What it saves, and what it costs",
    load: () => import("./MemoryComparison.svelte"),
    deeper: [{ id: "copy", title: "The price, to the byte: one copy of the gradients", load: () => import("./GradientCopy.svelte") }],
  },
  {
    id: "claims",
    title: "What is true of it, and what is only said",
    load: () => import("./Claims.svelte"),
    deeper: [
      { id: "batch-norm", title: "BatchNorm: the layer that sees its neighbours", load: () => import("./BatchNorm.svelte") },
      { id: "exercises", title: "Exercises: find the bug", load: () => import("./Exercises.svelte") },
    ],
  },
  {
    id: "devices",
    title: "Several devices",
    load: () => import("./devices/Devices.svelte"),
    deeper: [
      { id: "who-holds", title: "Who holds what: one device, replicas, shared states, shards", load: () => import("./devices/WhoHolds.svelte") },
      { id: "why-not-linear", title: "Why two ranks are not twice as fast", load: () => import("./devices/WhyNotLinear.svelte") },
      { id: "forecast", title: "A forecast: move the link, the ranks, the micro-batches", load: () => import("./devices/Forecast.svelte") },
      { id: "said-of-devices", title: "What is said about several devices, measured", load: () => import("./devices/SaidOfDevices.svelte") },
    ],
  },
  {
    id: "batch-size",
    title: "How large a batch",
    load: () => import("./batch_size/BatchSize.svelte"),
    deeper: [
      { id: "noise", title: "How noisy is the gradient? What a larger batch buys", load: () => import("./batch_size/Noise.svelte") },
      { id: "strategies", title: "Small, accumulated, native: variance, memory and time", load: () => import("./batch_size/Strategies.svelte") },
      { id: "sharpness", title: "Sharp and flat minima", load: () => import("./batch_size/Sharpness.svelte") },
      { id: "spikes", title: "When a run leaves its course", load: () => import("./batch_size/Spikes.svelte") },
      { id: "said-of-size", title: "What is said about the size of a batch, measured", load: () => import("./batch_size/SaidOfSize.svelte") },
    ],
  },
  { id: "lengths", title: "Sentences of different lengths", load: () => import("./batch_size/Lengths.svelte") },
  { id: "why-wrong", title: "Why is my loss wrong?", load: () => import("./why_wrong/WhyWrong.svelte") },
  {
    id: "playground",
    title: "The playground: make it, break it",
    load: () => import("./Playground.svelte"),
    deeper: [{ id: "sources", title: "Every recording, and how to make it again", load: () => import("./Sources.svelte") }],
  },
];

export const chapters: Chapter[] = ENTRIES.map((entry, at) => ({ deeper: [], ...entry, number: at + 1 }));
export const parts: Part[] = chapters.flatMap((chapter) => [chapter, ...chapter.deeper]);
