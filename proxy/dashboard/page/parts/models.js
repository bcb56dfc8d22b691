// The models: state, memory, queue, and what can be done with each.

import { MODEL_ACTIONS } from "../actions.js";
import { bytes, percent, seconds, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Progress } from "./bar.js";
import { byName } from "./order.js";
import { State } from "./state.js";
import { Table } from "./table.js";
import { WarmDialog } from "./warm_dialog.js";

export class Models extends Component {
  state = { warms: null };

  act(verb, name) {
    if (verb === "warm") this.setState({ warms: name });
    else this.props.actions.model(verb, name);
  }

  columns() {
    return [
      { title: "Model", cell: (row) => html`<a href=${`#chat/${encodeURIComponent(row.name)}`}>${row.name}</a>` },
      { title: "State", cell: state },
      { title: "Memory", figure: true, cell: (row) => bytes(row.memory_bytes) },
      { title: "Context", figure: true, wide: true, cell: (row) => whole(row.context) },
      { title: "Slots", figure: true, wide: true, cell: (row) => whole(row.slots) },
      { title: "Queue", figure: true, cell: (row) => this.queue(row) },
      { title: "Restarts", figure: true, wide: true, cell: (row) => whole(row.restarts) },
      { title: "Actions", acts: true, cell: (row) => this.buttons(row) },
    ];
  }

  queue({ queue: { length, oldest_at_s } }) {
    return length ? `${length}, ${seconds(this.props.clock.since(oldest_at_s))}` : "0";
  }

  buttons(row) {
    const verbs = row.actions.filter((action) => action in MODEL_ACTIONS);
    return html`<div class="buttons">${verbs.map((verb) => html`<button key=${verb} type="button"
      class="small" aria-label=${`${MODEL_ACTIONS[verb].label} ${row.name}`}
      disabled=${this.props.actions.busy.has(`${verb} ${row.name}`)}
      onClick=${() => this.act(verb, row.name)}>${MODEL_ACTIONS[verb].label}</button>`)}</div>`;
  }

  render({ models, actions }, { warms }) {
    return html`
      <${Table} caption="Models" columns=${this.columns()} rows=${byName(models)}
        rowKey=${(row) => row.name}
        empty="No model is configured. corral model get smollm2 fetches one." />
      ${warms && html`<${WarmDialog} model=${warms} onClose=${() => this.setState({ warms: null })}
        onWarm=${(prompt) => actions.warm(warms, prompt)} />`}`;
  }
}

function state(row) {
  return html`<${State} name=${row.state} />
    ${row.load_progress < 1 && html` <${Progress} value=${row.load_progress}
      label=${`${row.name}: ${percent(row.load_progress)} loaded`} />`}
    ${row.waiting && html`<div class="quiet">place ${row.waiting.place} in memory's queue</div>`}
    ${row.cause && html`<div class="cause">${row.cause}</div>`}`;
}
