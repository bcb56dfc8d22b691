// What one call of the API answers: loaded when shown, and again for another `version`, once that
// has stayed for `wait_ms`.

import { Component, html } from "../html.js";
import { Problem } from "./notice.js";

export class Loaded extends Component {
  state = { data: null, error: null };

  componentDidMount() {
    this.load();
  }

  componentDidUpdate(before) {
    if (before.version === this.props.version) return;
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.load(), this.props.wait_ms ?? 0);
  }

  componentWillUnmount() {
    this._isGone = true;
    clearTimeout(this._timer);
  }

  async load() {
    const { version } = this.props;
    try {
      const data = await this.props.load();
      this.take(version, { data, error: null });
    } catch (error) {
      this.take(version, { error });
    }
  }

  take(version, state) {
    if (!this._isGone && version === this.props.version) this.setState(state);
  }

  render({ show }, { data, error }) {
    return html`
      ${error && html`<${Problem} error=${error} />`}
      ${data ? show(data) : !error && html`<p class="waiting">Loading…</p>`}`;
  }
}
