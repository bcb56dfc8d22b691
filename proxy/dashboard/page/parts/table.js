// A table; on a phone each row is a block. The roles are written out, because a browser may
// take a table that is laid out otherwise for none.

import { html } from "../html.js";

// A column: title, cell(row), and its kinds: figure (right-aligned), wide (left out on phones),
// acts (buttons; its title is for screen readers only), fill (takes the width that is left).
export function Table({ caption, columns, rows, rowKey, empty, isCurrent }) {
  return html`<div class="scroll" role="region" aria-label=${caption} tabindex="0">
    <table role="table">
      <caption>${caption}</caption>
      <thead role="rowgroup"><tr role="row">${columns.map(heading)}</tr></thead>
      <tbody role="rowgroup">
        ${rows.map((row) => html`<tr role="row" key=${rowKey(row)} aria-current=${isCurrent?.(row) ? "true" : undefined}>
          ${columns.map((column, i) => cell(column, row, i))}
        </tr>`)}
        ${rows.length === 0 && html`<tr role="row">
          <td role="cell" class="empty" colspan=${columns.length}>${empty}</td>
        </tr>`}
      </tbody>
    </table>
  </div>`;
}

function heading({ title, ...column }) {
  return html`<th role="columnheader" scope="col" class=${classes(column)}>
    ${column.acts ? html`<span class="unseen">${title}</span>` : title}
  </th>`;
}

function cell({ cell: content, title, ...column }, row, i) {
  return i === 0
    ? html`<th role="rowheader" scope="row" class=${classes(column)}>${content(row)}</th>`
    : html`<td role="cell" class=${classes(column)} data-title=${title}>${content(row)}</td>`;
}

function classes(column) {
  return ["figure", "wide", "acts", "fill"].filter((name) => column[name]).join(" ");
}
