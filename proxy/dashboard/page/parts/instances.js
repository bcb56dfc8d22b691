// Each instance with a row of its slots: what they compute, and how full their context is.

import { bytes, duration, percent, rate, share, text, whole } from "../format.js";
import { html } from "../html.js";
import { Meter, Progress } from "./bar.js";
import { byName } from "./order.js";
import { State } from "./state.js";

export function Instances({ models, instances, requests, clock }) {
  const rows = byName(instances);
  return html`<section class="instances" aria-labelledby="instances-title">
    <h2 id="instances-title">Instances and slots</h2>
    ${rows.length === 0 && html`<p class="empty">No instance runs: no model is loaded.</p>`}
    ${rows.map((instance) => html`<${Instance} key=${instance.name} instance=${instance} clock=${clock}
      requests=${requests} context=${models[instance.model]?.context} />`)}
  </section>`;
}

function Instance({ instance, context, requests, clock }) {
  const { name, error } = instance;
  return html`<article class="card instance" aria-label=${`Instance ${name}`}>
    <header>
      <h3><a href=${`#logs/${encodeURIComponent(name)}`}>${name}</a></h3><span><${State} name=${instance.state} />
        ${instance.since_at_s != null && html`<span class="quiet"> for ${duration(clock.since(instance.since_at_s))}</span>`}</span>
      ${instance.load_progress < 1 && html`<${Progress} value=${instance.load_progress} label=${`${name}: loaded`} />`}
      <${Facts} instance=${instance} />
    </header>
    ${error && html`<p class="cause">${error.message}</p>`}
    ${error?.hint && html`<p class="quiet">${error.hint}</p>`}
    ${instance.warnings?.map((warning) => html`<p key=${warning} class="warning">${warning}</p>`)}
    <ul class="slots">
      ${byName(instance.slots ?? {}).map((slot) => html`<${Slot} key=${slot.name} slot=${slot} context=${context}
        request=${requests[slot.request]} />`)}
    </ul>
  </article>`;
}

function Facts({ instance }) {
  return html`<dl class="facts">
    ${instance.node && html`<div><dt>Node</dt><dd>${instance.node}</dd></div>`}
    ${instance.prefill_tokens_per_second > 0
      && html`<div><dt>Prefill</dt><dd>${rate(instance.prefill_tokens_per_second)} tokens/s</dd></div>`}
    ${instance.decode_tokens_per_second > 0
      && html`<div><dt>Decode</dt><dd>${rate(instance.decode_tokens_per_second)} tokens/s</dd></div>`}
    <div><dt>Memory</dt><dd>${bytes(instance.rss_bytes)}</dd></div>
    <div><dt>Restarts</dt><dd>${whole(instance.restarts)}</dd></div>
    <div class="wide"><dt>PID</dt><dd>${text(instance.pid)}</dd></div>
  </dl>`;
}

function Slot({ slot, context, request }) {
  const tokens = (slot.prompt_done ?? 0) + (slot.decoded ?? 0);
  const full = share(tokens, context);
  return html`<li class="slot ${slot.phase}">
    <div class="what">
      <span class="number">${slot.name}</span><${State} name=${slot.phase} />
      <span class="figure">${figure(slot, request)}</span>
    </div>
    ${slot.phase === "prefill" && html`<${Progress} value=${share(slot.prompt_done, slot.prompt_total)}
      label=${`Slot ${slot.name}: prefill`} />`}
    ${slot.phase !== "idle" && html`<${Meter} value=${full} tone=${full > 0.9 ? "high" : ""}
      label=${`Slot ${slot.name}: ${percent(full)} of the context`} />`}
    ${slot.phase !== "idle" && slot.phase !== "prefill"
      && html`<span class="full">${whole(tokens)} of ${whole(context)}</span>`}
  </li>`;
}

function figure(slot, request) {
  if (slot.phase === "prefill") return percent(share(slot.prompt_done, slot.prompt_total));
  if (slot.phase === "decode") return `${rate(request?.tokens_per_second)}/s`;
  return "";
}
