// The page: its frame, and the view that the address means.

import { Actions } from "./actions.js";
import { Chat } from "./chat/chat.js";
import { Component, createRef, html } from "./html.js";
import { Banner } from "./parts/banner.js";
import { Frame } from "./parts/frame.js";
import { Notice } from "./parts/notice.js";
import { ShortcutsDialog } from "./parts/shortcuts_dialog.js";
import { SignedOut } from "./parts/signed_out.js";
import { VIEWS, route, viewsOf } from "./routes.js";
import { signInByKey, signOut } from "./session.js";
import { listen } from "./shortcuts.js";
import { current, onSystemChange, toggle } from "./theme.js";

export class App extends Component {
  mainRef = createRef();
  state = { route: route(location.hash), theme: current(), showsShortcuts: false };
  actions = new Actions(() => this.forceUpdate());
  chat = new Chat(() => this.forceUpdate());

  componentDidMount() {
    this.props.store.subscribe(() => this.forceUpdate());
    window.addEventListener("hashchange", () => this.follow());
    onSystemChange(() => this.forceUpdate());
    listen(this.keys());
    this.entitle();
  }

  keys() {
    const views = VIEWS.map((view) => [view.key, () => viewsOf(this.props.store.state).includes(view) && this.go(view.name)]);
    return {
      ...Object.fromEntries(views),
      "/": () => this.mainRef.current.querySelector("[data-filter]")?.focus(),
      t: () => this.toggleTheme(),
      "?": () => this.setState({ showsShortcuts: true }),
    };
  }

  go(name) {
    location.hash = name;
  }

  follow() {
    const before = this.state.route.name;
    this.actions.dismiss();
    this.setState({ route: route(location.hash) }, () => {
      this.entitle();
      if (this.state.route.name !== before) this.begin();
    });
  }

  // As after the load of a page: at its top, and a screen reader reads the view next.
  begin() {
    this.mainRef.current?.focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  entitle() {
    document.title = `${this.state.route.title} · llama-corral`;
  }

  toggleTheme() {
    this.setState({ theme: toggle() });
  }

  async signIn(key) {
    await signInByKey(key);
    this.props.stream.open();
  }

  async signOut() {
    await this.actions.run("sign out", signOut, "Signed out");
    await this.props.stream.start();
  }

  render({ store, stream, refusal }, { route: { name, detail, view }, theme, showsShortcuts }) {
    if (store.connection.phase === "signed out") {
      return html`<${SignedOut} refusal=${refusal} client=${store.connection.client} onKey=${(key) => this.signIn(key)} />`;
    }
    const { live, actions, chat } = { live: store.state, actions: this.actions, chat: this.chat };
    return html`
      <a class="skip" href="#main" onClick=${(event) => this.skip(event)}>Skip to the content</a>
      <${Frame} views=${viewsOf(live)} name=${name} live=${live} theme=${theme}
        onTheme=${() => this.toggleTheme()} onSignOut=${() => this.signOut()}
        onShortcuts=${() => this.setState({ showsShortcuts: true })} />
      <main id="main" tabindex="-1" ref=${this.mainRef}>
        <${Banner} connection=${store.connection} onRetry=${() => this.props.stream.open()} />
        <${Notice} notice=${actions.notice} onDismiss=${() => actions.dismiss()} />
        ${live
          ? html`<${view} key=${name} live=${live} store=${store} stream=${stream}
              detail=${detail} actions=${actions} chat=${chat} />`
          : html`<p class="waiting">Waiting for the daemon's figures…</p>`}
      </main>
      <div class="unseen" aria-live="polite">${store.announcement}</div>
      ${showsShortcuts && html`<${ShortcutsDialog} views=${viewsOf(live)}
        onClose=${() => this.setState({ showsShortcuts: false })} />`}`;
  }

  skip(event) {
    event.preventDefault();
    this.mainRef.current.focus();
  }
}
