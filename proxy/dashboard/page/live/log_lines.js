// The last lines of one log: events of the daemon as JSON, or the text of an engine.

const LINES_MAX = 1000;
// An engine's line: `0.06.787.236 W srv …`. Source: llama.cpp, common/log.cpp.
const ENGINE_LEVEL = /^[\d.]+ ([IWED]) /;
const LEVELS = { I: "info", W: "warning", E: "error", D: "debug" };

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
    const parsed = all.map((text) => parse(text, (this._count += 1)));
    this.lines = [...this.lines, ...parsed].slice(-LINES_MAX);
    this._changed();
  }
}

// `level` is undefined if the line has none; `event` only exists for events.
export function parse(text, number) {
  if (text.startsWith("[llama-corral: ")) return { number, text, level: "own" };
  if (!text.startsWith("{")) return { number, text, level: LEVELS[ENGINE_LEVEL.exec(text)?.[1]] };
  try {
    const { timestamp: at, level, event: name, ...fields } = JSON.parse(text);
    return { number, text, level, event: name ? { seq: number, at, level, name, fields } : undefined };
  } catch {
    return { number, text }; // cut off, or of another program
  }
}
