// The page. It holds one stream of updates open, and shows what each brings. Everything that comes from the server is
// put on the page as text (textContent), never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
// "#accumulators" is where the skip link leads.
const idInAddress = () => (/^#[0-9a-f]{16}$/.test(location.hash) ? location.hash.slice(1) : "");
const state = { text: "", sort: "name", rows: 100, detail: idInAddress(), workers: 100 };
const STEP = 100, MOST = 1000;
const SVG = "http://www.w3.org/2000/svg";
const narrow = matchMedia("(max-width: 640px)");

// Texts

const digits = (x) => (x >= 100 ? Math.round(x).toLocaleString("en") : x >= 10 ? x.toFixed(1) : x ? String(+x.toFixed(2)) : "0");
const count = (x) => x.toLocaleString("en");
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

function bytes(x) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = 0;
  while (x >= 1000 && n < 4) { x /= 1024; n += 1; }
  return `${n && x < 99.5 ? +x.toPrecision(3) : Math.round(x)} ${units[n]}`;
}

function seconds(x) {
  if (x < 0.0995) return `${+(x * 1000).toPrecision(2)} ms`;
  if (x < 9.95) return `${+x.toPrecision(2)} s`;
  if (x < 90) return `${Math.round(x)} s`;
  if (x < 5400) return `${Math.round(x / 60)} min`;
  return x < 172800 ? `${Math.round(x / 3600)} h` : `${Math.round(x / 86400)} d`;
}

// Elements

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value; else if (name === "text") made.textContent = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function setText(target, text) { if (target.textContent !== text) target.textContent = text; }
function setWidth(target, share) { target.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`; }
const items = (listed) => listed.map(([dt, dd]) => element("div", {}, element("dt", { text: dt }), element("dd", { text: dd })));
const cell = (text, kind = "") => element("td", { class: kind, text });

// Ages: elements whose text grows older. `at` is in milliseconds of the server's clock, or in seconds of the dashboard's.

const ages = new Map();
let received = { clock: Date.now(), now: 0, at: performance.now() };
const elapsed = () => (performance.now() - received.at) / 1000;
const ageOfClock = (ms) => Math.max((received.clock - ms) / 1000 + elapsed(), 0);
const ageOfHeard = (at) => Math.max(received.now - at + elapsed(), 0);

function keepAge(target, text) { ages.set(target, text); setText(target, text()); }
function showAges() {
  for (const [target, text] of ages) {
    if (target.isConnected) setText(target, text()); else ages.delete(target);
  }
}
setInterval(showAges, 1000);

// The server, and all accumulators together

function showServer(server) {
  setText(byId("address"), server.address);
  document.title = `redisacc: ${server.address}`;
  for (const name of ["applied", "takes", "stale"]) setText(byId(`sum-${name}`), digits(server[name]));
  setText(byId("sum-bytes"), bytes(server.bytes));
  for (const name of ["late", "gone", "waiting", "unacknowledged"]) setText(byId(`sum-${name}`), count(server[name]));
  byId("sum-late").closest("div").classList.toggle("alarm", server.late > 0 && server.waiting > 0);
  showNodes(server.nodes);
  const problems = [server.problem, ...server.problems].filter(Boolean);
  byId("problem").hidden = !problems.length;
  if (problems.length) setText(byId("problem"), problems.join(" · "));
  document.body.classList.toggle("stale-data", Boolean(server.problem));
  showLink(server.problem ? "no answer" : "live");
  const shown = server.matching === server.accumulators ? count(server.accumulators) : `${count(server.matching)} of ${count(server.accumulators)}`;
  setText(byId("matching"), shown);
  byId("more").hidden = server.matching <= state.rows || state.rows >= MOST;
  byId("none").hidden = server.matching > 0;
  setText(byId("none"), server.accumulators ? "No name contains this text." : "There are no accumulators yet. They appear here when a process opens one.");
}

function memoryText(node) {
  if (node.used_memory === null) return ["unknown", " this user may not ask"];
  return [bytes(node.used_memory), node.maxmemory ? ` of ${bytes(node.maxmemory)}${node.evicts ? ", may evict" : ""}` : " without a limit"];
}

function memoryBar(target, node) {
  const share = node.maxmemory ? node.used_memory / node.maxmemory : 0;
  setWidth(target, share);
  target.className = share > 0.85 ? "high" : "";
}

function showNodes(nodes) {
  const alone = nodes.length === 1;
  byId("nodes").hidden = nodes.length < 2;
  byId("memory").querySelector("dt").textContent = alone ? `Memory of ${nodes[0].version || "the server"}` : "Memory of all nodes";
  const known = nodes.filter((node) => node.used_memory !== null);
  const sum = { used_memory: null, maxmemory: 0, evicts: known.some((node) => node.evicts) };
  if (known.length) {
    sum.used_memory = known.reduce((total, node) => total + node.used_memory, 0);
    sum.maxmemory = known.every((node) => node.maxmemory) ? known.reduce((total, node) => total + node.maxmemory, 0) : 0;
  }
  const [used, limit] = memoryText(sum);
  setText(byId("memory-used"), used);
  setText(byId("memory-limit"), limit);
  memoryBar(byId("memory-bar"), sum);
  byId("memory-bar").parentElement.hidden = !sum.maxmemory;
  byId("nodes-rows").replaceChildren(...(alone ? [] : nodes.map(nodeRow)));
}

function nodeRow(node) {
  const inner = element("i");
  memoryBar(inner, node);
  const memory = element("td", {}, ...(node.maxmemory ? [element("div", { class: "bar" }, inner)] : []), memoryText(node).join(""));
  const rate = (value, text) => cell(value === null ? "–" : text(value), "number");
  return element("tr", {}, cell(node.address, "mono"), cell(node.version), memory, rate(node.received_per_second, (x) => `${bytes(x)}/s`),
    rate(node.sent_per_second, (x) => `${bytes(x)}/s`), rate(node.commands_per_second, (x) => `${digits(x)}/s`), rate(node.clients, count));
}

// The list

const rows = new Map();

function makeRow(id) {
  const name = element("button", { type: "button" });
  const bar = element("i"), text = element("span");
  const cells = [element("td", {}, name), cell("", "number"), element("td", {}, element("div", { class: "round-cell" }, element("div", { class: "bar" }, bar), text)),
    cell("", "number"), cell("", "number spare"), cell("", "number spare")];
  const tr = element("tr", { "data-id": id }, ...cells);
  return { tr, name, bar, text, cells };
}

function roundText(row) {
  if (row.waiting && row.required !== null) return `${count(row.count)} of ${count(row.required)}`;
  return plural(row.count, "gradient");
}

function fillBar(target, row) {
  const share = row.required ? row.count / row.required : 0;
  setWidth(target, share);
  target.className = share >= 1 ? "full" : "";
}

function showRow(id, row) {
  let known = rows.get(id);
  if (!known) rows.set(id, (known = makeRow(id)));
  known.row = row;
  setText(known.name, row.name);
  known.name.title = row.name;
  setText(known.cells[1], row.step);
  fillBar(known.bar, row);
  setText(known.text, roundText(row));
  setText(known.cells[3], row.late ? count(row.late) : "–");
  known.tr.classList.toggle("stalled", row.stalled);
  known.cells[3].className = `number ${row.late ? (row.waiting ? "some" : "") : "none"}`;
  setText(known.cells[4], digits(row.applied));
  setText(known.cells[5], row.bytes ? bytes(row.bytes) : "–");
}

function showOrder(order) {
  const wanted = new Set(order);
  for (const [id, known] of rows) if (!wanted.has(id)) { known.tr.remove(); rows.delete(id); }
  // Rows that are where they belong stay untouched, so that the focus stays where it is.
  const body = byId("rows");
  const kinds = order.map((id) => rows.get(id).row.training);
  const grouped = kinds.includes(true) && kinds.includes(false);
  const wantedRows = order.flatMap((id, n) => [...(grouped && kinds[n] !== kinds[n - 1] ? [GROUPS[kinds[n]]] : []), rows.get(id).tr]);
  for (const group of Object.values(GROUPS)) if (!grouped) group.remove();
  let next = body.firstElementChild;
  for (const tr of wantedRows) {
    if (tr === next) next = next.nextElementSibling; else body.insertBefore(tr, next);
  }
  // One alone is what everybody wants to see. On a phone, the list comes first if there are several.
  if (!state.detail && order.length && (order.length === 1 || !narrow.matches) && !state.text) choose(mostUrgent(order), false);
}

const heading = (text) => element("tr", { class: "group" }, element("th", { colspan: 6, scope: "rowgroup", text }));
const GROUPS = { true: heading("Runs"), false: heading("Accumulators") };

// Returns a training if there is one, and of several, the one that stalls or has the most late workers.
function mostUrgent(order) {
  const rank = (id) => { const row = rows.get(id).row; return (row.training ? 2e6 : 0) + (row.stalled ? 1e6 : 0) + row.late; };
  return order.reduce((best, id) => (rank(id) > rank(best) ? id : best));
}

// The accumulator in detail

let filling = null, facts = null, waiting = [];

function showFacts(found) {
  facts = found;
  setText(byId("name"), found.name);
  setText(byId("kind"), found.kind);
  const created = element("dd");
  keepAge(created, () => `${seconds(ageOfClock(found.created))} ago`);
  byId("facts").replaceChildren(...items(found.listed), element("div", {}, element("dt", { text: "created" }), created));
}

function showFilling() {
  if (!filling || !facts) return;
  const row = rows.get(state.detail)?.row;
  const head = waiting[0], required = head ? head.required : row?.required ?? null;
  setText(byId("filling-title"), `Round of step ${filling.step}`);
  fillBar(byId("filling-bar"), { count: filling.count, required });
  setText(byId("filling-count"), head ? `${count(filling.count)} of ${plural(head.required, "gradient")}` : plural(filling.count, "gradient"));
  const weight = head?.weight ? `, with a weight of ${+head.weight.toPrecision(6)}` : "";
  setText(byId("filling-for"), head ? `for ${head.taker}${weight}${waiting.length > 1 ? ` and ${waiting.length - 1} more` : ""}` : "and no taker is waiting");
  keepAge(byId("filling-times"), () => [
    filling.began === null ? "" : `began ${seconds(ageOfHeard(filling.began))} ago`,
    filling.first === null ? "" : `first gradient ${seconds(ageOfHeard(filling.first))} ago`,
    filling.last === null || filling.count < 2 ? "" : `latest ${seconds(ageOfHeard(filling.last))} ago`,
  ].filter(Boolean).join(" · "));
  const notes = [];
  const note = (text, kind = "") => notes.push(element("li", { class: kind, text }));
  const limit = facts.buffer_limit;
  if (filling.buffered_bytes) note(`buffered ${bytes(filling.buffered_bytes)}${limit ? ` of ${bytes(limit)}` : ""}`, limit && filling.buffered_bytes > 0.85 * limit ? "warn" : "");
  if (filling.total_weight !== filling.count) note(`total weight ${+filling.total_weight.toPrecision(6)}`);
  if (filling.staleness.length) note(filling.staleness.map(([steps, n]) => `${n} by ${plural(steps, "step")}`).join(", ") + " late");
  if (facts.reducer) note(`the reducer ${facts.reducer}`, facts.reducer === "is late" ? "warn" : "");
  byId("notes").replaceChildren(...notes);
}

function showStall(found) {
  byId("stall").hidden = !found;
  if (!found) return;
  const names = found.workers.join(", ") + (found.more ? ` and ${count(found.more)} more` : "");
  keepAge(byId("stall"), () => `It waits for ${names}.` + (found.since === null ? "" : ` Nothing has come for ${seconds(ageOfHeard(found.since))}.`));
}

const kindOf = (name) => name.replaceAll(" ", "-");

function showWorkers({ numbers, rows: found }) {
  const total = Object.values(numbers).reduce((a, b) => a + b, 0);
  const states = Object.entries(numbers).filter(([, n]) => n);
  byId("states-bar").replaceChildren(...states.map(([name, n]) => {
    const part = element("i", { class: kindOf(name) });
    part.style.flexGrow = n;
    return part;
  }));
  byId("states").replaceChildren(...states.map(([name, n]) => element("span", { class: kindOf(name), text: `${count(n)} ${name}` })));
  if (!total) setText(byId("states"), "No worker has sent a gradient.");
  byId("workers").closest("table").hidden = !total;
  byId("workers").replaceChildren(...found.map(([name, process, memory, label, inRound, applied, stale, seen, took]) => {
    const age = cell("", "number");
    keepAge(age, () => `${seconds(ageOfClock(seen))} ago`);
    const first = cell(name);
    first.title = name;
    return element("tr", {}, first, cell(process || "–", "mono"), cell(memory === null ? "–" : bytes(memory), "number"), cell(label, kindOf(label)), age, cell(took === null ? "–" : seconds(took), "number"), cell(count(inRound), "number"), cell(count(applied), "number"), cell(count(stale), "number"));
  }));
  byId("more-workers").hidden = total <= found.length || state.workers >= MOST;
  setText(byId("more-workers"), total > MOST ? `Show ${count(MOST)} of ${count(total)} workers` : `Show all ${count(total)} workers`);
  announce(`${facts?.name ?? ""}: ${plural(numbers.late, "worker")} late`, numbers.late);
}

// The training, and the curves of its metrics

function showTraining(found) {
  byId("training-section").hidden = byId("training-facts").hidden = !found;
  if (!found) return;
  byId("training-progress").hidden = found.share === null;
  setWidth(byId("training-bar"), found.share ?? 0);
  byId("training-bar").className = found.finished ? "full" : "";
  const whole = (text) => count(BigInt(text));
  setText(byId("training-step"), `Step ${whole(found.step)}`);
  const share = found.share === null ? "" : `of ${whole(found.until)}, ${Math.floor(found.share * 100)} %`;
  const left = found.left === null || found.finished || found.left <= 0 ? "" : `about ${seconds(found.left)} left`;
  setText(byId("training-of"), [share, found.finished ? "finished" : left].filter(Boolean).join(" · "));
  byId("training-facts").replaceChildren(...items(found.listed));
}

// Returns means of the values so far, in which each counts 0.8 times as much as the next.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((y) => {
    if (y === null) return null;
    [sum, weight] = [0.8 * sum + y, 0.8 * weight + 1];
    return sum / weight;
  });
}

const value = (x) => (x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4)));
const WIDE = 300, HIGH = 80;

function drawCurve(name, latest, steps, values, text) {
  const isLog = byId("log").checked, shown = byId("smooth").checked ? smoothed(values) : values;
  const points = steps.map((step, n) => [step, shown[n]]).filter(([, y]) => y !== null && (!isLog || y > 0));
  const head = element("b", { text: latest });
  const figure = element("figure", {}, element("figcaption", {}, element("span", { text: name }), head));
  if (!points.length) return figure;
  const ys = points.map(([, y]) => y), low = Math.min(...ys), high = Math.max(...ys);
  const from = steps[0], to = Math.max(steps.at(-1), from + 1);
  const scaled = isLog ? Math.log10 : (y) => y, span = scaled(high) - scaled(low);
  const place = ([x, y]) => [((x - from) / (to - from)) * WIDE, span > 0 ? HIGH - 3 - ((scaled(y) - scaled(low)) / span) * (HIGH - 6) : HIGH / 2];
  const svg = document.createElementNS(SVG, "svg");
  const add = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [key, given] of Object.entries(attributes)) made.setAttribute(key, given);
    svg.append(made);
    return made;
  };
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${latest} in step ${count(to)}, between ${text(low)} and ${text(high)} since step ${count(from)}`);
  for (const y of [0.5, HIGH / 2, HIGH - 0.5]) add("line", { class: "grid", x1: 0, x2: WIDE, y1: y, y2: y });
  const path = points.map((point) => place(point).map((n) => n.toFixed(1)).join(",")).join(" ");
  add("polyline", { class: "curve", points: points.length > 1 ? path : `${path} ${WIDE},${place(points[0])[1]}` });
  const mark = add("line", { class: "mark", x1: 0, x2: 0, y1: 0, y2: HIGH, visibility: "hidden" });
  // The value below the pointer, or the finger.
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = from + ((event.clientX - box.left) / box.width) * (to - from);
    const nearest = points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
    mark.setAttribute("x1", place(nearest)[0]);
    mark.setAttribute("x2", place(nearest)[0]);
    mark.setAttribute("visibility", "visible");
    setText(head, `${text(nearest[1])} in step ${count(nearest[0])}`);
    looking = true;
  });
  svg.addEventListener("pointerleave", () => { looking = false; mark.setAttribute("visibility", "hidden"); setText(head, latest); });
  figure.append(element("div", { class: "plot" }, element("div", { class: "scale" }, element("span", { text: text(high) }), element("span", { text: text(low) })), svg),
    element("div", { class: "steps" }, element("span", { text: `step ${count(from)}` }), element("span", { text: count(steps.at(-1)) })));
  return figure;
}

// Whether somebody points at a curve, which then stays as it is.
let looking = false, curvesFound = null;
for (const id of ["log", "smooth"]) byId(id).addEventListener("change", () => { looking = false; if (curvesFound) showCurves(curvesFound); });

function showCurves(found) {
  curvesFound = found;
  byId("curves-section").hidden = !found.names.length;
  if (!found.names.length) { looking = false; byId("curves").replaceChildren(); return; }
  if (looking) return;
  const drawn = found.names.map((name, n) => drawCurve(name, found.latest[n], found.steps, found.values[n], value));
  const times = found.values.at(-1), last = times.findLast((y) => y !== null);
  if (last !== undefined) drawn.push(drawCurve("time of a step", seconds(last), found.steps, times, seconds));
  byId("curves").replaceChildren(...drawn);
  byId("curves-more").hidden = !found.more;
  setText(byId("curves-more"), `and ${plural(found.more, "more metric")}`);
}

const PHASES = ["to the first gradient", "first to last gradient", "last gradient to take", "take to publish"];

function showRounds(found) {
  byId("no-rounds").hidden = found.length > 0;
  byId("rounds-table").hidden = !found.length;
  // Without its beginning, nobody knows how long a round took.
  const totals = found.map(([, , , , phases]) => (phases[0] === null ? 0 : phases.reduce((total, phase) => total + (phase ?? 0), 0)));
  const longest = Math.max(...totals, 1e-9);
  setText(byId("scale"), `0 to ${seconds(longest)}`);
  byId("rounds").replaceChildren(...found.map(([step, number, nbytes, , phases], n) => {
    const svg = document.createElementNS(SVG, "svg");
    let x = 0;
    phases.forEach((phase, kind) => {
      if (!phase || !totals[n]) return;
      const part = document.createElementNS(SVG, "rect");
      const width = Math.max((phase / longest) * 100, 0.15);
      for (const [name, value] of Object.entries({ x: `${x}%`, width: `${width}%`, height: "100%", class: `p${kind}` })) part.setAttribute(name, value);
      svg.append(part);
      x += width;
    });
    svg.setAttribute("role", "img");
    const said = phases.map((phase, kind) => (phase === null ? "" : `${PHASES[kind]} ${seconds(phase)}`)).filter(Boolean).join(", ");
    svg.setAttribute("aria-label", said);
    const time = element("td", { class: "time", title: said }, svg);
    return element("tr", {}, cell(step, "number"), time, cell(count(number), "number spare"), cell(nbytes === null ? "–" : bytes(nbytes), "number spare"), cell(totals[n] ? seconds(totals[n]) : "–", "number"));
  }));
}

function showStaleness(found) {
  byId("staleness-section").hidden = !found.length;
  const most = Math.max(...found.map(([, n]) => n), 1);
  let below = -1;
  byId("staleness").replaceChildren(...found.map(([bound, n]) => {
    const low = below + 1;
    const label = bound === null ? `more than ${below}` : bound === low ? plural(bound, "step") : `${low} to ${bound} steps`;
    below = bound;
    const inner = element("i");
    setWidth(inner, n / most);
    return element("tr", {}, cell(label), element("td", {}, element("div", { class: "bar" }, inner)), cell(count(n), "number"));
  }));
}

function showWaiting(found) {
  waiting = found;
  byId("waiting-section").hidden = found.length < 2;
  byId("waiting").replaceChildren(...found.map((of) => element("tr", {}, cell(of.taker), cell(count(of.required), "number"), cell(of.grace ? `${seconds(of.grace)}${of.most ? `, up to ${count(of.most)}` : ""}` : "–", "number"))));
}

function showUnacknowledged(found) {
  byId("unacknowledged-section").hidden = !found.length;
  byId("unacknowledged").replaceChildren(...found.map((of) => {
    const age = cell("", "number");
    keepAge(age, () => `${seconds(ageOfClock(of.granted))} ago`);
    return element("tr", {}, cell(of.step, "number"), cell(of.taker), cell(count(of.count), "number"), age);
  }));
}

function showDetail(id) {
  const there = id !== null;
  byId("detail").hidden = !there;
  document.querySelector("main").classList.toggle("chosen", there);
  for (const [of, { tr }] of rows) {
    if (of === id) tr.setAttribute("aria-selected", "true"); else tr.removeAttribute("aria-selected");
  }
  // It was deleted, or the address of the page was of another server.
  if (!there && state.detail) { state.detail = ""; history.replaceState(null, "", location.pathname); }
}

// What is said to those who hear the page: seldom, and only what has changed.

let said = "", saidAt = -Infinity;
function announce(text, number) {
  if (text === said || performance.now() - saidAt < 10000) return;
  const worth = number > 0 || said;
  said = text;
  if (worth) { saidAt = performance.now(); byId("said").textContent = text; }
}

function showLink(name) {
  if (byId("link").dataset.state === name) return;
  byId("link").dataset.state = name;
  setText(byId("link"), name === "no answer" ? "no answer from the server" : name);
  byId("said").textContent = `Connection: ${name}`;
}

// The stream

let stream = null, retry = 0, expectsFocus = false;

function connect() {
  stream?.close();
  clearTimeout(retry);
  stream = new EventSource(`updates?${new URLSearchParams(state)}`);
  stream.onmessage = ({ data }) => show(JSON.parse(data));
  stream.onerror = async () => {
    showLink("reconnecting");
    document.body.classList.add("stale-data");
    if (stream.readyState !== EventSource.CLOSED) return;
    // An answer that is no stream ends the attempts of the browser. The browser asks for a token that is no longer right.
    const answer = await fetch("./", { method: "HEAD" }).catch(() => null);
    if (answer?.status === 401) location.reload(); else retry = setTimeout(connect, 2000);
  };
}

function show({ clock, now, changed }) {
  received = { clock, now, at: performance.now() };
  if ("detail:id" in changed) showDetail(changed["detail:id"]);
  for (const [name, value] of Object.entries(changed)) if (name.startsWith("row:")) showRow(name.slice(4), value);
  if (changed.order) showOrder(changed.order);
  const sections = {
    server: showServer, "detail:facts": showFacts, "detail:filling": (found) => { filling = found; }, "detail:waiting": showWaiting,
    "detail:training": showTraining, "detail:curves": showCurves, "detail:stall": showStall, "detail:workers": showWorkers, "detail:rounds": showRounds, "detail:staleness": showStaleness, "detail:unacknowledged": showUnacknowledged,
  };
  for (const [name, showSection] of Object.entries(sections)) if (name in changed) showSection(changed[name]);
  showFilling();
  document.body.classList.toggle("stale-data", byId("link").dataset.state === "no answer");
  if (byId("link").dataset.state !== "no answer") showLink("live");
  if (expectsFocus && !byId("detail").hidden) { expectsFocus = false; byId("name").focus(); }
}

// What people do

function choose(id, byHand = true) {
  if (id === state.detail) return;
  state.detail = id;
  state.workers = 100;
  looking = false;
  expectsFocus = byHand && narrow.matches;
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
  connect();
}

byId("rows").addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row) choose(row.dataset.id);
});
byId("back").addEventListener("click", () => {
  const before = rows.get(state.detail);
  showDetail(null);
  state.detail = "";
  history.replaceState(null, "", location.pathname);
  (before?.name ?? byId("accumulators")).focus();
});
addEventListener("hashchange", () => { if (location.hash !== "#accumulators") choose(idInAddress()); });

let typing = 0;
byId("filter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => { state.text = byId("filter").value; state.rows = STEP; connect(); }, 200);
});
byId("more").addEventListener("click", () => { state.rows = Math.min(state.rows + 3 * STEP, MOST); connect(); });
byId("more-workers").addEventListener("click", () => { state.workers = MOST; connect(); });
for (const header of document.querySelectorAll("th[data-sort]")) {
  header.firstElementChild.addEventListener("click", () => {
    document.querySelector("th[aria-sort]").removeAttribute("aria-sort");
    header.setAttribute("aria-sort", header.dataset.sort === "name" ? "ascending" : "descending");
    state.sort = header.dataset.sort;
    connect();
  });
}

const THEMES = ["system", "light", "dark"];
function showTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
}
function storedTheme() {
  // A browser may forbid pages to store anything.
  try { return THEMES.includes(localStorage.theme) ? localStorage.theme : "system"; } catch { return "system"; }
}
let theme = storedTheme();
showTheme(theme);
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.theme = theme; } catch { /* It lasts as long as the page. */ }
  showTheme(theme);
});

connect();
