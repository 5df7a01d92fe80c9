// The page: hears the dashboard, and hands each kind of news to what shows it.

import * as charts from "./charts.js";
import * as events from "./events.js";
import * as ring from "./ring.js";
import { byName, clock, day, el, fill, number, percent, plural, seconds, size } from "./format.js";
import { fillTable, right } from "./table.js";

const by = (id) => document.getElementById(id);
const now = { state: null, view: null, servers: [], workers: [], sample: null, columns: null, connected: false, at: 0, skew: 0 };
let forecast = null, whose = "", whoseHistory = null;

// ------------------------------------------------------------------------------------------------ what is heard

const heard = {
  snapshot(told) {
    now.columns = told.columns;
    now.skew = told.now - Date.now() / 1000;
    by("act").hidden = !told.actions;
    if (whose) loadHistory(); else charts.setHistory(told.history);
    for (const kind of ["state", "servers", "view", "workers", "tables", "checkpoints", "sample"]) heard[kind](told[kind]);
    events.setEntries(told.entries);
    events.goToHash();
  },
  state(told) { now.state = told; soon(tellHealth); },
  view(told) { now.view = ring.opened(told); soon(drawRing); soon(tellHealth); },
  servers(told) { now.servers = told.sort((a, b) => byName(a.id, b.id)); soon(drawRing); soon(drawServers); soon(tellHealth); soon(drawChoices); },
  workers(told) { now.workers = told; soon(drawWorkers); },
  sample(told) {
    if (!told || (now.sample && told.t === now.sample.t)) return;
    now.sample = told;
    charts.add(told.t, whose ? now.columns.server : now.columns.cluster, whose ? told.servers[whose] : told.cluster);
    soon(drawServers);
    soon(drawWorkers);
    soon(drawReaders);
    if (charts.shown().live) soon(events.draw);
  },
  tables(told) { drawTables(told); },
  checkpoints(told) { drawCheckpoints(told); },
  entry(told) { events.noteEntry(told); },
};

// Once a frame, however much is heard meanwhile.
const due = new Set();
function soon(draw) {
  if (!due.size) requestAnimationFrame(() => { const all = [...due]; due.clear(); for (const each of all) each(); });
  due.add(draw);
}

// A sample comes every second, whatever the cluster does: without one the dashboard, or the way to it, stands still.
const SILENT_MS = 5000;
setInterval(() => {
  if (!now.connected || performance.now() - now.at < SILENT_MS) return;
  now.connected = false;
  tellHealth();
}, 1000);

function listen() {
  const source = new EventSource("/api/stream");
  for (const [kind, take] of Object.entries(heard)) {
    source.addEventListener(kind, (event) => {
      now.at = performance.now();
      if (!now.connected) { now.connected = true; soon(tellHealth); }
      take(JSON.parse(event.data));
    });
  }
  source.onerror = () => {
    now.connected = false;
    tellHealth();
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

// ------------------------------------------------------------------------------------------------ how it is

function tellHealth() {
  const { state, view, servers } = now, badge = by("health"), trouble = by("trouble");
  const away = servers.filter((s) => s.state === "silent"), lost = servers.filter((s) => s.state === "lost");
  let word = "healthy", kind = "good", text = "";
  if (!now.connected) {
    [word, kind, text] = ["not connected", "bad", "The dashboard does not answer; this page goes on by itself when it does."];
  } else if (state?.store_error && servers.length && away.length === servers.length - lost.length) {
    [word, kind, text] = ["down", "bad", `Nobody answers, since ${clock(state.store_since)}: ${state.store_error}`];
  } else if (state?.store_error) {
    [word, kind, text] = ["no etcd", "bad", `etcd does not answer, since ${clock(state.store_since)}: ${state.store_error}`];
  } else if (!view) {
    [word, kind] = ["no view", ""];
  } else if (away.length) {
    [word, kind, text] = ["degraded", "bad", away.map((s) => `${s.id} does not answer: ${s.reason}`).slice(0, 3).join("; ")];
  } else if (view.short) {
    [word, kind] = ["healing", ""];
  } else if (view.moving) {
    [word, kind] = ["moving", ""];
  }
  if (state && !state.leader && !state.store_error) text = text || "No coordinator leads: nobody is replaced until one does.";
  badge.textContent = word;
  badge.className = `badge ${kind}`;
  trouble.textContent = text;
  trouble.hidden = !text;
  by("cluster").textContent = state ? state.cluster : "";
  document.title = `${word} · ${state ? state.cluster : "elasticps"}`;
  const serving = servers.filter((s) => s.held && s.state !== "lost").length;
  by("facts").textContent = view
    ? `epoch ${view.epoch} · ${plural(serving, "server")} · ${view.ranges} ranges × ${view.replicas} · led by ${state?.leader || "nobody"}` : "";
}

function drawRing() {
  const { view, servers } = now;
  if (forecast) return;
  ring.show(view, servers);
  const reasons = servers.filter((s) => s.state === "lost").map((s) => `${s.id} was lost at ${clock(s.since)}: ${s.reason}`);
  by("reason").textContent = reasons.length ? reasons.slice(0, 3).join("\n") : view ? `epoch ${view.epoch}: ${view.reason}` : "";
  if (!view) return ring.tellCentre("no view\nhas been formed");
  const left = view.short + view.moving;
  const done = view.peak ? 1 - left / view.peak : 1;
  const work = view.short ? `${plural(view.short, "range")} short\n${percent(done)} refilled`
    : view.moving ? `${plural(view.moving, "range")} on the way\n${percent(done)} moved` : "all replicas\nare there";
  ring.tellCentre(`epoch ${view.epoch}\n${work}`);
}

function drawServers() {
  const columns = now.columns?.server ?? [];
  fillTable(by("servers").tBodies[0], now.servers.map((s) => {
    const values = now.sample?.servers[s.id], value = (name) => (values ? values[columns.indexOf(name)] : null);
    const mark = value("memory_mark"), room = mark ? size(Math.max(0, mark - value("memory_used"))) : "–";
    const swatch = s.state === "lost" ? "var(--dead)" : ring.colour(s.id), address = `${s.address}, incarnation ${s.incarnation}`;
    return [{ text: s.zone ? `${s.id} (${s.zone})` : s.id, swatch, title: address },
      { text: s.joining ? ` ${s.joining} to fill` : "", state: s.state, title: s.reason },
      ...[s.heads, s.held, number(value("rows")), size(value("memory_used")), room, size(value("log_bytes")),
        number(value("push_s")), number(value("pull_s"))].map(right)];
  }), "No server has registered.");
}

function drawWorkers() {
  const told = now.sample?.workers ?? {};
  fillTable(bodyOf("workers"), now.workers.map((w) => {
    const [at, lag, step, open, hits, nbytes, shards] = told[w.id] ?? [];
    return [w.name, w.app, ...[w.id, number(at), number(open), number(lag), seconds(step), number(shards),
      hits == null ? "–" : percent(hits), size(nbytes)].map(right)];
  }), "No worker is there.");
}

function drawReaders() {
  const readers = now.sample?.readers ?? [];
  by("readers").hidden = !readers.length;
  fillTable(bodyOf("readers"), readers.map((r) => [r.name, r.app,
    ...[r.age_s == null ? "reads all rows" : seconds(r.age_s), size(r.unread_bytes)].map(right)]), "No reader is there.");
}

function drawTables(told) {
  fillTable(bodyOf("tables"), told.map((t) => {
    const { kind, ...values } = t.optimizer;
    if (t.lr_set !== null) values.lr = `${t.lr_set} (set for all)`;
    const options = Object.entries(values).map(([key, value]) => `${key}=${value}`).join(" ");
    const gone = Object.values(t.evicted).reduce((sum, count) => sum + count, 0), grows = t.policies.length > 0 || gone > 0;
    const why = Object.entries(t.evicted).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
    return [t.app, t.name, t.shape, t.dtype, `${kind ?? ""} ${options}`, [...t.filters, ...t.policies].join(", ") || "–",
      right(number(t.rows)), right(grows || t.waiting ? number(t.waiting) : "–"),
      { ...right(grows ? number(gone) : "–"), title: why }, right(size(t.bytes)), right(t.servers)];
  }), "No worker has made a table yet.");
}

function drawCheckpoints(told) {
  const { newest, catalog } = told;
  const age = newest && `${seconds(Math.max(0, Date.now() / 1000 + now.skew - newest.time))} ago`;
  const known = newest ? `The newest that the coordinator made: ${newest.cut}, ${age}. ` : "";
  const where = catalog ? `In ${catalog.url}${catalog.error ? `: ${catalog.error}` : ""}` : "Say --checkpoints URL to see what is kept.";
  by("newest").textContent = known + where;
  fillTable(bodyOf("checkpoints"), (catalog?.checkpoints ?? []).map((c) => (c.error
    ? [c.cut, "–", "–", right("–"), right("–"), right("–"), c.error]
    : [c.cut, day(c.time), c.since || "full", right(number(c.rows)), right(size(c.bytes)), right(c.tables), c.state])),
  "None are known.");
}

const bodyOf = (id) => by(id).querySelector("tbody");

// ------------------------------------------------------------------------------------------------ what is asked

function drawChoices() {
  const names = now.servers.filter((s) => s.state !== "lost").map((s) => s.id);
  for (const [id, first] of [["whose", [["", "the whole cluster"]]], ["leaver", []]]) {
    const select = by(id), kept = select.value;
    const wanted = [...first, ...names.map((name) => [name, name])];
    if (wanted.map(([v]) => v).join() === [...select.options].map((o) => o.value).join()) continue;
    fill(select, ...wanted.map(([value, text]) => el("option", { value }, text)));
    select.value = wanted.some(([v]) => v === kept) ? kept : wanted[0]?.[0] ?? "";
  }
}

async function ask(path, options) {
  try {
    const answer = await fetch(path, options), found = await answer.json();
    return answer.ok ? found : { error: found.error };
  } catch {
    return { error: "the dashboard does not answer" };
  }
}

by("whatif").addEventListener("submit", async (event) => {
  event.preventDefault();
  const drain = event.submitter?.value === "drain";
  const query = drain ? new URLSearchParams({ drain: by("leaver").value }) : new URLSearchParams({ servers: by("count").value });
  by("forecast").textContent = "planning …";
  const found = await ask(`/api/preview?${query}`);
  if (found.error) { by("forecast").textContent = found.error; return; }
  forecast = ring.opened(found.view);
  const known = new Map(now.servers.map((s) => [s.id, s]));
  const all = forecast.servers.map((id) => ({ zone: "", state: "serving", reason: "", joining: 0, peak: 0, ...known.get(id), ...found.counts[id], id }));
  ring.show(forecast, all.map((s) => ({ ...s, state: known.has(s.id) ? "serving" : "new" })), now.view);
  ring.tellCentre(`as it\nwould be\n${plural(forecast.servers.length, "server")}`);
  const moves = found.moves.slice(0, 12).map((m) => `${m.from} → ${m.to}: ${m.copies}`).join(", ");
  const command = drain ? `elasticps drain ${by("leaver").value}` : `elasticps scale ${by("count").value}`;
  by("forecast").textContent = found.copies
    ? `${plural(found.copies, "copy").replace("copys", "copies")} of ranges, about ${size(found.bytes)}: ${moves}${found.moves.length > 12 ? " …" : ""}. ${found.waiting} To do it: ${command}`
    : `Nothing would move. ${found.waiting}`;
  by("back").hidden = false;
});

by("back").addEventListener("click", () => {
  forecast = null;
  by("back").hidden = true;
  by("forecast").textContent = "";
  drawRing();
});

const acts = {
  drain: () => ({ act: "drain", server: by("leaver").value }),
  stay: () => ({ act: "cancel-drain", server: by("leaver").value }),
  scale: () => ({ act: "scale", servers: Number(by("count").value) }),
};
for (const [id, wanted] of Object.entries(acts)) {
  by(id).addEventListener("click", async () => {
    const headers = { authorization: `Bearer ${by("token").value}` };
    by("forecast").textContent = "asked …";
    const found = await ask("/api/act", { method: "POST", headers, body: JSON.stringify(wanted()) });
    by("forecast").textContent = found.error ?? found.done;
  });
}

by("look").addEventListener("click", async () => {
  by("look").disabled = true;
  by("looked").textContent = "looking …";
  const found = await ask("/api/hot");
  by("look").disabled = false;
  if (found.error) { by("looked").textContent = found.error; return; }
  const silent = found.silent.length ? `; no answer from ${found.silent.join(", ")}` : "";
  by("looked").textContent = `${number(found.sampled)} keys at ${plural(found.servers, "server")} in ${seconds(found.seconds)}${silent}`;
  const shares = (pairs) => pairs.map(([key, share]) => `${key} (${percent(share)})`).join(", ") || "–";
  fillTable(by("hot").tBodies[0], [["ranges", right(number(found.sampled)), shares(found.ranges)],
    ...found.tables.map((t) => [t.name, right(number(t.sampled)), shares(t.keys)])], "");
});

async function loadHistory() {
  const name = whose, found = await ask(`/api/history?${new URLSearchParams({ server: name })}`);
  if (name === whose && !found.error) charts.setHistory(found);
}

by("whose").addEventListener("change", async () => {
  whose = by("whose").value;
  if (whose) return loadHistory();
  const told = await ask("/api/snapshot");
  if (!told.error && !whose) charts.setHistory(told.history);
});

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => charts.setRange({ live: true, span: Number(button.dataset.span) }));
}
by("live").addEventListener("click", () => charts.setRange({ live: true }));
charts.onRange((live, named) => {
  by("live").setAttribute("aria-pressed", String(live));
  const { from, to } = charts.shown();
  by("window").textContent = live ? "" : `${clock(from)} – ${clock(to)}`;
  if (live) history.replaceState(null, "", location.pathname);
  else if (!named) history.replaceState(null, "", `#t=${from.toFixed(2)}-${to.toFixed(2)}`);
});
addEventListener("hashchange", events.goToHash);

function repaint() {
  charts.build();
  ring.redraw();
  drawServers();
}
by("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

charts.build();
listen();
