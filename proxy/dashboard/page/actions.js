// Actions of a person on the daemon, and their results.

import { post } from "./api.js";

export const MODEL_ACTIONS = {
  start: { label: "Start", done: (name) => `${name} is being started` },
  load: { label: "Load", done: (name) => `${name} is being loaded` },
  unload: { label: "Unload", done: (name) => `${name} is being unloaded` },
  restart: { label: "Restart", done: (name) => `${name} is being restarted` },
  warm: { label: "Warm", done: (name) => `${name} has the prompt in its cache` },
};

const SHOWN_MS = 6000;

export class Actions {
  constructor(changed) {
    this.notice = null;
    this.busy = new Set();
    this._changed = changed;
  }

  async model(verb, name, body = {}) {
    const path = `/corral/v1/models/${encodeURIComponent(name)}/${verb}`;
    await this.run(`${verb} ${name}`, () => post(path, body), MODEL_ACTIONS[verb].done(name));
  }

  async warm(name, prompt) {
    await this.model("warm", name, { messages: [{ role: "system", content: prompt }] });
  }

  async cancel(id) {
    const path = `/corral/v1/requests/${encodeURIComponent(id)}/cancel`;
    await this.run(`cancel ${id}`, () => post(path), `Request ${id} was cancelled`);
  }

  async forget({ name }) {
    const path = `/corral/v1/caches/${encodeURIComponent(name)}/forget`;
    await this.run(`forget ${name}`, () => post(path), ({ files, in_use }) =>
      `Deleted: ${files === 1 ? "1 file" : `${files} files`}${in_use ? ". A request in flight still belongs to the conversation: forget it again afterwards" : ""}`);
  }

  dismiss() {
    this._show(null);
  }

  async run(key, call, done) {
    this.busy.add(key);
    this._show(null);
    try {
      const answer = await call();
      this._show({ kind: "done", message: done instanceof Function ? done(answer) : done });
    } catch (error) {
      this._show({ kind: "error", message: error.message, hint: error.hint });
    } finally {
      this.busy.delete(key);
      this._changed();
    }
  }

  // A success soon shows in the figures; a failure stays until it is dismissed.
  _show(notice) {
    clearTimeout(this._timer);
    if (notice?.kind === "done") this._timer = setTimeout(() => this.dismiss(), SHOWN_MS);
    this.notice = notice;
    this._changed();
  }
}
