// Find actions by what is typed: an action ("2F0"), a kind ("B", "SEND_F"), a kind and a microbatch
// ("F3"), a stage and a kind ("2B"), or words ("rank 1", "stage 2", "microbatch 3").

const ACTION = /^(\d+)?([A-Z_]+)?(\d+)?$/;
const WORDS = /\b(rank|stage|microbatch)\s*(\d+)\b/gi;

export function parseQuery(text) {
  const wanted = {};
  const rest = text.replace(WORDS, (_, word, number) => {
    wanted[word.toLowerCase()] = Number(number);
    return " ";
  }).trim();
  if (!rest) return Object.keys(wanted).length ? wanted : null;
  const match = ACTION.exec(rest.toUpperCase());
  if (!match || !match[2]) return { ...wanted, part: rest.toUpperCase() };
  if (match[1] !== undefined) wanted.stage = Number(match[1]);
  wanted.kind = match[2];
  if (match[3] !== undefined) wanted.microbatch = Number(match[3]);
  return wanted;
}

// All spans that fit, in order of time; a fused action fits when one of its parts does.
export function findSpans(report, text) {
  const wanted = parseQuery(text);
  if (!wanted) return null;
  const spans = [];
  const masks = report.timelines.map((timeline) => {
    const mask = new Uint8Array(timeline.count);
    for (let span = 0; span < timeline.count; span++) {
      if (wanted.rank !== undefined && timeline.rankOf(span) !== wanted.rank) continue;
      if (!fits(timeline, span, wanted)) continue;
      mask[span] = 1;
      spans.push({ timeline, span });
    }
    return mask;
  });
  return { text, spans, masks, current: -1 };
}

function fits(timeline, span, wanted) {
  if (wanted.part) return timeline.text(span).toUpperCase().includes(wanted.part);
  const whole = timeline.kinds[timeline.column.kind[span]].name;
  return timeline.parts(span).some(([kind, stage, microbatch]) => {
    if (wanted.stage !== undefined && wanted.stage !== stage) return false;
    if (wanted.microbatch !== undefined && wanted.microbatch !== microbatch) return false;
    const { name } = timeline.kinds[kind];
    return wanted.kind === undefined || wanted.kind === name || wanted.kind === whole;
  });
}
