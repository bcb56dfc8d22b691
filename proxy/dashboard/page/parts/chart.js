// A chart over time; the pointer shows the value at a moment, in all charts of the page at once.

import uPlot from "../../vendor/uplot/uPlot.esm.js";

import { moment } from "../format.js";
import { Component, createRef, html } from "../html.js";

const HEIGHT = 112;
const FONT = "11px system-ui, sans-serif";

export class Chart extends Component {
  plotRef = createRef();
  state = { at: null }; // the index under the pointer

  componentDidMount() {
    this._plot = new uPlot(this.options(), this.plotted(), this.plotRef.current);
    this._observer = new ResizeObserver(() => this.resize());
    this._observer.observe(this.plotRef.current);
  }

  componentDidUpdate(before) {
    if (before.data[0].at(-1) !== this.props.data[0].at(-1) || before.span_s !== this.props.span_s) {
      this._plot.setData(this.plotted());
    } else if (this._drawnIn !== this.style().color) {
      this._plot.redraw();
    }
    this._drawnIn = this.style().color; // another one with another theme
  }

  componentWillUnmount() {
    this._observer.disconnect();
    this._plot.destroy();
  }

  resize() {
    this._plot.setSize({ width: this.plotRef.current.clientWidth, height: HEIGHT });
  }

  // The style sheet's colours, as they are now: `fill` is the line's, `color` that of its figures.
  style() {
    return getComputedStyle(this.plotRef.current);
  }

  plotted() {
    return this.props.data;
  }

  series() {
    return [{ stroke: () => this.style().fill, width: 1.5, points: { show: false }, spanGaps: true,
      fill: () => this.style().accentColor }];
  }

  options() {
    const axis = { stroke: () => this.style().color, ticks: { show: false }, font: FONT };
    return {
      width: this.plotRef.current.clientWidth || 200,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "page" },
        points: { size: 6, fill: () => this.style().fill, stroke: () => this.style().fill } },
      scales: {
        x: { range: (_plot, _low, high) => [high - this.props.span_s, high] },
        y: { range: (_plot, _low, high) => [0, Math.max(high * 1.15, this.props.least)] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 18, gap: 2, space: 64,
          values: (_plot, splits) => splits.map((at_s) => moment(at_s, this.props.span_s)) },
        { ...axis, grid: { stroke: () => this.style().stroke, width: 1 }, size: 40, gap: 4, space: 28 },
      ],
      series: [{}, ...this.series()],
      hooks: { setCursor: [(plot) => plot.cursor.idx !== this.state.at && this.setState({ at: plot.cursor.idx })] },
    };
  }

  render({ show, data: [, values] }, { at }) {
    return this.figure(show((at == null ? values.findLast((value) => value != null) : values[at]) ?? null));
  }

  figure(value, legend) {
    const { title, unit, data: [times], span_s } = this.props;
    const { at } = this.state;
    return html`<figure class="card chart">
      <figcaption>
        <span>${title}${at != null && times[at] != null && html` <span class="at">${moment(times[at], Math.min(span_s, 86_400))}</span>`}</span>
        <span class="now"><strong>${value}</strong> ${unit}</span>
      </figcaption>
      ${legend}
      <div class="plot" role="img" aria-label=${`${title}: ${value} ${unit}`} ref=${this.plotRef}></div>
    </figure>`;
  }
}

// Parts of a whole as areas above each other. `parts`: pairs of class and title, from the bottom; `data` has a
// column for each. Without a pointer, the figures are sums over all times.
export class StackedChart extends Chart {
  legendRef = createRef();

  plotted() {
    const [times, ...columns] = this.props.data;
    const sums = columns.map((_, part) => times.map((_, i) => columns.slice(0, part + 1).reduce((sum, values) => sum + values[i], 0)));
    return [times, ...sums.reverse()]; // the highest is drawn first, and the next ones over it
  }

  series() {
    const colour = (tone) => getComputedStyle(this.legendRef.current.querySelector(`.${tone} dt`), "::before").backgroundColor;
    return this.props.parts.map(([tone]) => ({ width: 0, points: { show: false }, fill: () => colour(tone) })).reverse();
  }

  render({ show, value, parts, data: [, ...columns] }, { at }) {
    const figures = columns.map((values) => (at == null ? values.reduce((sum, count) => sum + count, 0) : values[at]));
    return this.figure(value(figures), html`<dl class="facts legend" ref=${this.legendRef}>
      ${parts.map(([tone, title], i) => html`<div key=${tone} class=${tone}><dt>${title}</dt><dd>${show(figures[i])}</dd></div>`)}
    </dl>`);
  }
}
