// Whether all is well, each problem with its fix, and the addresses that clients need.

import { duration, text, whole } from "../format.js";
import { health } from "../health.js";
import { html } from "../html.js";
import { Copy } from "./copy.js";
import { Shape } from "./icon.js";

export const SHAPES = { good: "full", busy: "dots", warn: "triangle", bad: "cross" };

export function Status({ live, clock, actions }) {
  const { tone, sentence, problems } = health(live);
  return html`<section class="card status" aria-label="Status">
    <div class="line">
      <h2 class="state ${tone}"><${Shape} name=${SHAPES[tone]} />${sentence}</h2>
      <${Load} live=${live} />
      <dl class="facts about">
        <div><dt>Up</dt><dd>${duration(clock.now_s())}</dd></div>
        <div><dt>Engine</dt><dd>${text(builds(live.instances))}</dd></div>
        <div><dt>API keys</dt><dd>${live.server.has_keys ? "required" : "not required"}</dd></div>
      </dl>
    </div>
    ${problems.length > 0 && html`<ul class="problems">
      ${problems.map((problem) => html`<${Problem} key=${`${problem.subject} ${problem.message}`} ...${problem}
        clock=${clock} actions=${actions} />`)}
    </ul>`}
    <dl class="addresses">
      <${Address} name="OPENAI_BASE_URL" url=${`${location.origin}/v1`} />
      <${Address} name="ANTHROPIC_BASE_URL" url=${location.origin} />
    </dl>
  </section>`;
}

function Load({ live: { models, instances } }) {
  const all = Object.values(models);
  const slots = Object.values(instances).flatMap((instance) => Object.values(instance.slots ?? {}));
  const queued = all.reduce((sum, model) => sum + model.queue.length, 0);
  return html`<p class="quiet">
    ${all.filter((model) => model.state === "loaded").length} of ${all.length} models loaded ·${" "}
    ${slots.filter((slot) => slot.phase !== "idle").length} of ${slots.length} slots busy · ${whole(queued)} queued</p>`;
}

function Problem({ tone, subject, message, hint, model, log, again_at_s, clock, actions }) {
  const wait_s = again_at_s == null ? null : Math.ceil(again_at_s - clock.now_s());
  return html`<li>
    <p><strong class=${tone}>${subject}</strong> <span>${message}</span>
      ${hint && html` <span class="quiet">· ${hint}</span>`}
      ${wait_s > 0 && html` <span class="quiet">· next try in ${duration(wait_s)}</span>`}</p>
    <div class="buttons">
      ${log && html`<a class="button small" href=${`#logs/${encodeURIComponent(log)}`}>Log<span class="unseen"> of ${log}</span></a>`}
      ${model && html`<button type="button" class="small" aria-label=${`Load ${model} again`}
        disabled=${actions.busy.has(`load ${model}`)} onClick=${() => actions.model("load", model)}>Try again</button>`}
    </div>
  </li>`;
}

function builds(instances) {
  return [...new Set(Object.values(instances).map((instance) => instance.engine).filter(Boolean))].join(", ");
}

function Address({ name, url }) {
  return html`<div><dt>${name}</dt><dd><code>${url}</code><${Copy} text=${url} what=${name} /></dd></div>`;
}
