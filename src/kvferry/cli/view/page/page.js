"use strict";
// Draws /state.json again and again. Text from elsewhere goes into the page as text only.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const TIMEOUT_MS = 8000;
let token = "";
let asked = 0;

function element(name, attributes = {}, ...children) {
  const made = attributes.svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key !== "svg") made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const draw = (name, attributes, ...children) => element(name, { svg: true, ...attributes }, ...children);

// Text in which `names` stand in backticks.
const words = (text) => text.split("`").map((part, index) => (index % 2 ? element("code", {}, part) : part));

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

const rate = (bytes) => (bytes === null || bytes === undefined ? "–" : `${size(bytes)}/s`);
const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "–");

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

const idle = (minutes) => (minutes <= 1 ? "just now" : `${duration(60 * minutes)} ago`);

function table(columns, rows, none) {
  if (!rows.length) return element("p", { class: "none" }, none);
  const head = columns.map(([name, , kind]) => element("th", kind ? { class: kind } : {}, name));
  const body = rows.map((row) => element("tr", {}, ...columns.map(([name, value, kind]) => {
    const shown = value(row);
    const attributes = { "data-name": name };
    if (kind) attributes.class = kind;
    return element("td", attributes, shown);
  })));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body));
}

function tile(name, value, note, share) {
  const made = element("div", { class: "tile" }, element("div", { class: "name" }, name),
    element("div", { class: "value" }, value));
  if (share !== undefined) {
    const bar = element("i");
    bar.style.width = `${Math.min(100, 100 * share)}%`;
    made.append(element("div", { class: "bar" }, bar));
  }
  made.append(element("div", { class: "note" }, note));
  return made;
}

function tiles(state) {
  const look = state.store.look;
  const recent = state.recent;
  const minutes = Math.round(state.recent_s / 60);
  const shown = [];
  if (look) {
    let lookups = 0;
    let hits = 0;
    for (const one of Object.values(recent.namespaces)) { lookups += one.lookups; hits += one.hits; }
    const leases = look.namespaces.reduce((sum, one) => sum + one.reserved, 0);
    shown.push(
      tile("Store used", percent(look.used_bytes, look.capacity_bytes),
        `${size(look.used_bytes)} of ${size(look.capacity_bytes)}`,
        look.used_bytes / look.capacity_bytes),
      tile("Hit rate", percent(hits, lookups), lookups
        ? `of ${count(lookups)} chunks in ${minutes} min` : `nothing looked up in ${minutes} min`),
      tile("Engines alive", look.engines === null ? "…" : count(look.engines),
        look.engines === null ? "known in a few seconds" : "processes that hold the store"),
      tile("Evictions", count(recent.evicted), `pages in ${minutes} min, ${count(look.evicted)} ever`),
      tile("Leases", count(leases), "slots reserved by writers"));
  }
  if (state.engines.length) {
    shown.push(tile("Loading", rate(state.bandwidth.load), "all engines, last 30 s"),
      tile("Storing", rate(state.bandwidth.store), "all engines, last 30 s"));
  }
  byId("tiles").replaceChildren(...shown);
}

function verdict(state) {
  const shown = state.wrong.map((one) => element("div", { class: `wrong ${one.level}` },
    element("b", {}, one.what), element("span", {}, ...words(one.action))));
  if (!shown.length) {
    const what = state.store.look ? "Nothing is wrong." : "Looking at the store …";
    const quiet = state.engines.length ? "" :
      "No engines are listed (--engine URL), so bandwidth, drops and breakers are not seen here.";
    shown.push(element("div", { class: "right good" }, element("b", {}, what),
      element("span", {}, quiet)));
  }
  byId("verdict").replaceChildren(...shown);
}

function path(points, column, top) {
  const first = points[0][0] || 1;
  return points.map((point, index) => {
    const x = 1000 * (1 - point[0] / first);
    const y = 150 - 140 * point[column] / top;
    return `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
  }).join("");
}

function chart(state) {
  const points = state.bandwidth.series;
  if (!state.engines.length) {
    return [element("p", { class: "none" }, "No engines are listed: start with --engine URL.")];
  }
  if (points.length < 2) return [element("p", { class: "none" }, "Known in a few seconds.")];
  const top = Math.max(...points.map((point) => Math.max(point[1], point[2])), 1);
  const lines = draw("svg", { viewBox: "0 0 1000 160", preserveAspectRatio: "none", "aria-hidden": "true" },
    ...[10, 80, 150].map((y) => draw("path", { class: "grid", d: `M0 ${y}L1000 ${y}` })),
    draw("path", { class: "store", d: path(points, 2, top) }),
    draw("path", { class: "load", d: path(points, 1, top) }));
  const last = points[points.length - 1];
  const legend = element("p", { class: "legend" }, `top line: ${rate(top)}; from `,
    `${duration(points[0][0])} ago to now. `,
    element("b", { class: "of-load" }, "— loading"), ` now ${rate(last[1])}, `,
    element("b", { class: "of-store" }, "- - storing"), ` now ${rate(last[2])}`);
  return [lines, legend];
}

function condition(engine) {
  if (!engine.is_up) return element("span", { class: "bad" }, engine.error);
  if (!engine.has_kvferry) return element("span", { class: "warning" }, "shows no figures of kvferry");
  if (engine.gauges.standing_aside) return element("span", { class: "bad" }, "stands aside");
  if (engine.gauges.breaker_open) return element("span", { class: "bad" }, "breaker open");
  return element("span", { class: "good" }, "well, breaker closed");
}

function tables(state) {
  const minutes = Math.round(state.recent_s / 60);
  const known = (value) => (engine) => (engine.is_up && engine.has_kvferry ? value(engine) : "–");
  byId("engines").replaceChildren(table([
    ["engine", (e) => e.name],
    ["condition", condition, "words"],
    ["model", (e) => e.model || "–", "words"],
    ["loading", known((e) => rate(e.load_bytes_per_s))],
    ["storing", known((e) => rate(e.store_bytes_per_s))],
    [`hit rate, ${minutes} min`, known((e) => percent(e.hits, e.lookups))],
    ["loads pending", known((e) => count(e.gauges.loads_pending || 0))],
    ["stores pending", known((e) => count(e.gauges.stores_pending || 0))],
  ], state.engines, "None are listed: start with --engine http://host:8000/metrics for each."));
  const recent = state.recent.namespaces;
  const look = state.store.look;
  byId("namespaces").replaceChildren(table([
    ["model", (s) => s.model || "–"],
    ["namespace", (s) => element("code", {}, s.namespace), "words"],
    ["pages", (s) => count(s.pages)],
    ["size", (s) => size(s.bytes)],
    [`hit rate, ${minutes} min`, (s) => percent(recent[s.namespace].hits, recent[s.namespace].lookups)],
    ["hit rate, ever", (s) => percent(s.hit_chunks, s.lookup_chunks)],
    ["leases", (s) => count(s.reserved)],
    ["segments", (s) => count(s.segments)],
  ], look ? look.namespaces : [], "None yet: no engine has used the store."));
  const reasons = (what) => [["reason", (r) => r.reason.replaceAll("_", " ")],
    [`${what}, ${minutes} min`, (r) => count(r.recent)], [`${what}, ever`, (r) => count(r.ever)]];
  const none = state.engines.length ? "None." : "Not known: no engines are listed.";
  byId("drops").replaceChildren(table(reasons("chunks"), state.reasons.store_drops_total, none));
  const failures = [
    ...state.reasons.load_failures_total.map((r) => ({ ...r, reason: `failed: ${r.reason}` })),
    ...state.reasons.loads_declined_total.map((r) => ({ ...r, reason: `declined: ${r.reason}` }))];
  byId("failures").replaceChildren(table(reasons("times"), failures, none));
  byId("prefixes").replaceChildren(table([
    ["first chunk", (p) => element("code", {}, p.key)],
    ["model", (p) => p.model || "–", "words"],
    ["minutes with use, last hour", (p) => count(p.minutes)],
    ["last used", (p) => idle(p.idle_minutes)],
    ["longest, tokens", (p) => count(p.tokens)],
    ["pages", (p) => count(p.pages)],
  ], state.prefixes, "None: the store has no pages."));
}

function show(state) {
  const look = state.store.look;
  byId("store").textContent = look ? `store ${look.store_id.slice(0, 12)} · ${look.catalog}` : "";
  const worst = state.wrong.find((one) => one.level === "bad") || state.wrong[0];
  document.title = worst ? `${worst.level === "bad" ? "✗" : "!"} kvferry` : "kvferry";
  verdict(state);
  tiles(state);
  byId("chart").replaceChildren(...chart(state));
  tables(state);
  const refused = Object.entries(state.refused).map(([why, times]) => `${why} ${count(times)}`);
  byId("foot").textContent = `kvferry ${state.version}` +
    (refused.length ? `; requests that this page's port refused: ${refused.join(", ")}` : "");
  byId("main").hidden = false;
}

function fresh(text, isOld) {
  byId("fresh").textContent = text;
  byId("fresh").className = isOld ? "old" : "";
}

let shownAt = 0;

function ask(isRefused) {
  byId("ask").hidden = false;
  byId("main").hidden = true;
  fresh("", false);
  byId("refused").textContent = isRefused ? "That is not the token." : "";
}

async function look() {
  const turn = ++asked;
  let wait = 2000;
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const reply = await fetch("state.json", { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (reply.status === 401) { ask(token !== ""); return; }
    if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
    const state = await reply.json();
    byId("ask").hidden = true;
    if (token) sessionStorage.setItem("token", token);
    if (state.store) {
      show(state);
      shownAt = Date.now();
      wait = 1000 * Math.min(10, Math.max(1, state.interval_s));
      fresh(`as of ${new Date(1000 * state.at).toLocaleTimeString()}`, false);
    }
  } catch (error) {
    const age = shownAt ? `; shown is what was ${duration((Date.now() - shownAt) / 1000)} ago` : "";
    fresh(`kvferry dashboard does not answer${age}`, true);
  }
  if (turn === asked) setTimeout(look, wait);
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  look();
});

const named = new URLSearchParams(location.hash.slice(1)).get("token");
if (named) history.replaceState(null, "", location.pathname);
token = named || sessionStorage.getItem("token") || "";
look();
