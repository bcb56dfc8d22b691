// A state, as shape, word and colour.

import { html } from "../html.js";
import { Shape } from "./icon.js";

const LOOKS = {
  ready: ["full", "good"],
  up: ["full", "good"],
  ok: ["full", "good"],
  loaded: ["full", "good"],
  serving: ["full", "good"],
  starting: ["half", "busy"],
  loading: ["half", "busy"],
  stopping: ["dots", "busy"],
  draining: ["dots", "busy"],
  unloaded: ["ring", "quiet"],
  stopped: ["ring", "quiet"],
  sleeping: ["ring", "quiet"],
  backoff: ["triangle", "warn"],
  unhealthy: ["triangle", "warn"],
  degraded: ["triangle", "warn"],
  failed: ["cross", "bad"],
  down: ["cross", "bad"],
  queued: ["ring", "quiet"],
  reading: ["dots", "quiet"],
  prefill: ["half", "busy"],
  decode: ["full", "busy"],
  ending: ["dots", "quiet"],
  stalled: ["triangle", "warn"],
  paused: ["dots", "quiet"],
  held: ["ring", "busy"],
  idle: ["ring", "quiet"],
};

export function State({ name }) {
  const [shape, tone] = LOOKS[name] ?? ["ring", "quiet"];
  return html`<span class="state ${tone}"><${Shape} name=${shape} />${name}</span>`;
}

// Whether a model fits this machine, and why; unknown for a model that cannot be planned.
export function Fit({ fits, reason }) {
  const [shape, tone, word] = fits ? ["full", "good", "fits"] : ["cross", "bad", fits == null ? "cannot be served" : "does not fit"];
  return html`<span class="state ${tone}"><${Shape} name=${shape} />${word}</span> <span class="quiet reason">${reason}</span>`;
}
