// Samples of the last 15 minutes, one a second, as columns for charts.

const KEPT = 900;
const NAMES = ["tokens_per_second", "prompt_tokens_per_second", "queued", "first_token_s"];

export class Rates {
  constructor(history) {
    const count = history.tokens_per_second.length;
    this.times = history.tokens_per_second.map((_, i) => history.at_s - (count - 1 - i) * history.interval_s);
    this.columns = Object.fromEntries(NAMES.map((name) => [name, [...history[name]]]));
  }

  take(sample) {
    if (!sample || sample.at_s === this.times.at(-1)) return;
    append(this.times, sample.at_s);
    for (const name of NAMES) append(this.columns[name], sample[name] ?? null);
  }
}

function append(column, value) {
  column.push(value);
  if (column.length > KEPT) column.shift();
}
