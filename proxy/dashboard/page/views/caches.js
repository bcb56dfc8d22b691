// What the router expected of the engines' caches, against what they found.

import { percent, share, whole } from "../format.js";
import { html } from "../html.js";
import { Meter } from "../parts/bar.js";
import { byName } from "../parts/order.js";
import { Table } from "../parts/table.js";

const COLUMNS = [
  { title: "Model", cell: (row) => row.name },
  { title: "Expected", figure: true, cell: (row) => whole(row.expected_tokens) },
  { title: "Found", figure: true, cell: (row) => whole(row.found_tokens) },
  { title: "From disk", figure: true, cell: (row) => whole(row.disk_tokens) },
  { title: "Computed", figure: true, cell: (row) => whole(row.computed_tokens) },
  { title: "Found of expected", cell: (row) => part(row.name, row.expected_tokens_found, row.expected_tokens) },
  { title: "Found of all", wide: true, cell: (row) => part(row.name, row.found_tokens, row.found_tokens + row.computed_tokens) },
];

export function Caches({ live }) {
  return html`
    <h1>Caches</h1>
    <p class="lead">For each request the router chooses the slot whose cache should hold most of its prompt. Where
      the engines find much less than it expects, <a href="#requests">a request's explanation</a> tells why.</p>
    <${Table} caption="Prompt tokens since the start" columns=${COLUMNS} rows=${byName(live.caches)}
      rowKey=${(row) => row.name} empty="No request has finished yet." />`;
}

function part(name, tokens, all) {
  if (!all) return "–";
  return html`<${Meter} value=${share(tokens, all)} label=${`${name}: ${percent(tokens / all)}`} />
    ${" "}${percent(tokens / all)}`;
}
