// Figures by day or month as stacked columns; the pointer shows the figures of its column.

import { date, share } from "../format.js";
import { Component, html } from "../html.js";

const DATES_MAX = 5;

// Series, from the bottom: their names, colours as classes, and a value for each date.
export class Columns extends Component {
  state = { at: null };

  render({ title, dates, series, show }, { at }) {
    const sums = dates.map((_, i) => series.reduce((sum, { values }) => sum + values[i], 0));
    const highest = Math.max(...sums);
    const total = (values) => values.reduce((sum, value) => sum + value, 0);
    const figure = (values) => show(at == null ? total(values) : values[at]);
    const every = Math.ceil(dates.length / DATES_MAX);
    return html`<section class="card columns-chart" aria-label=${title}>
      <header>
        <h2>${title} <span class="quiet">${figure(sums)}${at != null && ` on ${date(dates[at])}`}</span></h2>
        <dl class="facts legend">
          ${series.map(({ name, tone, values }) => html`<div key=${name} class=${tone}><dt>${name}</dt><dd>${figure(values)}</dd></div>`)}
        </dl>
      </header>
      <div class="columns" role="img" aria-label=${`${title}: at most ${show(highest)}`} onPointerLeave=${() => this.setState({ at: null })}>
        <span class="highest">${show(highest)}</span>
        ${dates.map((day, i) => html`<div key=${day} class="column" onPointerEnter=${() => this.setState({ at: i })}>
          ${series.map(({ name, tone, values }) => html`<span key=${name} class=${tone} style=${{ height: `${100 * share(values[i], highest)}%` }}></span>`)}
        </div>`)}
      </div>
      <div class="column-dates" aria-hidden="true">
        ${dates.map((day, i) => html`<span key=${day}>${(dates.length - 1 - i) % every === 0 && date(day)}</span>`)}
      </div>
    </section>`;
  }
}
