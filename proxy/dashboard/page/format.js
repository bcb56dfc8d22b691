// Figures as text.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NONE = "–";
const TIME = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});
const MINUTE = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en", { weekday: "short", day: "numeric" });
const DATE = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const MONTH = new Intl.DateTimeFormat("en", { month: "short", year: "numeric" });
const WHOLE = new Intl.NumberFormat("en");

export function bytes(count) {
  if (count == null) return NONE;
  const power = count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
  const value = count / 1024 ** power;
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${BYTE_UNITS[power]}`;
}

export function whole(count) {
  return count == null ? NONE : WHOLE.format(Math.round(count));
}

export function rate(perSecond) {
  if (perSecond == null) return NONE;
  return perSecond >= 100 || perSecond === 0 ? whole(perSecond) : perSecond.toFixed(1);
}

export function percent(share) {
  return share == null ? NONE : `${Math.round(share * 100)} %`;
}

export function seconds(value) {
  if (value == null) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  return duration(value);
}

export function milliseconds(value) {
  return value == null ? NONE : seconds(value / 1000);
}

// Of two units, so that its width stays: 12 s, 3 min 12 s, 4 h 5 min, 2 d 3 h.
export function duration(value) {
  if (value == null) return NONE;
  const whole_s = Math.floor(value);
  if (whole_s < 60) return `${whole_s} s`;
  if (whole_s < 3600) return `${Math.floor(whole_s / 60)} min ${whole_s % 60} s`;
  if (whole_s < 86400) return `${Math.floor(whole_s / 3600)} h ${Math.floor(whole_s / 60) % 60} min`;
  return `${Math.floor(whole_s / 86400)} d ${Math.floor(whole_s / 3600) % 24} h`;
}

export function clock(time) {
  const date = new Date(time);
  return Number.isNaN(date.valueOf()) ? NONE : TIME.format(date);
}

// A moment in Unix time, as precise as an axis of that span needs it.
export function moment(at_s, span_s) {
  return (span_s > 86_400 ? DAY : MINUTE).format(at_s * 1000);
}

// A day or a month, as 2026-11-28 or 2026-11.
export function date(text) {
  return (text.length > 7 ? DATE : MONTH).format(new Date(`${text.padEnd(10, "-01")}T12:00`));
}

export function share(part, total) {
  return total ? Math.min(1, Math.max(0, part / total)) : 0;
}

// Enough of a request's id to tell it from others: the prefix is that of all.
export function shortId(id) {
  return id.replace(/^(req|chat)_/, "").slice(0, 8);
}

export function text(value) {
  return value == null || value === "" ? NONE : String(value);
}
