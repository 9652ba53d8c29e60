// Mouse, touch and keyboard.

import { AXIS, GUTTER } from "explorer/layout.js";

const STILL = 4; // pixels a finger or mouse may move in a click

export function listen(canvas, view) {
  listenToPointers(canvas, view);
  canvas.addEventListener("wheel", (event) => turnWheel(event, canvas, view), { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const target = view.targetAt(...place(canvas, event));
    if (target?.type === "span") view.zoomTo(target);
    else view.camera.zoom(2, place(canvas, event)[0] - GUTTER);
    view.changed();
  });
  document.addEventListener("keydown", (event) => pressKey(event, canvas, view));
}

function place(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function listenToPointers(canvas, view) {
  const down = new Map();
  let moved = 0;

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, place(canvas, event));
    if (down.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(canvas, event);
    const before = down.get(event.pointerId);
    if (!before) {
      view.point(...now);
      return;
    }
    moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    down.set(event.pointerId, now);
    if (moved < STILL) return;
    if (down.size === 1) {
      view.camera.pan(before[0] - now[0], before[1] - now[1]);
    } else {
      pinch(view, before, now, [...down].find(([id]) => id !== event.pointerId)[1]);
    }
    view.point(null);
    view.changed();
  });
  const release = (event) => {
    const wasDown = down.delete(event.pointerId);
    if (event.type === "pointerup" && wasDown && moved < STILL && down.size === 0) {
      const target = view.targetAt(...place(canvas, event));
      view.select(target?.type === "memory" ? null : target);
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => view.point(null));
}

// Two fingers: what is between them stays between them.
function pinch(view, before, now, other) {
  const spread = (a, b) => Math.max(Math.abs(a[0] - b[0]), 20);
  const middle = (a, b) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
  const [x0, y0] = middle(before, other);
  const [x1, y1] = middle(now, other);
  view.camera.zoom(spread(now, other) / spread(before, other), x0 - GUTTER);
  view.camera.pan(x0 - x1, y0 - y1);
}

// Sideways pans. Up and down scrolls the ranks where they do not fit, and zooms where they do or
// with Ctrl (which is also what a pinch on a touchpad sends).
function turnWheel(event, canvas, view) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? view.camera.height : 1;
  const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
  const { camera } = view;
  const scrolls = camera.contentHeight > camera.height + 1;
  if (event.ctrlKey || event.metaKey || (!event.shiftKey && !scrolls && dy)) {
    camera.zoom(Math.exp(-dy * (event.ctrlKey ? 0.01 : 0.0022)), place(canvas, event)[0] - GUTTER);
    camera.pan(dx);
  } else if (event.shiftKey) {
    camera.pan(dx + dy);
  } else {
    camera.pan(dx, dy);
  }
  const [x, y] = place(canvas, event);
  view.point(x, y);
  view.changed();
}

function pressKey(event, canvas, view) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]")) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (typing) {
    if (event.key === "Enter") view.nextMatch(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") view.clearSearch();
    else return;
    event.preventDefault();
    return;
  }
  const onButton = event.target.matches?.("button, a, summary");
  const step = view.camera.width / 6;
  const actions = {
    a: () => view.camera.pan(-step),
    d: () => view.camera.pan(step),
    w: () => view.camera.zoom(1.4, zoomAt(view)),
    s: () => view.camera.zoom(1 / 1.4, zoomAt(view)),
    "+": () => view.camera.zoom(1.4, zoomAt(view)),
    "=": () => view.camera.zoom(1.4, zoomAt(view)),
    "-": () => view.camera.zoom(1 / 1.4, zoomAt(view)),
    0: () => view.camera.fit(),
    Home: () => view.camera.fit(),
    PageUp: () => view.camera.pan(0, -view.camera.height * 0.9),
    PageDown: () => view.camera.pan(0, view.camera.height * 0.9),
    ArrowLeft: () => view.step(-1),
    ArrowRight: () => view.step(1),
    ArrowUp: () => view.stepRank(-1),
    ArrowDown: () => view.stepRank(1),
    Enter: () => view.followDependency(),
    Backspace: () => view.goBack(),
    z: () => view.selected?.type === "span" && view.zoomTo(view.selected),
    n: () => view.nextMatch(1),
    N: () => view.nextMatch(-1),
    "/": () => view.focusSearch(),
    i: () => view.toggle("idle"),
    c: () => view.toggle("critical"),
    m: () => view.toggle("messages"),
    y: () => view.toggle("memory"),
    x: () => view.toggle("difference"),
    r: () => view.toggle("relative"),
    ">": () => view.scaleRows(1.25),
    "<": () => view.scaleRows(0.8),
    l: () => view.nextTheme(),
    t: () => view.openTable(),
    "?": () => view.openHelp(),
    Escape: () => view.clear(),
  };
  const action = actions[event.key];
  if (!action || (onButton && (event.key === "Enter" || event.key === " "))) return;
  event.preventDefault();
  action();
  view.changed();
}

// Keys zoom at the selected action, else at the pointer, else in the middle.
function zoomAt(view) {
  if (view.selected?.type === "span") {
    const { timeline, span } = view.selected;
    const { start, end } = timeline.column;
    const middle = ((start[span] + end[span]) / 2) * view.options.factor(timeline);
    const x = view.camera.toX(middle);
    if (x >= 0 && x <= view.camera.width) return x;
  }
  return view.pointer && view.pointer.y > AXIS ? view.pointer.x - GUTTER : view.camera.width / 2;
}

export const KEYS = [
  ["Drag, A D", "move in time"],
  ["Wheel, pinch, W S, + −", "zoom (with Ctrl where the wheel scrolls)"],
  ["0", "see everything"],
  ["← →", "previous, next action of the rank"],
  ["↑ ↓", "the rank above, below"],
  ["Enter", "go to what the action waits for"],
  ["Backspace", "go back"],
  ["Z, double click", "zoom to the action"],
  ["/", "find; Enter, N: next match"],
  ["C", "critical path"],
  ["I", "idle time by cause"],
  ["M", "messages"],
  ["Y", "memory"],
  ["X", "difference between predicted and measured"],
  ["R", "scale all timelines to one length"],
  ["< >", "lower, higher rows"],
  ["L", "light, dark"],
  ["T", "table of the data"],
  ["Esc", "clear"],
];
