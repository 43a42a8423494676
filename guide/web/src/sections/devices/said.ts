/** Claims about several devices: measured ones, and forecasts, which stand with the forecast figure. */
export const MEASURED = ["data_parallel", "ddp_memory", "no_average", "all_reduce_saves", "sampler_overlap"];
export const FORECAST = ["linear_to_eight", "usual_buckets"];
