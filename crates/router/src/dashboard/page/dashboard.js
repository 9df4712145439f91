// Shows what /dashboard/state says, once a second.
"use strict";

const POLL_MS = 1000;
const SPAN_S = 300;
const ROLES = ["prefill", "mixed", "decode"];
// On the drawing, more than these are only in the table.
const MOST_LABELS = 12;

const PHASES = [
  ["queue", "queue", "waits until a prefill worker schedules it"],
  ["prefill", "prefill", "its prompt is computed"],
  ["transfer", "transfer", "waits for KV on its way to the decode worker"],
  ["first_decode", "first decode", "until the second token"],
  ["decode", "decode", "from the second token to the last"],
  ["rest", "messages", "messages between processes, and what no phase has"],
];

const HEALTH = {
  ready: "●", connecting: "◌", suspect: "◐", draining: "◒", failing: "▲", down: "✕",
};

const byId = (id) => document.getElementById(id);

function scaled(value, units, step) {
  let i = 0;
  while (i + 1 < units.length && value >= step) {
    value /= step;
    i += 1;
  }
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[i]}`.trim();
}

const count = (value) => scaled(value, ["", "k", "M", "G"], 1000);
const rate = (value) => `${count(value)}/s`;
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
const byteRate = (value) => `${bytes(value)}/s`;

function seconds(value) {
  if (value === 0) return "0";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const ms = value * 1000;
  return `${ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`;
}

// -- numbers of the whole deployment --

function showTotals(state) {
  const sum = (read) => state.workers.reduce((all, { load }) => all + (load ? read(load) : 0), 0);
  const recent = state.series.slice(-5);
  const mean = (read) =>
    recent.reduce((all, point) => all + read(point), 0) / (recent.length * state.interval_s || 1);
  const blocks = sum((load) => load.total_blocks);
  const used = blocks - sum((load) => load.free_blocks);
  const up = state.workers.filter((worker) => worker.state === "ready").length;
  const totals = [
    ["Workers ready", `${up} of ${state.workers.length}`],
    ["Requests running", count(state.requests_in_flight - state.requests_waiting)],
    ["Waiting to be placed", count(state.requests_waiting)],
    ["Finished", rate(mean((point) => point.done))],
    ["Output tokens", rate(mean((point) => point.output_tokens))],
    ["KV in use", blocks ? `${((100 * used) / blocks).toFixed(0)} %` : "–"],
  ];
  byId("totals").replaceChildren(...totals.map(([name, value]) =>
    html("div", {}, html("dt", {}, name), html("dd", {}, value))));
}

// -- workers and links --

function fact(name, value) {
  return html("div", {}, html("dt", {}, name), html("dd", {}, value));
}

function meter(used, total) {
  const bar = html("div", { class: "meter" }, html("i", {}));
  bar.firstChild.style.width = `${total ? (100 * used) / total : 0}%`;
  return bar;
}

function card(worker) {
  const name = worker.engine_id ?? worker.address;
  const mark = html("span", { class: "mark", "aria-hidden": "true" }, HEALTH[worker.state]);
  const health = html("span", { class: `health ${worker.state}` }, mark, worker.state);
  const title = html("h4", {}, html("span", { class: "id" }, `${worker.id}`), worker.address);
  const facts = html("dl", {});
  const { load } = worker;
  const parts = [html("div", { class: "head" }, title, health)];
  parts.push(html("p", { class: "model", title: `engine ${name}` }, worker.model ?? "no report yet"));
  if (load) {
    const used = load.total_blocks - load.free_blocks;
    facts.append(
      fact("running", count(load.running_requests)),
      fact("waiting", count(load.waiting_requests)),
      fact("prompt tokens queued", count(load.waiting_prefill_tokens)),
      fact("KV blocks", `${used} / ${load.total_blocks}`),
    );
    parts.push(facts, meter(used, load.total_blocks));
  }
  if (worker.fails_by.length) {
    parts.push(html("p", { class: "trouble" }, `fails by: ${worker.fails_by.join(", ")}`));
  }
  return html("article", { class: "worker", "data-worker": worker.id }, ...parts);
}

function showWorkers(workers) {
  const columns = [...ROLES, null].flatMap((role) => {
    const members = workers.filter((worker) => worker.role === role);
    if (!members.length) return [];
    const title = html("h3", {}, role ?? "role unknown", " ",
      html("small", {}, `${members.length}`));
    return [html("div", { class: "role", "data-role": role ?? "" }, title, ...members.map(card))];
  });
  const none = html("p", { class: "none" }, "The router knows no worker yet.");
  byId("topology").replaceChildren(links, ...(columns.length ? columns : [none]));
}

function showLinks(found) {
  const rows = found.map((link) => html("tr", {},
    html("td", {}, link.from), html("td", {}, link.to),
    html("td", {}, byteRate(link.bytes_per_s)), html("td", {}, rate(link.handoffs_per_s))));
  byId("link-table").hidden = !found.length;
  byId("link-table").tBodies[0].replaceChildren(...rows);
  drawLinks(found);
}

function drawLinks(found) {
  const area = byId("topology").getBoundingClientRect();
  const most = Math.max(...found.map((link) => link.bytes_per_s), 1);
  const lines = [];
  const labels = [];
  found.forEach((link, i) => {
    const [from, to] = [link.from, link.to].map((id) =>
      document.querySelector(`[data-worker="${CSS.escape(id)}"]`)?.getBoundingClientRect());
    if (!from || !to || from.right >= to.left) return;
    const [x1, x2] = [from.right - area.left, to.left - area.left];
    const [y1, y2] = [from, to].map((box) => box.top + box.height / 2 - area.top);
    const middle = (x1 + x2) / 2;
    const width = 1.5 + 4 * (link.bytes_per_s / most);
    const d = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2 - 6} ${y2}`;
    lines.push(svg("path", { d, class: "link", "stroke-width": width.toFixed(1) }));
    lines.push(svg("path", { d: `M${x2} ${y2}l-9 -5v10z`, class: "arrow" }));
    if (found.length > MOST_LABELS) return;
    // Links that cross do so in the middle, so labels stand at different parts of the way.
    const part = found.length > 1 ? 0.3 + (0.4 * i) / (found.length - 1) : 0.5;
    const curve = lines[lines.length - 2];
    const at = curve.getPointAtLength(curve.getTotalLength() * part);
    labels.push(svg("text", { x: at.x, y: at.y - 10, "text-anchor": "middle" },
      byteRate(link.bytes_per_s)));
    labels.push(svg("text", { x: at.x, y: at.y + 18, "text-anchor": "middle", class: "less" },
      `${rate(link.handoffs_per_s)} handoffs`));
  });
  // On a wide page the table has only what the drawing lacks.
  const drawn = lines.length === 2 * found.length && found.length <= MOST_LABELS;
  byId("link-table").classList.toggle("drawn", drawn);
  links.setAttribute("viewBox", `0 0 ${area.width} ${area.height}`);
  links.replaceChildren(...lines, ...labels);
}

// -- the last minutes --

const per = (key) => (point) => point[key] / latest.interval_s;
const of = (key) => (point) => point[key];
const quantiles = (key) => [
  { name: "p50", value: of(`${key}_p50`), style: "first" },
  { name: "p99", value: of(`${key}_p99`), style: "second" },
];
const CHARTS = [
  { title: "Time to first token", lines: quantiles("ttft"), format: seconds, least: 0.01 },
  { title: "Inter-token latency", lines: quantiles("itl"), format: seconds, least: 0.001 },
  {
    title: "Requests", format: rate, least: 1,
    lines: [
      { name: "goodput", value: per("good"), style: "first" },
      { name: "finished", value: per("done"), style: "second" },
    ],
  },
  {
    title: "Output tokens", format: rate, least: 10,
    lines: [{ name: "all", value: per("output_tokens"), style: "first" }],
  },
  {
    title: "KV moved", format: byteRate, least: 1000,
    lines: [{ name: "all links", value: per("transfer_bytes"), style: "first" }],
  },
  {
    title: "Trouble", format: rate, least: 1,
    lines: [
      { name: "retries", value: per("retries"), style: "first" },
      { name: "refused", value: per("refused"), style: "second" },
      { name: "failed", value: per("failed"), style: "third" },
    ],
  },
].map((described) => new Chart(described));

// -- the last requests --

function phasesOf(request) {
  const found = request.phases;
  if (!found) return null;
  const known = PHASES.slice(0, -1).map(([key]) => found[key]);
  const rest = request.total_s - known.reduce((all, each) => all + each, 0);
  return [...known, Math.max(rest, 0)];
}

function bar(request, longest) {
  const times = phasesOf(request);
  const element = html("div", { class: "bar" });
  const parts = times
    ? PHASES.map(([key, name], i) => [key, name, times[i]])
    : [["ended", request.outcome, request.total_s]];
  for (const [key, name, time] of parts) {
    const share = (100 * time) / longest;
    if (share < 0.05) continue;
    const segment = html("span", { class: `phase ${key}`, title: `${name}: ${seconds(time)}` });
    segment.style.width = `${share}%`;
    if (share > 12) segment.textContent = seconds(time);
    element.append(segment);
  }
  const told = parts.map(([, name, time]) => `${name} ${seconds(time)}`).join(", ");
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", told);
  return element;
}

function row(request, longest) {
  const found = request.phases;
  const done = request.outcome === "done";
  const tokens = `${count(request.prompt_tokens)} in, ${count(request.output_tokens)} out`;
  const facts = [tokens];
  if (found?.cached_prompt_tokens) facts.push(`${count(found.cached_prompt_tokens)} cached`);
  if (found?.transfer_bytes) facts.push(`${bytes(found.transfer_bytes)} KV`);
  if (found?.replacements) facts.push(`placed again ${found.replacements} ×`);
  if (found) facts.push(`TTFT ${seconds(found.first_token)}`);
  const { prefill_worker: from, decode_worker: to } = found ?? {};
  const route = found ? (from === to ? from : `${from} → ${to}`) : "";
  return html("li", { "data-request": request.id },
    html("span", { class: "time" }, new Date(request.ended_at * 1000).toLocaleTimeString([], { hour12: false })),
    html("span", { class: "route", title: request.id }, route),
    bar(request, longest),
    html("span", { class: "total" }, seconds(request.total_s)),
    html("span", { class: done ? "facts" : "facts trouble" },
      (done ? facts : [request.outcome.replace("_", " "), ...facts]).join(" · ")));
}

function showRequests(requests) {
  const longest = Math.max(...requests.map((request) => request.total_s), 1e-6);
  byId("no-requests").hidden = requests.length > 0;
  byId("requests").replaceChildren(...requests.map((request) => row(request, longest)));
}

// -- live --

const links = byId("links");
let latest = null;

function show(state) {
  latest = state;
  showTotals(state);
  showWorkers(state.workers);
  showLinks(state.links);
  for (const chart of CHARTS) chart.draw(state.series, SPAN_S);
  showRequests(state.requests);
  document.documentElement.dataset.shown = `${state.series.length}`;
}

async function poll() {
  const live = byId("live");
  if (!document.hidden) {
    try {
      const answer = await fetch("dashboard/state", { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await answer.json());
      live.textContent = `● live · ${latest.version}`;
      live.className = "";
    } catch (error) {
      live.textContent = `✕ no answer from the router (${error.message})`;
      live.className = "lost";
    }
  }
  setTimeout(poll, POLL_MS);
}

byId("charts").append(...CHARTS.map((chart) => chart.element));
byId("legend").append(...PHASES.map(([key, name, meaning]) =>
  html("li", { title: meaning }, html("span", { class: `phase ${key}` }), name)));
addEventListener("resize", () => latest && drawLinks(latest.links));
poll();
