// Where the time of a request went, as one bar.

import { milliseconds, share } from "../format.js";
import { html } from "../html.js";

const GROUPS = [
  ["queue", "Queue", ["queued_ms", "paused_ms"]],
  ["loading", "Load", ["evict_ms", "load_ms", "slots_ms"]],
  ["prefill", "Prefill", ["prefill_ms"]],
  ["decode", "Decode", ["decode_ms"]],
  ["stalled", "Client did not read", ["stalled_ms"]],
];

export function PhasesBar({ row }) {
  const parts = GROUPS.map(([name, title, members]) => ({
    name, title, ms: members.reduce((sum, member) => sum + (row[member] ?? 0), 0),
  })).filter(({ ms }) => ms > 0);
  const label = parts.map(({ title, ms }) => `${title} ${milliseconds(ms)}`).join(", ") || "No time in a phase";
  return html`<div class="segments phases" role="img" aria-label=${label} title=${label}>
    ${parts.map(({ name, ms }) => html`<span key=${name} class=${name} style=${{ width: `${100 * share(ms, row.duration_ms)}%` }}></span>`)}
  </div>`;
}

export function PhasesLegend() {
  return html`<ul class="facts legend phases wide" aria-label="Colours of the times">
    ${GROUPS.map(([name, title]) => html`<li key=${name} class=${name}>${title}</li>`)}
  </ul>`;
}
