// A chat with any model; earlier conversations are kept in this browser.

import { percent, rate, seconds, whole } from "../format.js";
import { Component, createRef, html } from "../html.js";
import { Copy } from "../parts/copy.js";
import { Choice } from "../parts/field.js";
import { Markdown } from "../parts/markdown.js";
import { Problem } from "../parts/notice.js";

// The members of a request that people set: name, title, least, most, step, and the engine's default.
const SAMPLING = [
  ["temperature", "Temperature", 0, 2, 0.05, 0.8],
  ["top_p", "Top-p", 0, 1, 0.05, 0.95],
  ["top_k", "Top-k", 0, 1000, 1, 40],
  ["min_p", "Min-p", 0, 1, 0.01, 0.05],
  ["max_tokens", "Most tokens", 1, 1_000_000, 1, "no limit"],
  ["seed", "Seed", 0, 4_294_967_295, 1, "random"],
];
const BOTTOM_PX = 40;

export class ChatView extends Component {
  messagesRef = createRef();
  state = { images: [], edited: null };

  componentDidMount() {
    const { chat, live, detail } = this.props;
    const names = Object.keys(live.models);
    if (detail && names.includes(detail)) chat.choose(detail);
    else if (!names.includes(chat.model)) chat.choose(preferred(live.models));
  }

  // An answer is followed, unless its reader has scrolled up.
  getSnapshotBeforeUpdate() {
    const region = this.messagesRef.current;
    return region.scrollHeight - region.scrollTop - region.clientHeight < BOTTOM_PX;
  }

  componentDidUpdate(_props, _state, isAtBottom) {
    const region = this.messagesRef.current;
    if (this.props.chat.isRunning && isAtBottom) region.scrollTop = region.scrollHeight;
  }

  send(form) {
    const text = new FormData(form).get("text").trim();
    if (!text || this.props.chat.isRunning) return;
    const { images } = this.state;
    form.reset();
    this.setState({ images: [] });
    this.props.chat.send(text, images);
  }

  async attach(input) {
    const images = await Promise.all([...input.files].map(dataUrl));
    input.value = "";
    this.setState({ images: [...this.state.images, ...images] });
  }

  edit(index, text) {
    this.setState({ edited: null });
    if (text.trim()) this.props.chat.retry(index, text.trim());
  }

  message(message, index) {
    const { chat, live } = this.props;
    const isLast = index === chat.messages.length - 1;
    const key = `${chat.current.id} ${index}`;
    if (message.role !== "user") {
      return html`<${Answer} key=${key} message=${message} isRunning=${isLast && chat.isRunning}
        waiting=${waiting(live, message.request, chat.model)}
        onRetry=${isLast && !chat.isRunning ? () => chat.retry(index - 1) : null} />`;
    }
    return this.state.edited === index
      ? html`<${Editor} key=${key} text=${message.content} onSend=${(text) => this.edit(index, text)}
          onCancel=${() => this.setState({ edited: null })} />`
      : html`<${Question} key=${key} message=${message}
          onEdit=${chat.isRunning ? null : () => this.setState({ edited: index })} />`;
  }

  render({ chat, live }, { images }) {
    const options = Object.entries(live.models).map(([name, model]) => [name, `${name} (${model.state})`]);
    const seesImages = live.models[chat.model]?.sees_images;
    return html`
      <h1 class="unseen">Chat</h1>
      <div class="chat">
        <${Conversations} chat=${chat} />
        <div class="fields">
          <${Choice} label="Model" value=${chat.model} options=${options} onChange=${(value) => chat.choose(value)} />
          <${Settings} chat=${chat} />
        </div>
        <div class="messages" role="log" aria-label="Conversation" aria-busy=${chat.isRunning}
          tabindex="0" ref=${this.messagesRef}>
          ${chat.messages.length === 0 && html`<p class="empty">Ask ${chat.model ?? "a model"} something.
            ${live.models[chat.model]?.state === "unloaded" && " The first message loads the model."}</p>`}
          ${chat.messages.map((message, index) => this.message(message, index))}
          ${chat.error && html`<${Problem} error=${chat.error} />`}
          ${!chat.isRunning && chat.messages.at(-1)?.role === "user" && html`<div><button type="button" class="small"
            onClick=${() => chat.retry(chat.messages.length - 1)}>Try again</button></div>`}
        </div>
        <form class="compose" onSubmit=${(event) => { event.preventDefault(); this.send(event.target); }}>
          ${images.length > 0 && html`<${Images} urls=${images}
            onRemove=${(removed) => this.setState({ images: images.filter((_, i) => i !== removed) })} />`}
          <label class="unseen" for="text">Message</label>
          <textarea id="text" name="text" rows="2" data-filter placeholder="Message; Enter sends it, Shift+Enter begins a line"
            onKeyDown=${(event) => sendByKey(event)}></textarea>
          ${seesImages && html`<label class="button">Image<input type="file" class="unseen" accept="image/*" multiple
            onChange=${(event) => this.attach(event.target)} /></label>`}
          ${chat.isRunning
            ? html`<button key="stop" type="button" onClick=${() => chat.stop()}>Stop</button>`
            : html`<button key="send" type="submit" class="primary">Send</button>`}
        </form>
      </div>`;
  }
}

function sendByKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function preferred(models) {
  const names = Object.keys(models);
  return names.find((name) => models[name].state === "loaded") ?? names[0] ?? null;
}

// The phase of a request before its first token.
export function waiting({ requests, models }, id, name) {
  const { phase, position, prompt_tokens_done, prompt_tokens } = requests[id] ?? {};
  const progress = models[name]?.load_progress;
  if (phase === "queued" && position) return `queued, place ${position}`;
  if (phase === "loading" || phase === "queued") return progress == null ? `loading ${name}` : `loading ${name}, ${percent(progress)}`;
  if (phase === "prefill" && prompt_tokens) return `reading the prompt, ${percent(prompt_tokens_done / prompt_tokens)}`;
  return "waiting";
}

function Conversations({ chat }) {
  return html`<nav class="conversations" aria-label="Conversations">
    <button type="button" onClick=${() => chat.begin()}>New chat</button>
    <ul>${chat.conversations.map(({ id, title }) => html`<li key=${id}>
      <button type="button" class="plain" aria-current=${id === chat.current.id ? "true" : undefined}
        onClick=${() => chat.open(id)}>${title}</button>
      <button type="button" class="plain remove" aria-label=${`Delete ${title}`} title="Delete" onClick=${() => chat.remove(id)}>×</button>
    </li>`)}</ul>
  </nav>`;
}

function Settings({ chat }) {
  const { settings } = chat;
  const count = Object.keys(settings).length;
  const close = ({ currentTarget, relatedTarget }) => {
    if (!currentTarget.contains(relatedTarget)) currentTarget.open = false;
  };
  return html`<details class="sampling" onFocusOut=${close}>
    <summary>Settings${count > 0 && html` <span class="quiet">${count} set</span>`}</summary>
    <div class="panel" tabindex="-1">
      <label class="stack"><span>System prompt</span>
        <textarea rows="3" defaultValue=${settings.system ?? ""} onChange=${(event) => chat.set("system", event.target.value)}></textarea></label>
      <div class="fields">${SAMPLING.map(([name, title, min, max, step, usual]) => html`<label key=${name} class="stack">
        <span>${title}</span>
        <input type="number" min=${min} max=${max} step=${step} placeholder=${usual} defaultValue=${settings[name] ?? ""}
          onChange=${(event) => event.target.reportValidity()
            && chat.set(name, event.target.value === "" ? null : Number(event.target.value))} />
      </label>`)}</div>
    </div>
  </details>`;
}

function Images({ urls, onRemove }) {
  return html`<ul class="images">${urls.map((url, i) => html`<li key=${i}><img src=${url} alt=${`Image ${i + 1}`} />
    ${onRemove && html`<button type="button" class="small" aria-label=${`Remove image ${i + 1}`} onClick=${() => onRemove(i)}>×</button>`}</li>`)}</ul>`;
}

function Question({ message: { content, images }, onEdit }) {
  return html`<article class="message user" aria-label="You">
    ${images?.length > 0 && html`<${Images} urls=${images} />`}
    <div class="text">${content}</div>
    ${onEdit && html`<p class="speed"><button type="button" class="plain small" onClick=${onEdit}>Edit</button></p>`}
  </article>`;
}

function Editor({ text, onSend, onCancel }) {
  return html`<form class="message user stack" onSubmit=${(event) => { event.preventDefault(); onSend(new FormData(event.target).get("edited")); }}>
    <textarea name="edited" rows="3" aria-label="Edited message" defaultValue=${text} onKeyDown=${(event) => sendByKey(event)}></textarea>
    <div class="row"><button type="submit" class="primary small">Send</button>
      <button type="button" class="small" onClick=${onCancel}>Cancel</button></div>
  </form>`;
}

function Answer({ message, waiting, isRunning, onRetry }) {
  const { content, thought, speed, first_token_s, request, isStopped } = message;
  return html`<article class="message assistant" aria-label="Answer">
    ${thought && html`<details><summary>Reasoning</summary><div class="text">${thought}</div></details>`}
    ${isRunning && !content && !thought && html`<p class="quiet" role="status">${waiting}…</p>`}
    <div class="text"><${Markdown} text=${content} /></div>
    ${isStopped && html`<p class="quiet">(stopped)</p>`}
    ${!isRunning && html`<p class="speed">
      ${speed && html`<span>${rate(speed.predicted_per_second)} tokens/s</span>
        <span>${whole(speed.predicted_n)} tokens</span>
        <span>prompt ${whole(speed.prompt_n)}, cached ${whole(speed.cache_n)}</span>`}
      ${first_token_s !== undefined && html`<span>first token ${seconds(first_token_s)}</span>`}
      ${speed && html`<a href=${`#requests/${encodeURIComponent(request)}`}>Explain</a>`}
      <${Copy} text=${content} what="answer" />
      ${onRetry && html`<button type="button" class="small" onClick=${onRetry}>Retry</button>`}
    </p>`}
  </article>`;
}
