// Says that the page is out of date, because the daemon cannot be reached.

import { Component, html } from "../html.js";

export class Banner extends Component {
  componentDidMount() {
    this._timer = setInterval(() => this.setState({ now: Date.now() }), 1000);
  }

  componentWillUnmount() {
    clearInterval(this._timer);
  }

  shouldComponentUpdate(next) {
    return next.connection.phase === "lost" || next.connection !== this.props.connection;
  }

  render({ connection, onRetry }) {
    const isLost = connection.phase === "lost";
    const wait_s = isLost ? Math.max(0, Math.ceil((connection.again_at - Date.now()) / 1000)) : 0;
    return html`<div role="alert">
      ${isLost && html`<div class="notice error">
        <p><strong>The connection to the daemon is lost.</strong>
          ${" "}<span>The figures below are old. <span aria-hidden="true">Next try ${wait_s ? `in ${wait_s} s` : "now"}.</span></span></p>
        <button type="button" class="small" onClick=${onRetry}>Try now</button>
      </div>`}
    </div>`;
  }
}
