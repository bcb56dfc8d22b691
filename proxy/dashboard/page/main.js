// Start: sign in by the address if it has a token, then show the page.

import { App } from "./app.js";
import { html, render } from "./html.js";
import { LiveStore } from "./live/store.js";
import { LiveStream } from "./live/stream.js";
import { isSignInAddress, shareSession, signInByAddress } from "./session.js";
import { apply, current } from "./theme.js";

const TICK_MS = 1000;

apply(current());
const store = new LiveStore();
const stream = new LiveStream(store);
const refusal = await signInByAddress();
render(html`<${App} store=${store} stream=${stream} refusal=${refusal} />`, document.getElementById("app"));
setInterval(() => store.notify(), TICK_MS); // ages grow though nothing arrives
// A link of `corral ui` that is opened in a window with this page changes its address alone.
window.addEventListener("hashchange", () => isSignInAddress(location.hash) && location.reload());
await stream.start();
shareSession(store, () => stream.open());
