/** What travels between the engine and the page. The same words as in guide/src/anybatch_guide. */

/** Where and when data was computed. */
export interface Made {
  date: string;
  device: string;
  versions: Record<string, string>;
  commit: string | null;
  command: string;
}

/** What an experiment returned, and where that was. */
export interface Recording<Data = unknown> {
  name: string;
  question: string;
  made: Made;
  data: Data;
}

/** Where a number is from. */
export type From =
  | { kind: "recorded"; name: string }
  | { kind: "live"; name?: string; made?: Made }
  | { kind: "calculated"; formula: string }
  | { kind: "chosen"; note?: string }
  | { kind: "source"; note: string; href?: string }
  | { kind: "exact"; note: string };

/** One line of a run: a record of the engine, or a kind of the page's own. Kinds that are not known are left out. */
export interface Line {
  kind: string;
  [field: string]: unknown;
}

/** The playground's setting; what it means and its limits are in guide/src/anybatch_guide/setting.py. */
export interface Setting {
  task: "digits" | "spirals" | "shapes" | "text";
  norm: "batch" | "group" | "none";
  micro_batch_size: number;
  /** Of each rank. */
  accumulation_steps: number;
  optimizer: "sgd" | "adamw";
  learning_rate: number;
  steps: number;
  seed: number;
  precision: "fp32" | "bf16";
  mistake: "" | "no_division" | "zero_each" | "clip_each" | "schedule_each" | "drop_tail" | "mean_of_means";
  ranks: number;
  /** What the engine does about BatchNorm. */
  norm_policy: "keep" | "exact" | "ghost" | "freeze" | "sync";
  /** Most KiB that tensors of a rank may hold; 0 for no limit. */
  memory_limit_kib: number;
}

/** What can be asked for; begun paused, a run waits for "resume" or "micro". */
export type Order = ({ kind: "playground"; setting: Setting } | { kind: "experiment"; name: string }) & { paused?: boolean };

/** Names of the five things that fill memory, in the order they are drawn. */
export const CATEGORIES = ["weights", "gradients", "optimizer", "activations", "temporary"] as const;
export type Category = (typeof CATEGORIES)[number];
export const CATEGORY_NAMES: Record<Category, string> = {
  weights: "weights",
  gradients: "gradients",
  optimizer: "optimizer state",
  activations: "activations",
  temporary: "temporary",
};
