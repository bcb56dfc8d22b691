// The log of the daemon or of an instance, filtered, and followed while it grows.

import { get } from "../api.js";
import { Component, createRef, html } from "../html.js";
import { LogLines } from "../live/log_lines.js";
import { isOfRequest } from "../live/store.js";
import { EventTable, LEVELS, isOfModel, modelOptions } from "../parts/event_table.js";
import { Check, Choice, Filter } from "../parts/field.js";
import { Problem } from "../parts/notice.js";

export class Logs extends Component {
  linesRef = createRef();
  state = { sources: ["daemon"], source: "daemon", filter: "", levels: "", model: "", follows: true, hasRequests: false, error: null };
  log = new LogLines(() => this.props.store.notify());

  componentDidMount() {
    this.choose(this.props.detail ?? "daemon");
    this.list();
  }

  componentDidUpdate(before) {
    if (this.props.detail && before.detail !== this.props.detail) this.choose(this.props.detail);
    const region = this.linesRef.current;
    if (region && this.state.follows) region.scrollTop = region.scrollHeight;
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
    this.setState({ source, levels: "", model: "" });
    this.props.stream.followLogs(source, (batch) => this.take(source, batch));
  }

  take(source, batch) {
    if (batch.source === source && source === this.state.source) this.log.take(batch);
  }

  isWanted(line) {
    const { filter, levels, model, hasRequests } = this.state;
    return (!filter || line.text.toLowerCase().includes(filter.toLowerCase()))
      && (!levels || levels.split(" ").includes(line.level))
      && (!model || (line.event && isOfModel(line.event, model)))
      && (hasRequests || !line.event || !isOfRequest(line.event));
  }

  render({ live }, { sources, source, filter, levels, model, follows, hasRequests, error }) {
    const { lines } = this.log;
    const shown = lines.filter((line) => this.isWanted(line));
    const isDaemon = source === "daemon";
    return html`
      <h1>Logs</h1>
      <div class="fields">
        <${Choice} label="Source" value=${source} options=${sources.map((name) => [name, name])}
          onChange=${(value) => this.choose(value)} />
        <${Filter} label="Filter" value=${filter} onInput=${(value) => this.setState({ filter: value })} />
        <${Choice} label="Level" value=${levels} options=${LEVELS} onChange=${(value) => this.setState({ levels: value })} />
        ${isDaemon
          ? html`<${Choice} label="Model" value=${model} options=${modelOptions(live)} onChange=${(value) => this.setState({ model: value })} />
            <${Check} label="Requests" value=${hasRequests} onChange=${(value) => this.setState({ hasRequests: value })} />`
          : html`<${Check} label="Follow" value=${follows} onChange=${(value) => this.setState({ follows: value })} />`}
        <span class="quiet count">${shown.length} of ${lines.length} lines</span>
      </div>
      ${error && html`<${Problem} error=${error} />`}
      ${isDaemon
        ? html`<${EventTable} caption="Log of the daemon, newest first"
            rows=${shown.map(({ number, event, text }) => event ?? { seq: number, name: text, fields: {} }).reverse()} />`
        : html`<div class="log card" role="log" aria-live="off" aria-label=${`Log of ${source}`} tabindex="0" ref=${this.linesRef}>
            ${shown.map((line) => html`<div key=${line.number} class="level ${line.level}">${line.text}</div>`)}
          </div>`}`;
  }
}
