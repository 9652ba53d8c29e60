// The data of the report: columns of numbers, and the questions that can be asked of them.

const TYPES = {
  f64: Float64Array, f32: Float32Array, u8: Uint8Array,
  u16: Uint16Array, i32: Int32Array, u32: Uint32Array,
};

export async function loadReport(page) {
  const header = JSON.parse(page.getElementById("header-data").textContent);
  const element = page.getElementById("column-data");
  const buffer = await decompress(decodeBase64(element.textContent));
  element.remove(); // its text is large and no longer needed
  const timelines = header.timelines.map(
    (about, index) => new Timeline(about, readColumns(about.columns, buffer), header, index));
  return { ...header, timelines };
}

function readColumns(places, buffer) {
  const columns = {};
  for (const [name, [type, offset, length]] of Object.entries(places)) {
    columns[name] = new TYPES[type](buffer, offset, length);
  }
  return columns;
}

function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

async function decompress(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Spans are numbered as in the timeline: by start, then rank.
export class Timeline {
  constructor(about, columns, header, index) {
    Object.assign(this, about);
    this.index = index;
    this.kinds = header.kinds;
    this.causes = header.causes;
    this.column = columns;
    this.count = columns.start.length;
    this.ownFactor = about.factor;
    this.sortByRow();
    this.idleOffset = countUp(columns.idleRank, this.ranks);
    this.isCritical = new Uint8Array(this.count);
    for (const span of columns.critical) this.isCritical[span] = 1;
    this.chunkOfStage = new Map();
    for (const stages of this.stagesOfRank) {
      stages.forEach((stage, chunk) => this.chunkOfStage.set(stage, chunk));
    }
  }

  // order[rowOffset[r] .. rowOffset[r + 1]] are the spans of row r, in order of time.
  sortByRow() {
    const { row, start, end } = this.column;
    this.rowOffset = countUp(row, this.rows.length);
    this.order = new Uint32Array(this.count);
    this.longest = new Float64Array(this.rows.length);
    const next = this.rowOffset.slice();
    for (let i = 0; i < this.count; i++) {
      const r = row[i];
      this.order[next[r]++] = i;
      if (end[i] - start[i] > this.longest[r]) this.longest[r] = end[i] - start[i];
    }
  }

  rankOf(span) { return this.rows[this.column.row[span]][0]; }
  laneOf(span) { return this.rows[this.column.row[span]][1]; }
  duration(span) { return this.column.end[span] - this.column.start[span]; }

  text(span) {
    const { kind, stage, microbatch, extra } = this.column;
    const style = this.kinds[kind[span]];
    if (stage[span] < 0) return this.fused[extra[span]].text;
    let text = stage[span] + style.name;
    if (microbatch[span] >= 0) text += microbatch[span];
    if (extra[span] >= 0) text += (style.name.startsWith("RECV") ? "<" : ">") + extra[span];
    return text;
  }

  meaning(span) {
    const { kind, stage, microbatch } = this.column;
    const words = [this.kinds[kind[span]].meaning];
    if (stage[span] >= 0) words.push(`stage ${stage[span]}`);
    if (microbatch[span] >= 0) words.push(`microbatch ${microbatch[span]}`);
    words.push(`rank ${this.rankOf(span)}`);
    return words.join(", ");
  }

  // What a box is made of: [kind, stage, microbatch] of its parts.
  parts(span) {
    const { kind, stage, microbatch, extra } = this.column;
    if (stage[span] < 0) return this.fused[extra[span]].parts;
    return [[kind[span], stage[span], microbatch[span]]];
  }

  needs(span) {
    const { needs, needsOffset } = this.column;
    return needs.subarray(needsOffset[span], needsOffset[span + 1]);
  }

  // The same edges, turned around; made when first asked for.
  dependents(span) {
    if (!this.dependentOffset) {
      const { needs, needsOffset } = this.column;
      this.dependentOffset = countUp(needs, this.count);
      this.dependent = new Uint32Array(needs.length);
      const next = this.dependentOffset.slice();
      for (let i = 0; i < this.count; i++) {
        for (let k = needsOffset[i]; k < needsOffset[i + 1]; k++) {
          this.dependent[next[needs[k]]++] = i;
        }
      }
    }
    return this.dependent.subarray(this.dependentOffset[span], this.dependentOffset[span + 1]);
  }

  // Positions in `order` of the spans of a row that may touch the time from t0 to t1.
  visible(row, t0, t1) {
    const { start } = this.column;
    const [first, last] = [this.rowOffset[row], this.rowOffset[row + 1]];
    const at = (position) => start[this.order[position]];
    return [
      lowerBound(first, last, (p) => at(p) >= t0 - this.longest[row]),
      lowerBound(first, last, (p) => at(p) > t1),
    ];
  }

  visibleIdle(rank, t0, t1) {
    const { idleStart, idleEnd } = this.column;
    const [first, last] = [this.idleOffset[rank], this.idleOffset[rank + 1]];
    return [
      lowerBound(first, last, (i) => idleEnd[i] > t0),
      lowerBound(first, last, (i) => idleStart[i] > t1),
    ];
  }

  // The span before or after this one on its rank's lane.
  neighbour(span, step) {
    const row = this.column.row[span];
    const position = this.positionOf(span) + step;
    if (position < this.rowOffset[row] || position >= this.rowOffset[row + 1]) return -1;
    return this.order[position];
  }

  positionOf(span) {
    const row = this.column.row[span];
    return lowerBound(this.rowOffset[row], this.rowOffset[row + 1], (p) => this.order[p] >= span);
  }

  // The position on the rank's memory curve that holds at a time; -1 before its first.
  memoryAt(rank, time) {
    const { memoryOffset, memoryTime } = this.column;
    const [first, last] = [memoryOffset[rank], memoryOffset[rank + 1]];
    const position = lowerBound(first, last, (i) => memoryTime[i] > time) - 1;
    return position < first ? -1 : position;
  }

  // Who takes memory on a rank at a time, by name.
  aliveAt(rank, time) {
    const { lifeOffset, lifeStart, lifeEnd, lifeProduct, lifeStage, lifeMicrobatch } = this.column;
    const alive = new Map();
    for (let i = lifeOffset[rank]; i < lifeOffset[rank + 1]; i++) {
      if (lifeStart[i] > time) break;
      if (lifeEnd[i] <= time) continue;
      const name = `${this.products[lifeProduct[i]]} of stage ${lifeStage[i]}`;
      if (!alive.has(name)) alive.set(name, []);
      if (lifeMicrobatch[i] >= 0) alive.get(name).push(lifeMicrobatch[i]);
    }
    return alive;
  }

  get hasMemory() { return this.column.memoryTotal.length > 0 && this.largestMemory > 0; }

  get largestMemory() {
    if (this.topOfMemory === undefined) {
      this.topOfMemory = this.memoryLimit ?? 0;
      for (const total of this.column.memoryTotal) {
        if (total > this.topOfMemory) this.topOfMemory = total;
      }
    }
    return this.topOfMemory;
  }

  find(text) {
    for (let i = 0; i < this.count; i++) if (this.text(i) === text) return i;
    return -1;
  }
}

// offsets[k] = how many numbers of the column are smaller than k
function countUp(column, groups) {
  const offsets = new Uint32Array(groups + 1);
  for (let i = 0; i < column.length; i++) offsets[column[i] + 1]++;
  for (let k = 0; k < groups; k++) offsets[k + 1] += offsets[k];
  return offsets;
}

// The first position in [first, last) where the condition holds; it holds from there on.
export function lowerBound(first, last, holds) {
  while (first < last) {
    const middle = (first + last) >>> 1;
    if (holds(middle)) last = middle;
    else first = middle + 1;
  }
  return first;
}
