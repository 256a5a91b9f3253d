// Make elements. Text is set as text, never as markup; styles go by the object model, which the page's policy allows.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, set] of Object.entries(value)) node.style.setProperty(key, set);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** h("p", {class: "soft"}, "text", node, …) */
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

/** Put ``children`` in the place of what is in ``node``. */
function replace(node, ...children) {
  node.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
}

function card(title, note, ...body) {
  return h("section", { class: "card" }, title && h("header", {}, h("h2", {}, title), note && h("p", {}, note)), ...body);
}

/** A box for what may be too wide: it scrolls then, and the keyboard can reach it. */
function sideways(label, node) {
  const box = h("div", { class: "plainwrap", role: "group", "aria-label": label }, node);
  new ResizeObserver(() => { box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1; }).observe(box);
  return box;
}

/** A small table: titles, rows of cells (texts or nodes), numbers of the columns that end alike. */
function plainTable(caption, titles, rows, ends = [], look = "") {
  const side = (column) => (ends.includes(column) ? "end" : null);
  return sideways(caption, h("table", { class: `plain ${look}` },
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, titles.map((title, at) => h("th", { scope: "col", class: side(at) }, title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: side(at) }, cell)))))));
}

/** A long name that breaks behind its dots and underscores, where it breaks at all. */
const breakable = (name) => name.split(/(?<=[._/])(?=\w)/).flatMap((part, at) => (at ? [h("wbr"), part] : [part]));

/** A figure with its name above it and a note behind it, for a list of the class "tiles". */
const tile = (name, value, note = "") => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, note && [h("small", {}, " "), h("small", {}, note)]));

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** A select with a label; options: [value, text]. */
function choice(label, options, value, onchange, attributes = {}) {
  const select = h("select", { ...attributes, onchange: () => onchange(select.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", {}, label, select);
}

function searchBox(label, oninput) {
  let waiting = 0;
  const input = h("input", {
    type: "search", placeholder: `${label}  ( / )`, "aria-label": label, spellcheck: "false", autocomplete: "off",
    oninput: () => { clearTimeout(waiting); waiting = setTimeout(() => oninput(input.value.trim()), 80); },
  });
  return input;
}

function announce(text) { byId("live").textContent = text; }

function showTip(event, text) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${Math.max(8, y)}px`;
}

const hideTip = () => showTip(null, "");

/** The colour of a custom property, for canvases. */
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A canvas as wide as its box, drawn by ``draw(context, width, height)`` when it is shown, resized, or told. */
function drawing(height, draw, attributes = {}) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const box = h("div", { class: "canvas", style: { height: `${height}px` }, ...attributes }, canvas);
  const again = () => {
    const { width, height: tall } = box.getBoundingClientRect();
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, tall);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    draw(context, width, tall);
  };
  new ResizeObserver(again).observe(box);
  drawings.add(again);
  return { box, canvas, again };
}

const drawings = new Set();
const redraw = () => { for (const again of drawings) again(); };

/** ``text`` cut so that it fits into ``width``; empty if not even its start does. */
function fitted(context, text, width) {
  if (width < 14) return "";
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}
