// Templates: preact's elements, written as tagged strings, which need no build step.

import { Component, createRef, h, render } from "../vendor/preact/preact.mjs";
import htm from "../vendor/htm/htm.mjs";

export { Component, createRef, render };
export const html = htm.bind(h);
