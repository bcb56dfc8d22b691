// Markdown of a model as elements: HTML in it stays text, and nothing is loaded from another address.

import { marked } from "../../vendor/marked/marked.esm.js";
import { html } from "../html.js";
import { Copy } from "./copy.js";

const SAFE_LINK = /^(https?:|mailto:)/i;

export function Markdown({ text }) {
  return html`<div class="markdown">${blocks(marked.lexer(text))}</div>`;
}

function blocks(tokens) {
  return tokens.map(element);
}

function element(token) {
  switch (token.type) {
    case "space": return null;
    case "heading": return html`<p class="heading level-${token.depth}">${blocks(token.tokens)}</p>`;
    case "paragraph": return html`<p>${blocks(token.tokens)}</p>`;
    case "code": return html`<${Code} ...${token} />`;
    case "blockquote": return html`<blockquote>${blocks(token.tokens)}</blockquote>`;
    case "list": return list(token);
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "table": return table(token);
    case "hr": return html`<hr />`;
    case "br": return html`<br />`;
    case "strong": return html`<strong>${blocks(token.tokens)}</strong>`;
    case "em": return html`<em>${blocks(token.tokens)}</em>`;
    case "del": return html`<del>${blocks(token.tokens)}</del>`;
    case "codespan": return html`<code>${token.text}</code>`;
    case "link": return link(token);
    case "text": return token.tokens ? blocks(token.tokens) : token.text;
    case "escape": return token.text;
    default: return token.raw; // HTML, and images, which would be loaded from elsewhere
  }
}

function list({ ordered, start, items }) {
  const children = items.map((item) => html`<li>${blocks(item.tokens)}</li>`);
  return ordered ? html`<ol start=${start}>${children}</ol>` : html`<ul>${children}</ul>`;
}

function table({ header, rows }) {
  return html`<div class="table" tabindex="0" role="region" aria-label="Table"><table>
    <thead><tr>${header.map((cell) => html`<th scope="col">${blocks(cell.tokens)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${blocks(cell.tokens)}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

function link({ href, tokens }) {
  if (!SAFE_LINK.test(href)) return blocks(tokens);
  return html`<a href=${href} target="_blank" rel="noopener noreferrer">${blocks(tokens)}</a>`;
}

function Code({ lang, text }) {
  return html`<figure class="code">
    <figcaption><span>${lang}</span><${Copy} text=${text} what="code" /></figcaption>
    <pre tabindex="0" role="region" aria-label=${`Code${lang ? ` in ${lang}` : ""}`}><code>${text}</code></pre>
  </figure>`;
}
