// Shapes of states: a state is told by its shape and its word, its colour only helps.

import { html } from "../html.js";

const SHAPES = {
  full: html`<circle cx="6" cy="6" r="5" />`,
  ring: html`<circle cx="6" cy="6" r="4.2" class="line" />`,
  half: html`<circle cx="6" cy="6" r="4.2" class="line" /><path d="M6 1.8a4.2 4.2 0 0 1 0 8.4z" />`,
  triangle: html`<path d="M6 .8 11.6 11H.4z" />`,
  cross: html`<path d="m2 2 8 8M10 2l-8 8" class="line thick" />`,
  dots: html`<path d="M1 5h2v2H1zM5 5h2v2H5zM9 5h2v2H9z" />`,
};

export function Shape({ name }) {
  return html`<svg class="shape" viewBox="0 0 12 12" aria-hidden="true">${SHAPES[name]}</svg>`;
}
