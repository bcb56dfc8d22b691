// The backend of a desktop application: starts `corral serve --desktop`, and follows its lines.
//
// States, as in docs/desktop.md: starting, serving, stopping, ended, crashed, failed. Emits
// "state" (state, reason), "line" (each line, parsed) and "log" (a line of its log).

import { spawn } from "node:child_process";
import { EventEmitter } from "node:events";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const READY_TIMEOUT_MS = 60_000;
const STOP_TIMEOUT_MS = 10_000;
const RESTARTS_MAX = 3;
const RESTART_FIRST_MS = 1_000;
const SERVED_LONG_MS = 60_000;

export class Backend extends EventEmitter {
  #argv;
  #process = null;
  #timer = null;
  #restarts = 0;
  #servingSince = 0;
  #lastError = null;
  #hasStopped = false;
  state = "ended";
  ready = null; // the line `ready`, while it serves
  apiKey = null;

  /** `argv`: the program, and its words up to the models. */
  constructor(argv) {
    super();
    this.#argv = argv;
  }

  start() {
    this.#lastError = null;
    this.#hasStopped = false;
    this.#enter("starting");
    const [program, ...words] = this.#argv;
    // A session of its own: Ctrl-C in a terminal is for the host, which then closes the pipe.
    const child = spawn(program, words, { stdio: ["pipe", "pipe", "pipe"], detached: true });
    this.#process = child;
    this.#timer = setTimeout(() => child.kill("SIGKILL"), READY_TIMEOUT_MS);
    child.stdin.on("error", () => {}); // it has ended; "close" tells
    createInterface({ input: child.stdout }).on("line", (text) => this.#take(JSON.parse(text)));
    createInterface({ input: child.stderr }).on("line", (text) => this.emit("log", text));
    child.on("error", (error) => this.#ended(null, error.message));
    child.on("close", (code) => this.#ended(code, null));
  }

  /** Close the pipe, and wait for the end. */
  async stop() {
    clearTimeout(this.#timer);
    const child = this.#process;
    if (child === null) {
      return this.#enter("ended");
    }
    this.#enter("stopping");
    const ended = new Promise((resolve) => child.once("close", resolve));
    child.stdin.end();
    const timer = setTimeout(() => child.kill("SIGKILL"), STOP_TIMEOUT_MS);
    await ended;
    clearTimeout(timer);
  }

  #enter(state, reason = null) {
    if (this.state !== state) {
      this.state = state;
      this.emit("state", state, reason);
    }
  }

  #take(line) {
    switch (line.event) {
      case "ready":
        clearTimeout(this.#timer);
        this.apiKey = readFileSync(line.api_key_file, "utf8");
        this.ready = line;
        this.#servingSince = Date.now();
        if (this.state === "starting") {
          this.#enter("serving");
        }
        break;
      case "error":
        this.#lastError = line;
        break;
      case "stopping":
        this.#enter("stopping", line.reason);
        break;
      case "stopped":
        this.#hasStopped = true;
        break;
    }
    this.emit("line", line);
  }

  #ended(code, reason) {
    clearTimeout(this.#timer);
    if (this.#process === null) {
      return; // "error" and "close" of one end
    }
    const wasReady = this.ready !== null;
    this.#process = this.ready = this.apiKey = null;
    const error = this.#lastError;
    const why = reason ?? error?.message ?? `exit code ${code}`;
    if (this.#hasStopped || this.state === "stopping") {
      return this.#enter("ended");
    }
    if (wasReady && Date.now() - this.#servingSince > SERVED_LONG_MS) {
      this.#restarts = 0;
    }
    if (!wasReady || this.#restarts >= RESTARTS_MAX) {
      return this.#enter("failed", why);
    }
    this.#enter("crashed", why);
    this.#timer = setTimeout(() => this.start(), RESTART_FIRST_MS * 2 ** this.#restarts++);
  }
}
