// Details beside a list, which stays in use; Escape closes it.

import { Component, createRef, html } from "../html.js";

export class Drawer extends Component {
  drawerRef = createRef();

  componentDidMount() {
    this.drawerRef.current.focus({ preventScroll: true });
  }

  render({ title, children, onClose }) {
    return html`<aside class="drawer" aria-label=${title} tabindex="-1" ref=${this.drawerRef}
      onKeyDown=${(event) => event.key === "Escape" && onClose()}>
      <header>
        <h2>${title}</h2>
        <button type="button" class="small" onClick=${onClose}>Close</button>
      </header>
      ${children}
    </aside>`;
  }
}
