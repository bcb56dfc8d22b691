// Ready-made settings of client programs.

import { get } from "../api.js";
import { Component, html } from "../html.js";
import { Copy } from "../parts/copy.js";
import { Choice } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { asReached } from "../parts/origin.js";

export class Clients extends Component {
  state = { model: "" };

  load() {
    const { model } = this.state;
    return get(`/corral/v1/clients${model && `?model=${encodeURIComponent(model)}`}`);
  }

  reached(found) {
    return JSON.parse(asReached(JSON.stringify(found), this.props.live.server.url));
  }

  render(_props, { model }) {
    return html`
      <h1>Clients</h1>
      <p class="lead">Copy a program's settings, or let the command write them.</p>
      <${Loaded} version=${model} load=${() => this.load()} show=${(found) => this.show(found)} />`;
  }

  show(found) {
    const { clients, models, model, needs_key, key_variable, urls } = this.reached(found);
    return html`
      <div class="fields">
        <${Choice} label="Model" value=${model} options=${models.map((name) => [name, name])}
          onChange=${(value) => this.setState({ model: value })} />
      </div>
      <${Variables} urls=${urls} keyVariable=${needs_key ? key_variable : null} />
      ${clients.map((client) => html`<${Client} key=${client.name} ...${client} />`)}`;
  }
}

function Variables({ urls, keyVariable }) {
  const key = keyVariable ? `$${keyVariable}` : "none";
  const lines = [
    `export OPENAI_BASE_URL=${urls.openai}`,
    `export OPENAI_API_KEY=${key}`,
    `export ANTHROPIC_BASE_URL=${urls.anthropic}`,
    `export ANTHROPIC_AUTH_TOKEN=${key}`,
  ];
  return html`<section class="card client" aria-label="Variables">
    <${Settings} path="Any program that reads variables" content=${lines.join("\n")} />
  </section>`;
}

function Client({ title, files, notes, command, run }) {
  return html`<details class="card client">
    <summary><h2>${title}</h2></summary>
    <dl class="commands">
      <${Command} what="Write these settings" text=${command} />
      ${run && html`<${Command} what="Start it" text=${run} />`}
    </dl>
    ${files.map((file) => html`<${Settings} key=${file.path} ...${file} />`)}
    ${notes.map((note) => html`<p key=${note} class="quiet">${note}</p>`)}
  </details>`;
}

function Command({ what, text }) {
  return html`<div><dt>${what}</dt><dd class="command"><code>${text}</code><${Copy} text=${text} what=${what} /></dd></div>`;
}

function Settings({ path, content }) {
  return html`<figure class="settings">
    <figcaption><span>${path}</span><${Copy} text=${content} what=${path} /></figcaption>
    <pre tabindex="0" role="region" aria-label=${path}>${content}</pre>
  </figure>`;
}
