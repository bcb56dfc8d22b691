// A modal dialog: the browser keeps the focus in it, and Escape closes it.

import { Component, createRef, html } from "../html.js";

export class Dialog extends Component {
  dialogRef = createRef();

  componentDidMount() {
    this.dialogRef.current.showModal();
  }

  closeOutside(event) {
    if (event.target === this.dialogRef.current) this.dialogRef.current.close();
  }

  render({ title, children, onClose }) {
    return html`<dialog aria-labelledby="dialog-title" ref=${this.dialogRef} onClose=${onClose}
      onClick=${(event) => this.closeOutside(event)}>
      <div class="dialog">
        <header>
          <h2 id="dialog-title">${title}</h2>
          <button type="button" class="small" onClick=${() => this.dialogRef.current.close()}>Close</button>
        </header>
        ${children}
      </div>
    </dialog>`;
  }
}
