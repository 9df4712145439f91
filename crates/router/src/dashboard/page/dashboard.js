// Shows what /dashboard/state says, once a second.
"use strict";

const POLL_MS = 1000;
// A router that takes longer, or a broken connection, is no answer.
const ANSWER_MS = 5000;
// The charts begin with the shorter span and grow to the longer one.
const SPANS_S = [60, 300];
const ROLES = ["prefill", "mixed", "decode"];
// With less room the label of a link is only in the table.
const LABEL_HEIGHT = 26;

const PHASES = [
  ["queue", "queue", "waits until a prefill worker schedules it"],
  ["prefill", "prefill", "its prompt is computed"],
  ["transfer", "transfer", "waits for KV on its way to the decode worker"],
  ["first_decode", "first decode", "until the second token"],
  ["decode", "decode", "from the second token to the last"],
  ["recovery", "recovery", "attempts that were lost, and the waits between them"],
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
    ["Requests running", count(Math.max(state.requests_in_flight - state.requests_waiting, 0))],
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
      fact("queued tokens", count(load.waiting_prefill_tokens)),
      fact("KV blocks", `${count(used)} / ${count(load.total_blocks)}`),
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
  const known = columns.filter((column) => column.dataset.role);
  byId("topology").classList.toggle("crowded", known.length > 2);
  byId("topology").replaceChildren(links, ...(columns.length ? columns : [none]));
}

function showLinks(found, inUse) {
  const busiest = inUse > found.length ? `, the ${found.length} busiest of ${inUse} links` : "";
  byId("links-shown").textContent = busiest;
  const rows = found.map((link) => html("tr", {},
    html("td", {}, link.from), html("td", {}, link.to),
    html("td", {}, byteRate(link.bytes_per_s)), html("td", {}, rate(link.handoffs_per_s))));
  byId("link-table").hidden = !found.length;
  byId("link-table").tBodies[0].replaceChildren(...rows);
  drawLinks(found);
}

// Draws the links that go from one column to another. Each has its own place on the edges of both
// cards, in the order of the cards on the other side, so that links do not cross at their ends.
function drawLinks(found) {
  const area = byId("topology").getBoundingClientRect();
  const boxes = new Map([...document.querySelectorAll("[data-worker]")].map((each) =>
    [each.dataset.worker, each.getBoundingClientRect()]));
  const shown = found.filter(({ from, to }) => boxes.get(from)?.right < boxes.get(to)?.left);
  const at = (link, end, other) => {
    const beside = shown.filter((each) => each[end] === link[end])
      .sort((a, b) => boxes.get(a[other]).top - boxes.get(b[other]).top);
    const { top, height } = boxes.get(link[end]);
    const part = (beside.indexOf(link) + 1) / (beside.length + 1);
    return { y: top - area.top + height * part, room: height / (beside.length + 1) };
  };
  const most = Math.max(...shown.map((link) => link.bytes_per_s), 1);
  const [lines, labels] = [[], []];
  for (const link of shown) {
    const [x1, x2] = [boxes.get(link.from).right - area.left, boxes.get(link.to).left - area.left];
    const [start, end] = [at(link, "from", "to"), at(link, "to", "from")];
    const middle = (x1 + x2) / 2;
    const d = `M${x1} ${start.y}C${middle} ${start.y} ${middle} ${end.y} ${x2 - 6} ${end.y}`;
    const width = (1.5 + 3 * (link.bytes_per_s / most)).toFixed(1);
    lines.push(svg("path", { d, class: "link", "stroke-width": width }));
    lines.push(svg("path", { d: `M${x2} ${end.y}l-9 -5v10z`, class: "arrow" }));
    if (start.room < LABEL_HEIGHT) continue;
    labels.push(svg("text", { x: x1 + 8, y: start.y - 8 },
      byteRate(link.bytes_per_s),
      svg("tspan", { class: "less" }, ` · ${count(link.handoffs_per_s)} handoffs/s`)));
  }
  // On a wide page the table has only what the drawing lacks.
  byId("link-table").classList.toggle("drawn", labels.length === found.length);
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

// What a request must keep to count as goodput.
function objectives({ objectives: { ttft_s, tpot_s } }) {
  const kept = [["TTFT", ttft_s], ["TPOT", tpot_s]].filter(([, most]) => most !== null);
  if (!kept.length) return "no objective for goodput";
  return kept.map(([name, most]) => `${name} ≤ ${seconds(most)}`).join(", ");
}

const CHARTS = [
  { title: "Time to first token", lines: quantiles("ttft"), format: seconds, least: 0.01 },
  { title: "Inter-token latency", lines: quantiles("itl"), format: seconds, least: 0.001 },
  {
    title: "Requests", format: rate, least: 1, note: objectives,
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
    if (times && share < 0.05) continue;
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

// Rows on the page, by request; they stay as long as they are right, and so do their hover titles.
let rows = new Map();
let rowsLongest = 0;

function showRequests(requests) {
  const longest = Math.max(...requests.map((request) => request.total_s), 1e-6);
  const known = longest === rowsLongest ? rows : new Map();
  const key = (request) => `${request.id} ${request.ended_at}`;
  const shown = new Map(requests.map((request) =>
    [key(request), known.get(key(request)) ?? row(request, longest)]));
  const changed = [...shown.values()].some((element) => !element.isConnected);
  [rows, rowsLongest] = [shown, longest];
  byId("no-requests").hidden = requests.length > 0;
  if (changed) byId("requests").replaceChildren(...shown.values());
}

// -- live --

const links = byId("links");
let latest = null;

function show(state) {
  latest = state;
  showTotals(state);
  showWorkers(state.workers);
  showLinks(state.links, state.links_in_use);
  const covered = state.series.length * state.interval_s;
  const span = SPANS_S.find((each) => each >= covered) ?? SPANS_S[1];
  for (const chart of CHARTS) {
    chart.say(state);
    chart.draw(state.series, span);
  }
  showRequests(state.requests);
  document.documentElement.dataset.shown = `${state.series.length}`;
}

async function poll() {
  const live = byId("live");
  if (!document.hidden) {
    try {
      const signal = AbortSignal.timeout(ANSWER_MS);
      const answer = await fetch("dashboard/state", { cache: "no-store", signal });
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
