/** The claims, and the number that each of their cards shows. */
export const FIGURES: Record<string, string> = {
  data_parallel: "memory_ratio",
  ddp_memory: "ddp_ratio",
  linear_to_eight: "at_10_gbit",
  no_average: "sum_error",
  all_reduce_saves: "through_one_ratio",
  usual_buckets: "most_lost_at_50",
  sampler_overlap: "twice_on_8",
};
export const CLAIMS = Object.keys(FIGURES).map((name) => `claims_${name}`);
