// A small chart of the last five minutes.

import uPlot from "../../vendor/uplot/uPlot.esm.js";

import { Component, createRef, html } from "../html.js";

const HEIGHT = 84;
const WINDOW_S = 300;

export class Chart extends Component {
  plotRef = createRef();

  componentDidMount() {
    this._plot = new uPlot(this.options(), this.props.data, this.plotRef.current);
    this._observer = new ResizeObserver(() => this.resize());
    this._observer.observe(this.plotRef.current);
  }

  componentDidUpdate() {
    this._plot.setData(this.props.data);
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

  options() {
    const figures = () => this.style().color;
    const grid = { stroke: () => this.style().stroke, width: 1 };
    return {
      width: this.plotRef.current.clientWidth || 200,
      height: HEIGHT,
      padding: [6, 4, 8, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: (_plot, _low, high) => [high - WINDOW_S, high] },
        y: { range: (_plot, _low, high) => [0, Math.max(high * 1.15, this.props.least)] } },
      axes: [
        { show: false },
        { stroke: figures, grid, ticks: { show: false }, size: 34, gap: 2, space: 24,
          font: "11px system-ui, sans-serif" },
      ],
      series: [{}, { stroke: () => this.style().fill, width: 1.5, points: { show: false }, spanGaps: true }],
    };
  }

  render({ title, value, unit }) {
    return html`<figure class="chart">
      <figcaption>
        <span>${title}</span>
        <span class="now"><strong>${value}</strong> ${unit}</span>
      </figcaption>
      <div class="plot" role="img" aria-label=${`${title}, the last five minutes; now ${value} ${unit}`}
        ref=${this.plotRef}></div>
    </figure>`;
  }
}
