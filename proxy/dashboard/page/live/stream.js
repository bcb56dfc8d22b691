// The connection that brings what the daemon sends; opened again when it is lost.

import { get } from "../api.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 30;

export class LiveStream {
  constructor(store) {
    this._store = store;
    this._failures = 0;
    this._logs = null;
  }

  // Without a session the daemon would count a refused request.
  async start() {
    this._source?.close();
    if (await knowsOfNoSession()) this._store.setConnection({ phase: "signed out" });
    else this.open();
  }

  // Logs of one source come by the same connection, while a view wants them.
  followLogs(source, onLines) {
    this._logs = { source, onLines };
    this.open();
  }

  leaveLogs() {
    this._logs = null;
    this.open();
  }

  open() {
    clearTimeout(this._timer);
    this._source?.close();
    const source = new EventSource(this._address());
    this._source = source;
    this._on("snapshot", (snapshot) => this._begin(snapshot));
    this._on("patch", (patch) => this._store.takePatch(patch));
    this._on("event", (event) => this._store.takeEvent(event));
    this._on("log", (log) => this._logs?.onLines(log));
    source.onerror = () => this._lose(source);
  }

  _address() {
    const path = "/corral/v1/live";
    return this._logs ? `${path}?logs=${encodeURIComponent(this._logs.source)}&lines=1000` : path;
  }

  _on(name, take) {
    this._source.addEventListener(name, (message) => take(JSON.parse(message.data)));
  }

  _begin(snapshot) {
    this._failures = 0;
    this._store.takeSnapshot(snapshot);
    this._store.setConnection({ phase: "open" });
  }

  // The browser's own reconnection tells neither why it failed nor when it tries again.
  async _lose(source) {
    source.close();
    const isSignedOut = await knowsOfNoSession();
    if (source !== this._source) return;
    if (isSignedOut) this._store.setConnection({ phase: "signed out" });
    else this._retry();
  }

  _retry() {
    const wait_s = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** this._failures);
    this._failures += 1;
    this._store.setConnection({ phase: "lost", again_at: Date.now() + wait_s * 1000 });
    this._timer = setTimeout(() => this.open(), wait_s * 1000);
  }
}

async function knowsOfNoSession() {
  try {
    return !(await get("/corral/v1/session")).signed_in;
  } catch {
    return false; // it does not answer at all
  }
}
