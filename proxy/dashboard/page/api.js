// Calls of the daemon's HTTP API, from the page's own origin.

export class ApiError extends Error {
  constructor(status, { message, hint, code }) {
    super(message);
    this.status = status;
    this.hint = hint;
    this.code = code;
  }
}

const KEY = "corral.session";
const HEADER = "X-Corral-Session";

// The session's cookie is nothing without this token: other ports of the host get the cookie too,
// and this tab's storage is for this page alone. Null: the tab is not signed in.
export function sessionToken() {
  return sessionStorage.getItem(KEY);
}

export function keepSessionToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

// `fetch`, as this page's session; throws ApiError for a status that is not 2xx.
export async function request(path, options = {}) {
  const token = sessionToken();
  const headers = { ...options.headers, ...(token && { [HEADER]: token }) };
  return check(await fetch(path, { ...options, credentials: "same-origin", headers }));
}

export async function get(path) {
  return call(path, { method: "GET" });
}

export async function post(path, body = {}) {
  return call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function check(response) {
  if (response.ok) return response;
  throw new ApiError(response.status, await problem(response));
}

async function call(path, options) {
  let response;
  try {
    response = await request(path, options);
  } catch (error) {
    if (error instanceof ApiError) throw error;
    throw new ApiError(0, {
      message: "The daemon did not answer.",
      hint: "corral status tells whether it runs.",
    });
  }
  return response.json();
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  const { message, hint, code } = body?.error ?? {};
  return { message: message ?? `The daemon answered ${response.status}.`, hint, code };
}
