/**
 * Compact drawings. Coordinates are rounded to a tenth of their unit, below screen resolution, and the points of
 * a curve are relative. A hydrated part draws its own again.
 */
const DRAWING = /<svg\b.*?<\/svg>/gs;
const PLACES = /(?<= (?:points|transform|x|y|x1|x2|y1|y2|cx|cy|r|rx|width|height)=")[^"]*/g;
const SHADE = /(?<= opacity=")[^"]*/g;
const PATH = /(?<= d=")[^"]*/g;
const LONG = /-?\d+\.\d{2,}(?:e-?\d+)?/g;
const POINTS = /^(?:[ML]-?[\d.]+[ ,]-?[\d.]+){4,}Z?$/;
const POINT = /([ML])(-?[\d.]+)[ ,](-?[\d.]+)/g;

/** @param {string} body */
export function rounded(body) {
  return body.replace(DRAWING, (drawing) => drawing.replace(PLACES, shorter).replace(SHADE, (shade) => Number(shade).toFixed(2)).replace(PATH, (path) => stepwise(shorter(path))));
}

/** @param {string} places */
function shorter(places) {
  return places.replace(LONG, (number) => tenth(Number(number)));
}

/**
 * "M1 2L3 5" as "M1 2l2 3"; inner points of horizontal and vertical lines are removed.
 * @param {string} path
 */
export function stepwise(path) {
  if (!POINTS.test(path)) return path;
  const points = [...path.matchAll(POINT)].map(([, letter, across, down]) => ({ letter, x: Number(across), y: Number(down) }));
  const kept = points.filter((now, at) => !between(points[at - 1], now, points[at + 1]));
  const steps = kept.map(({ letter, x, y }, at) => {
    const from = letter === "L" ? (kept[at - 1] ?? { x: 0, y: 0 }) : { x: 0, y: 0 };
    return `${letter === "L" ? "l" : "M"}${tenth(x - from.x)} ${tenth(y - from.y)}`.replace(" -", "-");
  });
  return `${steps.join("")}${path.endsWith("Z") ? "Z" : ""}`;
}

/** @typedef {{ letter: string | undefined, x: number, y: number }} Point */

/**
 * @param {Point | undefined} before
 * @param {Point} now
 * @param {Point | undefined} after
 */
function between(before, now, after) {
  if (!before || now.letter !== "L" || after?.letter !== "L") return false;
  const level = before.y === now.y && now.y === after.y && (now.x - before.x) * (after.x - now.x) >= 0;
  const upright = before.x === now.x && now.x === after.x && (now.y - before.y) * (after.y - now.y) >= 0;
  return level || upright;
}

/** @param {number} value */
function tenth(value) {
  return String(Math.round(value * 10) / 10 + 0);
}
