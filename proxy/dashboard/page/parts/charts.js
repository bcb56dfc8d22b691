// Charts of the last five minutes.

import { rate, seconds, whole } from "../format.js";
import { html } from "../html.js";
import { Chart } from "./chart.js";

const CHARTS = [
  { name: "tokens_per_second", title: "Generation", unit: "tokens/s", least: 10, now: (rates, name) => rate(rates.last(name)) },
  { name: "prompt_tokens_per_second", title: "Prompts", unit: "tokens/s", least: 10, now: (rates, name) => rate(rates.last(name)) },
  { name: "queued", title: "Queue", unit: "requests", least: 4, now: (rates, name) => whole(rates.last(name)) },
  { name: "first_token_s", title: "First token", unit: "", least: 0.5, now: (rates, name) => seconds(rates.latest(name)) },
];

export function Charts({ rates }) {
  return html`<section class="charts" aria-label="Rates of the last five minutes">
    ${CHARTS.map(({ name, title, unit, least, now }) => html`<${Chart} key=${name} title=${title}
      unit=${unit} least=${least} value=${now(rates, name)} data=${[rates.times, rates.columns[name]]} />`)}
  </section>`;
}
