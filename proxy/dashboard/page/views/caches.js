// Where the tokens of prompts came from: a slot, the host cache, a file, or computing; and the files.

import { get } from "../api.js";
import { bytes, duration, percent, share, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Dialog } from "../parts/dialog.js";
import { StackedChart } from "../parts/chart.js";
import { SPANS, SPANS_S, timesUntil } from "../parts/charts.js";
import { Segments } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { byName } from "../parts/order.js";
import { Table } from "../parts/table.js";

const TIERS = [
  ["slot", "Slots"],
  ["host_cache", "Host cache"],
  ["disk", "Disk"],
  ["computed", "Computed"],
];
// Of answers of nodes, the place is not known.
const NODE = ["node", "Other machines"];
const RELOAD_MS = 5000;

export class Caches extends Component {
  state = { forgets: null, forgotten: 0, span: "15m" };

  async forget(file) {
    await this.props.actions.forget(file);
    this.setState(({ forgotten }) => ({ forgotten: forgotten + 1 }));
  }

  render({ live, store }, { forgets, forgotten, span }) {
    const models = byName(live.caches).filter((model) => tokensOf(model) > 0);
    return html`
      <h1>Caches</h1>
      <p class="lead">Prompt tokens of complete responses since the start, by the place where the engine found them. If many
        are computed again, <a href="#requests">a request's explanation</a> tells why.</p>
      ${models.length === 0 && html`<p class="empty">No request has finished yet.</p>`}
      ${models.length > 0 && html`<section class="card memory" aria-label="Prompt tokens">
        ${models.map((model) => html`<${Model} key=${model.name} model=${model} />`)}
      </section>`}
      <section aria-labelledby="over-time-title" class="activity">
        <header><h2 id="over-time-title">Over time</h2>
          <${Segments} label="Range" value=${span} options=${SPANS} onChange=${(value) => this.setState({ span: value })} /></header>
        <${Loaded} key=${span} version=${`${store.lastRequest} ${Math.floor(Date.now() / RELOAD_MS)}`}
          load=${() => get(`/corral/v1/caches/rates?span=${span}`)} show=${(found) => overTime(found, span)} />
      </section>
      <${Loaded} version=${`${forgotten} ${Math.floor(Date.now() / RELOAD_MS)}`} load=${() => get("/corral/v1/caches")}
        show=${(found) => this.files(found)} />
      ${forgets && html`<${ForgetDialog} file=${forgets} onClose=${() => this.setState({ forgets: null })}
        onForget=${() => this.forget(forgets)} />`}`;
  }

  files({ count, size_bytes, files }) {
    const { busy } = this.props.actions;
    const acts = { title: "Actions", acts: true, cell: (row) => html`<button type="button" class="small"
      aria-label=${`Forget ${shortName(row)}`} disabled=${busy.has(`forget ${row.name}`)}
      onClick=${() => this.setState({ forgets: row })}>Forget</button>` };
    return html`<${Table} caption="On disk" columns=${[...FILE_COLUMNS, acts]} rows=${files} rowKey=${(row) => row.name}
        empty="No conversation is saved." />
      ${count > 0 && html`<p class="quiet">${count > files.length && `The latest used ${files.length} of `}${count === 1 ? "1 file" : `${whole(count)} files`}, ${bytes(size_bytes)}</p>`}`;
  }
}

function overTime({ until, interval_s, models, saved_today_s }, span) {
  const names = Object.keys(models).sort();
  if (names.length === 0) return html`<p class="empty">No request ended in this time, or no history is kept.</p>`;
  return html`<div class="charts wide-charts">${names.map((name) => {
    const tiers = [...TIERS.slice(0, -1), ...(models[name].node.some(Boolean) ? [NODE] : []), TIERS.at(-1)];
    const columns = tiers.map(([tier]) => models[name][tier]);
    return html`<${StackedChart} key=${`${name} ${tiers.length}`} title=${name} span_s=${SPANS_S[span]} least=${10} show=${whole}
      unit=${`from caches, ${duration(saved_today_s[name] ?? 0)} saved today`} value=${fromCaches}
      parts=${tiers.map(([tier, title]) => [`${tier}-tier`, title])}
      data=${[timesUntil(until, interval_s, columns[0].length), ...columns]} />`;
  })}</div>`;
}

// The share of the tokens that were not computed, which come last.
function fromCaches(tokens) {
  const all = tokens.reduce((sum, count) => sum + count, 0);
  return percent(all ? 1 - share(tokens.at(-1), all) : null);
}

const FILE_COLUMNS = [
  { title: "Conversation", cell: (row) => html`<code title=${row.name}>${shortName(row)}</code>` },
  { title: "Model", cell: (row) => row.model },
  { title: "Content", cell: (row) => html`${row.is_prefix ? "shared beginning" : "conversation"}${row.is_encrypted && html` <span class="quiet">encrypted</span>`}` },
  { title: "Tokens", figure: true, cell: (row) => whole(row.tokens) },
  { title: "Size", figure: true, cell: (row) => bytes(row.size_bytes) },
  { title: "Age", figure: true, cell: (row) => age(row.saved_at) },
  { title: "Unused for", figure: true, cell: (row) => age(row.used_at) },
];

function ForgetDialog({ file, onForget, onClose }) {
  const forget = () => {
    onForget();
    onClose();
  };
  return html`<${Dialog} title=${`Forget ${shortName(file)}`} onClose=${onClose}>
    <div class="stack">
      <p>${file.is_prefix
        ? `Deletes this beginning of conversations with ${file.model}: their next prompts may be computed in full.`
        : `Deletes all files of this conversation with ${file.model}, and empties its slots: its next turn is computed in full.`}</p>
      <div><button type="button" class="primary" onClick=${forget}>Forget</button></div>
    </div>
  <//>`;
}

// The beginning of a name, as the commands take it.
function shortName({ name }) {
  return name.slice(0, 8);
}

function age(time) {
  return duration(Math.max(0, (Date.now() - new Date(time)) / 1000));
}

function Model({ model }) {
  const all = tokensOf(model);
  const { name, saved_s, expected_tokens, expected_tokens_found } = model;
  return html`<article class="memory-bar tiers" aria-label=${name}>
    <h2>${name} <span class="quiet">${percent(1 - model.computed_tokens / all)} from caches</span></h2>
    <dl class="facts legend">
      ${TIERS.map(([tier, title]) => html`<div key=${tier} class=${`${tier}-tier`}><dt>${title}</dt><dd>${whole(model[`${tier}_tokens`])}</dd></div>`)}
    </dl>
    <div class="segments" aria-hidden="true">
      ${TIERS.map(([tier]) => html`<span key=${tier} class=${`${tier}-tier`} style=${{ width: `${100 * share(model[`${tier}_tokens`], all)}%` }}></span>`)}
    </div>
    <p class="quiet facts">
      <span>${duration(saved_s)} of computing saved</span>
      ${expected_tokens > 0 && html`<span title="Prompt tokens that the router expected in the cache of the slot it chose">
        ${percent(share(expected_tokens_found, expected_tokens))} of the expected tokens found</span>`}
    </p>
  </article>`;
}

function tokensOf(model) {
  return TIERS.reduce((sum, [tier]) => sum + (model[`${tier}_tokens`] ?? 0), 0);
}
