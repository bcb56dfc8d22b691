// Tokens by key, model and day.

import { get } from "../api.js";
import { seconds, text, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Choice } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { Table } from "../parts/table.js";

const PERIODS = [["day", "Days"], ["month", "Months"]];

export class Usage extends Component {
  state = { period: "day" };

  render(_props, { period }) {
    return html`
      <h1>Usage</h1>
      <div class="fields">
        <${Choice} label="By" value=${period} options=${PERIODS}
          onChange=${(value) => this.setState({ period: value })} />
      </div>
      <${Loaded} version=${period} load=${() => get(`/corral/v1/usage?period=${period}`)}
        show=${({ usage }) => html`<${Table} caption="Tokens and time" columns=${COLUMNS} rows=${usage}
          rowKey=${(row) => `${row.period} ${row.client} ${row.model}`}
          empty="No request has finished yet." />`} />`;
  }
}

const COLUMNS = [
  { title: "Date", cell: (row) => row.period },
  { title: "Key", cell: (row) => text(row.client) },
  { title: "Model", cell: (row) => text(row.model) },
  { title: "Requests", figure: true, cell: (row) => whole(row.requests) },
  { title: "Prompt computed", figure: true, cell: (row) => whole(row.prompt_tokens) },
  { title: "Cached", figure: true, wide: true, cell: (row) => whole(row.cached_tokens) },
  { title: "Generated", figure: true, cell: (row) => whole(row.decoded_tokens) },
  { title: "Slot time", figure: true, wide: true, cell: (row) => seconds(row.slot_s) },
];
