// Tables whose cells change every second: only what is new is written, so that what is marked stays marked.
// A cell is its text, or {text, right, title, swatch (a colour), state (a word, shown as one)}.

import { el } from "./format.js";

export const right = (text) => ({ text, right: true });

export function fillTable(body, all, none) {
  const width = body.parentNode.tHead.rows[0].cells.length;
  if (!all.length) {
    body.replaceChildren(el("tr", {}, el("td", { class: "quiet", colspan: width }, none)));
    return;
  }
  if (body.rows[0]?.cells.length !== width) body.replaceChildren();
  while (body.rows.length > all.length) body.rows[body.rows.length - 1].remove();
  all.forEach((cells, i) => {
    const row = body.rows[i] ?? body.appendChild(el("tr", {}, ...cells.map(() => el("td"))));
    cells.forEach((cell, k) => write(row.cells[k], cell !== null && typeof cell === "object" ? cell : { text: cell }));
  });
}

function write(td, { text, right: toRight = false, title = "", swatch = "", state = "" }) {
  const shown = [text, toRight, title, swatch, state].join("\u0000");
  if (td.shown === shown) return;
  td.shown = shown;
  td.className = toRight ? "n" : "";
  if (title) td.title = title; else td.removeAttribute("title");
  const parts = [];
  if (swatch) {
    parts.push(el("span", { class: "swatch" }));
    parts[0].style.background = swatch;
  }
  if (state) parts.push(el("span", { class: `state ${state}` }, state));
  td.replaceChildren(...parts, String(text));
}
