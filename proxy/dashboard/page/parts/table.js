// A table that scrolls sideways where it is wider than the page.

import { html } from "../html.js";

// A column: title, cell(row), and where it helps: figure (right-aligned), wide (left out on phones),
// acts (buttons: always in sight; its title is for screen readers only).
export function Table({ caption, columns, rows, rowKey, empty }) {
  return html`<div class="scroll" role="region" aria-label=${caption} tabindex="0">
    <table>
      <caption>${caption}</caption>
      <thead><tr>${columns.map(heading)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${rowKey(row)}>
          ${columns.map((column, i) => cell(column, row, i))}
        </tr>`)}
        ${rows.length === 0 && html`<tr><td class="empty" colspan=${columns.length}>${empty}</td></tr>`}
      </tbody>
    </table>
  </div>`;
}

function heading({ title, ...column }) {
  return html`<th scope="col" class=${classes(column)}>
    ${column.acts ? html`<span class="unseen">${title}</span>` : title}
  </th>`;
}

function cell({ cell: content, ...column }, row, i) {
  return i === 0
    ? html`<th scope="row" class=${classes(column)}>${content(row)}</th>`
    : html`<td class=${classes(column)}>${content(row)}</td>`;
}

function classes(column) {
  return ["figure", "wide", "acts"].filter((name) => column[name]).join(" ");
}
