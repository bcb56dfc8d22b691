// The daemon, and the addresses that clients need.

import { duration, text } from "../format.js";
import { html } from "../html.js";
import { Copy } from "./copy.js";

export function Addresses({ server, build, uptime_s }) {
  return html`<section class="card server" aria-label="Server">
    <dl class="facts">
      <div><dt>Up</dt><dd>${duration(uptime_s)}</dd></div>
      <div><dt>Engine</dt><dd>${text(build)}</dd></div>
      <div><dt>API keys</dt><dd>${server.has_keys ? "required" : "not required"}</dd></div>
    </dl>
    <dl class="addresses">
      <${Address} name="OPENAI_BASE_URL" url=${`${location.origin}/v1`} />
      <${Address} name="ANTHROPIC_BASE_URL" url=${location.origin} />
    </dl>
  </section>`;
}

function Address({ name, url }) {
  return html`<div>
    <dt>${name}</dt>
    <dd><code>${url}</code><${Copy} text=${url} what=${name} /></dd>
  </div>`;
}
