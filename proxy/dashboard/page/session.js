// The session of this browser.

import { post } from "./api.js";

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
    await post("/corral/v1/session", { token });
    return null;
  } catch (error) {
    return error;
  }
}

export async function signInByKey(key) {
  await post("/corral/v1/session", { api_key: key });
}

export async function signOut() {
  await post("/corral/v1/session/end");
}
