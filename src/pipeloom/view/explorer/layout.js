// Where everything stands: lanes from top to bottom, in pixels of the content.

export const GUTTER = 92;
export const AXIS = 28;
const HEADING = 30;

// A lane is {type, timeline, rank, row, y, height, tracks}; types are heading, compute, message,
// memory.
export function layOut(report, options) {
  const ranks = report.timelines.reduce((sum, timeline) => sum + timeline.ranks, 0);
  const base = ranks <= 4 ? 38 : ranks <= 8 ? 30 : ranks <= 16 ? 22 : ranks <= 32 ? 14 : 10;
  const compute = Math.max(4, Math.round(base * options.rowScale));
  const message = Math.max(3, Math.round((ranks <= 16 ? 7 : 4) * options.rowScale));
  const memory = Math.max(10, Math.round((ranks <= 4 ? 40 : ranks <= 8 ? 30 : 20) * options.rowScale));
  const gap = ranks <= 8 ? 10 : ranks <= 16 ? 6 : ranks <= 32 ? 3 : options.memory ? 3 : 1;
  const lanes = [];
  let y = 0;
  const add = (lane) => {
    lanes.push({ ...lane, y });
    y += lane.height;
  };
  for (const timeline of report.timelines) {
    add({ type: "heading", timeline, height: HEADING });
    const rowsOfRank = Array.from({ length: timeline.ranks }, () => []);
    timeline.rows.forEach(([rank, lane, tracks], row) => rowsOfRank[rank].push([lane, tracks, row]));
    for (let rank = 0; rank < timeline.ranks; rank++) {
      for (const [lane, tracks, row] of rowsOfRank[rank]) {
        if (lane === "compute") {
          add({ type: "compute", timeline, rank, row, lane, tracks, height: compute });
        } else if (options.messages) {
          const shown = Math.min(tracks, 3);
          add({ type: "message", timeline, rank, row, lane, tracks: shown, height: message * shown });
          y += 1;
        }
      }
      if (options.memory && timeline.hasMemory) {
        y += 2;
        add({ type: "memory", timeline, rank, height: memory });
      }
      y += gap;
    }
    y += 10;
  }
  const laneOfRow = new Map();
  const computeOfRank = new Map();
  for (const lane of lanes) {
    if (lane.row !== undefined) laneOfRow.set(`${lane.timeline.index}:${lane.row}`, lane);
    if (lane.type === "compute") computeOfRank.set(`${lane.timeline.index}:${lane.rank}`, lane);
  }
  return {
    lanes,
    height: y + 8,
    // Where a span is drawn; one of a hidden lane is pointed at on its rank's compute lane.
    laneOf: (timeline, span) =>
      laneOfRow.get(`${timeline.index}:${timeline.column.row[span]}`)
      ?? computeOfRank.get(`${timeline.index}:${timeline.rankOf(span)}`),
  };
}

// The lanes between two heights; lanes are in order of y.
export function lanesBetween(layout, top, bottom) {
  return layout.lanes.filter((lane) => lane.y + lane.height > top && lane.y < bottom);
}

// What is at a point of the content: a span, idle time, memory, or nothing.
export function hitTest(layout, camera, options, x, y) {
  const lane = layout.lanes.find((l) => y >= l.y && y < l.y + l.height);
  if (!lane || lane.type === "heading" || x < 0) return null;
  const { timeline, rank } = lane;
  const factor = options.factor(timeline);
  const time = camera.toTime(x) / factor;
  if (lane.type === "memory") return { type: "memory", timeline, rank, time, lane };
  const slop = 2 / camera.scale / factor;
  const { start, end, track } = timeline.column;
  const [first, last] = timeline.visible(lane.row, time - slop, time + slop);
  const wanted = Math.floor(((y - lane.y) / lane.height) * lane.tracks);
  let best = -1;
  let distance = Infinity;
  for (let position = first; position < last; position++) {
    const span = timeline.order[position];
    if (lane.tracks > 1 && Math.min(track[span], lane.tracks - 1) !== wanted) continue;
    const off = time < start[span] ? start[span] - time : time > end[span] ? time - end[span] : 0;
    if (off <= slop && off < distance) {
      best = span;
      distance = off;
    }
  }
  if (best >= 0) return { type: "span", timeline, span: best, lane };
  if (lane.type === "compute") {
    const [from, to] = timeline.visibleIdle(rank, time, time);
    if (from < to) return { type: "idle", timeline, rank, idle: from, time, lane };
  }
  return null;
}
