// One colour for each server, the same after a reload; servers of one zone are shades of one hue.

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// What a colour of style.css is at the moment, for a canvas. Asked once for each: the answer takes a look at all styles.
let resolved = new Map(), resolvedDark = null;
export function resolve(name) {
  if (resolvedDark !== isDark()) [resolved, resolvedDark] = [new Map(), isDark()];
  if (!resolved.has(name)) {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return resolved.get(name);
}

function numberOf(name) {
  const digits = /(\d+)$/.exec(name);
  if (digits) return Number(digits[1]);
  let sum = 0;
  for (const letter of name) sum = (31 * sum + letter.codePointAt(0)) % 1000003;
  return sum;
}

export function colourOf(server, zones) {
  const number = numberOf(server.id);
  const [low, high] = isDark() ? [52, 72] : [42, 60];
  if (zones.length > 1) {
    const hue = (210 + (360 * zones.indexOf(server.zone)) / zones.length) % 360;
    return `hsl(${hue} 55% ${low + ((number * 7) % (high - low))}%)`;
  }
  return `hsl(${(212 + number * 137.508) % 360} 55% ${low + 6 * (number % 3)}%)`;
}
