// The last lines of one log.

const LINES_MAX = 1000;

export class LogLines {
  constructor(changed) {
    this._changed = changed;
    this.clear();
  }

  clear() {
    this.lines = [];
    this._count = 0;
  }

  take({ lines, dropped }) {
    const all = dropped ? [...lines, `… ${dropped} lines were left out: this page read too slowly`] : lines;
    const numbered = all.map((text) => ({ number: (this._count += 1), text }));
    this.lines = [...this.lines, ...numbered].slice(-LINES_MAX);
    this._changed();
  }
}
