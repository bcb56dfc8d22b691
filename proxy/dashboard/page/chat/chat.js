// Conversations with models, kept in this browser; the running answer goes on while other views are shown.

import { ApiError, request } from "../api.js";
import { events } from "../event_lines.js";

const REDRAW_MS = 100;
const PATH = "/corral/v1/chat/completions";
const KEY = "corral.chats";
const SETTINGS_KEY = "corral.chat_settings";
const KEPT = 50;
const TITLE_MAX = 48;

export class Chat {
  constructor(changed) {
    this.conversations = read(KEY, []); // the latest first
    this.settings = read(SETTINGS_KEY, {}); // members of a request, and `system`
    this.error = null;
    this._changed = changed;
    this._running = null;
    this.begin(this.conversations[0]?.model ?? null);
  }

  get isRunning() {
    return this._running !== null;
  }

  get model() {
    return this.current.model;
  }

  get messages() {
    return this.current.messages;
  }

  choose(model) {
    this.current.model = model;
    this._changed();
  }

  set(name, value) {
    this.settings = { ...this.settings, [name]: value };
    if (value === "" || value === null) delete this.settings[name];
    write(SETTINGS_KEY, this.settings);
    this._changed();
  }

  begin(model = this.model) {
    this._show({ id: randomHex(), model, title: "", messages: [] });
  }

  open(id) {
    this._show(this.conversations.find((conversation) => conversation.id === id));
  }

  remove(id) {
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    write(KEY, this.conversations);
    if (this.current.id === id) this.begin();
    this._changed();
  }

  stop() {
    this._running?.abort();
  }

  send(text, images = []) {
    return this._answer([...this.messages, { role: "user", content: text, images }]);
  }

  // Answers the message at `index` again, with another text if one is given; later messages are removed.
  retry(index, text = this.messages[index].content) {
    return this._answer([...this.messages.slice(0, index), { ...this.messages[index], content: text }]);
  }

  async _answer(sent) {
    const answer = { role: "assistant", content: "", thought: "", speed: null, request: `chat_${randomHex()}` };
    const conversation = this.current;
    conversation.messages = [...sent, answer];
    conversation.title ||= sent[0].content.slice(0, TITLE_MAX);
    this.error = null;
    const running = this._running = new AbortController();
    this._keep(conversation);
    try {
      await this._receive(conversation.model, sent, answer, running.signal);
    } catch (error) {
      this._fail(error, conversation, answer);
    } finally {
      this._running = null;
      this._keep(conversation);
    }
  }

  async _receive(model, sent, answer, signal) {
    const began = performance.now();
    const { system, ...sampling } = this.settings;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...sent.map(requestMessage)];
    const response = await request(PATH, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Request-Id": answer.request },
      body: JSON.stringify({ ...sampling, model, messages, stream: true }),
      signal,
    });
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

  _fail(error, conversation, answer) {
    if (error.name === "AbortError") answer.isStopped = true;
    else this.error = error;
    if (!answer.content && !answer.thought) conversation.messages = conversation.messages.slice(0, -1);
  }

  _show(conversation) {
    this.stop();
    this.current = conversation;
    this.error = null;
    this._changed();
  }

  _keep(conversation) {
    const others = this.conversations.filter(({ id }) => id !== conversation.id);
    this.conversations = [conversation, ...others].slice(0, KEPT);
    write(KEY, this.conversations);
    this._changed();
  }

  _redrawSoon() {
    this._timer ??= setTimeout(() => {
      this._timer = null;
      this._changed();
    }, REDRAW_MS);
  }
}

// A message in the form of the API; images are data URLs.
export function requestMessage({ role, content, images }) {
  if (!images?.length) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [{ type: "text", text: content }, ...parts] };
}

// Not `crypto.randomUUID`, which needs a secure context: plain HTTP of another machine is none.
function randomHex() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise; // written by hand, or by another version
  }
}

// The storage is limited, and images are large: the oldest conversations go first.
function write(key, value) {
  for (let kept = value; ;) {
    try {
      return localStorage.setItem(key, JSON.stringify(kept));
    } catch {
      if (!Array.isArray(kept) || kept.length === 0) return;
      kept = kept.slice(0, -1);
    }
  }
}
