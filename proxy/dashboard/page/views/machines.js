// This machine and its nodes: state, memory, models and requests of each, as they answer in 2 s; read
// again at once when a node or a model changes its state.

import { get } from "../api.js";
import { bytes, duration, seconds, shortId, text, whole } from "../format.js";
import { html } from "../html.js";
import { Loaded } from "../parts/loaded.js";
import { Memory } from "../parts/memory.js";
import { State } from "../parts/state.js";
import { Table } from "../parts/table.js";

const RELOAD_MS = 2000;

export function Machines({ live }) {
  const states = [live.nodes, live.models].flatMap((members) => Object.values(members ?? {}).map(({ state }) => state));
  return html`
    <h1>Machines</h1>
    <${Loaded} version=${`${Math.floor(Date.now() / RELOAD_MS)} ${states}`} load=${() => get("/corral/v1/machines")} show=${all} />`;
}

function all({ machines }) {
  const requests = machines.flatMap(({ name, machine }) => (machine?.requests ?? []).map((request) => ({ node: name, ...request })));
  return html`
    <${Table} caption="Machines" columns=${COLUMNS} rows=${machines} rowKey=${(row) => row.name} />
    ${machines.filter(({ machine }) => machine).map(({ name, machine }) => html`<section key=${name} class="stack" aria-label=${name}>
      <h2>${name}</h2>
      <${Memory} memory=${machine.memory} devices=${machine.devices} label=${`Memory of ${name}`} />
      <${Table} caption=${`Models of ${name}`} columns=${MODELS} rows=${machine.models} rowKey=${(row) => row.name} empty="It has no models." />
    </section>`)}
    <${Table} caption="Requests" columns=${REQUESTS} rows=${requests} rowKey=${(row) => `${row.node} ${row.client} ${row.id}`} empty="No request is in flight." />`;
}

function sum(rows, name) {
  return rows.reduce((total, row) => total + row[name], 0);
}

function memoryUse({ memory }) {
  const all = Object.values(memory);
  const used = all.reduce((total, { weights, caches, buffers, others }) => total + weights + caches + buffers + others, 0);
  return `${bytes(used)} of ${bytes(sum(all, "total"))}`;
}

function figure(show) {
  return ({ machine }) => (machine ? show(machine) : "–");
}

const COLUMNS = [
  { title: "Machine", cell: ({ name, url }) => html`${name}${url && html` <code class="quiet wide">${url}</code>`}` },
  { title: "State", cell: ({ state, problem, machine }) => html`<${State} name=${machine?.state === "stopping" ? "stopping" : state} />${problem && html`<div class="cause">${problem}</div>`}` },
  { title: "Models", cell: figure(({ models }) => text(models.filter(({ state }) => state === "loaded").map(({ name }) => name).join(", "))) },
  { title: "Busy slots", figure: true, cell: figure(({ models }) => `${whole(sum(models, "slots_busy"))} of ${whole(sum(models, "slots"))}`) },
  { title: "Requests", figure: true, cell: figure(({ requests }) => whole(requests.length)) },
  { title: "Memory", figure: true, cell: figure(memoryUse) },
  { title: "Up", figure: true, wide: true, cell: figure(({ up_s }) => duration(up_s)) },
  { title: "Version", wide: true, cell: figure(({ version }) => version) },
];

const MODELS = [
  { title: "Model", cell: (row) => row.name },
  { title: "State", cell: (row) => html`<${State} name=${row.state} />${row.cause && html`<div class="cause">${row.cause}</div>`}` },
  { title: "Busy slots", figure: true, cell: (row) => `${whole(row.slots_busy)} of ${whole(row.slots)}` },
  { title: "Queued", figure: true, cell: (row) => whole(row.queued) },
];

const REQUESTS = [
  { title: "Request", cell: (row) => html`<code title=${row.id}>${shortId(row.id)}</code>` },
  { title: "Machine", cell: (row) => row.node },
  { title: "Model", cell: (row) => text(row.model) },
  { title: "Client", wide: true, cell: (row) => row.client },
  { title: "Phase", cell: (row) => html`<${State} name=${row.phase} />` },
  { title: "Tokens", figure: true, cell: (row) => whole(row.decoded_tokens) },
  { title: "Age", figure: true, cell: (row) => seconds(row.age_s) },
];
