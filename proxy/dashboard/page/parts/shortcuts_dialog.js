// The keys and their effects.

import { html } from "../html.js";
import { areOn, setOn } from "../shortcuts.js";
import { Dialog } from "./dialog.js";

const OTHERS = [
  ["/", "Filter of the view"],
  ["t", "Light, dark, or as the system"],
  ["?", "This list"],
  ["Esc", "Close a dialog"],
];

export function ShortcutsDialog({ views, onClose }) {
  const keys = [...views.map((view) => [view.key, view.title]), ...OTHERS];
  return html`<${Dialog} title="Shortcuts" onClose=${onClose}>
    <dl class="keys">
      ${keys.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}
    </dl>
    <label class="check">
      <input type="checkbox" defaultChecked=${areOn()} onChange=${(event) => setOn(event.target.checked)} />
      Keys of one character work
    </label>
  <//>`;
}
