// Other machines, if there are any.

import { text, whole } from "../format.js";
import { html } from "../html.js";
import { State } from "./state.js";
import { Table } from "./table.js";

const COLUMNS = [
  { title: "Node", cell: (row) => row.name },
  { title: "State", cell: (row) => html`<${State} name=${row.state} />${row.reason && html`<div class="cause">${row.reason}</div>`}` },
  { title: "Address", wide: true, cell: (row) => html`<code>${row.url}</code>` },
  { title: "Models", cell: (row) => text(row.models.join(", ")) },
  { title: "Busy slots", figure: true, cell: (row) => `${whole(row.slots_busy)} of ${whole(row.slots)}` },
];

export function Nodes({ nodes = {} }) {
  const rows = Object.entries(nodes).map(([name, node]) => ({ name, ...node }));
  return rows.length > 0 && html`<${Table} caption="Nodes" columns=${COLUMNS} rows=${rows}
    rowKey=${(row) => row.name} />`;
}
