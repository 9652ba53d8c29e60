// The patterns that tell colours apart in grey, as tiles of 6 × 6 pixels.

const STROKES = {
  rising: [[-1, 7, 7, -1], [-1, 1, 1, -1], [5, 7, 7, 5]],
  falling: [[-1, -1, 7, 7], [5, -1, 7, 1], [-1, 5, 1, 7]],
  cross: [[0, 0, 6, 6], [6, 0, 0, 6]],
  horizontal: [[0, 1.5, 6, 1.5], [0, 4.5, 6, 4.5]],
  vertical: [[1.5, 0, 1.5, 6], [4.5, 0, 4.5, 6]],
};

export function makeFill(context, style, ratio) {
  if (style.pattern === "plain") return style.colour;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(6 * ratio);
  const ink = tile.getContext("2d");
  ink.scale(tile.width / 6, tile.height / 6);
  ink.fillStyle = style.colour;
  ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = ink.fillStyle = style.ink;
  if (style.pattern === "dots") {
    ink.globalAlpha = 0.55;
    for (const [x, y] of [[1.5, 1.5], [4.5, 4.5]]) {
      ink.beginPath();
      ink.arc(x, y, 0.8, 0, 2 * Math.PI);
      ink.fill();
    }
  } else {
    ink.globalAlpha = 0.45;
    ink.beginPath();
    for (const [x0, y0, x1, y1] of STROKES[style.pattern]) {
      ink.moveTo(x0, y0);
      ink.lineTo(x1, y1);
    }
    ink.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  if (tile.width !== 6) pattern.setTransform(new DOMMatrix().scale(6 / tile.width));
  return pattern;
}
