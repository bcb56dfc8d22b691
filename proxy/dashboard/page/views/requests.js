// Requests in flight, and those that ended.

import { get } from "../api.js";
import { clock, milliseconds, percent, rate, seconds, share, text, whole } from "../format.js";
import { html } from "../html.js";
import { Progress } from "../parts/bar.js";
import { Explanation } from "../parts/explanation.js";
import { Loaded } from "../parts/loaded.js";
import { byAge } from "../parts/order.js";
import { State } from "../parts/state.js";
import { Table } from "../parts/table.js";

const FINISHED_SHOWN = 100;

export function Requests({ live, store, detail, actions }) {
  const finished = store.events.filter((event) => event.name === "request.finished").length;
  return html`
    <h1>Requests</h1>
    <${Table} caption="In flight" columns=${inFlight(actions, store.clock)} rows=${byAge(live.requests)}
      rowKey=${(row) => row.id} empty="No request is in flight." />
    <${Loaded} version=${finished} load=${() => get(`/corral/v1/requests?state=finished&limit=${FINISHED_SHOWN}`)}
      show=${({ requests }) => html`<${Table} caption="Finished" columns=${FINISHED} rows=${requests}
        rowKey=${(row) => `${row.id} ${row.ended_at}`} empty="No request has finished yet." />`} />
    ${detail && html`<${Explanation} key=${detail} id=${detail} />`}`;
}

function inFlight(actions, clock) {
  return [
    { title: "Request", cell: (row) => html`<code>${row.id}</code>` },
    { title: "Model", cell: (row) => text(row.model) },
    { title: "Client", wide: true, cell: (row) => row.client },
    { title: "Phase", cell: phase },
    { title: "Prompt", figure: true, wide: true, cell: prompt },
    { title: "Tokens", figure: true, cell: (row) => whole(row.decoded_tokens) },
    { title: "Tokens/s", figure: true, cell: (row) => rate(row.tokens_per_second) },
    { title: "Age", figure: true, cell: (row) => seconds(clock.since(row.began_at_s)) },
    { title: "Actions", acts: true, cell: (row) => html`<button type="button" class="small"
      aria-label=${`Cancel ${row.id}`} disabled=${actions.busy.has(`cancel ${row.id}`)}
      onClick=${() => actions.cancel(row.id)}>Cancel</button>` },
  ];
}

function phase(row) {
  const part = share(row.prompt_tokens_done, row.prompt_tokens);
  return html`<${State} name=${row.phase} />
    ${row.position && html` <span class="quiet">place ${row.position}</span>`}
    ${row.phase === "prefill" && html` <${Progress} value=${part} label=${`${row.id}: ${percent(part)} of the prompt`} />`}`;
}

function prompt(row) {
  if (row.prompt_tokens == null) return "–";
  return row.cached_tokens
    ? `${whole(row.prompt_tokens)}, ${whole(row.cached_tokens)} cached`
    : whole(row.prompt_tokens);
}

const FINISHED = [
  { title: "Request", cell: (row) => html`<a href=${`#requests/${encodeURIComponent(row.id)}`}><code>${row.id}</code></a>` },
  { title: "Ended", wide: true, cell: (row) => clock(row.ended_at) },
  { title: "Model", cell: (row) => text(row.model) },
  { title: "Client", wide: true, cell: (row) => text(row.client) },
  { title: "Status", cell: (row) => html`<span class=${row.status >= 400 ? "bad" : ""}>${text(row.status)}</span>` },
  { title: "First token", figure: true, cell: (row) => milliseconds(row.first_token_ms) },
  { title: "Duration", figure: true, cell: (row) => milliseconds(row.duration_ms) },
  { title: "Computed", figure: true, wide: true, cell: (row) => whole(row.prompt_tokens) },
  { title: "Cached", figure: true, wide: true, cell: (row) => whole(row.cached_tokens) },
  { title: "Generated", figure: true, cell: (row) => whole(row.decoded_tokens) },
];
