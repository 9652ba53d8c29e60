// Which part of time and of the rows is in view.

const CLOSEST = 1e-7; // of the whole length

export class Camera {
  constructor(end) {
    this.end = end > 0 ? end : 1;
    this.scroll = 0;
    this.width = 1; // of the plot, in pixels
    this.height = 1;
    this.contentHeight = 1;
    this.fit();
  }

  fit() {
    this.start = 0;
    this.stop = this.end;
    this.scroll = 0;
  }

  get scale() { return this.width / (this.stop - this.start); }

  toX(time) { return (time - this.start) * this.scale; }
  toTime(x) { return this.start + x / this.scale; }

  set(start, stop) {
    const length = Math.min(Math.max(stop - start, this.end * CLOSEST), this.end);
    const middle = (start + stop) / 2;
    // A little beyond either end may be seen, never only emptiness.
    const low = Math.min(Math.max(middle - length / 2, 0), this.end - length);
    this.start = low;
    this.stop = low + length;
  }

  pan(pixels, lines = 0) {
    const shift = pixels / this.scale;
    this.set(this.start + shift, this.stop + shift);
    this.scrollTo(this.scroll + lines);
  }

  scrollTo(y) {
    this.scroll = Math.min(Math.max(y, 0), Math.max(0, this.contentHeight - this.height));
  }

  // Zoom in (factor > 1) or out; what is at pixel x stays there.
  zoom(factor, x = this.width / 2) {
    const length = this.stop - this.start;
    const wanted = Math.min(Math.max(length / factor, this.end * CLOSEST), this.end);
    const anchor = this.toTime(x);
    const start = anchor - (x / this.width) * wanted;
    this.set(start, start + wanted);
  }

  // Bring a stretch of time into view, with room around it; zoom only where it would be too small.
  show(start, stop, { smallest = 24 } = {}) {
    const length = this.stop - this.start;
    const wanted = (stop - start) * this.scale < smallest
      ? Math.max((stop - start) * (this.width / smallest) / 2, this.end * CLOSEST)
      : length;
    const inside = start >= this.start && stop <= this.stop;
    if (inside && wanted === length) return;
    const middle = (start + stop) / 2;
    this.set(middle - wanted / 2, middle + wanted / 2);
  }
}
