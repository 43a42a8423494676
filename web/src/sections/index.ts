/** The sections of the page, in their order. A section is one file here and one line below. */
import type { Component } from "svelte";

import Words from "./Words.svelte";

export interface SectionEntry {
  /** Its address: `#words`. */
  id: string;
  number: number;
  title: string;
  component: Component;
}

const ENTRIES: Omit<SectionEntry, "number">[] = [{ id: "words", title: "The words: eight names for parts of a step", component: Words }];

export const sections: SectionEntry[] = ENTRIES.map((entry, at) => ({ ...entry, number: at + 1 }));
