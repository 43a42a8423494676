/** Recordings of claims about the size of a batch. */
export const CLAIMS = ["larger_batch", "one_rule", "less_noise", "sharp"].map((name) => `claims_${name}`);
