/** The claims, and the number that each of their cards shows. */
export const FIGURES: Record<string, string> = {
  larger_batch: "time_256",
  one_rule: "linear_digits_adamw",
  less_noise: "noise_ratio",
  sharp: "eigenvalue_same_rate",
};
export const CLAIMS = Object.keys(FIGURES).map((name) => `claims_${name}`);
