// Calls of the daemon's HTTP API, from the page's own origin.

export class ApiError extends Error {
  constructor(status, { message, hint, code }) {
    super(message);
    this.status = status;
    this.hint = hint;
    this.code = code;
  }
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

export async function check(response) {
  if (response.ok) return response;
  throw new ApiError(response.status, await problem(response));
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, credentials: "same-origin" });
  } catch {
    throw new ApiError(0, {
      message: "The daemon did not answer.",
      hint: "corral status tells whether it runs.",
    });
  }
  return (await check(response)).json();
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  const { message, hint, code } = body?.error ?? {};
  return { message: message ?? `The daemon answered ${response.status}.`, hint, code };
}
