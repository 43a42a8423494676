/** Places of four ranks at the corners of a ring, clockwise from the top left. */

interface Place {
  x: number;
  y: number;
}

const GAP = 4;

/** Return the layout of the ring for a wide or a narrow drawing. */
export function stageLayout(width: 600 | 360) {
  const wide = width === 600;
  const box = { width: wide ? 238 : 160, height: 142 };
  const between = wide ? 40 : 46;
  const cell = { width: (box.width - 20 - 3 * GAP) / 4, height: 53 };
  const weights = { y: 44, height: 24 };
  const cells = { y: 83, x: (chunk: number) => 10 + chunk * (cell.width + GAP) };
  const [left, right, low] = [0, width - box.width, box.height + between];
  const boxes: Place[] = [
    { x: left, y: 0 },
    { x: right, y: 0 },
    { x: right, y: low },
    { x: left, y: low },
  ];
  const middle = box.height / 2;
  const [inner, outer] = [box.width, right];
  return {
    box,
    boxes,
    cell,
    cells,
    weights,
    height: low + box.height,
    /** Place of a chunk of a rank. */
    seat: (rank: number, chunk: number): Place => ({ x: boxes[rank]!.x + cells.x(chunk), y: boxes[rank]!.y + cells.y }),
    arrows: [
      `M${inner + 6} ${middle}H${outer - 8}`,
      `M${right + box.width / 2} ${box.height + 6}V${low - 8}`,
      `M${outer - 6} ${low + middle}H${inner + 8}`,
      `M${box.width / 2} ${low - 6}V${box.height + 8}`,
    ],
    heads: [
      `M${outer - 4} ${middle}l-9 -4.5v9z`,
      `M${right + box.width / 2} ${low - 4}l-4.5 -9h9z`,
      `M${inner + 4} ${low + middle}l9 -4.5v9z`,
      `M${box.width / 2} ${box.height + 4}l-4.5 9h9z`,
    ],
  };
}
