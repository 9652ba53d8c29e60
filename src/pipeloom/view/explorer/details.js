// What is said about an action, idle time or memory: in the tooltip, and at length in the panel.

import {
  element, formatChange, formatMemory, formatRuns, formatShare, formatTime,
} from "explorer/format.js";

const MOST_LINKS = 8;

// ── in the tooltip ──────────────────────────────────────────────────────────────────────────

export function describe(view, target) {
  if (target.type === "span") return describeSpan(view, target);
  if (target.type === "idle") return describeIdle(target);
  return describeMemory(target);
}

function describeSpan(view, { timeline, span }) {
  const { start, end, slack } = timeline.column;
  const time = (value) => formatTime(value, timeline);
  const rows = [
    ["from", `${time(start[span])} to ${time(end[span])}`],
    ["takes", time(timeline.duration(span))],
  ];
  const change = describeChange(view, timeline, span);
  if (change) rows.push(change);
  if (timeline.isCritical[span]) rows.push(["slack", "none: on the critical path"]);
  else if (span < slack.length) rows.push(["slack", time(slack[span])]);
  rows.push(["waits for", nameSpans(timeline, timeline.needs(span), latest(timeline, span))]);
  rows.push(["awaited by", nameSpans(timeline, timeline.dependents(span), -1)]);
  return block(swatch(timeline, span), timeline.text(span), timeline.meaning(span), rows);
}

function describeChange(view, timeline, span) {
  const base = view.baselineOf(timeline, span);
  if (!base) return null;
  const factor = view.options.factor(timeline);
  const own = timeline.duration(span) * factor;
  const other = base.timeline.duration(base.span) * view.options.factor(base.timeline);
  const difference = formatDifference(own, other, view.axis);
  const shown = formatTime(base.timeline.duration(base.span), base.timeline);
  return [`against ${base.timeline.source}`, `${shown}; ${difference}`];
}

// "+0.9 ms (+18.7 %)"
function formatDifference(own, other, axis) {
  const change = own - other;
  const share = other > 0 ? ` (${formatChange(Math.round((1000 * change) / other) / 10)} %)` : "";
  return `${change > 0 ? "+" : ""}${formatTime(change, axis)}${share}`;
}

function describeIdle({ timeline, rank, idle }) {
  const { idleStart, idleEnd, idleCause, idleWaitsFor, idleBefore } = timeline.column;
  const time = (value) => formatTime(value, timeline);
  const cause = timeline.causes[idleCause[idle]];
  const rows = [
    ["from", `${time(idleStart[idle])} to ${time(idleEnd[idle])}`],
    ["takes", time(idleEnd[idle] - idleStart[idle])],
  ];
  const awaited = idleWaitsFor[idle];
  if (awaited >= 0) {
    const place = `${timeline.text(awaited)} on rank ${timeline.rankOf(awaited)}`;
    rows.push(["waits for", `${place}, which ended at ${time(timeline.column.end[awaited])}`]);
  }
  if (idleBefore[idle] >= 0) rows.push(["then", timeline.text(idleBefore[idle])]);
  return block(chip(cause), `idle: ${cause.name}`, `${cause.meaning}, rank ${rank}`, rows);
}

function describeMemory({ timeline, rank, time }) {
  const position = timeline.memoryAt(rank, time);
  const amount = (value) => formatMemory(value, timeline);
  const rows = [["at", formatTime(time, timeline)]];
  if (position >= 0) {
    rows.push(["holds", amount(timeline.column.memoryTotal[position])]);
    timeline.categories.forEach((name, index) => {
      const value = timeline.column[`memory:${index}`][position];
      if (value) rows.push([name, amount(value)]);
    });
  }
  const peak = timeline.peaks[rank];
  if (peak) rows.push(["peak", `${amount(peak.total)} at ${formatTime(peak.time, timeline)}`]);
  if (timeline.memoryLimit !== null) rows.push(["limit", amount(timeline.memoryLimit)]);
  const alive = [...timeline.aliveAt(rank, time)];
  for (const [name, microbatches] of alive.slice(0, 8)) {
    rows.push([name, microbatches.length ? `microbatch ${formatRuns(microbatches)}` : "alive"]);
  }
  if (alive.length > 8) rows.push(["", `and ${alive.length - 8} more kinds`]);
  return block(null, `memory of rank ${rank}`, "who is alive", rows);
}

function block(sign, title, subtitle, rows) {
  const list = element("dl");
  for (const [name, value] of rows) {
    list.append(element("dt", {}, name), element("dd", {}, value));
  }
  return element("div", { class: "about" },
    element("p", { class: "about-title" }, sign, element("b", {}, title)),
    element("p", { class: "about-meaning" }, subtitle), list);
}

// Of what a span waits for, the one that comes last: what really holds it up.
export function latest(timeline, span) {
  let found = -1;
  for (const source of timeline.needs(span)) {
    if (found < 0 || timeline.column.end[source] > timeline.column.end[found]) found = source;
  }
  return found;
}

function nameSpans(timeline, spans, last) {
  if (!spans.length) return "nothing";
  const names = [...spans].slice(0, MOST_LINKS).map((span) => {
    const mark = span === last && spans.length > 1 ? " (last)" : "";
    return `${timeline.text(span)} on rank ${timeline.rankOf(span)}${mark}`;
  });
  if (spans.length > MOST_LINKS) names.push(`and ${spans.length - MOST_LINKS} more`);
  return names.join(", ");
}

export function chip(style) {
  const sign = element("span", { class: `chip ${style.pattern}`, "aria-hidden": "true" });
  sign.style.setProperty("--colour", style.colour);
  sign.style.setProperty("--ink", style.ink);
  sign.textContent = style.letter.length === 1 && style.short !== undefined ? style.letter : "";
  return sign;
}

function swatch(timeline, span) {
  return chip(timeline.kinds[timeline.parts(span)[0][0]]);
}

// ── in the panel ────────────────────────────────────────────────────────────────────────────

export function fillPanel(panel, view) {
  const sections = [selectedSection(view), comparisonSection(view)];
  for (const timeline of view.report.timelines) sections.push(causesSection(view, timeline));
  panel.replaceChildren(...sections.filter(Boolean));
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function selectedSection(view) {
  const target = view.selected;
  if (!target) {
    return section("Selected", element("p", { class: "quiet" },
      "Click an action, or press Tab and the arrow keys, to see what it waits for."));
  }
  const about = describe(view, target);
  if (target.type !== "span") return section("Selected", about);
  const { timeline, span } = target;
  const follow = (title, spans, last) => {
    if (!spans.length) return null;
    const list = element("ul", { class: "links" });
    for (const other of [...spans].slice(0, 40)) {
      list.append(element("li", {}, linkTo(view, timeline, other, other === last)));
    }
    return element("div", {}, element("h3", {}, title), list);
  };
  // The links say the same as the last two lines, and can be followed.
  const lines = about.querySelectorAll("dt, dd");
  [...lines].slice(-4).forEach((line) => line.remove());
  return section("Selected", about,
    follow("Waits for", timeline.needs(span), latest(timeline, span)),
    follow("Awaited by", timeline.dependents(span), -1));
}

function linkTo(view, timeline, span, last) {
  const end = formatTime(timeline.column.end[span], timeline);
  return element("button", {
    class: "link", type: "button", "data-span": span,
    onclick: () => view.select({ type: "span", timeline, span }, { show: true }),
  }, element("b", {}, timeline.text(span)),
    ` rank ${timeline.rankOf(span)}, ends ${end}${last ? " · comes last" : ""}`);
}

function causesSection(view, timeline) {
  const title = view.report.timelines.length > 1 ? `Idle time: ${timeline.title}` : "Idle time";
  if (!timeline.causeTotals.length) {
    return section(title, element("p", { class: "quiet" }, "No rank is ever idle."));
  }
  const styleOf = new Map(timeline.causes.map((style) => [style.name, style]));
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  for (const [cause, , share] of timeline.causeTotals) {
    const piece = element("span", { class: `piece ${styleOf.get(cause).pattern}` });
    piece.style.setProperty("--colour", styleOf.get(cause).colour);
    piece.style.setProperty("--ink", styleOf.get(cause).ink);
    piece.style.flexGrow = 100 * share;
    bar.append(piece);
  }
  const number = (text) => element("td", { class: "number" }, text);
  const totals = timeline.causeTotals.map(([cause, time, share]) => element("tr", {},
    element("td", {}, chip(styleOf.get(cause)), ` ${cause}`),
    number(formatTime(time, timeline)), number(formatShare(share))));
  const ranked = timeline.rankedCauses.filter(([, awaited]) => awaited);
  const waits = ranked.slice(0, 12).map(([cause, awaited, time, share, count, span]) =>
    element("tr", { title: `${cause}, ${count > 1 ? `${count} times` : "once"}` },
      element("td", {}, chip(styleOf.get(cause)), " ", span < 0 ? awaited : element("button", {
        class: "link", type: "button",
        onclick: () => view.select({ type: "span", timeline, span }, { show: true }),
      }, element("b", {}, timeline.text(span)), ` rank ${timeline.rankOf(span)}`)),
      number(formatTime(time, timeline)), number(formatShare(share))));
  const table = (caption, head, rows) => element("table", { class: "causes" },
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...[head, "Time", "Share"].map((name, index) =>
      element("th", { scope: "col", class: index ? "number" : "" }, name)))),
    element("tbody", {}, ...rows));
  const more = timeline.numCauses - timeline.rankedCauses.length + ranked.length - waits.length;
  return section(title, bar,
    table(`All idle time of ${timeline.title}, by cause`, "Cause", totals),
    waits.length ? table("What is waited for, longest first", "Waits for", waits) : null,
    more > 0 ? element("p", { class: "quiet" }, `and ${more} more`) : null);
}

function comparisonSection(view) {
  const compared = view.report.timelines.filter((timeline) => timeline.baseline !== null);
  if (!compared.length) return null;
  return section("Difference per action", ...compared.map((timeline) => {
    const base = view.report.timelines[timeline.baseline];
    const rows = view.largestChanges(timeline, 12);
    const body = element("tbody");
    for (const { span, own, other, shift } of rows) {
      body.append(element("tr", {},
        element("td", {}, element("button", {
          class: "link", type: "button",
          onclick: () => view.select({ type: "span", timeline, span }, { show: true }),
        }, timeline.text(span))),
        element("td", { class: "number" }, formatTime(other, view.axis)),
        element("td", { class: "number" }, formatTime(own, view.axis)),
        element("td", { class: "number" },
          other > 0 ? `${formatChange(Math.round((1000 * (own - other)) / other) / 10)} %`
            : formatChange(own - other)),
        element("td", { class: "number" }, `${shift > 0 ? "+" : ""}${formatTime(shift, view.axis)}`)));
    }
    const heads = ["Action", base.source, timeline.source, "Change", "Starts later by"];
    return element("table", { class: "changes" },
      element("caption", {}, `${timeline.title} against ${base.title}, largest change first`),
      element("thead", {}, element("tr", {},
        ...heads.map((name) => element("th", { scope: "col" }, name)))),
      body);
  }));
}
