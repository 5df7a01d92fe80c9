// What happened: on the time axis of the charts, and as a list. A click on an event makes a link to its moment.

import { onRange, setRange, shown } from "./charts.js";
import { clock, el, fill, plural, seconds } from "./format.js";

const LANES = [["loss", "losses"], ["repair", "repairs"], ["view", "views"], ["server", "servers"], ["drain", "drains"],
  ["worker", "workers"], ["election", "leaders"], ["outage", "etcd"], ["checkpoint", "checkpoints"]];
const LISTED = 200, MARKED = 400, LANE = 17.5;
const strip = document.getElementById("strip"), list = document.getElementById("entries");
const titles = LANES.map(([, title], i) => placed(el("span", {}, title), { top: `${i * LANE}px` }));

let entries = new Map(), chosen = 0;

function placed(node, style) { return Object.assign(node.style, style), node; }

export function setEntries(told) {
  entries = new Map(told.map((entry) => [entry.id, entry]));
  draw();
}

export function noteEntry(entry) {
  entries.set(entry.id, entry);
  draw();
}

function choose(entry) {
  chosen = entry.id;
  history.replaceState(null, "", `#t=${entry.t.toFixed(2)}`);
  setRange({ live: false, from: entry.t - 20, to: (entry.until ?? entry.t) + 20 }, true);
}

// The moment that the address names, if it does.
export function goToHash() {
  const found = /^#t=(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?$/.exec(location.hash);
  if (!found) return;
  const t = Number(found[1]), to = found[2] && Number(found[2]);
  const entry = [...entries.values()].find((e) => Math.abs(e.t - t) < 0.02);
  chosen = entry ? entry.id : 0;
  setRange(to ? { live: false, from: t, to } : { live: false, from: t - 20, to: t + 20 }, true);
  document.getElementById("happened").scrollIntoView();
}

export function draw() {
  const { from, to } = shown();
  const visible = [...entries.values()].filter((e) => (e.until ?? to) >= from && e.t <= to).sort((a, b) => b.t - a.t);
  const share = (t) => (100 * (Math.min(Math.max(t, from), to) - from)) / (to - from);
  const marks = visible.slice(0, MARKED).map((entry) => {
    const lane = LANES.findIndex(([kind]) => kind === entry.kind);
    const mark = el("button", { type: "button", class: `k-${entry.kind}`, "aria-label": `${clock(entry.t)} ${entry.title}`, title: entry.title });
    placed(mark, { top: `${lane * LANE + 1}px`, left: `min(${share(entry.t)}%, 100% - 8px)`, width: `${share(entry.until ?? to) - share(entry.t)}%` });
    mark.addEventListener("click", () => choose(entry));
    return mark;
  });
  const times = [0.25, 0.5, 0.75].map((x) => placed(el("time", {}, clock(from + x * (to - from))), { left: `${100 * x}%` }));
  fill(strip, ...titles, ...marks, ...times, ...(drawn?.mark.isConnected ? [drawn.mark] : []));
  fill(list, ...(visible.length ? visible.slice(0, LISTED).map(row) : [el("li", {}, "Nothing in the time shown.")]));
}

function row(entry) {
  const item = el("li", { class: `k-${entry.kind}${entry.id === chosen ? " chosen" : ""}`, "data-kind": entry.kind });
  const link = el("a", { href: `#t=${entry.t.toFixed(2)}` }, clock(entry.t));
  link.addEventListener("click", (event) => { event.preventDefault(); choose(entry); });
  const lasted = entry.until === null ? " – goes on" : entry.until > entry.t ? ` – ${seconds(entry.until - entry.t)}` : "";
  const times = entry.count > 1 ? `, ${plural(entry.count, "view")}` : "";
  item.append(link, " ", el("strong", {}, entry.title), `${times}${lasted}`);
  if (entry.reason) item.append(el("p", {}, entry.reason));
  if (entry.parts.length) {
    const first = entry.parts[0][1];
    item.append(el("p", { class: "parts" }, ...entry.parts.map(([name, t], i) =>
      el("span", {}, `${name} `, el("b", {}, i ? `+${seconds(t - first)}` : clock(t))))));
  }
  return item;
}

// --- zoom: draw over the strip, or + and -, arrows, Escape

const SHORTEST = 0.5, LONGEST = 3600;
let drawn = null;

function show(from, to) {
  const least = Math.max(SHORTEST, Math.min(LONGEST, to - from)), middle = (from + to) / 2;
  chosen = 0;
  setRange({ live: false, from: middle - least / 2, to: middle + least / 2 });
}

const timeAt = (x) => {
  const box = strip.getBoundingClientRect(), { from, to } = shown();
  return from + ((to - from) * Math.min(Math.max(x - box.left, 0), box.width)) / box.width;
};

strip.addEventListener("pointerdown", (event) => {
  if (event.button || event.target.closest("button")) return;
  drawn = { x: event.clientX, mark: el("span", { class: "picked" }) };
  strip.setPointerCapture(event.pointerId);
});
strip.addEventListener("pointermove", (event) => {
  if (!drawn) return;
  const box = strip.getBoundingClientRect(), [a, b] = [drawn.x, event.clientX].sort((p, q) => p - q);
  placed(drawn.mark, { left: `${a - box.left}px`, width: `${b - a}px` });
  if (!drawn.mark.isConnected) strip.append(drawn.mark);
});
strip.addEventListener("pointerup", (event) => {
  const began = drawn?.x, moved = drawn && Math.abs(event.clientX - began) > 4;
  drawn?.mark.remove();
  drawn = null;
  if (moved) show(...[began, event.clientX].sort((p, q) => p - q).map(timeAt)); // as it is shown now: it may have gone on
});
strip.addEventListener("pointercancel", () => { drawn?.mark.remove(); drawn = null; });
strip.addEventListener("dblclick", () => setRange({ live: true }));
strip.addEventListener("keydown", (event) => {
  const { from, to } = shown(), span = to - from, middle = (from + to) / 2;
  const keys = {
    "+": () => show(middle - span / 4, middle + span / 4), "-": () => show(middle - span, middle + span),
    ArrowLeft: () => show(from - span / 4, to - span / 4), ArrowRight: () => show(from + span / 4, to + span / 4),
    Escape: () => setRange({ live: true }),
  };
  const act = event.target === strip && keys[event.key === "=" ? "+" : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

onRange(draw);
