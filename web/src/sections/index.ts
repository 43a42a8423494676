/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import Claims from "./Claims.svelte";
import Exercises from "./Exercises.svelte";
import Playground from "./Playground.svelte";
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
  { id: "claims", title: "Thirteen claims, measured", component: Claims },
  { id: "playground", title: "The playground: make it, break it", component: Playground },
  { id: "exercises", title: "Exercises", component: Exercises },
];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
