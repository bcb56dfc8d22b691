// Where the time of one request went, and why its prompt was not in the cache.

import { get } from "../api.js";
import { milliseconds, seconds, share, whole } from "../format.js";
import { html } from "../html.js";
import { Drawer } from "./drawer.js";
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
  return html`<${Drawer} title=${`Request ${id}`} onClose=${() => { location.hash = "requests"; }}>
    <${Loaded} load=${() => get(path)} show=${(found) => html`
      <${Findings} findings=${found.findings} />
      <${Timeline} phases_ms=${found.phases_ms} duration_ms=${found.duration_ms} />
      <${Facts} found=${found} />`} />
  <//>`;
}

function Findings({ findings }) {
  return html`<ul class="findings">
    ${findings.map((finding) => html`<li key=${finding.cause} class=${finding.cause === "error" ? "is-error" : ""}>
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

function Facts({ found: { model, instance, first_token_ms, expected_cached_tokens, cache } }) {
  const facts = [
    ["Model", model],
    ["Instance", instance],
    ["First token", first_token_ms && milliseconds(first_token_ms)],
    ["Prompt", cache?.tokens && `${whole(cache.tokens)} tokens`],
    ["Expected in cache", cache && whole(expected_cached_tokens)],
    ["Found in cache", cache && whole(cache.found)],
    ["Earlier request", cache?.age_s && `${seconds(cache.age_s)} before`],
  ];
  return html`<dl class="facts">
    ${facts.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}
