// Each memory of the machine as one bar: what the models hold, what other programs hold, what is free.

import { bytes, share } from "../format.js";
import { html } from "../html.js";

const PARTS = [
  ["weights", "Weights"],
  ["caches", "Caches"],
  ["buffers", "Buffers"],
  ["others", "Other programs"],
  ["free", "Free"],
];

export function Memory({ memory = {}, label = "Memory" }) {
  const names = Object.keys(memory);
  return names.length > 0 && html`<section class="card memory" aria-label=${label}>
    ${names.map((name) => html`<${Bar} key=${name} title=${name === "host" ? "Main memory" : name} ...${memory[name]} />`)}
  </section>`;
}

function Bar({ title, ...memory }) {
  const used = memory.weights + memory.caches + memory.buffers + memory.others;
  const sizes = { ...memory, free: Math.max(0, memory.total - used) };
  return html`<div class="memory-bar" role="group" aria-label=${title}>
    <h2>${title} <span class="quiet">${bytes(memory.total)}</span></h2>
    <div class="segments" aria-hidden="true">
      ${PARTS.map(([name]) => html`<span key=${name} class=${name} style=${{ width: `${100 * share(sizes[name], memory.total)}%` }}></span>`)}
    </div>
    <dl class="facts legend">
      ${PARTS.map(([name, label]) => html`<div key=${name} class=${name}><dt>${label}</dt><dd>${bytes(sizes[name])}</dd></div>`)}
    </dl>
  </div>`;
}
