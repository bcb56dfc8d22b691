// Fields above a view: a filter, a choice.

import { html } from "../html.js";

export function Filter({ value, onInput, label }) {
  return html`<label class="field">
    <span>${label}</span>
    <input type="search" data-filter value=${value}
      onInput=${(event) => onInput(event.target.value)} />
  </label>`;
}

export function Check({ label, value, onChange }) {
  return html`<label class="check"><input type="checkbox" checked=${value}
    onChange=${(event) => onChange(event.target.checked)} /> ${label}</label>`;
}

// A few options side by side, as pairs of value and title.
export function Segments({ label, value, options, onChange }) {
  return html`<div class="segmented" role="group" aria-label=${label}>
    ${options.map(([option, title]) => html`<button key=${option} type="button" aria-pressed=${option === value}
      onClick=${() => onChange(option)}>${title}</button>`)}
  </div>`;
}

// Options: pairs of value and title.
export function Choice({ label, value, options, onChange }) {
  return html`<label class="field">
    <span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([option, title]) => html`<option key=${option} value=${option} selected=${option === value}>${title}</option>`)}
    </select>
  </label>`;
}

// Pairs for a choice of profiles: a model without `profile` has `base`, which the others extend.
export function profileOptions(names) {
  return names.map((name) => [name, name === "base" ? "base (the default)" : name]);
}
