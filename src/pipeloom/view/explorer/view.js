// The state of the page, and everything that can be done to it.

import { Camera } from "explorer/camera.js";
import { describe, fillPanel, latest } from "explorer/details.js";
import { Painter } from "explorer/draw.js";
import { formatTime } from "explorer/format.js";
import { AXIS, GUTTER, hitTest, layOut } from "explorer/layout.js";
import { boxOf, paintOverlay } from "explorer/overlay.js";
import { findSpans } from "explorer/search.js";
import { readState, writeState } from "explorer/state.js";
import { openTable } from "explorer/table.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");

export class View {
  constructor(report, parts) {
    this.report = report;
    this.parts = parts;
    this.painter = new Painter(parts.canvas, report);
    const ranks = report.timelines.reduce((sum, t) => sum + t.ranks, 0);
    this.defaults = {
      idle: true,
      critical: false,
      messages: ranks <= 16,
      memory: ranks <= 16,
      difference: false,
      relative: false,
    };
    this.options = { ...this.defaults, rowScale: 1, factor: (timeline) => this.factorOf(timeline) };
    this.axis = report.timelines[0];
    this.unit = this.axis.timeUnit;
    this.themeChoice = report.theme;
    this.camera = new Camera(this.endOfAxis());
    this.selected = this.hovered = this.pointer = this.search = null;
    this.past = [];
    this.changes = new Map();
    new ResizeObserver(() => this.resize()).observe(parts.stage);
    DARK.addEventListener("change", () => this.useTheme());
    addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.written) this.restore(location.hash);
    });
    parts.search.addEventListener("input", () => this.startSearch(parts.search.value));
    this.useTheme();
    this.resize();
    this.refreshPanel();
  }

  // ── time ──────────────────────────────────────────────────────────────────────────────────

  factorOf(timeline) {
    if (!this.options.relative) return timeline.ownFactor;
    return timeline.end > 0 ? this.axis.end / timeline.end : 1;
  }

  isScaled(timeline) { return timeline.relative || (this.options.relative && timeline !== this.axis); }

  endOfAxis() {
    return Math.max(...this.report.timelines.map((t) => t.end * this.factorOf(t)));
  }

  // ── painting ──────────────────────────────────────────────────────────────────────────────

  resize() {
    const { canvas, stage } = this.parts;
    const ratio = devicePixelRatio || 1;
    this.width = Math.max(stage.clientWidth, GUTTER + 40);
    this.height = Math.max(stage.clientHeight, AXIS + 40);
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    this.camera.width = this.width - GUTTER;
    this.camera.height = this.height - AXIS;
    this.painter.setTheme(this.theme, ratio);
    this.layOut();
    this.paintNow();
  }

  layOut() {
    this.layout = layOut(this.report, this.options);
    this.camera.contentHeight = this.layout.height;
    this.camera.scrollTo(this.camera.scroll);
  }

  // Something has changed: paint once before the next frame.
  changed() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.paintNow();
      this.rememberLater();
    });
  }

  paintNow() {
    cancelAnimationFrame(this.pending);
    this.pending = null;
    if (!this.layout) return;
    const lanes = this.painter.paint(this);
    paintOverlay(this.painter, this);
    this.painter.paintFrame(lanes);
  }

  // True while some actions are to stand out.
  get highlights() { return this.options.critical || Boolean(this.search?.spans.length); }

  fades(timeline, span) {
    if (this.search?.spans.length) return !this.search.masks[timeline.index][span];
    return this.options.critical && !timeline.isCritical[span];
  }

  // ── pointing and selecting ────────────────────────────────────────────────────────────────

  targetAt(x, y) {
    if (y < AXIS) return null;
    return hitTest(this.layout, this.camera, this.options, x - GUTTER, y - AXIS + this.camera.scroll);
  }

  point(x, y) {
    this.pointer = x === null || x < GUTTER ? null : { x, y };
    this.hovered = this.pointer && this.targetAt(x, y);
    const { tooltip } = this.parts;
    tooltip.hidden = !this.hovered;
    if (this.hovered) {
      tooltip.replaceChildren(describe(this, this.hovered));
      // Beside the pointer, inside the stage.
      const { offsetWidth: width, offsetHeight: height } = tooltip;
      const left = x + 18 + width > this.width ? x - width - 14 : x + 18;
      const top = Math.min(y + 14, this.height - height - 6);
      tooltip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
    }
    this.changed();
  }

  select(target, { show = false, remember = true } = {}) {
    if (remember && this.selected?.type === "span") this.past.push(this.selected);
    this.selected = target ?? null;
    if (target?.type === "span") {
      const { timeline, span } = target;
      if (show) this.bringIntoView(target);
      const start = formatTime(timeline.column.start[span], timeline);
      this.say(`${timeline.text(span)}, ${timeline.meaning(span)}, starts at ${start}`);
    }
    this.refreshPanel();
    this.changed();
  }

  bringIntoView({ timeline, span }) {
    const { start, end } = timeline.column;
    const factor = this.factorOf(timeline);
    this.camera.show(start[span] * factor, end[span] * factor);
    const lane = this.layout.laneOf(timeline, span);
    if (lane && (lane.y < this.camera.scroll
        || lane.y + lane.height > this.camera.scroll + this.camera.height)) {
      this.camera.scrollTo(lane.y - this.camera.height / 2);
    }
  }

  zoomTo({ timeline, span }) {
    const factor = this.factorOf(timeline);
    const [start, end] = [timeline.column.start[span] * factor, timeline.column.end[span] * factor];
    const room = Math.max(end - start, this.camera.end * 1e-6) * 4;
    this.camera.set((start + end) / 2 - room, (start + end) / 2 + room);
  }

  step(direction) {
    if (this.selected?.type !== "span") {
      const timeline = this.axis;
      const row = timeline.rows.findIndex(([, lane]) => lane === "compute");
      const span = timeline.order[timeline.rowOffset[row]];
      if (span !== undefined) this.select({ type: "span", timeline, span }, { show: true });
      return;
    }
    const { timeline, span } = this.selected;
    const next = timeline.neighbour(span, direction);
    if (next >= 0) this.select({ type: "span", timeline, span: next }, { show: true, remember: false });
  }

  // To the action of the lane above or below that is nearest in time.
  stepRank(direction) {
    if (this.selected?.type !== "span") {
      this.step(1);
      return;
    }
    const { timeline, span } = this.selected;
    const lanes = this.layout.lanes.filter((lane) => lane.row !== undefined);
    const here = lanes.indexOf(this.layout.laneOf(timeline, span));
    const lane = lanes[here + direction];
    if (!lane) return;
    const middle = ((timeline.column.start[span] + timeline.column.end[span]) / 2)
      * this.factorOf(timeline) / this.factorOf(lane.timeline);
    const [from, to] = [lane.timeline.rowOffset[lane.row], lane.timeline.rowOffset[lane.row + 1]];
    let [, position] = lane.timeline.visible(lane.row, middle, middle);
    position = Math.min(Math.max(position - 1, from), to - 1);
    if (from === to) return;
    this.select({ type: "span", timeline: lane.timeline, span: lane.timeline.order[position] },
      { show: true, remember: false });
  }

  // From an action to the one that it waited for last.
  followDependency() {
    if (this.selected?.type === "span") {
      const span = latest(this.selected.timeline, this.selected.span);
      if (span >= 0) this.select({ ...this.selected, span }, { show: true });
    } else if (this.selected?.type === "idle") {
      const { timeline, idle } = this.selected;
      const span = timeline.column.idleWaitsFor[idle];
      if (span >= 0) this.select({ type: "span", timeline, span }, { show: true });
    }
  }

  goBack() {
    const target = this.past.pop();
    if (target) this.select(target, { show: true, remember: false });
  }

  clear() {
    this.clearSearch();
    this.select(null);
  }

  refreshPanel() { fillPanel(this.parts.panel, this); }

  say(text) { this.parts.announcer.textContent = text; }

  // ── comparing ─────────────────────────────────────────────────────────────────────────────

  baselineOf(timeline, span) {
    if (timeline.baseline === null) return null;
    const match = timeline.column.match[span];
    return match < 0 ? null : { timeline: this.report.timelines[timeline.baseline], span: match };
  }

  changeOf(timeline, span) {
    const base = this.baselineOf(timeline, span);
    if (!base) return null;
    const other = base.timeline.duration(base.span) * this.factorOf(base.timeline);
    const own = timeline.duration(span) * this.factorOf(timeline);
    return other > 0 ? own / other - 1 : null;
  }

  // The computations whose durations differ most, in the time of the axis.
  largestChanges(timeline, most) {
    const key = `${timeline.index}:${this.options.relative}`;
    if (!this.changes.has(key)) {
      const found = [];
      for (let span = 0; span < timeline.count; span++) {
        const base = timeline.laneOf(span) === "compute" ? this.baselineOf(timeline, span) : null;
        if (!base) continue;
        const [a, b] = [this.factorOf(timeline), this.factorOf(base.timeline)];
        const own = timeline.duration(span) * a;
        const other = base.timeline.duration(base.span) * b;
        const shift = timeline.column.start[span] * a - base.timeline.column.start[base.span] * b;
        found.push({ span, own, other, shift });
      }
      found.sort((p, q) => Math.abs(q.own - q.other) - Math.abs(p.own - p.other) || p.span - q.span);
      this.changes.set(key, found.slice(0, 200));
    }
    return this.changes.get(key).slice(0, most);
  }

  // ── searching ─────────────────────────────────────────────────────────────────────────────

  find(text) { return findSpans(this.report, text); }

  startSearch(text) {
    this.search = text.trim() ? this.find(text.trim()) : null;
    const { matches } = this.parts;
    matches.textContent = !this.search ? "" : this.search.spans.length
      ? `${this.search.spans.length} found` : "none found";
    this.changed();
  }

  nextMatch(direction) {
    const found = this.search;
    if (!found?.spans.length) return;
    const count = found.spans.length;
    found.current = found.current < 0 && direction < 0 ? count - 1
      : (found.current + direction + count) % count;
    this.parts.matches.textContent = `${found.current + 1} of ${count}`;
    this.select({ type: "span", ...found.spans[found.current] }, { show: true });
  }

  focusSearch() {
    this.parts.search.focus();
    this.parts.search.select();
  }

  clearSearch() {
    this.parts.search.value = "";
    this.startSearch("");
    this.parts.search.blur();
  }

  // ── switches ──────────────────────────────────────────────────────────────────────────────

  toggle(name) { this.setOptions({ [name]: !this.options[name] }); }

  setOptions(values) {
    const before = this.camera.end;
    Object.assign(this.options, values);
    this.camera.end = this.endOfAxis();
    if (this.camera.end !== before) this.camera.fit();
    this.layOut();
    this.refreshPanel();
    for (const button of document.querySelectorAll("[data-switch]")) {
      button.setAttribute("aria-pressed", String(this.options[button.dataset.switch]));
    }
    this.changed();
  }

  scaleRows(factor) {
    this.setOptions({ rowScale: Math.min(8, Math.max(0.25, this.options.rowScale * factor)) });
  }

  nextTheme() {
    const order = ["auto", "light", "dark"];
    // From "auto" first to what differs from what is seen.
    if (this.themeChoice === "auto") this.themeChoice = DARK.matches ? "light" : "dark";
    else this.themeChoice = order[(order.indexOf(this.themeChoice) + 1) % 3];
    this.useTheme();
    this.parts.hint.textContent = `theme: ${this.themeChoice}`;
  }

  useTheme() {
    const name = this.themeChoice === "auto" ? (DARK.matches ? "dark" : "light") : this.themeChoice;
    this.theme = this.report.themes[name];
    const root = document.documentElement;
    root.dataset.theme = name;
    for (const part of ["paper", "text", "muted", "grid", "lane", "limit", "arrow"]) {
      root.style.setProperty(`--${part}`, this.theme[part]);
    }
    this.painter.setTheme(this.theme, devicePixelRatio || 1);
    this.changed();
  }

  openTable() { openTable(this.parts.table, this); }

  openHelp() { this.parts.help.showModal(); }

  // ── links ─────────────────────────────────────────────────────────────────────────────────

  rememberLater() {
    clearTimeout(this.remembering);
    this.remembering = setTimeout(() => this.remember(), 250);
  }

  remember() {
    this.written = writeState(this);
    const link = this.written ? `#${this.written}` : location.pathname + location.search;
    if (location.hash.slice(1) !== this.written) history.replaceState(null, "", link);
  }

  async copyLink() {
    this.remember();
    const { hint } = this.parts;
    try {
      await navigator.clipboard.writeText(location.href);
      hint.textContent = "link copied";
    } catch {
      hint.textContent = "the address bar has the link to this view";
    }
  }

  restore(hash) {
    const state = readState(hash);
    this.themeChoice = state.theme ?? this.report.theme;
    this.useTheme();
    this.setOptions({ ...this.defaults, rowScale: 1, ...state.options });
    this.camera.fit();
    if (state.times) this.camera.set(...state.times);
    this.camera.scrollTo(state.scroll ?? 0);
    this.parts.search.value = state.query;
    this.startSearch(state.query);
    const [index, span] = state.selected ?? [];
    const timeline = this.report.timelines[index];
    const known = timeline && span < timeline.count;
    this.select(known ? { type: "span", timeline, span } : null, { remember: false });
  }

  // The middle of an action's box, in pixels of the window; null where it is out of view.
  locate(text, index) {
    const timeline = this.report.timelines[index];
    const span = timeline.find(text);
    const box = span < 0 ? null : boxOf(this.painter, this, timeline, span);
    if (!box) return null;
    const canvas = this.parts.canvas.getBoundingClientRect();
    return {
      x: canvas.left + box.x + box.width / 2, y: canvas.top + box.y + box.height / 2,
      width: box.width, height: box.height,
    };
  }
}
