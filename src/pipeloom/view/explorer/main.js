// Starts the report: reads the data, builds the page around the canvas, restores the link's view.

import { loadReport } from "explorer/data.js";
import { element } from "explorer/format.js";
import { chip } from "explorer/details.js";
import { KEYS, listen } from "explorer/controls.js";
import { View } from "explorer/view.js";

const $ = (id) => document.getElementById(id);

const TOOLS = [
  // [name, label, key, what it does, is it there]
  ["critical", "Critical path", "C", (view) => view.toggle("critical"), () => true],
  ["idle", "Idle causes", "I", (view) => view.toggle("idle"), () => true],
  ["messages", "Messages", "M", (view) => view.toggle("messages"), hasMessages],
  ["memory", "Memory", "Y", (view) => view.toggle("memory"), hasMemory],
  ["difference", "Difference", "X", (view) => view.toggle("difference"), hasBaseline],
  ["relative", "One length", "R", (view) => view.toggle("relative"), isCompared],
];
const ACTIONS = [
  ["−", "Zoom out (S)", (view) => view.camera.zoom(1 / 1.5)],
  ["+", "Zoom in (W)", (view) => view.camera.zoom(1.5)],
  ["Fit", "See everything (0)", (view) => view.camera.fit()],
  ["Table", "The same data as a table (T)", (view) => view.openTable()],
  ["Theme", "Light, dark, or as the system (L)", (view) => view.nextTheme()],
  ["Link", "Copy a link to this view", (view) => view.copyLink()],
  ["?", "Keyboard and mouse (?)", (view) => view.openHelp()],
];

function hasMessages(report) {
  return report.timelines.some((t) => t.rows.some(([, lane]) => lane !== "compute"));
}
function hasMemory(report) { return report.timelines.some((t) => t.hasMemory); }
function hasBaseline(report) { return report.timelines.some((t) => t.baseline !== null); }
function isCompared(report) { return report.timelines.length > 1; }

function buildTools(view) {
  const switches = TOOLS.filter(([, , , , there]) => there(view.report)).map(
    ([name, label, key, act]) => element("button", {
      type: "button", class: "switch", "data-switch": name, title: `${label} (${key})`,
      "aria-pressed": "false", onclick: () => { act(view); view.changed(); },
    }, label));
  const buttons = ACTIONS.map(([label, title, act]) => element("button", {
    type: "button", title, "aria-label": title, onclick: () => { act(view); view.changed(); },
  }, label));
  $("tools").replaceChildren(...switches, element("span", { class: "space" }), ...buttons);
}

function buildLegend(view) {
  const { report } = view;
  const kinds = new Set();
  const causes = new Set();
  for (const timeline of report.timelines) {
    for (let span = 0; span < timeline.count; span++) kinds.add(timeline.column.kind[span]);
    for (const { parts } of timeline.fused) for (const [kind] of parts) kinds.add(kind);
    for (const cause of timeline.column.idleCause) causes.add(cause);
  }
  const entry = (style, text) => element("span", { class: "entry" }, chip(style), text);
  // A fused action is drawn as its parts.
  const drawn = [...kinds].sort((a, b) => a - b).filter((k) => !report.kinds[k].name.startsWith("OVERLAP"));
  $("legend").replaceChildren(
    ...drawn.map((kind) => entry(report.kinds[kind], report.kinds[kind].meaning)),
    element("span", { class: "divider" }),
    ...[...causes].sort((a, b) => a - b).map((cause) => entry(report.causes[cause],
      report.causes[cause].name)),
    report.timelines.some((t) => t.stagesOfRank.some((s) => s.length > 1))
      ? element("span", { class: "entry" }, element("span", { class: "chip second" }),
        "the rank's second stage") : "");
}

function buildHelp() {
  const rows = KEYS.map(([keys, what]) => element("tr", {},
    element("th", { scope: "row" }, element("kbd", {}, keys)), element("td", {}, what)));
  $("help").replaceChildren(
    element("h2", {}, "Keyboard and mouse"),
    element("table", {}, element("tbody", {}, ...rows)),
    element("form", { method: "dialog" }, element("button", { autofocus: true }, "Close")));
}

async function start() {
  const report = await loadReport(document);
  $("title").textContent = report.title;
  $("app").hidden = false;
  $("loading").remove();
  const view = new View(report, {
    canvas: $("canvas"), stage: $("stage"), tooltip: $("tooltip"), panel: $("panel"),
    search: $("search"), matches: $("matches"), table: $("table"), help: $("help"),
    hint: $("hint"), announcer: $("announcer"),
  });
  buildTools(view);
  buildLegend(view);
  buildHelp();
  listen($("canvas"), view);
  view.restore(location.hash);
  view.paintNow();
  // For programs that drive the page: where an action stands, and what is in view.
  window.pipeloomReport = {
    view,
    locate: (text, timeline = 0) => view.locate(text, timeline),
    ready: true,
  };
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  const place = $("loading") ?? document.body.appendChild(document.createElement("p"));
  place.textContent = `The timeline could not be opened: ${error.message}`;
  document.documentElement.dataset.ready = "failed";
  throw error;
});
