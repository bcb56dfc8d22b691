// The result of an action.

import { html } from "../html.js";

export function Notice({ notice, onDismiss }) {
  return html`<div class="notices" role="status">
    ${notice && html`<div class="notice ${notice.kind}">
      <p><strong>${notice.message}</strong>${notice.hint && html` <span>${notice.hint}</span>`}</p>
      <button type="button" class="small" onClick=${onDismiss}>Dismiss</button>
    </div>`}
  </div>`;
}

export function Problem({ error }) {
  return html`<div class="notice error" role="alert">
    <p><strong>${error.message}</strong>${error.hint && html` <span>${error.hint}</span>`}</p>
  </div>`;
}
