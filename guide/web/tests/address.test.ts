import { expect, test } from "vitest";

import { oneOf, parse, read, real, whole, write } from "../src/data/address";

const SHAPE = { micro: whole(1, 256), rate: real(1e-6, 10), optimizer: oneOf("sgd", "adamw") };
const FALLBACK = { micro: 16, rate: 0.1, optimizer: "sgd" } as const;

test("what is written is read again", () => {
  const values = { micro: 4, rate: 0.003, optimizer: "adamw" };
  const { section, values: found } = parse(write("playground", values));
  expect(section).toBe("playground");
  expect(read(SHAPE, found, FALLBACK)).toEqual(values);
});

test("a section alone is an address", () => {
  expect(parse("#words").section).toBe("words");
  expect(read(SHAPE, parse("#words").values, FALLBACK)).toEqual(FALLBACK);
});

test.each(["micro=0", "micro=257", "micro=1.5", "micro=1e2", "rate=NaN", "rate=Infinity", "rate=11", "optimizer=__proto__", "optimizer=", "micro=%3Cb%3E"])(
  "%s falls back",
  (query) => {
    expect(read(SHAPE, parse(`#playground?v=1&${query}`).values, FALLBACK)).toEqual(FALLBACK);
  },
);

test("another version and unknown keys are ignored", () => {
  expect(read(SHAPE, parse("#playground?v=2&micro=4").values, FALLBACK)).toEqual(FALLBACK);
  expect(read(SHAPE, parse("#playground?v=1&evil=4&micro=4").values, FALLBACK)).toEqual({ ...FALLBACK, micro: 4 });
});
