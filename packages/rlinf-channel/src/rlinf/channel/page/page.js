// Asks whether somebody has looked again, and shows what was seen. Everything is text but the two pictures of draw.js.
import { colour, curve, gantt, group, lately, number } from "./draw.js";

const EVERY_MS = 500, SKEWED = 1.5, FULL = 0.9, LATE_S = 3, MISSED_BEATS = 3, MOST_SPANS = 2000, MOST_ENTRIES = 100;
const byId = id => document.getElementById(id);
const main = byId("main"), nav = document.querySelector("nav"), tables = {};
let spans = [], seen = 0, state = null, paused = false;
const pulses = new Map();

const SECTIONS = [
  ["iterations", "Iterations", []],
  ["workers", "Workers", ["worker", "state", "process", "host", "devices", "memory", "processors", "heartbeat", "restarts", "does"]],
  ["channels", "Channels", ["channel", "queued", "bytes", "full", "leased", "put/s", "done/s", "skew", "given again", ""]],
  ["consumers", "Balance", ["channel", "consumer", "speed", "holds", "weight/s", "finished", "idle"]],
  ["waiting", "Waiting", ["who", "for what", "seconds"]],
  ["lock", "Device lock", ["who", "devices", "state", "seconds", "behind"]],
  ["connections", "Connections", ["between", "and", "transport", "because", "state", "bytes", "latency"]],
  ["log", "Log", ["when", "what", "of whom", ""]],
];

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function head(id, columns) {
  tables[id].tHead.replaceChildren(make("tr", {}, ...columns.map(c => make("th", { scope: "col", textContent: c }))));
}

for (const [id, title, columns] of SECTIONS) {
  const table = make("table"), box = make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title }, table);
  tables[id] = table;
  table.createTHead();
  table.createTBody();
  main.append(make("section", { id }, make("h2", { textContent: title }), box));
  head(id, columns);
}
byId("connections").insertBefore(make("div", { id: "graph" }), tables.connections.parentElement);
main.append(make("section", { id: "curves-of" }, make("h2", { textContent: "Curves" }), make("div", { id: "curves" })));
nav.append(...[...main.querySelectorAll("section")].map(s => make("a", { href: `#${s.id}`, textContent: s.querySelector("h2").textContent })));

const size = n => { let u = 0; while (n >= 1000 && u < 4) { n /= 1000; u++; } return number(n) + " " + ["B", "kB", "MB", "GB", "TB"][u]; };
const bad = (text, is = true) => ({ text, bad: is });
const late = s => bad(number(s), s > LATE_S);

function fill(id, rows) {
  const made = rows.map(cells => make("tr", {}, ...cells.map(cell => {
    const text = cell?.text ?? cell ?? "";
    return cell instanceof Node ? make("td", {}, cell) : make("td", { textContent: text, className: cell?.bad ? "bad" : "" });
  })));
  if (!made.length) made.push(make("tr", {}, make("td", { textContent: "nothing", className: "quiet", colSpan: 10 })));
  tables[id].tBodies[0].replaceChildren(...made);
}

function gauge(share) {
  const meter = make("meter", { min: 0, max: 1, high: FULL, optimum: 0, value: share });
  meter.title = meter.ariaLabel = Math.round(share * 100) + " % full";
  return meter;
}

function showHead(s) {
  document.title = byId("job").textContent = "job " + s.job;
  const mute = s.silent_s > LATE_S;
  byId("state").className = s.ended || mute ? "bad" : "quiet";
  byId("state").textContent = s.ended || (mute ? `no answer for ${Math.round(s.silent_s)} s` : s.server ? `up for ${Math.round(s.server.up_s)} s` : "looking");
  const count = s.findings.length ? `${s.findings.length} wrong` : "";
  if (byId("count").textContent !== count) byId("count").textContent = count;
  byId("count").className = "bad";
  byId("findings").replaceChildren(...(s.findings.length ? s.findings.map(f => make("li", { className: "bad", textContent: f.text })) : [make("li", { className: "quiet", textContent: "nothing" })]));
}

function showTimeline(s) {
  const life = s.life, any = spans.some(span => span[2] === "stage");
  byId("timeline").hidden = byId("iterations").hidden = !any;
  if (!any) return;
  const plan = s.log.findLast(entry => entry.kind === "plan");
  byId("plan").textContent = plan ? plan.text : "";
  const count = +byId("shown").value, { shown, begins } = lately(spans, count);
  gantt(byId("gantt"), spans, life?.workers ?? [], life?.now ?? 0, count);
  const names = [...new Set(shown.filter(x => x.kind === "stage").map(x => x.name))];
  const key = (look, text) => make("span", { className: "key" }, make("i", { className: look }), text);
  byId("legend").replaceChildren(...names.map(n => key(`stage ${colour(n)}`, n)), key("devices", "waits for devices"), key("items", "waits for items"));
  head("iterations", ["iteration", "seconds", ...names.map(n => `${n}: works, share`)]);
  fill("iterations", [...begins.keys()].sort((a, b) => b - a).map(i => {
    const of = shown.filter(x => x.iteration === i && x.kind !== "wait for items");
    const seconds = Math.max(...of.map(x => x.end)) - begins.get(i);
    return [i, number(seconds), ...names.map(n => {
      const work = of.filter(x => x.kind === "stage" && x.name === n), who = new Set(work.map(x => x.worker)).size || 1;
      const worked = work.reduce((sum, x) => sum + x.end - x.start, 0) / who;
      return `${number(worked)} s, ${Math.round(100 * worked / seconds)} %`;
    })];
  }));
}

// Processors in use: processor time between two signs of life.
function processors(w) {
  const before = pulses.get(w.id);
  if (!before || before.pid !== w.pid) pulses.set(w.id, { pid: w.pid, cpu: w.cpu_s, at: performance.now() });
  else if (w.cpu_s !== before.cpu) {
    const at = performance.now();
    before.used = 1000 * (w.cpu_s - before.cpu) / (at - before.at);
    Object.assign(before, { cpu: w.cpu_s, at });
  }
  const used = pulses.get(w.id).used;
  return used == null ? "" : used.toFixed(2);
}

function showWorkers(s) {
  const hosts = [...new Set(s.peers.map(p => p.host))], lives = new Map((s.life?.workers ?? []).map(w => [w.id, w]));
  const ids = [...lives.keys(), ...s.peers.map(p => p.id).filter(id => !lives.has(id))];
  fill("workers", ids.map(id => {
    const w = lives.get(id), p = s.peers.find(peer => peer.id === id);
    const gone = p?.gone && (!w || !w.running || w.pid === p.pid);
    const how = gone || (w && !w.running && w.restarts) ? bad(w?.restarts ? "starts again" : "gone") : w && !w.running ? "starts" : "runs";
    const host = p ? `host ${hosts.indexOf(p.host)}` : "";
    if (!w) return [id, how, p.pid, host, p.device, "", "", "", "", ""];
    return [id, how, w.pid || "", host, w.devices.join(", "), w.rss_bytes ? size(w.rss_bytes) : "", processors(w),
      w.running ? bad(`${number(w.heard_s)} s ago`, w.heard_s > MISSED_BEATS * w.beat_s) : "", bad(w.restarts || "", w.restarts > 0),
      w.doing ? `${w.doing} for ${number(w.doing_s)} s` : ""];
  }));
}

function showChannels(s) {
  const channels = s.server.channels;
  fill("channels", channels.map(c => {
    const full = Math.max(c.held_bytes / c.max_bytes, c.max_items ? c.depth / c.max_items : 0);
    return [c.name, c.max_items ? `${c.depth} of ${c.max_items}` : c.depth, size(c.held_bytes), gauge(Math.min(full, 1)),
      c.leased_items, number(c.rate_per_s.put_items), number(c.rate_per_s.done_items),
      c.consumers.length > 1 ? bad(number(c.balance), c.balance == null || c.balance > SKEWED) : "",
      c.redelivered_items || "", full >= FULL ? bad("full") : c.dead_items ? bad(`${c.dead_items} kept aside`) : c.closed ? "closed" : ""];
  }));
  fill("consumers", channels.flatMap(c => c.consumers.map(k => [c.name, k.id, number(k.capacity),
    `${k.leased_items} (${number(k.outstanding_weight)})`, number(k.weight_per_s), number(k.finished_weight), number(k.idle_s) + " s"])));
  fill("waiting", channels.flatMap(c => c.waiting.map(w => [w.id, `${w.operation} ${c.name}`, late(w.since_s)])));
  const lock = s.server.lock;
  fill("lock", [...lock.holders.map(h => [h.id, h.devices.join(", "), "holds", number(h.since_s), ""]),
    ...lock.waiters.map(h => [h.id, h.devices.join(", "), "waits", late(h.since_s), h.behind.join(", ")])]);
}

function showConnections(s) {
  const box = byId("graph");
  if (box.dataset.drawn !== s.graph) {
    const drawn = new DOMParser().parseFromString(s.graph || "<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml").documentElement;
    box.replaceChildren(document.importNode(drawn, true));
    box.dataset.drawn = s.graph;
  }
  fill("connections", s.connections.map(c => [c.one, c.other, c.transport, c.because, bad(c.state, !["up", "absent"].includes(c.state)),
    c.nbytes == null ? "" : size(c.nbytes), c.latency_s == null ? "" : number(1000 * c.latency_s) + " ms"]));
}

function show() {
  const s = state;
  showHead(s);
  if (!s.server) return;
  showTimeline(s);
  showWorkers(s);
  showChannels(s);
  showConnections(s);
  const when = at => new Date(1000 * at).toLocaleTimeString("en-GB");
  const grave = new Set(["died", "stopped", "gone", "silent", "full", "imbalance", "lock"]);
  fill("log", s.log.slice(-MOST_ENTRIES).reverse().map(e => [when(e.at), bad(e.kind, grave.has(e.kind)), e.who, e.text]));
  byId("curves-of").hidden = !Object.keys(s.curves).length;
  byId("curves").replaceChildren(...Object.entries(s.curves).map(([name, points]) => curve(name, points)));
}

async function look() {
  try {
    if (!paused && !document.hidden) {
      const answer = await fetch(`state.json?after=${seen}&turn=${state?.turn ?? 0}`);
      if (answer.status === 200) {
        state = await answer.json();
        spans = spans.concat(state.spans ?? []).slice(-MOST_SPANS);
        seen = spans.length ? spans[spans.length - 1][0] : 0;
        show();
      }
    }
  } catch (error) {
    if (!(error instanceof TypeError)) console.error(error);
    byId("state").className = "bad";
    byId("state").textContent = "the monitor does not answer";
  }
  setTimeout(look, EVERY_MS);
}

byId("pause").addEventListener("click", event => {
  paused = !paused;
  event.target.ariaPressed = paused;
});
byId("shown").addEventListener("change", () => state && show());
look();
