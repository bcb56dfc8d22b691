// A button that copies a text.

import { Component, html } from "../html.js";

const SHOWN_MS = 2000;

export class Copy extends Component {
  state = { result: "" };

  componentWillUnmount() {
    clearTimeout(this._timer);
  }

  async copy() {
    const result = await write(this.props.text);
    this.setState({ result });
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.setState({ result: "" }), SHOWN_MS);
  }

  render({ what }, { result }) {
    return html`<span class="copy">
      <button type="button" class="small" aria-label=${`Copy ${what}`}
        onClick=${() => this.copy()}>${result || "Copy"}</button>
      <span class="unseen" role="status">${result && `${what}: ${result}`}</span>
    </span>`;
  }
}

// Only a secure context has a clipboard; plain http on another machine's address is none.
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    return "Select and copy it";
  }
}
