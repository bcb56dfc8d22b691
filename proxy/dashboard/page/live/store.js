// The daemon's state and its listeners, which draw it at most four times a second.

import { changes } from "./changes.js";
import { Clock } from "./clock.js";
import { mergePatch } from "./merge_patch.js";
import { Rates } from "./rates.js";

export const REDRAW_MS = 250;
const EVENTS_MAX = 500; // of requests, and of all else

export function isOfRequest({ name }) {
  return name.startsWith("request.");
}

export class LiveStore {
  constructor() {
    this.state = null;
    this.clock = null;
    this.rates = null;
    this.events = [];
    this.connection = { phase: "connecting" };
    this.announcement = "";
    this._listeners = new Set();
    this._drawnAt_ms = 0;
    this._isPending = false;
  }

  subscribe(listener) {
    this._listeners.add(listener);
  }

  setConnection(connection) {
    this.connection = connection;
    this.notify();
  }

  takeSnapshot({ now_s, state, history }) {
    this.clock = new Clock(now_s);
    this.rates = new Rates(history);
    this._replace(state);
  }

  takePatch(patch) {
    this._replace(mergePatch(this.state, patch));
    this.rates.take(patch.rates && this.state.rates);
  }

  // After a reconnection the last events come again; a restarted daemon numbers its own from one.
  takeEvent(event) {
    if (this.events.some((known) => known.seq === event.seq && known.at === event.at)) return;
    const alike = this.events.filter((known) => isOfRequest(known) === isOfRequest(event));
    const displaced = alike.length < EVENTS_MAX ? null : alike[0];
    this.events = [...this.events.filter((known) => known !== displaced), event];
    this.notify();
  }

  // Changes whenever a request has ended.
  get lastRequest() {
    return this.events.findLast(isOfRequest)?.seq;
  }

  notify() {
    if (this._isPending) return;
    this._isPending = true;
    const wait_ms = Math.max(0, this._drawnAt_ms + REDRAW_MS - performance.now());
    // A hidden page gets no frames, and so draws nothing.
    setTimeout(() => requestAnimationFrame(() => this._draw()), wait_ms);
  }

  _replace(state) {
    const changed = changes(this.state, state);
    if (changed.length) this.announcement = changed.join(". ");
    this.state = state;
    this.notify();
  }

  _draw() {
    this._isPending = false;
    this._drawnAt_ms = performance.now();
    for (const listener of this._listeners) listener();
  }
}
