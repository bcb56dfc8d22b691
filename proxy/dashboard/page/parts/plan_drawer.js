// Plans and starts one model with chosen options, and compares its profiles: the plan follows the options.

import { post } from "../api.js";
import { whole } from "../format.js";
import { Component, html } from "../html.js";
import { Bench } from "./bench.js";
import { Copy } from "./copy.js";
import { Drawer } from "./drawer.js";
import { Check, Choice, profileOptions } from "./field.js";
import { Loaded } from "./loaded.js";
import { Fit, State } from "./state.js";

const TYPING_MS = 250;
const RUNNING = new Set(["loaded", "loading"]);

export class PlanDrawer extends Component {
  state = { profile: "", ctx_size: "", slots: "", save: false };

  options() {
    const { profile, ctx_size, slots } = this.state;
    return {
      ...(profile && { profile }), ...(ctx_size && { ctx_size: Number(ctx_size) }), ...(slots && { slots: Number(slots) }),
    };
  }

  start(event) {
    event.preventDefault();
    const { model, actions } = this.props;
    actions.model("start", model.id, { ...this.options(), save: this.state.save });
  }

  number(label, name) {
    return html`<label class="field"><span>${label}</span>
      <input type="number" min="1" step="1" placeholder="as planned" value=${this.state[name]}
        onInput=${(event) => this.setState({ [name]: event.target.value })} /></label>`;
  }

  render({ model: { id, name, profile, fits, fit }, state, profiles, actions }) {
    const options = this.options();
    const restarts = RUNNING.has(state);
    const { save } = this.state;
    const isUnchanged = restarts && Object.keys(options).length === 0;
    const path = `/corral/v1/models/${encodeURIComponent(id)}/plan`;
    const own = [["", profile ? `${profile} (its own)` : "its own"], ...profileOptions(profiles.filter((other) => other !== profile))];
    return html`<${Drawer} title=${name} onClose=${() => { location.hash = "models"; }}>
      ${fits == null ? html`<${Fit} fits=${fits} reason=${fit} />` : html`
        <form class="fields plan-options" onSubmit=${(event) => this.start(event)}>
          <${Choice} label="Profile" value=${this.state.profile} options=${own}
            onChange=${(value) => this.setState({ profile: value })} />
          ${this.number("Context in all, tokens", "ctx_size")}
          ${this.number("Slots", "slots")}
          <button type="submit" class="primary" disabled=${(isUnchanged && !save) || actions.busy.has(`start ${id}`)}>
            ${isUnchanged && save ? "Save" : restarts ? "Restart with these" : "Start"}</button>
          ${state && html`<${State} name=${state} />`}
          <${Check} label="Save in corral.toml" value=${save} onChange=${(value) => this.setState({ save: value })} />
          ${!save && html`<p class="quiet">Options hold until the daemon stops.</p>`}
        </form>
        <${Loaded} version=${JSON.stringify(options)} wait_ms=${TYPING_MS} load=${() => post(path, options)} show=${(plan) => html`<${Plan} plan=${plan} />`} />
        <${Bench} model=${id} profile=${profile} profiles=${profiles} actions=${actions} />`}
    <//>`;
  }
}

function Plan({ plan: { command, slots, ctx_size, lines, omitted, warnings, fits, fit } }) {
  return html`
    <p><${Fit} fits=${fits} reason=${fit} /></p>
    <p>${whole(slots)} slots, ${whole(ctx_size)} tokens of context in all</p>
    ${warnings.map((warning) => html`<p key=${warning} class="warn-text">${warning}</p>`)}
    <${Flags} title="Flags" lines=${lines} />
    ${omitted.length > 0 && html`<${Flags} title="Left out" lines=${omitted} />`}
    <figure class="settings">
      <figcaption><span>Command</span><${Copy} text=${command} what="Command" /></figcaption>
      <pre tabindex="0" role="region" aria-label="Command">${command}</pre>
    </figure>`;
}

function Flags({ title, lines }) {
  return html`<section class="stack" aria-label=${title}>
    <h3>${title}</h3>
    <dl class="flags">${lines.map(({ flag, value, origin, reason }) => html`<div key=${`${flag} ${value}`}>
      <dt><code>${flag}${value != null && ` ${value}`}</code></dt>
      <dd>${origin}${reason && `: ${reason}`}</dd>
    </div>`)}</dl>
  </section>`;
}
