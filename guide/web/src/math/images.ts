/** Small grey images from the server, laid out next to each other. */

/** RGBA pixels of images in rows of `across`, with a dark line between them. */
export function pixels(base64: string, side: number, across: number): { width: number; height: number; data: Uint8ClampedArray } {
  const levels = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const count = levels.length / side ** 2;
  const [columns, rows] = [Math.min(across, count), Math.ceil(count / across)];
  const [width, height] = [columns * (side + 1) - 1, rows * (side + 1) - 1];
  const data = new Uint8ClampedArray(4 * width * height);
  levels.forEach((level, at) => {
    const [image, inside] = [Math.floor(at / side ** 2), at % side ** 2];
    const x = (image % across) * (side + 1) + (inside % side);
    const y = Math.floor(image / across) * (side + 1) + Math.floor(inside / side);
    data.set([level, level, level, 255], 4 * (y * width + x));
  });
  return { width, height, data };
}
