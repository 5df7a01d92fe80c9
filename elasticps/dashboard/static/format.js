// How values are told to people. Text from outside only ever becomes text: nothing here makes HTML of it.

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function fill(node, ...children) { node.replaceChildren(...children); }

const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const number = (value) => (value == null ? "–" : value < 100 && value % 1 ? few.format(value) : count.format(value));

export function size(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1024 && i < units.length - 1) { value /= 1024; i++; }
  return `${i ? value.toFixed(1) : value.toFixed(0)} ${units[i]}`;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 1e-3) return `${few.format(value * 1e6)} µs`;
  if (value < 1) return `${few.format(value * 1e3)} ms`;
  if (value < 120) return `${few.format(value)} s`;
  return value < 7200 ? `${few.format(value / 60)} min` : `${few.format(value / 3600)} h`;
}

export const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");
export const day = (t) => new Date(t * 1000).toLocaleString("en-GB");
export const percent = (value) => `${few.format(100 * value)} %`;
export const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

export const byName = new Intl.Collator("en", { numeric: true }).compare;
