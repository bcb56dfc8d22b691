// The models on this machine: whether each fits, its plan and start in a drawer; downloads of others;
// and the settings file.

import { get } from "../api.js";
import { bytes, text } from "../format.js";
import { Component, html } from "../html.js";
import { Filter } from "../parts/field.js";
import { Hub } from "../parts/hub.js";
import { Loaded } from "../parts/loaded.js";
import { PlanDrawer } from "../parts/plan_drawer.js";
import { SettingsEditor } from "../parts/settings_editor.js";
import { Fit, State } from "../parts/state.js";
import { Table } from "../parts/table.js";

const STORES = {
  corral: "llama-corral", models_dir: "models_dir", huggingface: "Hugging Face cache", "llama.cpp": "llama.cpp cache",
  lmstudio: "LM Studio", ollama: "Ollama",
};

export class ModelsView extends Component {
  state = { filter: "", stored: 0, isEditing: false }; // stored: how often downloads ended

  render({ live, detail, actions }, { filter, stored, isEditing }) {
    return html`
      <h1>Models</h1>
      <p class="lead">All models on this machine: those of corral.toml, and files in the stores of llama-corral, Hugging Face, llama.cpp, LM Studio and Ollama.</p>
      <div class="fields">
        <${Filter} label="Filter" value=${filter} onInput=${(value) => this.setState({ filter: value })} />
        <button type="button" aria-expanded=${String(isEditing)} onClick=${() => this.setState({ isEditing: !isEditing })}>Edit corral.toml</button>
      </div>
      ${isEditing && html`<${SettingsEditor} actions=${actions} onClose=${() => this.setState({ isEditing: false })} />`}
      <${Loaded} version=${[stored, ...Object.keys(live.models)].join()} load=${() => get("/corral/v1/models")}
        show=${(found) => this.found(found, live, detail, actions)} />
      <${Hub} actions=${actions} onStored=${() => this.setState(({ stored: count }) => ({ stored: count + 1 }))} />`;
  }

  found({ models, profiles, notes }, live, detail, actions) {
    const wanted = this.state.filter.toLowerCase();
    const rows = models.filter(({ name }) => name.toLowerCase().includes(wanted));
    const chosen = models.find(({ id }) => id === detail);
    return html`
      <${Table} caption="On this machine" columns=${columns(live)} rows=${rows} rowKey=${(row) => row.id}
        isCurrent=${(row) => row.id === detail} empty=${"No such model; a search below finds others."} />
      ${notes.map((note) => html`<p key=${note} class="quiet">${note}</p>`)}
      ${chosen && html`<${PlanDrawer} key=${chosen.id} model=${chosen} state=${live.models[chosen.id]?.state}
        profiles=${profiles} actions=${actions} />`}`;
  }
}

function columns(live) {
  return [
    { title: "Model", cell: (row) => html`<a href=${`#models/${encodeURIComponent(row.id)}`}>${row.name}</a>` },
    { title: "State", cell: ({ id }) => live.models[id] && html`<${State} name=${live.models[id].state} />` },
    { title: "Size", figure: true, cell: (row) => bytes(row.size_bytes) },
    { title: "Quantisation", wide: true, cell: (row) => text(row.quantisation) },
    { title: "Kind", wide: true, cell: (row) => text(row.kind) },
    { title: "Store", wide: true, cell: (row) => STORES[row.store] ?? "corral.toml" },
    { title: "Memory", fill: true, cell: (row) => html`<${Fit} fits=${row.fits} reason=${row.fit} />` },
  ];
}
