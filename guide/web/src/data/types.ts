/** Messages between the engine and the page. Names match guide/src/anybatch_guide. */

/** Where and when data was computed. */
export interface Made {
  date: string;
  device: string;
  versions: Record<string, string>;
  commit: string | null;
  command: string;
}

/** The result of an experiment, with its provenance. */
export interface Recording<Data = unknown> {
  name: string;
  question: string;
  made: Made;
  data: Data;
}

/** Source of a number. */
export type From =
  | { kind: "recorded"; name: string }
  | { kind: "live"; name?: string; made?: Made }
  | { kind: "calculated"; formula: string }
  | { kind: "forecast"; name: string; made?: Made }
  | { kind: "chosen"; note?: string }
  | { kind: "source"; note: string; href?: string }
  | { kind: "exact"; note: string };

/** One line of a run: a record of the engine or of the guide. Unknown kinds are ignored. */
export interface Line {
  kind: string;
  [field: string]: unknown;
}

/** The setting of the playground; see guide/src/anybatch_guide/setting.py for meanings and limits. */
export interface Setting {
  task: "digits" | "spirals" | "shapes" | "text";
  norm: "batch" | "group" | "none";
  micro_batch_size: number;
  /** Per rank. */
  accumulation_steps: number;
  optimizer: "sgd" | "adamw";
  learning_rate: number;
  steps: number;
  seed: number;
  precision: "fp32" | "bf16";
  mistake: "" | "no_division" | "zero_each" | "clip_each" | "schedule_each" | "drop_tail" | "mean_of_means";
  ranks: number;
  /** How the engine handles BatchNorm. */
  norm_policy: "keep" | "exact" | "ghost" | "freeze" | "sync";
  /** Limit in KiB for the tensors of a rank; 0: no limit. */
  memory_limit_kib: number;
}

/** A request to run; a run that starts paused waits for "resume" or "micro". */
export type Order = ({ kind: "playground"; setting: Setting } | { kind: "experiment"; name: string }) & { paused?: boolean };

/** The five memory categories, in drawing order. */
export const CATEGORIES = ["weights", "optimizer", "gradients", "activations", "temporary"] as const;
export type Category = (typeof CATEGORIES)[number];
export const CATEGORY_NAMES: Record<Category, string> = {
  weights: "weights",
  gradients: "gradients",
  optimizer: "optimizer state",
  activations: "activations",
  temporary: "temporary",
};
