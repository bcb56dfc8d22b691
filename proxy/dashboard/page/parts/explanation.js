// Where the time of one request went, and why.

import { get } from "../api.js";
import { milliseconds, share, text, whole } from "../format.js";
import { html } from "../html.js";
import { Dialog } from "./dialog.js";
import { Loaded } from "./loaded.js";

const PHASES = [
  ["queued_ms", "Queue"],
  ["load_ms", "Load"],
  ["prefill_ms", "Prefill"],
  ["decode_ms", "Decode"],
  ["stalled_ms", "Client did not read"],
];

export function Explanation({ id }) {
  const path = `/corral/v1/requests/${encodeURIComponent(id)}/explanation`;
  return html`<${Dialog} title=${`Request ${id}`} onClose=${() => { location.hash = "requests"; }}>
    <${Loaded} load=${() => get(path)} show=${(found) => html`
      <p class="sentence">${found.summary}</p>
      <${Timeline} figures=${found} />
      <${Tokens} figures=${found} />`} />
  <//>`;
}

function Timeline({ figures }) {
  const known = PHASES.filter(([name]) => figures[name] > 0);
  return html`<table class="timeline">
    <caption>Time</caption>
    <thead><tr><th scope="col">Phase</th><th scope="col" class="figure">Time</th><th scope="col">Share</th></tr></thead>
    <tbody>
      ${known.map(([name, title]) => html`<tr key=${name}>
        <th scope="row">${title}</th>
        <td class="figure">${milliseconds(figures[name])}</td>
        <td><span class="share" style=${{ width: `${100 * share(figures[name], figures.duration_ms)}%` }}></span></td>
      </tr>`)}
      <tr><th scope="row">In all</th><td class="figure">${milliseconds(figures.duration_ms)}</td><td></td></tr>
    </tbody>
  </table>`;
}

function Tokens({ figures }) {
  return html`<dl class="facts">
    <div><dt>Model</dt><dd>${text(figures.model)}</dd></div>
    <div><dt>Instance, slot</dt><dd>${text(figures.instance)}, ${text(figures.slot)}</dd></div>
    <div><dt>Cached, expected</dt><dd>${whole(figures.expected_cached_tokens)}</dd></div>
    <div><dt>Cached, found</dt><dd>${whole(figures.cached_tokens)}</dd></div>
    <div><dt>Prompt computed</dt><dd>${whole(figures.prompt_tokens)}</dd></div>
    <div><dt>Generated</dt><dd>${whole(figures.decoded_tokens)}</dd></div>
  </dl>`;
}
