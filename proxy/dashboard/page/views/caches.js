// Where the tokens of prompts came from: a slot, the host cache, a file, or computing.

import { duration, percent, share, whole } from "../format.js";
import { html } from "../html.js";
import { byName } from "../parts/order.js";

const TIERS = [
  ["slot", "Slots"],
  ["host_cache", "Host cache"],
  ["disk", "Disk"],
  ["computed", "Computed"],
];

export function Caches({ live }) {
  const models = byName(live.caches).filter((model) => tokensOf(model) > 0);
  return html`
    <h1>Caches</h1>
    <p class="lead">Prompt tokens of complete responses since the start, by the place where the engine found them. If many
      are computed again, <a href="#requests">a request's explanation</a> tells why.</p>
    ${models.length === 0 && html`<p class="empty">No request has finished yet.</p>`}
    ${models.length > 0 && html`<section class="card memory" aria-label="Prompt tokens">
      ${models.map((model) => html`<${Model} key=${model.name} model=${model} />`)}
    </section>`}`;
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
