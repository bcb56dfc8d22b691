// Where the time of one request went, and why its prompt was not in the cache.

import { get } from "../api.js";
import { milliseconds, seconds, share, text, whole } from "../format.js";
import { html } from "../html.js";
import { Dialog } from "./dialog.js";
import { Loaded } from "./loaded.js";

const PHASES = {
  queued: "Queue",
  evict: "Making room in memory",
  load: "Load",
  slots: "Asking for the slots",
  prefill: "Prefill",
  decode: "Decode",
  paused: "Paused",
  stalled: "Client did not read",
  other: "Other",
};

export function Explanation({ id }) {
  const path = `/corral/v1/requests/${encodeURIComponent(id)}/explanation`;
  return html`<${Dialog} title=${`Request ${id}`} onClose=${leave}>
    <${Loaded} load=${() => get(path)} show=${(found) => html`
      <${Findings} findings=${found.findings} />
      <${Timeline} phases_ms=${found.phases_ms} duration_ms=${found.duration_ms} />
      <${Facts} found=${found} />`} />
  <//>`;
}

// The browser tells of a closed dialog later: the page may show another view by then.
function leave() {
  if (/^#\/?requests\//.test(location.hash)) location.hash = "requests";
}

function Findings({ findings }) {
  return html`<ul class="findings">
    ${findings.map((finding) => html`<li key=${finding.cause}>
      <p class="sentence">${finding.sentence}</p>
      ${finding.advice && html`<p class="quiet">${finding.advice}</p>`}
    </li>`)}
  </ul>`;
}

function Timeline({ phases_ms, duration_ms }) {
  const known = Object.keys(PHASES).filter((name) => phases_ms[name] > 0);
  return html`<table class="timeline">
    <caption>Time</caption>
    <thead><tr><th scope="col">Phase</th><th scope="col" class="figure">Time</th><th scope="col">Share</th></tr></thead>
    <tbody>
      ${known.map((name) => html`<tr key=${name}>
        <th scope="row">${PHASES[name]}</th>
        <td class="figure">${milliseconds(phases_ms[name])}</td>
        <td><${Bar} part=${phases_ms[name]} all=${duration_ms} /></td>
      </tr>`)}
      <tr><th scope="row">In all</th><td class="figure">${milliseconds(duration_ms)}</td><td></td></tr>
    </tbody>
  </table>`;
}

function Bar({ part, all }) {
  return html`<span class="share" style=${{ width: `${100 * share(part, all)}%` }}></span>`;
}

function Facts({ found }) {
  const cache = found.cache ?? {};
  return html`<dl class="facts">
    <div><dt>Model</dt><dd>${text(found.model)}</dd></div>
    <div><dt>Instance</dt><dd>${text(found.instance)}</dd></div>
    <div><dt>First token</dt><dd>${milliseconds(found.first_token_ms)}</dd></div>
    <div><dt>Prompt</dt><dd>${whole(cache.tokens)} tokens</dd></div>
    <div><dt>Expected in cache</dt><dd>${whole(found.expected_cached_tokens)}</dd></div>
    <div><dt>Found in cache</dt><dd>${whole(cache.found)}</dd></div>
    ${cache.age_s != null && html`<div><dt>Earlier request</dt><dd>${seconds(cache.age_s)} before</dd></div>`}
  </dl>`;
}
