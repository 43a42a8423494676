/** Data of a run from the server: guide/src/anybatch_guide/watch/run_log.py. */

export type Axis = "step" | "samples" | "seconds";

export interface Points {
  step: number[];
  samples: number[];
  seconds: number[];
  value: (number | null)[];
}

export interface Span {
  rank: number;
  kind: "load" | "compute" | "update" | "reduce" | "collective";
  name: string;
  from: number;
  to: number;
  samples: number | null;
  bytes: number | null;
}

export interface Lanes {
  step: number;
  ranks: number[];
  num_left_out: number;
  shifted: number[];
  spans: Span[];
  num_steps: number;
  parts: { rank: number; load: number; compute: number; exposed: number; others: number; update: number; step: number }[];
}

export interface Memory {
  rank: number;
  step: number | null;
  allocated_bytes: number | null;
  reserved_bytes: number | null;
  peak_bytes: number | null;
  limit_bytes: number | null;
  largest_peak_bytes: number;
  categories: Record<string, number>;
}

export interface Diagnosis {
  rank: number | null;
  step: number | null;
  level: "info" | "warning" | "error";
  code: string | null;
  message: string | null;
  remedy: string | null;
}

export interface Verdict {
  word: "reference" | "same" | "drifted" | "another" | "unknown";
  step: number | null;
  num_steps: number;
  difference: number | null;
  tolerance: number;
  reasons: string[];
}

export interface Run {
  name: string;
  path: string;
  /** Written on this page, saved next to the log. */
  title: string;
  note: string;
  state: "unread" | "open" | "completed" | "stopped" | "failed";
  message: string | null;
  written: number;
  looked: number;
  read: number;
  size: number;
  facts: {
    geometry?: string | null;
    strategy?: string | null;
    precision?: string | null;
    device?: string | null;
    dtype?: string | null;
    world_size?: number | null;
    effective_batch_size?: number | null;
    seed?: number | null;
    num_parameters?: number | null;
    gradient_bytes?: number | null;
    versions?: Record<string, string>;
    decisions?: Record<string, string>;
  };
  num_logs: number;
  last: { step: number; samples: number; seconds: number; loss: number | string } | null;
  speed: number | string | null;
  stride: number;
  /** The latest spikes, as `anybatch spikes` finds them. */
  spikes: { step: number; quantity: string; form: string; value: number | string; level: number | null }[];
  num_spikes: number;
  diverged: boolean;
  settings: Record<string, string>;
  counts: { clipped: number; skipped: number };
  curves: Record<"loss" | "speed" | "norm" | "rate" | "clipped", Points>;
  /** Preview of a long log while it is read: some of its steps, with estimated samples. */
  sketch: Points | null;
  geometry: { step: number; text: string; why: string }[];
  evaluations: { step: number; samples: number | null; metrics: Record<string, number | string> }[];
  checkpoints: { step: number | null; bytes: number | null; event: string | null; path: string | null; message: string | null }[];
  num_diagnoses: number;
  diagnoses: Diagnosis[];
  memory: Memory[];
  lanes: Lanes | null;
  num_skipped: number;
  verdict: Verdict;
  command: string | null;
  resume: string | null;
  changes: number;
}
