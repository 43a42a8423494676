/** Recordings of claims about several devices. */
export const CLAIMS = ["data_parallel", "ddp_memory", "linear_to_eight", "no_average", "all_reduce_saves", "usual_buckets", "sampler_overlap"].map((name) => `claims_${name}`);
