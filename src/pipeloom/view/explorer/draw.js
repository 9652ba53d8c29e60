// Paints the lanes in view.

import { LaneDensity, packColour, paintDensity } from "explorer/density.js";
import { formatMemory, formatNumber, formatShare, roundStep } from "explorer/format.js";
import { AXIS, GUTTER, lanesBetween } from "explorer/layout.js";
import { makeFill } from "explorer/patterns.js";

const FONT = "system-ui, 'Helvetica Neue', Arial, sans-serif";
const NARROWEST = 3; // pixels to a box, below which a lane is shown as a density
const SMALLEST_PATTERN = 8;

export class Painter {
  constructor(canvas, report) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.report = report;
    this.densities = new Map();
    this.images = new Map();
    this.widths = new Map();
  }

  setTheme(theme, ratio) {
    const { kinds, causes } = this.report;
    this.theme = theme;
    this.ratio = ratio;
    this.styles = [...kinds, ...causes];
    this.fills = this.styles.map((style) => makeFill(this.context, style, ratio));
    this.packed = {
      background: packColour(theme.lane),
      ofStyle: this.styles.map((style) => packColour(style.colour)),
    };
  }

  paint(view) {
    const { context, theme, ratio } = this;
    const { camera, layout } = view;
    this.view = view;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, view.width, view.height);
    const lanes = lanesBetween(layout, camera.scroll, camera.scroll + camera.height);
    this.paintGrid();
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, camera.width, camera.height);
    context.clip();
    for (const lane of lanes) this.paintLane(lane);
    context.restore();
    return lanes;
  }

  top(lane) { return lane.y - this.view.camera.scroll + AXIS; }

  x(timeline, time) {
    return GUTTER + this.view.camera.toX(time * this.view.options.factor(timeline));
  }

  // ── axis, grid, names ─────────────────────────────────────────────────────────────────────

  paintGrid() {
    const { context, theme, view } = this;
    const { camera } = view;
    const step = roundStep(camera.stop - camera.start, Math.max(2, camera.width / 90));
    this.step = step;
    context.fillStyle = theme.grid;
    for (let n = Math.ceil(camera.start / step); n * step <= camera.stop; n++) {
      context.fillRect(Math.round(GUTTER + camera.toX(n * step)), AXIS, 1, camera.height);
    }
  }

  paintFrame(lanes) {
    const { context, theme, view } = this;
    const { camera } = view;
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, view.width, AXIS);
    context.fillRect(0, AXIS, GUTTER, camera.height);
    context.font = `11px ${FONT}`;
    context.fillStyle = theme.muted;
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let n = Math.ceil(camera.start / this.step); n * this.step <= camera.stop; n++) {
      context.fillText(formatNumber(n * this.step), GUTTER + camera.toX(n * this.step), AXIS / 2);
    }
    context.textAlign = "right";
    context.fillText(view.unit ? `time (${view.unit})` : "time", GUTTER - 12, AXIS / 2);
    context.fillStyle = theme.grid;
    context.fillRect(0, AXIS - 1, view.width, 1);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, view.width, camera.height);
    context.clip();
    for (const lane of lanes) this.paintName(lane);
    context.restore();
  }

  paintName(lane) {
    const { context, theme } = this;
    const { timeline, rank } = lane;
    const middle = this.top(lane) + lane.height / 2;
    if (lane.type === "heading") {
      context.textAlign = "left";
      context.font = `600 13px ${FONT}`;
      context.fillStyle = theme.text;
      context.fillText(timeline.title, 14, middle + 2);
      const width = context.measureText(timeline.title).width;
      context.font = `11px ${FONT}`;
      context.fillStyle = theme.muted;
      const facts = timeline.facts.map(([name, value]) => `${name} ${value}`).join("   ");
      const scaled = this.view.isScaled(timeline) ? "   (scaled to one length)" : "";
      context.fillText(`${timeline.source}   ${facts}${scaled}`, 14 + width + 16, middle + 2);
      return;
    }
    context.textAlign = "right";
    if (lane.type === "compute") {
      if (lane.height < 12 && rank % 4) return;
      context.font = `${Math.min(12, Math.max(9, lane.height - 1))}px ${FONT}`;
      context.fillStyle = theme.text;
      const two = lane.height >= 28;
      context.fillText(`rank ${rank}`, GUTTER - 12, two ? middle - 6 : middle);
      if (two) {
        context.font = `10px ${FONT}`;
        context.fillStyle = theme.muted;
        context.fillText(`idle ${formatShare(timeline.idleOfRank[rank])}`, GUTTER - 12, middle + 8);
      }
    } else if (lane.height >= 9) {
      context.font = `9px ${FONT}`;
      context.fillStyle = theme.muted;
      const peak = timeline.peaks[rank];
      const name = lane.type === "memory"
        ? `peak ${formatMemory(peak ? peak.total : 0, timeline)}` : lane.lane;
      context.fillText(name, GUTTER - 12, middle);
    }
  }

  // ── lanes ─────────────────────────────────────────────────────────────────────────────────

  paintLane(lane) {
    if (lane.type === "heading") return;
    if (lane.type === "memory") {
      this.paintMemory(lane);
      return;
    }
    const { timeline } = lane;
    const { camera, options } = this.view;
    const factor = options.factor(timeline);
    const [t0, t1] = [camera.start / factor, camera.stop / factor];
    const [first, last] = timeline.visible(lane.row, t0, t1);
    const compares = options.difference && timeline.baseline !== null;
    if (last - first > camera.width / NARROWEST && !compares) {
      this.paintDense(lane, t0, t1);
    } else {
      this.paintBoxes(lane, first, last, t0, t1);
    }
  }

  paintDense(lane, t0, t1) {
    const { camera, options } = this.view;
    const key = `${lane.timeline.index}:${lane.row}`;
    if (!this.densities.has(key)) this.densities.set(key, new LaneDensity(lane.timeline, lane));
    const density = this.densities.get(key);
    const width = Math.round(camera.width * this.ratio);
    const height = Math.max(1, Math.round(lane.height * this.ratio));
    const image = this.imageOf(width, height);
    const shares = density.measure(t0, t1, width);
    const pixels = new Uint32Array(image.data.buffer);
    paintDensity(pixels, width, height, shares, density, this.packed, options.idle);
    const top = Math.round(this.top(lane) * this.ratio);
    this.context.putImageData(image, Math.round(GUTTER * this.ratio), top);
    if (this.view.highlights) this.paintHighlights(lane, t0, t1);
  }

  // Of a dense lane: what is looked for stands out, the rest steps back.
  paintHighlights(lane, t0, t1) {
    const { context, theme, view } = this;
    const { timeline } = lane;
    const { start, end, kind } = timeline.column;
    const y = this.top(lane);
    context.globalAlpha = 0.78;
    context.fillStyle = theme.paper;
    context.fillRect(GUTTER, y, view.camera.width, lane.height);
    context.globalAlpha = 1;
    const [first, last] = timeline.visible(lane.row, t0, t1);
    let painted = -1;
    for (let position = first; position < last; position++) {
      const span = timeline.order[position];
      if (view.fades(timeline, span)) continue;
      const left = this.x(timeline, start[span]);
      const right = Math.max(this.x(timeline, end[span]), left + 1.5);
      if (right <= painted) continue;
      context.fillStyle = this.styles[kind[span]].colour;
      context.fillRect(left, y, right - left, lane.height);
      painted = right;
    }
  }

  imageOf(width, height) {
    const key = `${width}x${height}`;
    if (!this.images.has(key)) {
      if (this.images.size > 12) this.images.clear();
      this.images.set(key, this.context.createImageData(width, height));
    }
    return this.images.get(key);
  }

  paintBoxes(lane, first, last, t0, t1) {
    const { context, theme } = this;
    const { timeline } = lane;
    const y = this.top(lane);
    if (lane.type === "compute") {
      context.fillStyle = theme.lane;
      const right = this.x(timeline, timeline.end);
      context.fillRect(GUTTER, y, right - GUTTER, lane.height);
      if (this.view.options.idle) this.paintIdle(lane, t0, t1);
    }
    const { start, end, track } = timeline.column;
    const { camera } = this.view;
    const scale = camera.scale * this.view.options.factor(timeline) * this.ratio;
    const origin = (GUTTER - camera.start * camera.scale) * this.ratio;
    const [low, high] = [GUTTER - 8, this.view.width + 8];
    const height = lane.height / lane.tracks;
    for (let position = first; position < last; position++) {
      const span = timeline.order[position];
      const at = y + Math.min(track[span], lane.tracks - 1) * height;
      // On whole pixels: edges are crisp, and painting is a good deal faster.
      const left = Math.max(low, Math.round(origin + start[span] * scale) / this.ratio);
      const right = Math.min(high, Math.round(origin + end[span] * scale) / this.ratio);
      const width = Math.max(right - left - (right - left > 4 ? 1 : 0), 1);
      this.paintBox(lane, span, left, at, width, lane.tracks > 1 ? height - 1 : height);
    }
  }

  paintIdle(lane, t0, t1) {
    const { context } = this;
    const { timeline } = lane;
    const { idleStart, idleEnd, idleCause } = timeline.column;
    const [from, to] = timeline.visibleIdle(lane.rank, t0, t1);
    const [y, height] = [this.top(lane) + lane.height / 4, lane.height / 2];
    for (let idle = from; idle < to; idle++) {
      const left = Math.max(GUTTER - 2, this.x(timeline, idleStart[idle]));
      const right = Math.min(this.view.width + 2, this.x(timeline, idleEnd[idle]));
      context.fillStyle = this.fills[timeline.kinds.length + idleCause[idle]];
      context.fillRect(left, y, Math.max(right - left, 0.5), height);
    }
  }

  paintBox(lane, span, left, y, width, height) {
    const { context, theme, view } = this;
    const { timeline } = lane;
    const faded = view.highlights && view.fades(timeline, span);
    if (faded) context.globalAlpha = 0.22;
    if (view.options.difference && timeline.baseline !== null) {
      const change = view.changeOf(timeline, span);
      context.fillStyle = change === null ? theme.grid : colourOfChange(change);
      context.fillRect(left, y, width, height);
      const text = change === null ? "" : `${change > 0 ? "+" : ""}${(100 * change).toFixed(0)} %`;
      this.paintText(text, left, y, width, height, "#10151B");
    } else {
      const { kind, stage, microbatch } = timeline.column;
      if (stage[span] >= 0) {
        this.paintPart(lane, kind[span], stage[span], microbatch[span], left, y, width, height);
      } else {
        const parts = timeline.parts(span);
        const share = width / parts.length;
        parts.forEach((part, i) => this.paintPart(lane, ...part, left + i * share, y, share, height));
      }
    }
    if (view.options.critical && timeline.isCritical[span]) {
      context.strokeStyle = theme.critical;
      context.lineWidth = Math.min(2, height / 3);
      context.strokeRect(left + 0.5, y + 0.5, Math.max(width - 1, 1), height - 1);
    }
    if (faded) context.globalAlpha = 1;
  }

  paintPart(lane, kind, stage, microbatch, x, y, width, height) {
    const { context } = this;
    const style = this.styles[kind];
    context.fillStyle = width >= SMALLEST_PATTERN ? this.fills[kind] : style.colour;
    context.fillRect(x, y, width, height);
    if (lane.type !== "compute") return;
    const chunk = lane.timeline.chunkOfStage.get(stage) ?? 0;
    if (chunk && width > 3 && height >= 14) {
      context.fillStyle = style.ink;
      for (let bar = 0; bar < Math.min(chunk, 3); bar++) {
        context.fillRect(x, y + height - 2 - 3 * bar, width, 1.5);
      }
    }
    if (width < 8 || height < 11) return;
    const letter = style.short ? style.name : style.letter;
    const number = microbatch === null || microbatch < 0 ? "" : String(microbatch);
    for (const name of [`${stage}${letter}${number}`, `${letter}${number}`, number || letter]) {
      const plain = style.pattern === "plain" ? null : style.colour;
      if (this.paintText(name, x, y, width, height - (chunk ? 2 : 0), style.ink, plain)) break;
    }
  }

  // Text in the middle of a box, if it fits.
  paintText(text, x, y, width, height, colour, background = null) {
    const { context } = this;
    const size = Math.min(11, Math.floor(height) - 3);
    if (size < 8 || !text || width < 6) return false;
    const length = this.measure(text) * size;
    if (length > width - 3) return false;
    context.font = `${size}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (background) {
      context.fillStyle = background;
      context.fillRect(x + width / 2 - length / 2 - 1, y + height / 2 - size / 2 - 1,
        length + 2, size + 2);
    }
    context.fillStyle = colour;
    context.fillText(text, x + width / 2, y + height / 2 + 0.5);
    return true;
  }

  measure(text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 20000) this.widths.clear();
      this.context.font = `100px ${FONT}`;
      width = this.context.measureText(text).width / 100;
      this.widths.set(text, width);
    }
    return width;
  }

  paintMemory(lane) {
    const { context, theme, view } = this;
    const { timeline, rank, height } = lane;
    const { memoryOffset, memoryTime, memoryTotal } = timeline.column;
    const y = this.top(lane);
    const factor = view.options.factor(timeline);
    const bottom = y + height - 1;
    const level = (total) => bottom - (height - 3) * (total / timeline.largestMemory);
    const end = memoryOffset[rank + 1];
    let position = Math.max(timeline.memoryAt(rank, view.camera.start / factor),
      memoryOffset[rank]);
    const last = Math.min(this.x(timeline, timeline.end), view.width);
    if (position < end) {
      // One step per pixel, the highest in it.
      const outline = new Path2D();
      let x = Math.max(GUTTER, this.x(timeline, memoryTime[position]));
      outline.moveTo(x, bottom);
      while (position < end && x < last) {
        let top = memoryTotal[position];
        let next = position + 1 < end ? this.x(timeline, memoryTime[position + 1]) : last;
        while (next < x + 1 && position + 1 < end) {
          position++;
          top = Math.max(top, memoryTotal[position]);
          next = position + 1 < end ? this.x(timeline, memoryTime[position + 1]) : last;
        }
        outline.lineTo(x, level(top));
        x = Math.min(next, last);
        outline.lineTo(x, level(top));
        position++;
      }
      outline.lineTo(x, bottom);
      context.fillStyle = `${theme.memory}55`;
      context.fill(outline);
      context.strokeStyle = theme.memory;
      context.lineWidth = 1;
      context.stroke(outline);
    }
    if (timeline.memoryLimit !== null) {
      context.strokeStyle = theme.limit;
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(GUTTER, level(timeline.memoryLimit));
      context.lineTo(last, level(timeline.memoryLimit));
      context.stroke();
      context.setLineDash([]);
    }
  }
}

// Slower than the baseline: towards vermilion; faster: towards blue; grey within 1 %.
function colourOfChange(change) {
  const strength = Math.min(Math.abs(change) / 0.5, 1);
  const target = change > 0 ? [232, 120, 60] : [90, 170, 225];
  if (Math.abs(change) < 0.01) return "#D5D9DE";
  const mixed = target.map((c) => Math.round(c + (225 - c) * (1 - strength) * 0.8));
  return `rgb(${mixed.join(",")})`;
}
