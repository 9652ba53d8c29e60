// Numbers as people read them; the same rules as in the other pictures.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SCALES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];

export function formatNumber(value) {
  if (!Number.isFinite(value)) return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) {
    return value.toExponential(3);
  }
  const digits = value ? Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value)))) : 0;
  return String(Number(value.toFixed(digits)));
}

export function formatTime(value, timeline) {
  const { secondsPerUnit, timeUnit } = timeline;
  if (!secondsPerUnit || !value) return `${formatNumber(value)} ${timeUnit}`.trim();
  const seconds = value * secondsPerUnit;
  const [name, scale] = SCALES.find(([, size]) => Math.abs(seconds) >= size) ?? SCALES.at(-1);
  return `${formatNumber(seconds / scale)} ${name}`;
}

export function formatMemory(value, timeline) {
  const { memoryUnit } = timeline;
  let power = ["byte", "bytes"].includes(memoryUnit) ? 0 : BINARY.indexOf(memoryUnit);
  if (power < 0) return `${formatNumber(value)} ${memoryUnit}`.trim();
  while (value && Math.abs(value) < 1 && power > 0) {
    value *= 1024;
    power--;
  }
  while (Math.abs(value) >= 1024 && power < BINARY.length - 1) {
    value /= 1024;
    power++;
  }
  return `${formatNumber(value)} ${BINARY[power]}`;
}

export const formatShare = (share) => `${(100 * share).toFixed(1)} %`;

export const formatChange = (change) => `${change > 0 ? "+" : ""}${formatNumber(change)}`;

// 1, 2, 5 × a power of ten, so that at most `most` steps fit into `length`.
export function roundStep(length, most) {
  const power = 10 ** Math.floor(Math.log10(length / most));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => length / step <= most) ?? 10 * power;
}

// Numbers in a list, runs written as "3–7".
export function formatRuns(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const runs = [];
  for (const n of sorted) {
    const run = runs.at(-1);
    if (run && n === run[1] + 1) run[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}
