// Compares two profiles of a model by `corral bench`: progress, cancel, figures, report.

import { get, post } from "../api.js";
import { percent } from "../format.js";
import { html } from "../html.js";
import { Progress } from "./bar.js";
import { Check, Choice, profileOptions } from "./field.js";
import { Polling } from "./polling.js";

const PATH = "/corral/v1/bench";
const POLL_MS = 1000;
const TONES = { better: "good-text", worse: "bad-text", same: "" };
const WORKLOADS = [["", "all that suit the model"], ...["chat", "long-prompt", "generation", "concurrent", "batch", "embedding"].map((name) => [name, name])];
const PLAIN = ["plain", "llama-server's own defaults"];

export class Bench extends Polling {
  path = PATH;
  pause_ms = POLL_MS;
  state = { job: null, first: "plain", second: this.props.profile, workload: "", minutes: "5", force: false };

  take({ job }) {
    if (this._isGone) return;
    this.setState({ job });
    if (job?.state === "running") this.wait();
  }

  begin(event) {
    event.preventDefault();
    const { first, second, workload, minutes, force } = this.state;
    const body = { model: this.props.model, profiles: [first, second], workload, minutes: Number(minutes), force };
    this.props.actions.run("bench", async () => this.take(await post(PATH, body)), `${first} and ${second} are being measured`);
  }

  cancel() {
    this.props.actions.run("cancel bench", async () => this.take(await post(`${PATH}/cancel`)), "The measuring is being cancelled");
  }

  async save() {
    const { html: report } = await get(`${PATH}/report`);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([report], { type: "text/html" }));
    link.download = "corral-bench.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), POLL_MS);
  }

  choice(label, name, options) {
    return html`<${Choice} label=${label} value=${this.state[name]} options=${options} onChange=${(value) => this.setState({ [name]: value })} />`;
  }

  form({ profiles, actions }, { first, second, minutes, force }) {
    const options = [PLAIN, ...profileOptions(profiles)];
    return html`<form class="fields plan-options" onSubmit=${(event) => this.begin(event)}>
      ${this.choice("Compare", "first", options)}
      ${this.choice("with", "second", options)}
      ${this.choice("Workload", "workload", WORKLOADS)}
      <label class="field"><span>Minutes</span><input type="number" min="0.1" max="240" step="any" required value=${minutes}
        onInput=${(event) => this.setState({ minutes: event.target.value })} /></label>
      <${Check} label="Although the machine is not free" value=${force} onChange=${(value) => this.setState({ force: value })} />
      <button type="submit" disabled=${first === second || actions.busy.has("bench")}>Measure</button>
      <p class="quiet">It starts separate engines, which share the machine with those that serve.</p>
    </form>`;
  }

  render({ model, actions }, { job }) {
    const isRunning = job?.state === "running";
    return html`<section class="stack" aria-label="Comparison of profiles">
      <h3>Compare profiles</h3>
      ${isRunning ? html`<p><${Progress} value=${job.share} label=${`${percent(job.share)} measured`} />
        <span class="quiet reason"> ${job.model}: ${job.profiles.join(" and ")}. ${job.detail}</span></p>
        <div class="fields"><button type="button" class="small" disabled=${actions.busy.has("cancel bench")} onClick=${() => this.cancel()}>Cancel the measuring</button></div>`
        : this.form(this.props, this.state)}
      ${job && !isRunning && job.model === model && html`<${Outcome} job=${job} onSave=${() => actions.run("save report", () => this.save(), "The report is saved")} />`}
    </section>`;
  }
}

function Outcome({ job: { state, error, rows, notes }, onSave }) {
  const figures = Map.groupBy(rows, ({ workload, figure }) => `${workload ?? "whole round"}: ${figure}`);
  return html`
    ${state !== "done" && html`<p class=${state === "failed" ? "bad-text" : ""}>${state}${error && `: ${error}`}</p>`}
    <dl class="flags">${[...figures].map(([title, variants]) => html`<div key=${title}>
      <dt>${title}</dt>
      ${variants.map(({ variant, values, verdict, ...row }) => html`<dd key=${variant}><strong>${variant}</strong> ${values}
        ${verdict && html` <span class=${TONES[row.class]}>${verdict}</span>`}</dd>`)}
    </div>`)}</dl>
    ${notes.map((note) => html`<p key=${note} class="quiet reason">${note}</p>`)}
    ${state === "done" && html`<div class="fields"><button type="button" class="small" onClick=${onSave}>Save the report</button></div>`}`;
}
