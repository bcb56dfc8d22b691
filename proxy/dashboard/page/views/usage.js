// Tokens and time, by API key, model, day or month.

import { get } from "../api.js";
import { seconds, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Choice } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { Table } from "../parts/table.js";

const GROUPS = [["", "Key and model"], ["key", "Key"], ["model", "Model"], ["day", "Day"], ["month", "Month"]];
const TITLES = { key: "Key", model: "Model", day: "Day", month: "Month" };

export class Usage extends Component {
  state = { by: "" };

  render(_props, { by }) {
    const names = by ? [by] : ["key", "model"];
    return html`
      <h1>Usage</h1>
      <div class="fields">
        <${Choice} label="By" value=${by} options=${GROUPS}
          onChange=${(value) => this.setState({ by: value })} />
      </div>
      <${Loaded} key=${by} load=${() => get(`/corral/v1/usage${by && `?by=${by}`}`)}
        show=${({ usage }) => html`<${Table} caption="Tokens and time" columns=${columns(names)} rows=${usage}
          rowKey=${(row) => names.map((name) => row[name]).join(" ")}
          empty="No request has finished yet." />`} />`;
  }
}

function columns(names) {
  return [...names.map((name) => ({ title: TITLES[name], cell: (row) => row[name] })), ...FIGURES];
}

const FIGURES = [
  { title: "Requests", figure: true, cell: (row) => whole(row.requests) },
  { title: "Prompt computed", figure: true, cell: (row) => whole(row.prompt_tokens) },
  { title: "Cached", figure: true, cell: (row) => whole(row.cached_tokens) },
  { title: "Generated", figure: true, cell: (row) => whole(row.generated_tokens) },
  { title: "Slot time", figure: true, wide: true, cell: (row) => seconds(row.slot_seconds) },
  { title: "Processor time", figure: true, wide: true, cell: (row) => seconds(row.cpu_seconds) },
];
