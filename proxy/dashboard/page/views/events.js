// What happened: states, exits, requests, settings.

import { clock } from "../format.js";
import { Component, html } from "../html.js";
import { Choice, Filter } from "../parts/field.js";
import { Table } from "../parts/table.js";

const FIRST_SHOWN = 8;
const LEVELS = [["", "All"], ["warning error", "Warnings and errors"], ["error", "Errors"]];

export class Events extends Component {
  state = { filter: "", levels: "" };

  isWanted(event) {
    const { filter, levels } = this.state;
    return (!levels || levels.split(" ").includes(event.level))
      && (!filter || JSON.stringify(event).toLowerCase().includes(filter.toLowerCase()));
  }

  render({ store }, { filter, levels }) {
    const rows = store.events.filter((event) => this.isWanted(event)).reverse();
    return html`
      <h1>Events</h1>
      <div class="fields">
        <${Filter} label="Filter" value=${filter} onInput=${(value) => this.setState({ filter: value })} />
        <${Choice} label="Level" value=${levels} options=${LEVELS}
          onChange=${(value) => this.setState({ levels: value })} />
        <span class="quiet count">${rows.length} of ${store.events.length} events</span>
      </div>
      <${Table} caption="Events, newest first" columns=${COLUMNS} rows=${rows}
        rowKey=${(row) => `${row.at} ${row.seq}`} empty="No such event." />`;
  }
}

const COLUMNS = [
  { title: "Time", cell: (row) => clock(row.at) },
  { title: "Level", wide: true, cell: (row) => html`<span class="level ${row.level}">${row.level}</span>` },
  { title: "Event", cell: (row) => html`<code>${row.name}</code>` },
  { title: "What", cell: (row) => html`<${Fields} fields=${row.fields} />` },
];

// A request has some thirty figures; the first ones tell most.
function Fields({ fields }) {
  const known = Object.entries(fields).filter(([, value]) => value != null && value !== 0);
  const [first, others] = [known.slice(0, FIRST_SHOWN), known.slice(FIRST_SHOWN)];
  return html`<div class="pairs">${first.map(pair)}</div>
    ${others.length > 0 && html`<details>
      <summary class="quiet">${others.length} more</summary>
      <div class="pairs">${others.map(pair)}</div>
    </details>`}`;
}

function pair([name, value]) {
  return html`<span key=${name}><span class="quiet">${name}</span> ${shown(value)}</span>`;
}

function shown(value) {
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
