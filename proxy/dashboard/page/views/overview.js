// The server, its models, instances and slots.

import { html } from "../html.js";
import { Addresses } from "../parts/addresses.js";
import { Charts } from "../parts/charts.js";
import { Instances } from "../parts/instances.js";
import { Models } from "../parts/models.js";
import { Nodes } from "../parts/nodes.js";

export function Overview({ live, store, actions }) {
  return html`
    <h1>Overview</h1>
    <${Addresses} server=${live.server} build=${build(live)} uptime_s=${store.clock.now_s()} />
    <${Charts} rates=${store.rates} />
    <${Models} models=${live.models} clock=${store.clock} actions=${actions} />
    <${Instances} models=${live.models} instances=${live.instances}
      requests=${live.requests} clock=${store.clock} />
    <${Nodes} nodes=${live.nodes} />`;
}

function build({ instances }) {
  return [...new Set(Object.values(instances).map((instance) => instance.engine).filter(Boolean))].join(", ");
}
