// Light, dark, or as the system has it.

const KEY = "corral.theme";
const NEXT = { system: "light", light: "dark", dark: "system" };

export function current() {
  const kept = localStorage.getItem(KEY);
  return kept in NEXT ? kept : "system";
}

export function apply(theme) {
  document.documentElement.dataset.theme = theme;
}

export function toggle() {
  const theme = NEXT[current()];
  localStorage.setItem(KEY, theme);
  apply(theme);
  return theme;
}

export function onSystemChange(listener) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
