/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import GpuMemory from "./GpuMemory.svelte";
import MemoryComparison from "./MemoryComparison.svelte";
import Planner from "./Planner.svelte";
import Words from "./Words.svelte";

export interface SectionEntry {
  /** Its address: `#words`. */
  id: string;
  number: number;
  title: string;
  component: Component;
}

const ENTRIES: Omit<SectionEntry, "number">[] = [
  { id: "words", title: "The words: eight names for parts of a step", component: Words },
  { id: "gpu-memory", title: "The memory of a GPU is finite", component: GpuMemory },
  { id: "memory", title: "What accumulation saves, and what it costs", component: MemoryComparison },
  { id: "planner", title: "A plan for real models and GPUs", component: Planner },
];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
