/** The chapters of the page, in their order. A chapter is one file here and one entry below; what goes deeper is a fold at its end. */
import type { Component } from "svelte";

import BatchNorm from "./BatchNorm.svelte";
import Claims from "./Claims.svelte";
import EngineLog from "./EngineLog.svelte";
import Exercises from "./Exercises.svelte";
import FullLoop from "./FullLoop.svelte";
import GpuMemory from "./GpuMemory.svelte";
import GradientCopy from "./GradientCopy.svelte";
import Mathematics from "./Mathematics.svelte";
import MemoryComparison from "./MemoryComparison.svelte";
import OneBatch from "./OneBatch.svelte";
import OutOfMemory from "./OutOfMemory.svelte";
import Planner from "./Planner.svelte";
import Playground from "./Playground.svelte";
import Sources from "./Sources.svelte";
import SplitSum from "./SplitSum.svelte";
import BatchSize from "./batch_size/BatchSize.svelte";
import Lengths from "./batch_size/Lengths.svelte";
import Devices from "./devices/Devices.svelte";
import WalkThrough from "./WalkThrough.svelte";
import WhyWrong from "./WhyWrong.svelte";
import Words from "./Words.svelte";

/** A part of the page with an address of its own: `#words`. */
export interface Part {
  id: string;
  title: string;
  component: Component;
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
    component: GpuMemory,
    deeper: [
      { id: "planner", title: "A plan for real models and GPUs", component: Planner },
      { id: "out-of-memory", title: "Out of memory, really, and foretold from two small steps", component: OutOfMemory },
    ],
  },
  {
    id: "split",
    title: "Split, accumulate, update",
    component: SplitSum,
    deeper: [
      { id: "words", title: "The words: eight names for parts of a step", component: Words },
      { id: "one-batch", title: "One batch, four ways, and three mistakes", component: OneBatch },
    ],
  },
  {
    id: "loop",
    title: "The full loop",
    component: FullLoop,
    deeper: [
      { id: "walk", title: "Other loops, line by line: DDP, anybatch, and nine from scratch", component: WalkThrough },
      { id: "log", title: "A step of the engine, from its own log", component: EngineLog },
    ],
  },
  { id: "mathematics", title: "Why the sum is exact", component: Mathematics },
  {
    id: "memory",
    title: "What it saves, and what it costs",
    component: MemoryComparison,
    deeper: [{ id: "copy", title: "The price, to the byte: one copy of the gradients", component: GradientCopy }],
  },
  {
    id: "claims",
    title: "What is true of it, and what is only said",
    component: Claims,
    deeper: [
      { id: "batch-norm", title: "BatchNorm: the layer that sees its neighbours", component: BatchNorm },
      { id: "exercises", title: "Exercises: find the bug", component: Exercises },
    ],
  },
  { id: "devices", title: "Several devices", component: Devices },
  { id: "batch-size", title: "How large a batch", component: BatchSize },
  { id: "lengths", title: "Sentences of different lengths", component: Lengths },
  { id: "why-wrong", title: "Why is my loss wrong?", component: WhyWrong },
  {
    id: "playground",
    title: "The playground: make it, break it",
    component: Playground,
    deeper: [{ id: "sources", title: "Where the numbers are from", component: Sources }],
  },
];

export const chapters: Chapter[] = ENTRIES.map((entry, at) => ({ deeper: [], ...entry, number: at + 1 }));
