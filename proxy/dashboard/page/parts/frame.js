// Header and navigation.

import { health } from "../health.js";
import { html } from "../html.js";
import { Shape } from "./icon.js";
import { SHAPES } from "./status.js";

const THEMES = { system: ["half", "as the system"], light: ["ring", "light"], dark: ["full", "dark"] };

function Health({ live }) {
  const { tone, sentence } = health(live);
  return html`<span class="state ${tone}"><${Shape} name=${SHAPES[tone]} /><span class="sentence">${sentence}</span></span>`;
}

export function Frame({ views, name, live, theme, onTheme, onShortcuts, onSignOut }) {
  return html`<header class="top">
    <a class="brand" href="#overview"><img src="page/icon.svg" alt="" width="22" height="22" />llama-corral</a>
    ${live && html`${name !== "overview" && html`<${Health} live=${live} />`}<span class="version wide">${live.server.version}</span>`}
    <div class="tools">
      <button type="button" class="plain" onClick=${onTheme} aria-label=${`Colours: ${THEMES[theme][1]}. Change`}
        title=${`Colours: ${THEMES[theme][1]}`}><${Shape} name=${THEMES[theme][0]} /></button>
      <button type="button" class="plain" onClick=${onShortcuts} aria-label="Shortcuts" title="Shortcuts">?</button>
      <button type="button" class="plain" onClick=${onSignOut}>Sign out</button>
    </div>
  </header>
  <nav aria-label="Views"><ul>
    ${views.map((view) => html`<li key=${view.name}><a href=${`#${view.name}`}
      aria-current=${view.name === name ? "page" : undefined}>${view.title}</a></li>`)}
  </ul></nav>`;
}
