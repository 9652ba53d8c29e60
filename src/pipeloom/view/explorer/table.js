// The same data as a table, page by page, for reading without seeing and for looking things up.

import { element, formatMemory, formatShare, formatTime } from "explorer/format.js";

const PAGE = 100;

export function openTable(dialog, view) {
  const state = { timeline: 0, what: "actions", filter: view.search?.text ?? "", page: 0 };
  const body = element("div", { class: "table-body", tabindex: "0" });
  const status = element("output", {});
  const choose = (name, label, choices) => element("label", {}, `${label} `,
    element("select", { name, onchange: (event) => change({ [name]: event.target.value, page: 0 }) },
      ...choices.map(([value, text]) => element("option", { value }, text))));
  const change = (values) => {
    Object.assign(state, values);
    const rows = listRows(view, state);
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    state.page = Math.min(Math.max(state.page, 0), pages - 1);
    status.textContent = `${rows.length} rows, page ${state.page + 1} of ${pages}`;
    body.replaceChildren(makeTable(view, state, rows.slice(state.page * PAGE, (state.page + 1) * PAGE)));
    body.scrollTop = 0;
  };
  const button = (text, act) => element("button", { type: "button", onclick: act }, text);
  dialog.replaceChildren(
    element("form", { method: "dialog", class: "table-tools" },
      choose("timeline", "Timeline", view.report.timelines.map((t, i) => [i, t.title])),
      choose("what", "Show", [["actions", "actions"], ["idle", "idle time"], ["memory", "memory peaks"]]),
      element("label", {}, "Only ", element("input", {
        name: "filter", type: "search", value: state.filter, placeholder: "2F0, rank 1 …",
        oninput: (event) => change({ filter: event.target.value, page: 0 }),
        onkeydown: (event) => event.key === "Enter" && event.preventDefault(),
      })),
      button("Previous page", () => change({ page: state.page - 1 })),
      button("Next page", () => change({ page: state.page + 1 })),
      status,
      element("button", { type: "submit", value: "close" }, "Close")),
    body);
  change({});
  dialog.showModal();
}

function listRows(view, state) {
  const timeline = view.report.timelines[state.timeline];
  if (state.what === "memory") return timeline.peaks.map((_, rank) => rank);
  if (state.what === "idle") return [...timeline.column.idleRank.keys()];
  const found = state.filter.trim() ? view.find(state.filter) : null;
  const rows = [];
  for (let span = 0; span < timeline.count; span++) {
    if (!found || found.masks[timeline.index][span]) rows.push(span);
  }
  return rows;
}

function makeTable(view, state, rows) {
  const timeline = view.report.timelines[state.timeline];
  const { heads, cells } = { actions, idle, memory }[state.what](timeline);
  const body = element("tbody");
  for (const row of rows) {
    const [first, ...rest] = cells(row);
    body.append(element("tr", {}, element("th", { scope: "row" }, first),
      ...rest.map((cell) => element("td", {}, cell))));
  }
  return element("table", { class: "data" },
    element("caption", {}, `${timeline.title}: ${state.what}`),
    element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", { scope: "col" }, h)))),
    body);
}

function actions(timeline) {
  const { start, end, slack } = timeline.column;
  const time = (value) => formatTime(value, timeline);
  const names = (spans) => [...spans].slice(0, 12).map((s) => timeline.text(s)).join(", ");
  return {
    heads: ["Action", "Rank", "Lane", "Start", "End", "Takes", "Slack", "Waits for", "Awaited by"],
    cells: (span) => [
      timeline.text(span), timeline.rankOf(span), timeline.laneOf(span), time(start[span]),
      time(end[span]), time(timeline.duration(span)), span < slack.length ? time(slack[span]) : "",
      names(timeline.needs(span)), names(timeline.dependents(span)),
    ],
  };
}

function idle(timeline) {
  const { idleRank, idleStart, idleEnd, idleCause, idleWaitsFor } = timeline.column;
  const time = (value) => formatTime(value, timeline);
  const total = idleStart.reduce((sum, start, i) => sum + idleEnd[i] - start, 0);
  return {
    heads: ["Rank", "Cause", "Waits for", "Start", "End", "Takes", "Share of all idle time"],
    cells: (i) => [
      idleRank[i], timeline.causes[idleCause[i]].name,
      idleWaitsFor[i] < 0 ? "" : timeline.text(idleWaitsFor[i]), time(idleStart[i]),
      time(idleEnd[i]), time(idleEnd[i] - idleStart[i]),
      total ? formatShare((idleEnd[i] - idleStart[i]) / total) : "",
    ],
  };
}

function memory(timeline) {
  return {
    heads: ["Rank", "Peak", "At", "During", "Made of", "Alive, largest first"],
    cells: (rank) => {
      const peak = timeline.peaks[rank];
      const amount = (value) => formatMemory(value, timeline);
      const more = peak.numAlive - peak.alive.length;
      return [
        rank, amount(peak.total), formatTime(peak.time, timeline), peak.action ?? "",
        Object.entries(peak.categories).map(([n, v]) => `${n} ${amount(v)}`).join(", "),
        peak.alive.map(([name, size]) => `${name} (${amount(size)})`).join(", ")
          + (more > 0 ? `, and ${more} more` : ""),
      ];
    },
  };
}
