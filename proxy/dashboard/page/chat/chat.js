// One conversation with one model; it stays while other views are shown.

import { ApiError, request } from "../api.js";
import { events } from "../event_lines.js";

const REDRAW_MS = 100;
const PATH = "/corral/v1/chat/completions";

export class Chat {
  constructor(changed) {
    this.model = null;
    this.messages = [];
    this.error = null;
    this._changed = changed;
    this._running = null;
  }

  get isRunning() {
    return this._running !== null;
  }

  choose(model) {
    this.model = model;
    this._changed();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.error = null;
    this._changed();
  }

  stop() {
    this._running?.abort();
  }

  async send(text) {
    const answer = { role: "assistant", content: "", thought: "", speed: null, request: null };
    const sent = [...this.messages, { role: "user", content: text }];
    this.messages = [...sent, answer];
    this.error = null;
    this._running = new AbortController();
    this._changed();
    try {
      await this._receive(sent, answer, this._running.signal);
    } catch (error) {
      this._fail(error, answer);
    } finally {
      this._running = null;
      this._changed();
    }
  }

  async _receive(sent, answer, signal) {
    const began = performance.now();
    const messages = sent.map(({ role, content }) => ({ role, content }));
    const response = await request(PATH, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: this.model, messages, stream: true }),
      signal,
    });
    answer.request = response.headers.get("X-Request-Id");
    for await (const { data } of events(response.body)) this._take(data, answer, began);
  }

  _take(event, answer, began) {
    if (event.error) throw new ApiError(0, event.error);
    const delta = event.choices?.[0]?.delta ?? {};
    const isText = delta.content || delta.reasoning_content;
    if (isText && answer.first_token_s === undefined) {
      answer.first_token_s = (performance.now() - began) / 1000;
    }
    answer.content += delta.content ?? "";
    answer.thought += delta.reasoning_content ?? "";
    if (event.timings) answer.speed = event.timings;
    this._redrawSoon();
  }

  _fail(error, answer) {
    if (error.name === "AbortError") answer.isStopped = true;
    else this.error = error;
    if (!answer.content && !answer.thought) this.messages = this.messages.slice(0, -1);
  }

  _redrawSoon() {
    this._timer ??= setTimeout(() => {
      this._timer = null;
      this._changed();
    }, REDRAW_MS);
  }
}
