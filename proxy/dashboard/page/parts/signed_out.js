// Shown instead of everything else to a tab without a session.

import { Component, html } from "../html.js";
import { Copy } from "./copy.js";
import { Problem } from "./notice.js";

export class SignedOut extends Component {
  state = { error: null, isBusy: false };

  async signIn(event) {
    event.preventDefault();
    this.setState({ error: null, isBusy: true });
    try {
      await this.props.onKey(new FormData(event.target).get("key"));
    } catch (error) {
      this.setState({ error, isBusy: false });
    }
  }

  render({ refusal, client }, { error, isBusy }) {
    return html`<main class="signed-out">
      <h1><img src="page/icon.svg" alt="" width="28" height="28" /> llama-corral</h1>
      ${refusal ? html`<${Problem} error=${refusal} />` : html`<p>${client ? `${client} may not use the dashboard, which needs the rights of an admin.` : "This tab is not signed in."}</p>`}
      <section>
        <h2>On the machine of the daemon</h2>
        <p>Run this command; it opens the dashboard with a token that works once.</p>
        <p class="command"><code>corral ui</code><${Copy} text="corral ui" what="command" /></p>
      </section>
      <section>
        <h2>Elsewhere</h2>
        <form onSubmit=${(event) => this.signIn(event)}>
          <label for="key">API key with the admin right</label>
          <div class="row">
            <input id="key" name="key" type="password" autocomplete="current-password" required />
            <button type="submit" class="primary" disabled=${isBusy}>Sign in</button>
          </div>
        </form>
        ${error && html`<${Problem} error=${error} />`}
      </section>
    </main>`;
  }
}
