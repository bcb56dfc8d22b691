// The models: state, slots, memory, queue, and the actions for each.

import { MODEL_ACTIONS } from "../actions.js";
import { bytes, duration, percent, rate, seconds, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Progress } from "./bar.js";
import { byName } from "./order.js";
import { Slots } from "./slots.js";
import { State } from "./state.js";
import { WarmDialog } from "./warm_dialog.js";

const IDLE = new Set(["stopped", "failed"]); // the model's state says as much

export class Models extends Component {
  state = { warms: null };

  act(verb, name) {
    if (verb === "warm") this.setState({ warms: name });
    else this.props.actions.model(verb, name);
  }

  buttons({ name, actions, state }) {
    // The status has the button that loads a failed model again.
    const verbs = state === "failed" ? [] : actions.filter((action) => action in MODEL_ACTIONS);
    return html`<div class="buttons">${verbs.map((verb) => html`<button key=${verb} type="button"
      class="small" aria-label=${`${MODEL_ACTIONS[verb].label} ${name}`}
      disabled=${this.props.actions.busy.has(`${verb} ${name}`)}
      onClick=${() => this.act(verb, name)}>${MODEL_ACTIONS[verb].label}</button>`)}</div>`;
  }

  model(model) {
    const { instances, requests, clock } = this.props;
    const own = byName(instances).filter(({ model: name, state }) => name === model.name && !IDLE.has(state));
    return html`<article key=${model.name} class="model" aria-label=${model.name}>
      <div class="name">
        <h3><a href=${`#chat/${encodeURIComponent(model.name)}`}>${model.name}</a></h3>
        <${State} name=${model.state} />
        ${model.load_progress < 1 && html` <${Progress} value=${model.load_progress}
          label=${`${model.name}: ${percent(model.load_progress)} loaded`} />`}
      </div>
      <${Facts} model=${model} clock=${clock} />
      <div class="replicas">${own.map((instance) => html`<${Replica} key=${instance.name} instance=${instance}
        context=${model.context} requests=${requests} clock=${clock} />`)}</div>
      ${this.buttons(model)}
    </article>`;
  }

  render({ models, actions }, { warms }) {
    const rows = byName(models);
    return html`<section class="card models" aria-labelledby="models-title">
      <h2 id="models-title">Models</h2>
      ${rows.map((row) => this.model(row))}
      ${rows.length === 0 && html`<p class="empty">No model is configured. <a href="#models">Models</a> shows those on this machine; <code>corral model get smollm2</code> fetches one.</p>`}
      ${warms && html`<${WarmDialog} model=${warms} onClose=${() => this.setState({ warms: null })}
        onWarm=${(prompt) => actions.warm(warms, prompt)} />`}
    </section>`;
  }
}

function Facts({ model, clock }) {
  const { queue, waiting, memory_bytes, context, unload_at_s } = model;
  const unload_in_s = unload_at_s == null ? null : unload_at_s - clock.now_s();
  return html`<p class="quiet facts">
    ${memory_bytes != null && html`<span>${bytes(memory_bytes)}</span>`}
    ${context != null && html`<span>context ${whole(context)}</span>`}
    ${queue.length > 0 && html`<strong class="warn">${queue.length} queued, ${seconds(clock.since(queue.oldest_at_s))}</strong>`}
    ${waiting && html`<strong class="warn">waits to be loaded, place ${waiting.place}</strong>`}
    ${unload_in_s > 0 && html`<span>unloads in ${duration(unload_in_s)}</span>`}
  </p>`;
}

function Replica({ instance, context, requests, clock }) {
  const { name, state, restarts, node, since_at_s, decode_tokens_per_second: speed } = instance;
  return html`<div class="replica">
    <${Slots} instance=${instance} context=${context} requests=${requests} />
    <p class="quiet facts">
      <a href=${`#logs/${encodeURIComponent(name)}`} title=${instance.pid ? `PID ${instance.pid}` : undefined}>${name}</a>
      ${state !== "ready" && html`<${State} name=${state} />`}
      ${state === "ready" && since_at_s != null && html`<span>up ${duration(clock.since(since_at_s))}</span>`}
      ${node && html`<span>on ${node}</span>`}
      ${speed > 0 && html`<span>${rate(speed)} tokens/s a slot</span>`}
      ${restarts > 0 && html`<strong class="warn">${restarts === 1 ? "1 restart" : `${restarts} restarts`}</strong>`}
    </p>
  </div>`;
}
