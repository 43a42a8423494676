/**
 * Drawings as they travel. Places are told to a tenth of their unit, which is less than a screen shows, and the points of
 * a curve each from the one before. A part that comes to life draws its own again.
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
 * "M1 2L3 5" as "M1 2l2 3".
 * @param {string} path
 */
function stepwise(path) {
  if (!POINTS.test(path)) return path;
  let before = { x: 0, y: 0 };
  return path.replace(POINT, (_whole, letter, across, down) => {
    const now = { x: Number(across), y: Number(down) };
    const from = letter === "L" ? before : { x: 0, y: 0 };
    before = now;
    return `${letter === "L" ? "l" : "M"}${tenth(now.x - from.x)} ${tenth(now.y - from.y)}`.replace(" -", "-");
  });
}

/** @param {number} value */
function tenth(value) {
  return String(Math.round(value * 10) / 10 + 0);
}
