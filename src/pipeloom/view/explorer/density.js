// Lanes with more boxes than pixels: in each column of pixels, the height of a colour is the share
// of the time that it fills.
//
//     ░░░░      idle, by cause
//     ████      I
//     ████      F
//
// A lane is summed up once into bins; a column of pixels is then a difference of two running sums.

const MOST_BINS = 16384;

export class LaneDensity {
  constructor(timeline, lane) {
    this.timeline = timeline;
    this.lane = lane;
    const used = new Set();
    this.eachPiece(0, timeline.end, (style) => used.add(style));
    this.styles = [...used].sort((a, b) => a - b);
    this.slot = new Map(this.styles.map((style, index) => [style, index]));
    const count = timeline.rowOffset[lane.row + 1] - timeline.rowOffset[lane.row];
    this.numBins = Math.min(MOST_BINS, Math.max(256, 2 * count));
    this.sums = this.styles.map(() => new Float32Array(this.numBins + 1));
    const scale = this.numBins / timeline.end;
    this.eachPiece(0, timeline.end, (style, start, end) => {
      addCoverage(this.sums[this.slot.get(style)], start * scale, end * scale, this.numBins, 1);
    });
    for (const sums of this.sums) {
      for (let bin = 1; bin <= this.numBins; bin++) sums[bin] += sums[bin - 1];
    }
  }

  // Styles are kinds, then causes of idle time.
  eachPiece(begin, stop, visit) {
    const { timeline, lane } = this;
    const { start, end, kind, idleStart, idleEnd, idleCause } = timeline.column;
    const [first, last] = timeline.visible(lane.row, begin, stop);
    for (let position = first; position < last; position++) {
      const span = timeline.order[position];
      const style = kind[span];
      if (timeline.column.stage[span] >= 0) {
        visit(style, start[span], end[span]);
        continue;
      }
      const parts = timeline.parts(span);
      const share = (end[span] - start[span]) / parts.length;
      parts.forEach(([part], i) => {
        visit(part, start[span] + i * share, start[span] + (i + 1) * share);
      });
    }
    if (lane.type !== "compute") return;
    const [from, to] = timeline.visibleIdle(lane.rank, begin, stop);
    for (let idle = from; idle < to; idle++) {
      visit(timeline.kinds.length + idleCause[idle], idleStart[idle], idleEnd[idle]);
    }
  }

  // shares[slot * columns + column], for columns from t0 to t1 in the timeline's own time.
  measure(t0, t1, columns) {
    const shares = new Float32Array(this.styles.length * columns);
    const binsPerColumn = ((t1 - t0) / columns / this.timeline.end) * this.numBins;
    if (binsPerColumn < 1) {
      this.measureExactly(shares, t0, t1, columns);
      return shares;
    }
    const from = (t0 / this.timeline.end) * this.numBins;
    this.sums.forEach((sums, slot) => {
      let before = readSum(sums, from);
      for (let column = 0; column < columns; column++) {
        const after = readSum(sums, from + (column + 1) * binsPerColumn);
        shares[slot * columns + column] = (after - before) / binsPerColumn;
        before = after;
      }
    });
    return shares;
  }

  // The same where a bin is wider than a column: from the boxes themselves.
  measureExactly(shares, t0, t1, columns) {
    const scale = columns / (t1 - t0);
    const offsets = [];
    for (const [style, slot] of this.slot) offsets[style] = slot * columns;
    this.eachPiece(t0, t1, (style, start, end) => {
      addCoverage(shares, (start - t0) * scale, (end - t0) * scale, columns, offsets[style]);
    });
  }
}

// Add the stretch from one column to another to a row of columns that starts at `offset`.
function addCoverage(target, from, to, columns, offset) {
  const low = from > 0 ? from : 0;
  const high = to < columns ? to : columns;
  if (high <= low) return;
  let column = Math.floor(low);
  const last = Math.ceil(high) - 1;
  if (column === last) {
    target[offset + column] += high - low;
    return;
  }
  target[offset + column] += column + 1 - low;
  while (++column < last) target[offset + column] += 1;
  target[offset + last] += high - last;
}

function readSum(sums, at) {
  if (at <= 0) return 0;
  const bin = Math.floor(at);
  if (bin >= sums.length - 1) return sums[sums.length - 1];
  return sums[bin] + (sums[bin + 1] - sums[bin]) * (at - bin);
}

// Paint shares into the pixels of one lane; both are `width` columns wide.
export function paintDensity(pixels, width, height, shares, density, colours, showIdle) {
  const numKinds = density.timeline.kinds.length;
  const { background } = colours;
  pixels.fill(background);
  const slots = density.styles.length;
  for (let x = 0; x < width; x++) {
    let filled = 0;
    let bottom = height;
    for (let slot = 0; slot < slots; slot++) {
      const share = shares[slot * width + x];
      if (share <= 0) continue;
      const style = density.styles[slot];
      if (style >= numKinds && !showIdle) continue;
      filled += share;
      const top = Math.max(0, Math.round(height * (1 - Math.min(filled, 1))));
      const colour = colours.ofStyle[style];
      for (let y = top; y < bottom; y++) pixels[y * width + x] = colour;
      if (top < bottom) bottom = top;
    }
  }
}

// "#RRGGBB" as the number that a little-endian canvas stores.
export function packColour(hex) {
  const value = parseInt(hex.slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
