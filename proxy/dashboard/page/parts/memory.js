// Each memory of the machine as one bar: the shares of models and of other programs, and the free rest;
// below them, the load of each card.

import { bytes, percent, share, whole } from "../format.js";
import { html } from "../html.js";

const PARTS = [
  ["weights", "Weights"],
  ["caches", "Caches"],
  ["buffers", "Buffers"],
  ["others", "Other programs"],
  ["free", "Free"],
];

export function Memory({ memory = {}, devices = {}, label = "Memory" }) {
  const names = Object.keys(memory);
  return names.length > 0 && html`<section class="card memory" aria-label=${label}>
    ${names.map((name) => html`<${Bar} key=${name} title=${name === "host" ? "Main memory" : name} ...${memory[name]} />`)}
    ${Object.values(devices).map((device) => html`<${Device} key=${device.id} ...${device} />`)}
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

// A figure that a driver does not give has no place.
function Device({ name, ...device }) {
  const figures = [
    ["Load", device.load, percent],
    ["Memory", device.memory_used_bytes, (used) => of(bytes(used), device.memory_total_bytes && bytes(device.memory_total_bytes))],
    ["Temperature", device.temperature_c, (degrees) => `${whole(degrees)} °C`],
    ["Power", device.power_w, (watts) => `${of(whole(watts), device.power_limit_w && whole(device.power_limit_w))} W`],
    ["Throttled by", device.throttled?.length ? device.throttled : null, (reasons) => reasons.join(", ")],
    ["Problem", device.problem, (problem) => problem],
  ].filter(([, value]) => value != null);
  return html`<div class="device" role="group" aria-label=${name}>
    <h2>${name}</h2>
    <dl class="facts">
      ${figures.map(([label, value, show]) => html`<div key=${label}><dt>${label}</dt><dd>${show(value)}</dd></div>`)}
    </dl>
  </div>`;
}

function of(used, limit) {
  return limit ? `${used} of ${limit}` : used;
}
