/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import FullLoop from "./FullLoop.svelte";
import OneBatch from "./OneBatch.svelte";
import SplitSum from "./SplitSum.svelte";
import WalkThrough from "./WalkThrough.svelte";
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
  { id: "split", title: "Split, accumulate, update", component: SplitSum },
  { id: "loop", title: "The full loop, as it ran", component: FullLoop },
  { id: "walk", title: "The code, line by line", component: WalkThrough },
];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
