// The connection for the daemon's events; opened again when it is lost.

import { get, request } from "../api.js";
import { events } from "../event_lines.js";

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
    this._running?.abort();
    const { isSignedOut, client } = await session();
    if (isSignedOut) this._store.setConnection({ phase: "signed out", client });
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
    this._running?.abort();
    this._running = new AbortController();
    this._follow(this._running);
  }

  // Not an EventSource, which sends no header of ours.
  async _follow(running) {
    try {
      const { body } = await request(this._address(), { signal: running.signal });
      for await (const { name, data } of events(body)) {
        if (running !== this._running) return;
        this._take(name, data);
      }
    } catch {
      // How it ended is the same to `_lose`, which finds out why.
    }
    await this._lose(running);
  }

  _address() {
    const path = "/corral/v1/live";
    return this._logs ? `${path}?logs=${encodeURIComponent(this._logs.source)}&lines=1000` : path;
  }

  _take(name, data) {
    if (name === "snapshot") this._begin(data);
    else if (name === "patch") this._store.takePatch(data);
    else if (name === "event") this._store.takeEvent(data);
    else if (name === "log") this._logs?.onLines(data);
  }

  _begin(snapshot) {
    this._failures = 0;
    this._store.takeSnapshot(snapshot);
    this._store.setConnection({ phase: "open" });
  }

  async _lose(running) {
    if (running.signal.aborted) return;
    const { isSignedOut, client } = await session();
    if (running !== this._running || running.signal.aborted) return;
    if (isSignedOut) this._store.setConnection({ phase: "signed out", client });
    else this._retry();
  }

  _retry() {
    const wait_s = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** this._failures);
    this._failures += 1;
    this._store.setConnection({ phase: "lost", again_at: Date.now() + wait_s * 1000 });
    this._timer = setTimeout(() => this.open(), wait_s * 1000);
  }
}

// The daemon is asked without a token, too: a reverse proxy may have signed the user in, or someone who
// may not use the dashboard (`client`).
async function session() {
  try {
    const { signed_in, client } = await get("/corral/v1/session");
    return { isSignedOut: !signed_in, client };
  } catch (error) {
    return { isSignedOut: error.status === 401 }; // with another status it does not answer at all
  }
}
