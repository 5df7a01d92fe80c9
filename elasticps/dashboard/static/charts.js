// The charts: one time axis for all of them and for the events. It follows the present until somebody zooms.

import { isDark, resolve } from "./colours.js";
import { el, number, seconds, size, clock } from "./format.js";

const KEPT = 3600;
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i); // steps of axes in bytes
const CHARTS = [
  { title: "Requests a second", unit: number, lines: [["push_s", "pushes"], ["pull_s", "pulls"]] },
  { title: "Rows a second", unit: number, lines: [["rows_pushed_s", "pushed"], ["rows_pulled_s", "pulled"]] },
  { title: "Time until an answer (servers that --measure)", unit: seconds,
    lines: [["push_p50", "push p50"], ["push_p99", "push p99"], ["pull_p50", "pull p50"], ["pull_p99", "pull p99"]] },
  { title: "Steps a second; not committed; the last is behind", unit: number,
    lines: [["steps_s", "steps"], ["outstanding", "not committed"], ["lag", "behind"]] },
  { title: "Received and sent to fill, a second", unit: size, lines: [["received_s", "received"], ["sent_s", "fills"]] },
  { title: "Memory", unit: size, lines: [["memory_used", "used"], ["bytes", "rows"]] },
  { title: "Replication lag: not acknowledged by tails", unit: size, lines: [["log_bytes", "lag"]] },
  { title: "Pulls that wait, refusals", unit: number, lines: [["parked", "waiting"], ["refused_s", "refused/s"]] },
];

const place = document.getElementById("charts");
let plots = [], data = { time: [] };
let range = { live: true, span: 300, from: 0, to: 0 };
const listeners = [];

export const shown = () => {
  const now = data.time.at(-1) ?? Date.now() / 1000;
  return range.live ? { ...range, from: now - range.span, to: now } : range;
};

export function onRange(listener) { listeners.push(listener); }

// named: the address names it already.
export function setRange(next, named = false) {
  range = { ...range, ...next };
  apply();
  for (const listener of listeners) listener(range.live, named);
}

function strokes() {
  const dark = isDark();
  return [212, 28, 150, 330].map((hue) => `hsl(${hue} 65% ${dark ? 66 : 38}%)`);
}

export function build() {
  for (const plot of plots) plot.destroy();
  const axis = { stroke: resolve("--soft"), grid: { stroke: resolve("--line"), width: 1 }, ticks: { stroke: resolve("--line") } };
  const colours = strokes();
  CHARTS.forEach((chart, i) => { if (!place.children[i].children.length) place.children[i].append(el("h3", {}, chart.title)); });
  plots = CHARTS.map((chart, i) => new uPlot({
    width: place.children[i].clientWidth, height: 190,
    cursor: { sync: { key: "time" }, drag: { x: true, y: false, setScale: false } },
    select: { show: true },
    scales: { x: { time: true, range: () => [shown().from, shown().to] }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map(clock), space: 90 },
      { ...axis, size: 74, incrs: chart.unit === size ? BINARY : undefined, values: (_, ticks) => ticks.map(chart.unit) }],
    series: [{ label: "at", value: (_, t) => (t == null ? "–" : clock(t)) },
      ...chart.lines.map(([, label], k) => ({ label, stroke: colours[k], width: 1.5, value: (_, v) => chart.unit(v) }))],
    hooks: { setSelect: [(plot) => zoom(plot)] },
  }, columns(chart), place.children[i]));
}

function zoom(plot) {
  if (plot.select.width < 4) return;
  const from = plot.posToVal(plot.select.left, "x"), to = plot.posToVal(plot.select.left + plot.select.width, "x");
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  setRange({ live: false, from, to });
}

const columns = (chart) => [data.time, ...chart.lines.map(([column]) => data[column] ?? data.time.map(() => null))];

function apply() {
  plots.forEach((plot, i) => {
    plot.setData(columns(CHARTS[i]), true);
    if (!(plot.cursor.left >= 0)) plot.setLegend({ idx: data.time.length - 1 }); // nobody points at a moment: the newest
  });
}

export function setHistory(history) {
  data = history;
  apply();
}

export function add(time, names, values) {
  const last = data.time.at(-1);
  if (last !== undefined && time <= last) return;
  data.time.push(time);
  for (const column of Object.keys(data)) {
    if (column === "time") continue;
    const value = values ? values[names.indexOf(column)] : null;
    data[column].push(value === undefined ? null : value);
  }
  if (data.time.length > KEPT) for (const column of Object.keys(data)) data[column].shift();
  if (!document.hidden) apply();
}

new ResizeObserver(() => {
  plots.forEach((plot, i) => {
    const width = place.children[i].clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: 190 });
  });
}).observe(place);
