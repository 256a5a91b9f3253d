// Sizes as areas: squarified rectangles (Bruls, Huizing, van Wijk 2000), a few levels of names in one another.

/** Rectangles of ``items`` ({value}) within a box, as near to squares as a row at a time gets. */
function squarified(items, x, y, width, height) {
  const found = [];
  const rest = items.filter((item) => item.value > 0).sort((a, b) => b.value - a.value);
  const total = rest.reduce((sum, item) => sum + item.value, 0);
  if (!total || width <= 0 || height <= 0) return found;
  const scale = (width * height) / total;
  let at = 0;
  while (at < rest.length) {
    const side = Math.min(width, height);
    let sum = 0, end = at, worst = Infinity;
    while (end < rest.length) {
      const next = sum + rest[end].value * scale;
      const most = rest[at].value * scale, least = rest[end].value * scale;
      const ratio = Math.max((side * side * most) / (next * next), (next * next) / (side * side * least));
      if (ratio > worst) break;
      [sum, worst, end] = [next, ratio, end + 1];
    }
    const thick = sum / side;
    let along = 0;
    for (const item of rest.slice(at, end)) {
      const length = (item.value * scale) / thick;
      found.push(width >= height
        ? { item, x, y: y + along, width: thick, height: length }
        : { item, x: x + along, y, width: length, height: thick });
      along += length;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    at = end;
  }
  return found;
}

const TREEMAP_MOST = 600;
const TREEMAP_LEVELS = 4;

class Treemap {
  constructor(open) {
    this.open = open;
    this.crumbs = h("nav", { class: "crumbs", "aria-label": "Part of the names that is shown" });
    this.plot = drawing(380, (context, width, height) => this.draw(context, width, height), {
      role: "img",
      onpointermove: (event) => {
        const hit = this.at(event);
        this.plot.box.style.cursor = hit ? "pointer" : "default";
        showTip(event, hit ? `${hit.node.path}\n${bytes(hit.node.nbytes)} (${percent(hit.node.nbytes / this.names.root.nbytes)})${hit.node.tensor < 0 ? `, ${plural(hit.node.count, "tensor")}` : ""}` : "");
      },
      onpointerleave: hideTip,
      onclick: (event) => { const hit = this.at(event); if (hit) this.enter(hit.node.tensor >= 0 ? hit.node : hit.parent ?? hit.node); hideTip(); },
    });
    this.legend = h("ul", { class: "legend" });
    this.box = h("div", {}, this.crumbs, this.plot.box, this.legend);
  }

  show(names) {
    this.names = names;
    const known = new Map();
    for (let at = 0; at < names.columns.size; at++) {
      const dtype = names.columns.dtype(at);
      known.set(dtype, (known.get(dtype) ?? 0) + names.columns.nbytes[at]);
    }
    this.dtypes = [...known].sort((a, b) => b[1] - a[1]);
    replace(this.legend, this.dtypes.map(([dtype, size], at) => legendItem(`${dtype} ${bytes(size)}`, this.css(at))));
    this.enter(names.root);
  }

  css(at) {
    return ["var(--mid)", "var(--pale)", "var(--accent)", "var(--warn)", "var(--soft)"][Math.min(at, 4)];
  }

  colour(node) {
    let leaf = node;
    while (leaf.tensor < 0) [leaf] = leaf.children.values();
    const dtype = this.names.columns.dtype(leaf.tensor);
    return ink(["--mid", "--pale", "--accent", "--warn", "--soft"][Math.min(4, this.dtypes.findIndex(([name]) => name === dtype))]);
  }

  enter(node) {
    if (node.tensor >= 0 && !node.children.size) return this.open(node);
    this.node = node;
    const trail = [];
    for (let at = node; at; at = at.above ?? (at === this.names.root ? null : this.names.root)) trail.unshift(at);
    replace(this.crumbs, trail.map((part, at) => [at ? "›" : null, part === node
      ? h("span", { "aria-current": "true" }, part.shown ?? "everything")
      : h("button", { type: "button", class: "link", onclick: () => this.enter(part) }, part.shown ?? "everything")]),
    h("span", { class: "soft" }, ` ${bytes(node.nbytes)}`));
    this.plot.box.setAttribute("aria-label", `Treemap of sizes; the table of tensors has the same figures. ${this.names.below(node)
      .slice().sort((a, b) => b.nbytes - a.nbytes).slice(0, 5).map((child) => `${child.shown} ${bytes(child.nbytes)}`).join(", ")}`);
    this.plot.again();
  }

  draw(context, width, height) {
    this.boxes = [];
    if (!this.node) return;
    const items = (node) => this.names.below(node).map((child) => ({ node: child, value: child.nbytes }))
      .sort((a, b) => b.value - a.value).slice(0, TREEMAP_MOST);
    const lay = (node, box, level) => {
      for (const found of squarified(items(node), box.x, box.y, box.width, box.height)) {
        const child = found.item.node;
        const roomy = child.children.size > 0 && level < TREEMAP_LEVELS && found.width > 54 && found.height > 44;
        this.paint(context, found, child, roomy);
        this.boxes.push({ ...found, node: child, parent: node === this.node ? null : node });
        if (roomy) lay(child, { x: found.x + 3, y: found.y + 20, width: found.width - 6, height: found.height - 23 }, level + 1);
      }
    };
    lay(this.node, { x: 0, y: 0, width, height }, 1);
  }

  paint(context, { x, y, width, height }, node, isFrame) {
    const gap = width > 5 && height > 5 ? 1 : 0.25;
    context.fillStyle = isFrame ? ink("--sunk") : this.colour(node);
    context.beginPath();
    context.roundRect(x + gap, y + gap, Math.max(0.5, width - 2 * gap), Math.max(0.5, height - 2 * gap), Math.min(4, width / 4, height / 4));
    context.fill();
    if (height < 16) return;
    const first = this.dtypes.findIndex(([name]) => !isFrame && node.tensor >= 0 && name === this.names.columns.dtype(node.tensor));
    context.fillStyle = isFrame ? ink("--ink") : first === 2 ? ink("--on-accent") : isDark() ? "#f4f4f2" : "#10201e";
    context.textAlign = "left";
    const text = isFrame ? `${node.shown}  ${bytes(node.nbytes)}` : node.shown;
    context.fillText(fitted(context, text, width - 12), x + 6, isFrame ? y + 11 : y + Math.min(12, height / 2));
  }

  at(event) {
    for (let index = this.boxes.length - 1; index >= 0; index--) {
      const box = this.boxes[index];
      if (event.offsetX >= box.x && event.offsetX < box.x + box.width && event.offsetY >= box.y && event.offsetY < box.y + box.height) return box;
    }
    return null;
  }
}
