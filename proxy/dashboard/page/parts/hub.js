// Downloads pinned models and those that a search of Hugging Face finds: whether each fits and why,
// progress, cancel.

import { get, post } from "../api.js";
import { bytes, percent, share, text, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Progress } from "./bar.js";
import { Choice } from "./field.js";
import { Loaded } from "./loaded.js";
import { Polling } from "./polling.js";
import { Fit } from "./state.js";
import { Table } from "./table.js";

const PATH = "/corral/v1/downloads";
const POLL_MS = 500;

export class Hub extends Polling {
  path = PATH;
  pause_ms = POLL_MS;
  state = { words: "", downloads: [], pinned: [] };

  take({ downloads, pinned }) {
    if (this._isGone) return;
    const done = (rows) => rows.filter(({ state }) => state === "done").length;
    if (done(downloads) !== done(this.state.downloads)) this.props.onStored();
    this.setState({ downloads, pinned });
    if (downloads.some(({ state }) => state === "running")) this.wait();
  }

  download(name) {
    this.props.actions.run(`get ${name}`, async () => this.take(await post(PATH, { name })), `${name} is being downloaded`);
  }

  cancel(name) {
    this.props.actions.run(`cancel ${name}`, async () => {
      await post(`${PATH}/cancel`, { name });
      this.poll();
    }, `The download of ${name} is cancelled; its data are kept`);
  }

  search(event) {
    event.preventDefault();
    this.setState({ words: new FormData(event.target).get("words").trim() });
  }

  render({ actions }, { words, downloads, pinned }) {
    return html`
      ${pinned.length > 0 && html`<${Table} caption="Models to begin with" columns=${this.pinnedColumns(actions)}
        rows=${pinned} rowKey=${(row) => row.name} />`}
      <form class="fields" role="search" onSubmit=${(event) => this.search(event)}>
        <label class="field"><span>Search Hugging Face</span><input type="search" name="words" maxlength="200" required /></label>
        <button type="submit">Search</button>
      </form>
      ${downloads.length > 0 && html`<${Table} caption="Downloads" columns=${this.downloadColumns(actions)}
        rows=${downloads} rowKey=${(row) => row.name} />`}
      ${words && html`<${Loaded} version=${words} load=${() => get(`/corral/v1/hub?words=${encodeURIComponent(words)}`)}
        show=${({ repositories }) => html`<${Table} caption="On Hugging Face" rows=${repositories} rowKey=${(row) => row.repo}
          columns=${this.foundColumns(actions)} empty="No GGUF repository has these words." />`} />`}`;
  }

  get(name, actions) {
    return html`<button type="button" class="small" aria-label=${`Download ${name}`} disabled=${actions.busy.has(`get ${name}`)}
      onClick=${() => this.download(name)}>Download</button>`;
  }

  pinnedColumns(actions) {
    return [
      { title: "Model", cell: (row) => row.name },
      { title: "Size", figure: true, cell: (row) => bytes(row.size_bytes) },
      { title: "Licence", wide: true, cell: (row) => row.license },
      { title: "Description", fill: true, cell: (row) => html`<span class="quiet reason">${row.description}</span>` },
      { title: "Actions", acts: true, cell: ({ name }) => this.get(name, actions) },
    ];
  }

  downloadColumns(actions) {
    return [
      { title: "Model", cell: (row) => row.name },
      { title: "State", fill: true, cell: (row) => html`<${DownloadState} row=${row} />` },
      { title: "Actions", acts: true, cell: ({ name, state }) => state === "running" && html`<button type="button" class="small"
        aria-label=${`Cancel ${name}`} disabled=${actions.busy.has(`cancel ${name}`)} onClick=${() => this.cancel(name)}>Cancel</button>` },
    ];
  }

  foundColumns(actions) {
    return [
      { title: "Repository", cell: (row) => `${row.repo}${row.is_gated ? " (gated)" : ""}` },
      { title: "Parameters", figure: true, wide: true, cell: ({ parameters }) => (parameters ? `${(parameters / 1e9).toFixed(1)} B` : "–") },
      { title: "Downloads", figure: true, wide: true, cell: (row) => whole(row.downloads) },
      { title: "Changed", wide: true, cell: (row) => text(row.date) },
      { title: "Size", fill: true, cell: (row) => html`<${Sizes} key=${row.repo} row=${row} button=${(name) => this.get(name, actions)} />` },
    ];
  }
}

function DownloadState({ row: { name, state, file, done_bytes, size_bytes, error } }) {
  if (state !== "running") return html`<span class=${state === "failed" ? "bad" : ""}>${state}</span> <span class="quiet reason">${error}</span>`;
  const part = share(done_bytes, size_bytes);
  return html`<${Progress} value=${part} label=${`${name}: ${percent(part)} downloaded`} />
    <span class="quiet reason"> ${file ? `${file}: ${bytes(done_bytes)} of ${bytes(size_bytes)}` : "choosing its files"}</span>`;
}

class Sizes extends Component {
  state = { chosen: "", planned: null }; // planned: the name whose plan is shown

  choose(repo, chosen) {
    this.setState({ chosen, planned: chosen ? `${repo}:${chosen}` : null });
  }

  render({ row: { repo, quantisations }, button }, { chosen, planned }) {
    const options = quantisations.map(({ name, size_bytes, fits }) => [name, `${name}, ${bytes(size_bytes)}${fits ? "" : ": more than the memory"}`]);
    const name = chosen ? `${repo}:${chosen}` : repo;
    return html`<span class="fields">
      <${Choice} label="Quantisation" value=${chosen} options=${[["", "the best that fits"], ...options]}
        onChange=${(value) => this.choose(repo, value)} />
      ${button(name)}
      ${planned !== name && html`<button type="button" class="small" aria-label=${`Plan ${name}`}
        onClick=${() => this.setState({ planned: name })}>Plan</button>`}
    </span>
    ${planned === name && html`<div><${Loaded} key=${name} load=${() => get(`/corral/v1/hub/fit?name=${encodeURIComponent(name)}`)}
      show=${(found) => html`<${Fit} fits=${found.fits} reason=${`${found.name}: ${found.fit}`} />`} /></div>`}`;
  }
}
