// Keys that work on the whole page, unless a person is typing or has turned them off.

const KEY = "corral.shortcuts";

export function areOn() {
  return localStorage.getItem(KEY) !== "off";
}

export function setOn(isOn) {
  localStorage.setItem(KEY, isOn ? "on" : "off");
}

export function listen(actions) {
  document.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || !areOn() || isModified(event) || isTyping(event.target)) return;
    event.preventDefault();
    action();
  });
}

function isModified(event) {
  return event.ctrlKey || event.metaKey || event.altKey;
}

function isTyping(target) {
  return target.closest("input, textarea, select, dialog, [contenteditable]") !== null;
}
