// Whether all is well, memory, models with their slots, and the recent past.

import { html } from "../html.js";
import { Charts } from "../parts/charts.js";
import { Memory } from "../parts/memory.js";
import { Models } from "../parts/models.js";
import { Nodes } from "../parts/nodes.js";
import { Status } from "../parts/status.js";

export function Overview({ live, store, actions }) {
  return html`
    <h1 class="unseen">Overview</h1>
    <${Status} live=${live} clock=${store.clock} actions=${actions} />
    <${Memory} memory=${live.memory} devices=${live.devices} />
    <${Models} models=${live.models} instances=${live.instances} requests=${live.requests}
      clock=${store.clock} actions=${actions} />
    <${Charts} rates=${store.rates} clock=${store.clock} />
    <${Nodes} nodes=${live.nodes} />`;
}
