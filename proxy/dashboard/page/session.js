// The session of this tab.

import { keepSessionToken, post, sessionToken } from "./api.js";

const TOKEN = /^#token=([\w-]+)$/;
const CHANNEL = "corral.session";

export function isSignInAddress(hash) {
  return TOKEN.test(hash);
}

// `corral ui` opens the page with a token after `#`, which no server or log ever sees.
export async function signInByAddress() {
  const token = TOKEN.exec(location.hash)?.[1];
  if (!token) return null;
  history.replaceState(null, "", location.pathname);
  try {
    await begin({ token });
    return null;
  } catch (error) {
    return error;
  }
}

export async function signInByKey(key) {
  await begin({ api_key: key });
}

export async function signOut() {
  await post("/corral/v1/session/end");
  keepSessionToken(null);
}

// Tabs that show the daemon's figures give their token to a signed-out tab that asks. The
// channel reaches pages of this origin in this browser alone, as `sessionStorage` does.
export function shareSession(store, onToken) {
  const channel = new BroadcastChannel(CHANNEL);
  channel.addEventListener("message", ({ data: { isAsked, token } }) => {
    const phase = store.connection.phase;
    if (isAsked && phase === "open") channel.postMessage({ token: sessionToken() });
    if (!token || phase !== "signed out") return;
    keepSessionToken(token);
    onToken();
  });
  if (store.connection.phase === "signed out") channel.postMessage({ isAsked: true });
}

async function begin(secret) {
  const { page_token } = await post("/corral/v1/session", secret);
  keepSessionToken(page_token);
}
