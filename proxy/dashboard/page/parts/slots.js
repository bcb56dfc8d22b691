// The slots of an instance as small tiles: the phase of each, and how full its context is.

import { percent, rate, share, whole } from "../format.js";
import { html } from "../html.js";
import { byName } from "./order.js";
import { State } from "./state.js";

export function Slots({ instance, context, requests }) {
  return html`<ul class="slots" aria-label=${`Slots of ${instance.name}`}>
    ${byName(instance.slots ?? {}).map((slot) => html`<${Slot} key=${slot.name} slot=${slot} context=${context}
      request=${requests[slot.request]} />`)}
  </ul>`;
}

function Slot({ slot, context, request }) {
  const { name, phase, client } = slot;
  const tokens = (slot.prompt_done ?? 0) + (slot.decoded ?? 0);
  const full = share(tokens, context);
  const about = `Slot ${name}: ${whole(tokens)} of ${whole(context)} tokens${client ? `, for ${client}` : ""}`;
  return html`<li class="slot ${phase}" title=${phase === "idle" ? `Slot ${name}` : about}>
    <${State} name=${phase} /> <span class="figure">${figure(slot, request)}</span>
    ${phase !== "idle" && html`<span class="fill ${full > 0.9 ? "high" : ""}" role="img"
      aria-label=${`${percent(full)} of the context`}><span style=${{ width: percent(full).replace(" ", "") }}></span></span>`}
  </li>`;
}

function figure(slot, request) {
  if (slot.phase === "prefill") return percent(share(slot.prompt_done, slot.prompt_total));
  if (slot.phase === "decode") return `${rate(request?.tokens_per_second)}/s`;
  return "";
}
