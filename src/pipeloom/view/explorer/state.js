// The view as the part of the link after "#", so that a link shows what its sender saw.

const FLAGS = { idle: "i", critical: "c", messages: "m", memory: "y", difference: "d", relative: "r" };

export function writeState(view) {
  const { camera, options } = view;
  const parts = new URLSearchParams();
  if (camera.start > 0 || camera.stop < camera.end) {
    parts.set("t", [camera.start, camera.stop].map((time) => Number(time.toPrecision(9))).join(","));
  }
  if (camera.scroll) parts.set("y", Math.round(camera.scroll));
  if (view.selected?.type === "span") {
    parts.set("sel", `${view.selected.timeline.index}.${view.selected.span}`);
  }
  if (view.search) parts.set("q", view.search.text);
  const flags = Object.entries(FLAGS)
    .filter(([name]) => options[name] !== view.defaults[name])
    .map(([name, letter]) => (options[name] ? letter : `-${letter}`));
  if (flags.length) parts.set("show", flags.join("."));
  if (options.rowScale !== 1) parts.set("rows", options.rowScale);
  if (view.themeChoice !== view.report.theme) parts.set("theme", view.themeChoice);
  return parts.toString();
}

export function readState(text) {
  const parts = new URLSearchParams(text.replace(/^#/, ""));
  const state = { options: {} };
  const times = (parts.get("t") ?? "").split(",").map(Number);
  if (times.length === 2 && times.every(Number.isFinite) && times[1] > times[0]) state.times = times;
  const scroll = Number(parts.get("y"));
  if (Number.isFinite(scroll)) state.scroll = scroll;
  const selected = /^(\d+)\.(\d+)$/.exec(parts.get("sel") ?? "");
  if (selected) state.selected = [Number(selected[1]), Number(selected[2])];
  state.query = parts.get("q") ?? "";
  const letters = Object.fromEntries(Object.entries(FLAGS).map(([name, letter]) => [letter, name]));
  for (const flag of (parts.get("show") ?? "").split(".")) {
    const name = letters[flag.replace("-", "")];
    if (name) state.options[name] = !flag.startsWith("-");
  }
  const rows = Number(parts.get("rows"));
  if (rows >= 0.25 && rows <= 8) state.options.rowScale = rows;
  const theme = parts.get("theme");
  if (["auto", "light", "dark"].includes(theme)) state.theme = theme;
  return state;
}
