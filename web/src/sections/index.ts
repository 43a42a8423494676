/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import BatchNorm from "./BatchNorm.svelte";
import Mathematics from "./Mathematics.svelte";
import Sources from "./Sources.svelte";
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
  { id: "mathematics", title: "The mathematics: why a batch may be cut", component: Mathematics },
  { id: "batch-norm", title: "BatchNorm: the layer that sees its neighbours", component: BatchNorm },
  { id: "sources", title: "Where the numbers are from", component: Sources },
];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
