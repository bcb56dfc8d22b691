// The session of this tab.

import { keepSessionToken, post } from "./api.js";

const TOKEN = /^#token=([\w-]+)$/;

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

async function begin(secret) {
  const { page_token } = await post("/corral/v1/session", secret);
  keepSessionToken(page_token);
}
