// Edits corral.toml: problems at their lines while typing, the effects of a reload, save.

import { get, post } from "../api.js";
import { Component, createRef, html } from "../html.js";
import { Loaded } from "./loaded.js";
import { Problem } from "./notice.js";

const PATH = "/corral/v1/settings";
const TYPING_MS = 400;
const CHANGES = [["changed", "Restarts"], ["added", "Adds"], ["removed", "Removes"]];

export class SettingsEditor extends Component {
  render({ actions, onClose }) {
    return html`<section class="card settings-editor" aria-labelledby="editor-title">
      <header><h2 id="editor-title">corral.toml</h2><button type="button" class="small" onClick=${onClose}>Close</button></header>
      <${Loaded} load=${() => get(PATH)} show=${(file) => html`<${Editor} file=${file} actions=${actions} onClose=${onClose} />`} />
    </section>`;
  }
}

class Editor extends Component {
  textRef = createRef();
  gutterRef = createRef();
  state = { text: this.props.file.text, checked: null, found: null, error: null };

  componentWillUnmount() {
    clearTimeout(this._timer);
    this._isGone = true;
  }

  type(text) {
    this.setState({ text });
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.check(text), TYPING_MS);
  }

  async check(text) {
    try {
      this.take(text, { found: await post(`${PATH}/check`, { text }), error: null });
    } catch (error) {
      this.take(text, { found: null, error });
    }
  }

  take(text, state) {
    if (!this._isGone && text === this.state.text) this.setState({ ...state, checked: text });
  }

  save(event) {
    event.preventDefault();
    const { text } = this.state;
    const { actions, file, onClose } = this.props;
    actions.run("save settings", async () => {
      const found = await post(PATH, { text, etag: file.etag });
      this.take(text, { found, error: null });
      if (found.problems.length > 0) throw new Error("Nothing was saved: the text has problems");
      onClose();
    }, "corral.toml is saved, and is being applied");
  }

  // Selects a line, so that it is seen and the next key changes it.
  show(line) {
    const { current: area } = this.textRef;
    const lines = area.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    area.focus();
    area.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    area.scrollTop = Math.max(0, (line - 5) * (area.scrollHeight / lines.length));
  }

  render({ file, actions }, { text, checked, found, error }) {
    const problems = found?.problems ?? [];
    const wrong = new Set(problems.map(({ line }) => line));
    const isChecked = checked === text && problems.length === 0 && !error;
    return html`<form class="stack" onSubmit=${(event) => this.save(event)}>
      <p class="quiet"><code>${file.path}</code></p>
      <div class="text-editor">
        <pre class="gutter" aria-hidden="true" ref=${this.gutterRef}>${text.split("\n").map((_, i) =>
          html`<span key=${i} class=${wrong.has(i + 1) ? "bad" : ""}>${i + 1}</span>`)}</pre>
        <textarea ref=${this.textRef} aria-label="Text of corral.toml" aria-describedby="editor-findings" spellcheck="false"
          autocomplete="off" wrap="off" value=${text} onInput=${(event) => this.type(event.target.value)}
          onScroll=${(event) => { this.gutterRef.current.scrollTop = event.target.scrollTop; }}></textarea>
      </div>
      <div id="editor-findings" class="stack" role="status">
        ${error && html`<${Problem} error=${error} />`}
        ${problems.map(({ line, message }) => html`<p key=${`${line} ${message}`} class="bad-text">
          ${line && html`<button type="button" class="small" onClick=${() => this.show(line)}>Line ${line}</button>`} ${message}</p>`)}
        ${isChecked && html`<${Effect} ...${found} isSame=${text === file.text} />`}
      </div>
      <div class="buttons">
        <button type="submit" class="primary" disabled=${!isChecked || text === file.text || actions.busy.has("save settings")}>Save and apply</button>
      </div>
    </form>`;
  }
}

function Effect({ isSame, kept, notes, ...found }) {
  const changes = CHANGES.filter(([kind]) => found[kind].length > 0);
  return html`
    ${changes.map(([kind, title]) => html`<p key=${kind}><strong>${title}</strong> ${found[kind].join(", ")}</p>`)}
    ${changes.length === 0 && html`<p>${isSame ? "As saved." : "No model restarts."}</p>`}
    ${notes.map((note) => html`<p key=${note} class="quiet">${note}</p>`)}`;
}
