// What is painted above the lanes: arrows, the selected and hovered box, the time under the pointer.

import { AXIS, GUTTER } from "explorer/layout.js";

export function paintOverlay(painter, view) {
  const { context } = painter;
  context.save();
  context.beginPath();
  context.rect(GUTTER, AXIS, view.camera.width, view.camera.height);
  context.clip();
  paintMatches(painter, view);
  for (const target of [view.selected, view.hovered]) {
    if (target?.type === "span") paintLinks(painter, view, target);
    if (target?.type === "idle") paintReason(painter, view, target);
  }
  if (view.selected?.type === "span") paintOutline(painter, view, view.selected, 2.5);
  if (view.hovered?.type === "span") paintOutline(painter, view, view.hovered, 1.5);
  if (view.pointer) {
    context.fillStyle = painter.theme.arrow;
    context.globalAlpha = 0.35;
    context.fillRect(Math.round(view.pointer.x), AXIS, 1, view.camera.height);
    context.globalAlpha = 1;
  }
  context.restore();
}

// The box of a span on the canvas; null where its lane is not shown.
export function boxOf(painter, view, timeline, span) {
  const lane = view.layout.laneOf(timeline, span);
  if (!lane) return null;
  const { start, end, track } = timeline.column;
  const height = lane.height / lane.tracks;
  const left = painter.x(timeline, start[span]);
  return {
    x: left,
    y: painter.top(lane) + Math.min(track[span], lane.tracks - 1) * height,
    width: Math.max(painter.x(timeline, end[span]) - left, 1),
    height,
  };
}

function paintOutline(painter, view, { timeline, span }, width) {
  const box = boxOf(painter, view, timeline, span);
  if (!box) return;
  const { context, theme } = painter;
  context.strokeStyle = theme.paper;
  context.lineWidth = width + 2;
  context.strokeRect(box.x, box.y, box.width, box.height);
  context.strokeStyle = theme.text;
  context.lineWidth = width;
  context.strokeRect(box.x, box.y, box.width, box.height);
}

function paintMatches(painter, view) {
  const { context, theme } = painter;
  const found = view.search;
  if (!found || found.spans.length > 400) return;
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  for (const { timeline, span } of found.spans) {
    const box = boxOf(painter, view, timeline, span);
    if (box) context.strokeRect(box.x + 0.75, box.y + 0.75, box.width - 1.5, box.height - 1.5);
  }
}

// Full arrows from what it waits for, dashed ones to who waits for it.
function paintLinks(painter, view, { timeline, span }) {
  for (const source of timeline.needs(span)) connect(painter, view, timeline, source, span, false);
  for (const next of timeline.dependents(span)) connect(painter, view, timeline, span, next, true);
}

function paintReason(painter, view, { timeline, idle }) {
  const { idleWaitsFor, idleBefore } = timeline.column;
  const [source, next] = [idleWaitsFor[idle], idleBefore[idle]];
  if (source >= 0 && next >= 0) connect(painter, view, timeline, source, next, false);
  if (source >= 0) paintOutline(painter, view, { timeline, span: source }, 1.5);
}

function connect(painter, view, timeline, source, target, dashed) {
  const from = boxOf(painter, view, timeline, source);
  const to = boxOf(painter, view, timeline, target);
  if (!from || !to) return;
  const { context, theme } = painter;
  const [x0, y0] = [from.x + from.width, from.y + from.height / 2];
  const [x1, y1] = [to.x, to.y + to.height / 2];
  // Along one lane the arrow goes over the boxes between.
  const rise = Math.abs(y1 - y0) < 1 ? Math.min(14 + from.height / 2, 30) : 0;
  const bend = rise ? 6 : Math.max(14, Math.min(Math.abs(x1 - x0) / 2, 60));
  const strokes = [[`${theme.paper}B0`, 4, []], [theme.arrow, 1.6, dashed ? [5, 3] : []]];
  for (const [colour, width, dash] of strokes) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + bend, y0 - rise, x1 - bend, y1 - rise, x1, y1);
    context.stroke();
  }
  context.setLineDash([]);
  context.fillStyle = theme.arrow;
  context.beginPath();
  context.moveTo(x1 + 1, y1);
  context.lineTo(x1 - 7, y1 - 4);
  context.lineTo(x1 - 7, y1 + 4);
  context.fill();
}
