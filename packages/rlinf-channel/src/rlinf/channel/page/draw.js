// Pictures of the page: what each worker did in time, and curves. No state but the colours given out.
const SVG = "http://www.w3.org/2000/svg";
const ROW = 24, TOP = 20, LABEL = 130, COLOURS = 8;
const LOOKS = { stage: "stage", onload: "load", offload: "load", "wait for devices": "devices", "wait for items": "items" };
const colours = new Map();

export const number = x => x == null ? "∞" : x >= 100 ? Math.round(x).toLocaleString("en") : (+x.toPrecision(3)).toString();

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function colour(name) {
  if (!colours.has(name)) colours.set(name, `c${colours.size % COLOURS}`);
  return colours.get(name);
}

// The spans of the last `count` iterations, as objects, and where these begin and end.
export function lately(spans, count) {
  const named = spans.map(([number, worker, kind, name, iteration, start, end]) => ({ number, worker, kind, name, iteration, start, end }));
  const last = Math.max(...named.map(s => s.iteration));
  const shown = named.filter(s => s.iteration > last - count);
  const begins = new Map();
  for (const s of shown) if (s.kind === "stage") begins.set(s.iteration, Math.min(s.start, begins.get(s.iteration) ?? Infinity));
  return { shown, begins, from: Math.min(...begins.values()), to: Math.max(...shown.map(s => s.end)) };
}

export function gantt(svg, spans, workers, now, count) {
  const { shown, begins, from, to } = lately(spans, count);
  const open = workers.filter(w => w.doing && shown.some(s => s.name === `${group(w.id)}.${w.doing}`));
  const end = open.length ? Math.max(now, to) : to;
  const rows = [...new Set([...workers.map(w => w.id), ...shown.map(s => s.worker)])].filter(id => shown.some(s => s.worker === id));
  const width = Math.max(480, svg.parentElement.clientWidth), height = TOP + ROW * rows.length + 18;
  const x = t => LABEL + (width - LABEL - 10) * (Math.max(t, from) - from) / (end - from || 1);
  const y = id => TOP + ROW * rows.indexOf(id);
  const parts = rows.map(id => node("text", { x: 0, y: y(id) + 16 }, id));
  for (const [iteration, start] of begins) {
    parts.push(node("line", { class: "rule", x1: x(start), x2: x(start), y1: 4, y2: height - 16 }));
    parts.push(node("text", { class: "quiet", x: x(start) + 3, y: 12 }, `iteration ${iteration}`));
  }
  for (const s of shown) {
    if (s.end <= from || !LOOKS[s.kind]) continue;
    const thin = s.kind === "wait for items", high = thin ? 3 : ROW - 6;
    const bar = node("rect", { class: `${LOOKS[s.kind]} ${colour(s.name)}`, x: x(s.start), y: y(s.worker) + (thin ? 10 : 2),
      width: Math.max(.75, x(s.end) - x(s.start)), height: high });
    bar.append(node("title", {}, `${s.worker} ${s.name}, iteration ${s.iteration}: ${s.kind === "stage" ? "works" : s.kind} ${number(s.end - s.start)} s`));
    parts.push(bar);
  }
  for (const w of open) {
    const begun = Math.max(now - w.doing_s, from);
    parts.push(node("rect", { class: `open ${colour(`${group(w.id)}.${w.doing}`)}`, x: x(begun), y: y(w.id) + 2, width: Math.max(1, x(now) - x(begun)), height: ROW - 6 }));
  }
  parts.push(node("text", { class: "quiet", x: LABEL, y: height - 3 }, "0 s"));
  parts.push(node("text", { class: "quiet", x: width - 10, y: height - 3, "text-anchor": "end" }, `${number(end - from)} s`));
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", `What ${rows.length} workers did in ${number(end - from)} s; the table below has it in figures`);
  svg.replaceChildren(...parts);
}

export function curve(name, points) {
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = p => `${100 * (p[0] - x0) / (x1 - x0 || 1)},${100 - 100 * (p[1] - y0) / (y1 - y0 || 1)}`;
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = `${name}: ${signed(ys[ys.length - 1])} at step ${x1} (${signed(y0)} to ${signed(y1)})`;
  const svg = node("svg", { viewBox: "-2 -4 104 108", preserveAspectRatio: "none", role: "img", "aria-label": caption.textContent });
  svg.append(node("polyline", { points: points.map(at).join(" ") }));
  figure.append(caption, svg);
  return figure;
}

const signed = x => Math.abs(x) >= 1e-3 || x === 0 ? (x < 0 ? "-" : "") + number(Math.abs(x)) : x.toExponential(1);
export const group = id => id.slice(0, id.lastIndexOf("/"));
