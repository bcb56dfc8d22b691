// Usage of API keys: a chart by day or month and key, and sums as a table. Work that no client
// requested is one row, which opens.

import { get } from "../api.js";
import { seconds, whole } from "../format.js";
import { Component, html } from "../html.js";
import { Columns } from "../parts/columns.js";
import { Choice, Segments } from "../parts/field.js";
import { Loaded } from "../parts/loaded.js";
import { Table } from "../parts/table.js";

const SPANS = [["7d", "7 days"], ["30d", "30 days"], ["all", "All months"]];
const DAYS = { "7d": 7, "30d": 30 };
const INTERNAL = "Internal work";
// Its kinds by key, each with its description; older versions had the last one alone.
const KINDS = {
  "(warming)": ["Warming", "Models loaded, engines warmed up, prompts prefilled"],
  "(ahead)": ["Ahead", "Next turns of conversations, computed before they came"],
  "(files)": ["Files", "Prompts computed for slot files"],
  "(checks)": ["Checks", "Health checks, calibration, and all else between requests"],
  "(warming, checks)": ["Warming, checks", "Recorded by an older version"],
};
const TITLES = { key: "Key", model: "Model", day: "Day", month: "Month" };
const DATES = new Set(["day", "month"]);
const KEYS_MAX = 5;
const RELOAD_MS = 60_000;

const COLUMNS = [
  { name: "requests", title: "Requests", show: whole },
  { name: "prompt_tokens", title: "Prompt computed", show: whole },
  { name: "cached_tokens", title: "Cached", show: whole },
  { name: "generated_tokens", title: "Generated", show: whole },
  { name: "slot_seconds", title: "Slot time", show: seconds, wide: true },
  { name: "cpu_seconds", title: "Processor time", show: seconds, wide: true },
];
const FIGURES = [{ name: "total_tokens", title: "Tokens", show: whole }, ...COLUMNS];

export class Usage extends Component {
  state = { by: "key,model", span: "30d", figure: "total_tokens", isOpen: false };

  async load(unit, span) {
    const since = DAYS[span] ? `&since=${DAYS[span] - 1}d` : "";
    const [byDate, byModel] = await Promise.all([`${unit},key`, "key,model"].map((by) => get(`/corral/v1/usage?by=${by}${since}`)));
    return { byDate: byDate.usage, byModel: byModel.usage };
  }

  render(_props, { by, span, figure }) {
    const unit = DAYS[span] ? "day" : "month";
    const groups = ["key,model", "key", "model", unit].map((names) => [names, title(names)]);
    return html`
      <h1>Usage</h1>
      <div class="fields">
        <${Choice} label="Figure" value=${figure} options=${FIGURES.map(({ name, title }) => [name, title])}
          onChange=${(value) => this.setState({ figure: value })} />
        <${Choice} label="By" value=${by} options=${groups} onChange=${(value) => this.setState({ by: value })} />
        <${Segments} label="Range" value=${span} options=${SPANS}
          onChange=${(value) => this.setState({ span: value, by: DATES.has(by) ? "key,model" : by })} />
      </div>
      <${Loaded} key=${span} version=${Math.floor(Date.now() / RELOAD_MS)} load=${() => this.load(unit, span)}
        show=${(usage) => this.usage(usage, unit)} />`;
  }

  usage({ byDate, byModel }, unit) {
    const { by, span, figure } = this.state;
    const names = by.split(",");
    const { name, title: figureTitle, show } = FIGURES.find((wanted) => wanted.name === figure);
    return html`
      ${byDate.length > 0 && html`<${Columns} title=${`${figureTitle} by ${unit} and key`} show=${show}
        ...${chart(byDate, unit, name, DAYS[span])} />`}
      <${Table} caption="Tokens and time" columns=${this.columns(names)} rows=${this.rows(by === unit ? byDate : byModel, names)}
        rowKey=${(row) => `${row.isNested && row.key} ${names.map((name) => row[name])}`} empty="No request has finished yet." />`;
  }

  rows(rows, names) {
    const own = rows.filter(isInternal);
    const opened = names.includes("key") ? names : ["key"];
    return [
      ...sum(rows.filter((row) => !isInternal(row)), names),
      ...sum(own, []).map((row) => ({ ...row, isFolded: true })),
      ...(this.state.isOpen ? sum(own, opened).map((row) => ({ ...row, isNested: true })) : []),
    ];
  }

  columns(names) {
    const cells = names.map((name, i) => ({
      title: TITLES[name],
      cell: (row) => (i === 0 ? this.first(row, row[name]) : row[name]),
    }));
    return [...cells, ...COLUMNS.map(({ name, show, ...column }) => ({ ...column, figure: true, cell: (row) => show(row[name]) }))];
  }

  first({ isFolded, isNested, key }, name) {
    if (isNested) return html`<span class="nested" title=${KINDS[key][1]}>${KINDS[key][0]}</span>`;
    return isFolded
      ? html`<button type="button" class="opens" title="Work that no client requested"
          aria-expanded=${String(this.state.isOpen)} onClick=${() => this.setState(({ isOpen }) => ({ isOpen: !isOpen }))}>${INTERNAL}</button>`
      : name;
  }
}

function title(names) {
  return names.split(",").map((name, i) => (i ? TITLES[name].toLowerCase() : TITLES[name])).join(" and ");
}

function isInternal({ key }) {
  return key in KINDS;
}

// Sums of rows with equal names, in the order of these; dates latest first.
function sum(rows, names) {
  const sums = new Map();
  for (const row of rows) {
    const id = JSON.stringify(names.map((name) => row[name]));
    const found = sums.get(id) ?? Object.fromEntries([...names.map((name) => [name, row[name]]), ...FIGURES.map(({ name }) => [name, 0])]);
    for (const { name } of FIGURES) found[name] += row[name];
    sums.set(id, found);
  }
  const ordered = [...sums].sort(([first], [second]) => (first < second ? -1 : 1)).map(([, found]) => found);
  return DATES.has(names[0]) ? ordered.reverse() : ordered;
}

// The series of the keys that used most, of the other keys together, and of internal work.
function chart(rows, unit, figure, days) {
  const dates = datesUntil(rows, unit, days);
  const values = (own) => dates.map((day) => own.reduce((total, row) => total + (row[unit] === day ? row[figure] : 0), 0));
  const clients = rows.filter((row) => !isInternal(row));
  const keys = sum(clients, ["key"]).sort((first, second) => second[figure] - first[figure]).map(({ key }) => key);
  const rest = new Set(keys.slice(KEYS_MAX));
  return {
    dates,
    series: [
      ...keys.slice(0, KEYS_MAX).map((key, i) => ({ name: key, tone: `key-${i + 1}`, values: values(rows.filter((row) => row.key === key)) })),
      { name: `${rest.size} other keys`, tone: "key-rest", values: values(rows.filter((row) => rest.has(row.key))) },
      { name: INTERNAL, tone: "internal", values: values(rows.filter(isInternal)) },
    ].filter(({ tone }) => tone !== "key-rest" || rest.size > 0),
  };
}

// The days until today, or the months since the first; the daemon's day may be ahead of the browser's.
function datesUntil(rows, unit, days) {
  const now = new Date();
  const latest = rows.reduce((day, row) => (row[unit] > day ? row[unit] : day), iso(now));
  const earliest = rows.reduce((day, row) => (row[unit] < day ? row[unit] : day), latest);
  const found = [];
  for (let i = 0; days ? found.length < days : (found[0] ?? "9") > earliest; i += 1) {
    const day = new Date(`${latest.slice(0, 7)}-${days ? latest.slice(8) : "01"}T12:00`);
    if (days) day.setDate(day.getDate() - i);
    else day.setMonth(day.getMonth() - i);
    found.unshift(iso(day).slice(0, days ? 10 : 7));
  }
  return found;
}

function iso(date) {
  return [date.getFullYear(), date.getMonth() + 1, date.getDate()].map((part) => String(part).padStart(2, "0")).join("-");
}
