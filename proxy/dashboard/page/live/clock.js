// The server's clock, which counts seconds from the daemon's start.

export class Clock {
  constructor(now_s) {
    this._offset_s = now_s - performance.now() / 1000;
    this.epoch_s = Date.now() / 1000 - now_s; // the daemon's start in Unix time, by the browser's clock
  }

  now_s() {
    return performance.now() / 1000 + this._offset_s;
  }

  // Seconds since a moment of the server's clock; null if there is none.
  since(at_s) {
    return at_s == null ? null : Math.max(0, this.now_s() - at_s);
  }
}
