// A chat with any model. Texts of models are shown as text, never as HTML.

import { rate, seconds, whole } from "../format.js";
import { Component, createRef, html } from "../html.js";
import { Choice } from "../parts/field.js";
import { Problem } from "../parts/notice.js";

export class ChatView extends Component {
  messagesRef = createRef();

  componentDidMount() {
    const { chat, live, detail } = this.props;
    const names = Object.keys(live.models);
    if (detail && names.includes(detail)) chat.choose(detail);
    else if (!names.includes(chat.model)) chat.choose(preferred(live.models));
  }

  componentDidUpdate() {
    const region = this.messagesRef.current;
    if (this.props.chat.isRunning) region.scrollTop = region.scrollHeight;
  }

  send(form) {
    const text = new FormData(form).get("text").trim();
    if (!text || this.props.chat.isRunning) return;
    form.reset();
    this.props.chat.send(text);
  }

  sendByKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send(event.target.form);
  }

  render({ chat, live }) {
    const options = Object.entries(live.models).map(([name, model]) => [name, `${name} (${model.state})`]);
    return html`
      <h1>Chat</h1>
      <div class="fields">
        <${Choice} label="Model" value=${chat.model} options=${options}
          onChange=${(value) => chat.choose(value)} />
        <button type="button" class="small" onClick=${() => chat.clear()}
          disabled=${chat.messages.length === 0}>Clear</button>
      </div>
      <div class="messages" role="log" aria-label="Conversation" aria-busy=${chat.isRunning}
        tabindex="0" ref=${this.messagesRef}>
        ${chat.messages.length === 0 && html`<p class="empty">A model that is not loaded is loaded by the first message.</p>`}
        ${chat.messages.map((message, i) => html`<${Message} key=${i} ...${message} />`)}
        ${chat.error && html`<${Problem} error=${chat.error} />`}
      </div>
      <form class="compose" onSubmit=${(event) => { event.preventDefault(); this.send(event.target); }}>
        <label class="unseen" for="text">Message</label>
        <textarea id="text" name="text" rows="2" data-filter placeholder="Message; Enter sends it, Shift+Enter begins a line"
          onKeyDown=${(event) => this.sendByKey(event)}></textarea>
        ${chat.isRunning
          ? html`<button key="stop" type="button" onClick=${() => chat.stop()}>Stop</button>`
          : html`<button key="send" type="submit" class="primary">Send</button>`}
      </form>`;
  }
}

function preferred(models) {
  const names = Object.keys(models);
  return names.find((name) => models[name].state === "ready") ?? names[0] ?? null;
}

function Message({ role, content, thought, speed, first_token_s, request, isStopped }) {
  return html`<article class="message ${role}">
    <h2>${role === "user" ? "You" : "Model"}</h2>
    ${thought && html`<details><summary>Reasoning</summary><div class="text">${thought}</div></details>`}
    <div class="text">${content}${isStopped && html`<span class="quiet"> (stopped)</span>`}</div>
    ${role === "assistant" && html`<p class="speed">
      ${first_token_s !== undefined && html`<span>first token ${seconds(first_token_s)}</span>`}
      ${speed && html`<span>${rate(speed.predicted_per_second)} tokens/s</span>
        <span>${whole(speed.predicted_n)} tokens</span>
        <span>prompt ${whole(speed.prompt_n)}, cached ${whole(speed.cache_n)}</span>`}
      ${speed && request && html`<a href=${`#requests/${encodeURIComponent(request)}`}>Explain</a>`}
    </p>`}
  </article>`;
}
