// An example of a desktop application, in a terminal: node main.mjs MODEL
//
// Each line is a message; the answer appears as it is generated. Ctrl-C or /cancel ends an answer,
// /quit, Ctrl-D or Ctrl-C without one ends the application, which leaves no process behind. The
// program is `corral`, or the one that CORRAL names.

import { createInterface } from "node:readline";
import { Backend } from "./backend.mjs";
import { answer } from "./chat.mjs";

const [model, ...options] = process.argv.slice(2);
if (!model) {
  console.error("usage: node main.mjs MODEL [OPTION]...");
  process.exit(2);
}
const corral = process.env.CORRAL ?? "corral";
const backend = new Backend([corral, "serve", "--desktop", ...options, "--", model]);
const messages = [];
let running = null; // the AbortController of an answer

backend.on("state", (state, reason) => tell(reason ? `${state}: ${reason}` : state));
backend.on("state", (state) => {
  if (state === "failed" || state === "ended") {
    process.exit(state === "failed" ? 1 : 0);
  }
});
backend.on("line", (line) => {
  switch (line.event) {
    case "progress":
      return tell(`loading ${line.model}: ${Math.round(100 * line.value)} %`);
    case "state":
      return line.state === "ready" ? tell(`${line.model} is ready`) : undefined;
    case "error":
      return tell([line.message, line.hint, line.log].filter(Boolean).join("; "));
  }
});

const input = createInterface({ input: process.stdin });
input.on("line", (line) => take(line.trim()));
input.on("close", () => backend.stop());
process.on("SIGINT", () => (running ? running.abort() : backend.stop()));
process.on("SIGTERM", () => backend.stop());
backend.start();

function take(line) {
  if (line === "/quit") {
    backend.stop();
  } else if (line === "/cancel") {
    running?.abort();
  } else if (line) {
    chat(line);
  }
}

async function chat(text) {
  if (backend.state !== "serving" || running) {
    return tell(running ? "an answer is under way; /cancel ends it" : `not now: ${backend.state}`);
  }
  running = new AbortController();
  const said = [...messages, { role: "user", content: text }];
  let whole = "";
  try {
    for await (const part of answer(backend, backend.ready.requested[0], said, running.signal)) {
      whole += part;
      process.stdout.write(part);
    }
    messages.push(...said.slice(-1), { role: "assistant", content: whole });
    process.stdout.write("\n");
  } catch (error) {
    process.stdout.write("\n");
    tell(error.name === "AbortError" ? "cancelled" : error.message);
  } finally {
    running = null;
  }
}

function tell(text) {
  console.error(`[${text}]`);
}
