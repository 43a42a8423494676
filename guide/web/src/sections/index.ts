/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import BatchNorm from "./BatchNorm.svelte";
import Claims from "./Claims.svelte";
import Exercises from "./Exercises.svelte";
import FullLoop from "./FullLoop.svelte";
import GpuMemory from "./GpuMemory.svelte";
import Mathematics from "./Mathematics.svelte";
import MemoryComparison from "./MemoryComparison.svelte";
import OneBatch from "./OneBatch.svelte";
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

export interface SectionEntry {
  /** Its address: `#words`. */
  id: string;
  number: number;
  title: string;
  component: Component;
}

const ENTRIES: Omit<SectionEntry, "number">[] = [
  { id: "one-batch", title: "One batch, four ways", component: OneBatch },
  { id: "words", title: "The words: eight names for parts of a step", component: Words },
  { id: "gpu-memory", title: "The memory of a GPU is finite", component: GpuMemory },
  { id: "split", title: "Split, accumulate, update", component: SplitSum },
  { id: "loop", title: "The full loop, as it ran", component: FullLoop },
  { id: "mathematics", title: "The mathematics: why a batch may be cut", component: Mathematics },
  { id: "walk", title: "The code, line by line", component: WalkThrough },
  { id: "memory", title: "What accumulation saves, and what it costs", component: MemoryComparison },
  { id: "planner", title: "A plan for real models and GPUs", component: Planner },
  { id: "batch-norm", title: "BatchNorm: the layer that sees its neighbours", component: BatchNorm },
  { id: "claims", title: "Thirteen claims, measured", component: Claims },
  { id: "devices", title: "Several devices", component: Devices },
  { id: "batch-size", title: "How large a batch", component: BatchSize },
  { id: "lengths", title: "Sentences of different lengths", component: Lengths },
  { id: "why-wrong", title: "Why is my loss wrong?", component: WhyWrong },
  { id: "playground", title: "The playground: make it, break it", component: Playground },
  { id: "exercises", title: "Exercises", component: Exercises },
  { id: "sources", title: "Where the numbers are from", component: Sources },
];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
