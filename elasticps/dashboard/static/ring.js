// The ring. Outside, an arc for each server, as long as its share of the ranges that it heads; a lost one stays, grey.
// Inside, every range in the order of its hash: a band for each replica, the head outermost, and one for what is filled.

import { colourOf, resolve } from "./colours.js";
import { byName, percent, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 660, OUTER = 252, INNER = 226, BAND = 24, CELLS_MAX = 2048, LABELS_MAX = 26, SMALLEST = 0.012;
const LABEL_RADII = [OUTER + 16, OUTER + 34, OUTER + 52];
const canvas = document.getElementById("ranges"), glow = document.getElementById("moves"), svg = document.getElementById("arcs");
const centre = document.getElementById("centre"), caption = document.getElementById("range");
const asked = caption.textContent;

let view = null, servers = [], colours = new Map(), middles = new Map(), filling = [], at = -1, was = null;

export function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Int16Array(bytes.buffer); // little-endian, as every machine with a browser is
}

export function opened(told) {
  return told && { ...told, chains: unpack(told.chains), joining: unpack(told.joining), leaving: unpack(told.leaving) };
}

// `before`: the present view, when `shown` is one that might be.
export function show(shown, all, before = null) {
  view = shown;
  was = before;
  servers = [...all].sort((a, b) => byName(a.id, b.id));
  const zones = [...new Set(servers.map((s) => s.zone))].sort();
  colours = new Map(servers.map((s) => [s.id, colourOf(s, zones)]));
  if (view && at >= view.ranges) at = -1;
  drawArcs();
  drawRanges();
  tell();
}

export const colour = (name) => colours.get(name) ?? resolve("--dead");

const point = (radius, turn) => {
  const angle = 2 * Math.PI * turn - Math.PI / 2;
  return [radius * Math.cos(angle), radius * Math.sin(angle)].map((x) => x.toFixed(2));
};

function sector(inner, outer, from, to) {
  if (to - from > 0.9999) to = from + 0.9999;
  const large = to - from > 0.5 ? 1 : 0;
  const [a, b, c, d] = [point(outer, from), point(outer, to), point(inner, to), point(inner, from)];
  return `M${a} A${outer} ${outer} 0 ${large} 1 ${b} L${c} A${inner} ${inner} 0 ${large} 0 ${d} Z`;
}

function line(radius, from, to) {
  if (to - from > 0.9999) to = from + 0.9999;
  return `M${point(radius, from)} A${radius} ${radius} 0 ${to - from > 0.5 ? 1 : 0} 1 ${point(radius, to)}`;
}

function shape(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function describe(s) {
  const share = view ? s.heads / view.ranges : 0;
  const zone = s.zone ? `, zone ${s.zone}` : "";
  const filling = s.joining ? `, is being filled with ${s.joining}` : "";
  const why = s.reason ? `: ${s.reason}` : "";
  return `${s.id}: ${s.state}, heads ${plural(s.heads, "range")} (${percent(share)}), holds ${s.held}${filling}${zone}${why}`;
}

function drawArcs() {
  const focused = document.activeElement?.dataset?.server;
  const weights = servers.map((s) => Math.max(SMALLEST, view ? s.heads / view.ranges : 0));
  const total = weights.reduce((a, b) => a + b, 0) || 1;
  const gap = servers.length > 1 ? Math.min(0.004, 0.2 / servers.length) : 0;
  const nodes = [];
  middles = new Map();
  filling = [];
  let from = 0;
  servers.forEach((s, i) => {
    const to = from + weights[i] / total;
    const lost = s.state === "lost" || s.state === "silent";
    middles.set(s.id, (from + to) / 2);
    const arc = shape("path", {
      class: `arc ${s.state}`, d: sector(INNER + 4, OUTER, from + gap / 2, to - gap / 2), tabindex: 0, role: "img",
      "aria-label": describe(s), fill: lost ? resolve("--dead") : colour(s.id), "data-server": s.id, "data-state": s.state,
    }, shape("title", {}, describe(s)));
    arc.addEventListener("focus", () => { caption.textContent = describe(s); });
    arc.addEventListener("pointerenter", () => { caption.textContent = describe(s); });
    arc.addEventListener("pointerleave", tell);
    nodes.push(arc);
    if (s.joining) filling.push({ turn: [from + gap / 2, to - gap / 2], fill: colour(s.id) });
    if (s.joining && s.peak) {
      const done = 1 - s.joining / s.peak;
      nodes.push(shape("path", { class: "progress", d: line(OUTER + 5, from, from + Math.max(0.002, (to - from) * done)) }));
    }
    from = to;
  });
  svg.replaceChildren(...nodes, shape("g", { id: "chain" }));
  if (servers.length <= LABELS_MAX) drawLabels(weights);
  if (focused) svg.querySelector(`[data-server="${CSS.escape(focused)}"]`)?.focus();
}

// Those of long arcs first. A label that meets one that is there moves outwards, or is left out: pointing at the arc shows it.
function drawLabels(weights) {
  const taken = [];
  const order = servers.map((s, i) => i).sort((a, b) => weights[b] - weights[a] || a - b);
  for (const s of order.map((i) => servers[i])) {
    const label = shape("text", { class: s.state, "aria-hidden": "true" }, s.state === "serving" ? s.id : `${s.id} ${s.state}`);
    svg.append(label);
    const free = LABEL_RADII.some((radius) => {
      const [x, y] = point(radius, middles.get(s.id)).map(Number);
      const anchor = Math.abs(x) < 40 ? "middle" : x > 0 ? "start" : "end";
      const place = { x, y, dy: y > 0 ? "0.7em" : "0.2em", "text-anchor": anchor };
      for (const [key, value] of Object.entries(place)) label.setAttribute(key, value);
      const box = label.getBBox();
      if (taken.some((other) => meet(box, other))) return false;
      taken.push(box);
      return true;
    });
    if (!free) label.remove();
  }
}

function meet(a, b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

function cleared(one) {
  const side = Math.round(canvas.clientWidth * (window.devicePixelRatio || 1));
  if (one.width !== side) one.width = one.height = side;
  const paper = one.getContext("2d");
  paper.setTransform(side / WIDTH, 0, 0, side / WIDTH, side / 2, side / 2);
  paper.clearRect(-WIDTH / 2, -WIDTH / 2, WIDTH, WIDTH);
  return paper;
}

// Of more ranges than can be told apart only some are drawn.
function drawRanges() {
  const paper = cleared(canvas), moving = cleared(glow);
  if (!view) return;
  for (const { turn: [from, to], fill } of filling) {
    wedge(moving, OUTER + 14, 5, 2 * Math.PI * from - Math.PI / 2, 2 * Math.PI * to - Math.PI / 2, fill, 1);
  }
  const wedges = new Wedges(paper);
  const cells = Math.min(view.ranges, CELLS_MAX), step = view.ranges / cells, bands = Math.min(view.replicas, 4);
  const shades = view.servers.map(colour), empty = resolve("--line"), mark = resolve("--accent");
  const moved = was && resolve("--ink");
  const names = was && new Map(was.servers.map((name, i) => [i, name]));
  for (let cell = 0; cell < cells; cell++) {
    const r = Math.floor(cell * step), from = (2 * Math.PI * cell) / cells - Math.PI / 2;
    const to = from + (2 * Math.PI) / cells + 0.001;
    for (let b = 0; b < bands; b++) {
      const holder = view.chains[r * view.replicas + b];
      wedges.add(INNER - b * BAND, BAND - 2, from, to, holder < 0 ? empty : shades[holder], b ? 0.62 : 1);
    }
    const joiner = view.joining[r];
    const inner = INNER - bands * BAND;
    if (joiner >= 0) {
      wedge(moving, inner, 10, from, to, shades[joiner], 1);
      wedges.add(inner - 11, 3, from, to, mark, 1);
    } else if (moved && changed(r, names)) {
      wedges.add(inner, 10, from, to, moved, 1);
    }
  }
  wedges.draw();
  if (at >= 0) {
    const turn = (2 * Math.PI) / view.ranges, from = turn * at - Math.PI / 2;
    wedge(paper, INNER + 3, BAND * bands + 18, from - 0.004, from + turn + 0.004, resolve("--ink"), 0.35);
  }
}

// Many, of few colours: those of one colour are one shape.
class Wedges {
  constructor(paper) { this.paper = paper; this.paths = new Map(); }

  add(radius, width, from, to, fill, alpha) {
    const key = `${alpha} ${fill}`;
    let one = this.paths.get(key);
    if (!one) this.paths.set(key, one = { fill, alpha, path: new Path2D() });
    one.path.moveTo(radius * Math.cos(from), radius * Math.sin(from));
    one.path.arc(0, 0, radius, from, to);
    one.path.arc(0, 0, radius - width, to, from, true);
    one.path.closePath();
  }

  draw() {
    for (const { fill, alpha, path } of this.paths.values()) {
      this.paper.globalAlpha = alpha;
      this.paper.fillStyle = fill;
      this.paper.fill(path);
    }
    this.paper.globalAlpha = 1;
  }
}

function wedge(paper, radius, width, from, to, fill, alpha) {
  paper.globalAlpha = alpha;
  paper.fillStyle = fill;
  paper.beginPath();
  paper.arc(0, 0, radius, from, to);
  paper.arc(0, 0, radius - width, to, from, true);
  paper.fill();
  paper.globalAlpha = 1;
}

// Whether another set of servers would hold the range.
function changed(r, names) {
  const of = (one, name) => {
    const found = [];
    for (let b = 0; b < one.replicas; b++) {
      const i = one.chains[r * one.replicas + b];
      if (i >= 0) found.push(name(i));
    }
    return found.sort().join();
  };
  return of(view, (i) => view.servers[i]) !== of(was, (i) => names.get(i));
}

function chainOf(r) {
  const found = [];
  for (let b = 0; b < view.replicas; b++) {
    const i = view.chains[r * view.replicas + b];
    if (i >= 0) found.push(view.servers[i]);
  }
  return found;
}

function tell() {
  canvas.setAttribute("aria-valuemax", view ? view.ranges - 1 : 0);
  const group = svg.querySelector("#chain");
  group.replaceChildren();
  if (!view || at < 0) {
    caption.textContent = asked;
    canvas.setAttribute("aria-valuetext", view ? "no range chosen" : "no view yet");
    return;
  }
  const chain = chainOf(at), joiner = view.servers[view.joining[at]], leaver = view.servers[view.leaving[at]];
  const roles = chain.map((name, i) => (i === 0 ? `${name} (head)` : i === chain.length - 1 ? `${name} (tail)` : name));
  let text = `range ${at} of ${view.ranges}: ${roles.join(" → ") || "no replica"}`;
  if (joiner) text += `; ${joiner} is being filled${leaver ? `, in place of ${leaver}` : ""}`;
  caption.textContent = text;
  canvas.setAttribute("aria-valuenow", at);
  canvas.setAttribute("aria-valuetext", text);
  let last = point(INNER - 60, (at + 0.5) / view.ranges);
  for (const name of joiner ? [...chain, joiner] : chain) {
    if (!middles.has(name)) continue;
    const next = point(INNER + 6, middles.get(name));
    group.append(shape("path", { class: "chain", d: `M${last} Q0 0 ${next}`, "stroke-dasharray": name === joiner ? "4 4" : "none" }));
    group.append(shape("circle", { cx: next[0], cy: next[1], r: 5, fill: colour(name), stroke: "currentColor" }));
    last = next;
  }
}

export function tellCentre(text) { centre.textContent = text; }

function choose(r) {
  if (!view || r === at) return;
  at = r;
  drawRanges();
  tell();
}

canvas.addEventListener("pointermove", (event) => {
  if (!view) return;
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left - box.width / 2, y = event.clientY - box.top - box.height / 2;
  const radius = (WIDTH * Math.hypot(x, y)) / box.width;
  const turn = (Math.atan2(y, x) / (2 * Math.PI) + 1.25) % 1;
  choose(radius < 60 ? -1 : Math.min(view.ranges - 1, Math.floor(turn * view.ranges)));
});
canvas.addEventListener("pointerleave", () => choose(-1));
canvas.addEventListener("blur", () => choose(-1));
canvas.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 16, PageDown: -16 };
  if (!view || !(event.key in steps || event.key === "Home" || event.key === "End")) return;
  event.preventDefault();
  if (event.key === "Home") choose(0);
  else if (event.key === "End") choose(view.ranges - 1);
  else choose((Math.max(at, steps[event.key] > 0 ? -1 : 0) + steps[event.key] + view.ranges) % view.ranges);
});
new ResizeObserver(drawRanges).observe(canvas);

export function redraw() { show(view, servers, was); }
