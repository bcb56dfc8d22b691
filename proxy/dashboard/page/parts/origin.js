// Addresses as this browser knows them: the daemon calls itself 127.0.0.1, and may be another machine.

export function asReached(text, serverUrl) {
  return text.replaceAll(serverUrl, location.origin);
}
