// Requests in flight, and those that ended; a drawer explains one beside the list.

import { get } from "../api.js";
import { clock, milliseconds, percent, rate, seconds, share, shortId, text, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Progress } from "../parts/bar.js";
import { Explanation } from "../parts/explanation.js";
import { Choice } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { byAge } from "../parts/order.js";
import { State } from "../parts/state.js";
import { Table } from "../parts/table.js";
import { PhasesBar, PhasesLegend } from "../parts/phases.js";

const LIMIT = 100;
const CLIENT_LEFT = 499;
const RESULTS = [["", "All"], ["failed", "Failed"]];
const SINCE = [["", "Any time"], ["900", "15 min"], ["21600", "6 h"], ["604800", "7 days"]];
// Causes that are no news: nothing was computed that could have been in a cache.
const PLAIN = new Set(["all_found", "first_request", "short_prompt"]);

export class Requests extends Component {
  state = { model: "", client: "", result: "", since_s: "" };
  clients = new Set();

  query() {
    const { model, client, result, since_s } = this.state;
    const query = new URLSearchParams({ state: "finished", limit: LIMIT });
    if (model) query.set("model", model);
    if (client) query.set("client", client);
    if (result) query.set("failed", "true");
    if (since_s) query.set("since", Math.floor(Date.now() / 1000 - since_s));
    return query;
  }

  choice(label, name, options) {
    return html`<${Choice} label=${label} value=${this.state[name]} options=${options}
      onChange=${(value) => this.setState({ [name]: value })} />`;
  }

  render({ live, store, detail, actions }, { model, client, result, since_s }) {
    const running = byAge(live.requests).filter((row) => (!model || row.model === model) && (!client || row.client === client));
    for (const row of running) this.clients.add(row.client);
    const named = (names) => [["", "All"], ...[...names].sort().map((name) => [name, name])];
    return html`
      <h1>Requests</h1>
      <div class="fields">
        ${this.choice("Model", "model", named(Object.keys(live.models)))}
        ${this.choice("Client", "client", named(this.clients))}
        ${this.choice("Result", "result", RESULTS)}
        ${this.choice("Ended in", "since_s", SINCE)}
        <${PhasesLegend} />
      </div>
      ${running.length > 0 && html`<${Table} caption="In flight" columns=${inFlight(actions, store.clock)} rows=${running}
        rowKey=${(row) => row.id} />`}
      <${Loaded} version=${[store.lastRequest, model, client, result, since_s].join()}
        load=${() => get(`/corral/v1/requests?${this.query()}`)} show=${(found) => this.finished(found, detail)} />
      ${detail && html`<${Explanation} key=${detail} id=${detail} />`}`;
  }

  finished({ requests }, detail) {
    for (const row of requests) if (row.client) this.clients.add(row.client);
    return html`<${Table} caption="Finished" columns=${FINISHED} rows=${requests} isCurrent=${(row) => row.id === detail}
      rowKey=${(row) => `${row.id} ${row.ended_at}`} empty="No such request." />`;
  }
}

function inFlight(actions, clock) {
  return [
    { title: "Request", cell: (row) => html`<code title=${row.id}>${shortId(row.id)}</code>` },
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
  { title: "Request", cell: (row) => html`<a href=${`#requests/${encodeURIComponent(row.id)}`} title=${row.id}><code>${shortId(row.id)}</code></a>` },
  { title: "Ended", cell: (row) => clock(row.ended_at) },
  { title: "Model", cell: (row) => text(row.model) },
  { title: "Client", wide: true, cell: (row) => text(row.client) },
  { title: "Result", cell: result },
  { title: "Time", wide: true, cell: (row) => html`<${PhasesBar} row=${row} />` },
  { title: "Duration", figure: true, cell: (row) => milliseconds(row.duration_ms) },
  { title: "First token", figure: true, cell: (row) => milliseconds(row.first_token_ms) },
  { title: "Computed", figure: true, wide: true, cell: (row) => whole(row.prompt_tokens) },
  { title: "Cached", figure: true, wide: true, cell: (row) => whole(row.cached_tokens) },
  { title: "Generated", figure: true, cell: (row) => whole(row.decoded_tokens) },
];

function result({ status, code, cache_cause }) {
  if (status === CLIENT_LEFT && !code) return html`<span class="quiet">${status} client left</span>`;
  if (status >= 400) return html`<span class="bad">${status}</span> <span>${code?.replaceAll("_", " ")}</span>`;
  const cause = cache_cause && !PLAIN.has(cache_cause) ? `cache: ${cache_cause.replaceAll("_", " ")}` : "";
  return html`${text(status)} <span class="warn-text">${cause}</span>`;
}
