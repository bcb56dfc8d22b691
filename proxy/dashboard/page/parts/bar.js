// Shares as bars: progress of work, and how full something is.

import { html } from "../html.js";
import { percent } from "../format.js";

export function Progress({ value, label }) {
  return html`<progress max="1" value=${value} aria-label=${label}>${percent(value)}</progress>`;
}

export function Meter({ value, label, tone = "" }) {
  return html`<meter class=${tone} min="0" max="1" value=${value} aria-label=${label}
    title=${label}>${percent(value)}</meter>`;
}
