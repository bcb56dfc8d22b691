// Charts of the recent past: live for 15 minutes, from the history for longer.

import { get } from "../api.js";
import { rate, seconds, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Chart } from "./chart.js";
import { Segments } from "./field.js";
import { Loaded } from "./loaded.js";

export const SPANS = [["15m", "15 min"], ["6h", "6 h"], ["7d", "7 days"]];
export const SPANS_S = { "15m": 900, "6h": 21_600, "7d": 604_800 };
const RELOAD_MS = 60_000;

const FIGURES = [
  { name: "tokens_per_second", title: "Generation", unit: "tokens/s", least: 10, show: rate },
  { name: "prompt_tokens_per_second", title: "Prompts", unit: "tokens/s", least: 10, show: rate },
  { name: "queued", title: "Queue", unit: "requests", least: 4, show: (value) => value % 1 ? rate(value) : whole(value) },
  { name: "first_token_s", title: "First token", unit: "", least: 0.5, show: seconds },
];

// The middle of each interval, oldest first, in Unix time.
export function timesUntil(until, interval_s, count) {
  return Array.from({ length: count }, (_, i) => until - (count - 0.5 - i) * interval_s);
}

export class Charts extends Component {
  state = { span: "15m" };

  charts(times, columns, span) {
    return html`<div class="charts">
      ${FIGURES.map(({ name, ...figure }) => html`<${Chart} key=${name} ...${figure} span_s=${SPANS_S[span]}
        data=${[times, columns[name] ?? times.map(() => null)]} />`)}
    </div>`;
  }

  past(span) {
    return html`<${Loaded} key=${span} version=${Math.floor(Date.now() / RELOAD_MS)}
      load=${() => get(`/corral/v1/rates?span=${span}`)}
      show=${({ until, interval_s, ...columns }) => {
        const count = columns.queued?.length ?? 0;
        return count ? this.charts(timesUntil(until, interval_s, count), columns, span) : html`<p class="empty">No history is kept: set enabled = true in [history].</p>`;
      }} />`;
  }

  render({ rates, clock }, { span }) {
    return html`<section aria-labelledby="activity-title" class="activity">
      <header><h2 id="activity-title">Activity</h2>
        <${Segments} label="Range" value=${span} options=${SPANS} onChange=${(value) => this.setState({ span: value })} /></header>
      ${span === "15m" ? this.charts(rates.times.map((at_s) => at_s + clock.epoch_s), rates.columns, span) : this.past(span)}
    </section>`;
  }
}
