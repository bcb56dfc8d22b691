// Asks for the prompt that a model shall have in its cache.

import { html } from "../html.js";
import { Dialog } from "./dialog.js";

export function WarmDialog({ model, onWarm, onClose }) {
  const warm = (event) => {
    event.preventDefault();
    onWarm(new FormData(event.target).get("prompt"));
    onClose();
  };
  return html`<${Dialog} title=${`Warm ${model}`} onClose=${onClose}>
    <form class="stack" onSubmit=${warm}>
      <label for="prompt">System prompt, computed now so that requests which begin with it answer sooner</label>
      <textarea id="prompt" name="prompt" rows="6" required></textarea>
      <div><button type="submit" class="primary">Warm</button></div>
    </form>
  <//>`;
}
