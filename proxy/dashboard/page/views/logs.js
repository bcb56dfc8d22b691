// The log of the daemon or of an instance, filtered, and followed while it grows.

import { get } from "../api.js";
import { Component, createRef, html } from "../html.js";
import { LogLines } from "../live/log_lines.js";
import { Choice, Filter } from "../parts/field.js";
import { Problem } from "../parts/notice.js";

export class Logs extends Component {
  linesRef = createRef();
  state = { sources: ["daemon"], source: "daemon", filter: "", follows: true, error: null };
  log = new LogLines(() => this.props.store.notify());

  componentDidMount() {
    this.choose(this.props.detail ?? "daemon");
    this.list();
  }

  componentDidUpdate() {
    const region = this.linesRef.current;
    if (this.state.follows) region.scrollTop = region.scrollHeight;
  }

  componentWillUnmount() {
    this.props.stream.leaveLogs();
  }

  async list() {
    try {
      const { sources } = await get("/corral/v1/logs");
      this.setState({ sources });
    } catch (error) {
      this.setState({ error });
    }
  }

  choose(source) {
    this.log.clear();
    this.setState({ source });
    this.props.stream.followLogs(source, (batch) => this.take(source, batch));
  }

  take(source, batch) {
    if (batch.source === source && source === this.state.source) this.log.take(batch);
  }

  render(_props, { sources, source, filter, follows, error }) {
    const { lines } = this.log;
    const wanted = filter.toLowerCase();
    const shown = wanted ? lines.filter((line) => line.text.toLowerCase().includes(wanted)) : lines;
    return html`
      <h1>Logs</h1>
      <div class="fields">
        <${Choice} label="Source" value=${source} options=${sources.map((name) => [name, name])}
          onChange=${(value) => this.choose(value)} />
        <${Filter} label="Filter" value=${filter} onInput=${(value) => this.setState({ filter: value })} />
        <label class="check"><input type="checkbox" checked=${follows}
          onChange=${(event) => this.setState({ follows: event.target.checked })} /> Follow</label>
        <span class="quiet count">${shown.length} of ${lines.length} lines</span>
      </div>
      ${error && html`<${Problem} error=${error} />`}
      <div class="log" role="log" aria-live="off" aria-label=${`Log of ${source}`} tabindex="0" ref=${this.linesRef}>
        ${shown.map((line) => html`<div key=${line.number}>${line.text}</div>`)}
      </div>`;
  }
}
