/** Recording of `anybatch scale`: see guide/src/anybatch_guide/experiments/two_ranks.py. */

export type Parts = Record<"step" | "waiting" | "copies" | "compute" | "queued" | "communication" | "stragglers" | "update" | "world_size", number>;

export interface Scaling {
  effective_batch_size: number;
  report: {
    evidence: Record<string, { parts: Parts; alone: Parts; gradient_bytes: number }>;
    causes: { code: string; cost: number; what: string; change: string; predicted_step: number }[];
  };
}
