// Text from a journal is only ever put into text nodes: nothing in it is markup, and nothing in it runs.
const byId = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const svg = SVG_TAGS.has(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const SVG_TAGS = new Set(["svg", "path", "line", "text", "circle", "g"]);

const say = (text) => { byId("said").textContent = text; };
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value) {
  if (!isNumber(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function duration(seconds) {
  if (!isNumber(seconds)) return "";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 100) return `${Number(seconds.toFixed(seconds < 10 ? 2 : 1))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 100) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 100 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds)), two = (n) => String(n).padStart(2, "0");
  const rest = `${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  return whole >= 3600 ? `${Math.floor(whole / 3600)}:${rest}` : rest;
}
function date(unix) {
  if (!isNumber(unix)) return "";
  const when = new Date(1000 * unix);
  return Number.isNaN(when.getTime()) ? "" : when.toLocaleString("sv").slice(0, 19);
}
const plural = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;
const dark = matchMedia("(prefers-color-scheme: dark)"), colours = new Map();
dark.addEventListener("change", () => colours.clear());
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

function pairs(entries) {
  const list = make("dl");
  for (const [name, value] of entries) {
    if (value !== null && value !== undefined && value !== "") list.append(make("dt", null, name), make("dd", null, value));
  }
  return list;
}
function table(heads, rows, caption) {
  const cell = (tag, value, at) => make(tag, { class: heads[at][1], scope: tag === "th" ? "col" : null }, value);
  return make("table", null,
    make("caption", { class: "unseen" }, caption),
    make("thead", null, make("tr", null, heads.map((head, at) => cell("th", head[0], at)))),
    make("tbody", null, rows.map((row) => make("tr", null, row.map((value, at) => cell("td", value, at))))));
}
// The first index whose value is not before the wanted one.
function firstFrom(list, wanted, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(list[middle]) < wanted) low = middle + 1; else high = middle;
  }
  return low;
}
