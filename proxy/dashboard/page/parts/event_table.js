// Events as a table: time, level, event, subject, and the other fields, which unfold as JSON.

import { clock } from "../format.js";
import { html } from "../html.js";
import { Table } from "./table.js";

export const LEVELS = [["", "All"], ["warning error critical", "Warnings and errors"], ["error critical", "Errors"]];
const SUBJECTS = ["instance", "model", "node", "request", "client"];

export function modelOptions({ models }) {
  return [["", "All"], ...Object.keys(models).map((name) => [name, name])];
}

export function isOfModel(event, model) {
  return !model || event.fields.model === model || String(event.fields.instance ?? "").replace(/\.\d+$/, "") === model;
}

export function EventTable({ caption, rows }) {
  return html`<${Table} caption=${caption} columns=${COLUMNS} rows=${rows}
    rowKey=${(row) => `${row.at} ${row.seq}`} empty="No such event." />`;
}

const COLUMNS = [
  { title: "Time", cell: (row) => clock(row.at) },
  { title: "Level", cell: (row) => html`<span class="level ${row.level}">${row.level}</span>` },
  { title: "Event", cell: (row) => html`<code>${row.name}</code>` },
  { title: "Subject", cell: (row) => subject(row.fields)?.[1] ?? "" },
  { title: "Fields", fill: true, cell: (row) => html`<${Fields} fields=${row.fields} />` },
];

function subject(fields) {
  return Object.entries(fields).find(([name, value]) => SUBJECTS.includes(name) && value);
}

function Fields({ fields }) {
  const name = subject(fields)?.[0];
  const others = Object.entries(fields).filter(([key, value]) => key !== name && value != null && value !== 0);
  return html`<details class="event-fields">
    <summary>${others.map(([key, value]) => html`<span key=${key}><span class="quiet">${key}</span> ${text(value)}${" "}</span>`)}</summary>
    <pre tabindex="0" role="region" aria-label="JSON">${JSON.stringify(fields, null, 2)}</pre>
  </details>`;
}

function text(value) {
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
