// Two checkpoints beside each other: what of each tensor changed, by the checksums of its shards; on a live page values.

const KINDS = { same: "unchanged", changed: "changed", added: "added", removed: "removed", reshaped: "another shape or dtype", unknown: "cut otherwise" };

/** [{name, kind, share, nbytes, a, b}] of all tensors of two checkpoints; share: of its bytes, that changed. */
function compared(one, two) {
  const numbers = new Map(two.told.boxes.map((box, at) => [JSON.stringify(box), at]));
  const boxes = one.told.boxes.map((box) => numbers.get(JSON.stringify(box)) ?? -1);
  const found = [];
  const others = new Map(two.names.map((name, at) => [name, at]));
  for (let at = 0; at < one.size; at++) {
    const name = one.names[at], other = others.get(name);
    others.delete(name);
    found.push({ name, a: at, b: other ?? -1, ...change(one, at, two, other, boxes) });
  }
  for (const [name, at] of others) found.push({ name, a: -1, b: at, kind: "added", share: 1, nbytes: two.nbytes[at] });
  return found;
}

function change(one, at, two, other, boxes) {
  const nbytes = one.nbytes[at];
  if (other === undefined) return { kind: "removed", share: 1, nbytes };
  if (one.dtype(at) !== two.dtype(other) || one.shape(at).join() !== two.shape(other).join()) return { kind: "reshaped", share: 1, nbytes };
  if (!one.sums || !two.sums) return { kind: "unknown", share: null, nbytes };
  const sums = new Map();
  for (let shard = two.first[other]; shard < two.first[other + 1]; shard++) sums.set(two.told.shards.box[shard], two.sums[shard]);
  let changed = 0, all = 0;
  for (let shard = one.first[at]; shard < one.first[at + 1]; shard++) {
    const box = one.told.shards.box[shard];
    const known = sums.get(boxes[box]);
    if (known === undefined) return { kind: "unknown", share: null, nbytes };
    const size = one.told.boxes[box][1].reduce((product, length) => product * length, 1);
    all += size;
    if (known !== one.sums[shard]) changed += size;
  }
  return { kind: changed ? "changed" : "same", share: all ? changed / all : 0, nbytes };
}

/** A tensor's layer and kind: "model.layers.3.attn.q.weight" → ["model.layers.3", "attn.q.weight"], numbers after it as *. */
function layerAndKind(name) {
  const found = /^(.*?\.?)(\d+)\.(.+)$/.exec(name);
  if (!found) {
    const at = name.lastIndexOf(".");
    return at < 0 ? ["(top)", name] : [name.slice(0, at), name.slice(at + 1)];
  }
  return [found[1] + found[2], found[3].replace(/(^|\.)\d+(?=\.|$)/g, "$1*")];
}

const MEASURES = {
  share: { title: "share of bytes changed", of: (row) => row.share, text: percent, most: 1 },
  relative: { title: "relative change of values", of: (row) => (row.kind === "same" ? 0 : row.values?.relative ?? null), text: figure },
  max_abs: { title: "largest change of a value", of: (row) => (row.kind === "same" ? 0 : row.values?.max_abs ?? null), text: figure },
};
const HEAT = { cell: 22, left: 190, least: 60, top: 116, columns: 48, rows: 400 };

const diff = {
  id: "diff",
  title: "Diff",
  measure: "share",
  part: "",
  wanted: "",

  build(panel) {
    this.head = h("div", { class: "bar" });
    this.place = h("div", { class: "stack" });
    this.heat = drawing(300, (context, width, height) => this.draw(context, width, height), {
      tabindex: "0", role: "application", "aria-label": "Heat map of changes by layer and kind; arrow keys move, Enter lists the tensors of a cell",
      onpointermove: (event) => { const cell = this.cellAt(event); showTip(event, cell ? this.cellText(cell) : ""); },
      onpointerleave: hideTip,
      onclick: (event) => { const cell = this.cellAt(event); if (cell) this.pick(cell); },
      onkeydown: (event) => this.pressed(event),
    });
    this.grid = new Grid({
      caption: "Tensors of both", height: 460, least: LIVE ? 860 : 680, sort: { at: 3, down: true }, key: (row) => row.name,
      open: (row) => go("checkpoint", row.b >= 0 ? this.names[1] : this.names[0], row.name),
      columns: [
        { title: "tensor", value: (row) => row.name, cell: (row) => h("code", { title: row.name }, row.name) },
        { title: "what", width: "160px", value: (row) => KINDS[row.kind], cell: (row) => h("span", { class: `chip ${{ added: "good", removed: "bad", reshaped: "warn", unknown: "warn" }[row.kind] ?? ""}` }, KINDS[row.kind]) },
        { title: "size", width: "92px", end: true, value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
        { title: "bytes changed", width: "150px", end: true, value: (row) => row.share, cell: (row) => percent(row.share) },
        ...(LIVE ? [{ title: "relative", width: "92px", end: true, value: (row) => row.values?.relative ?? null, cell: (row) => figure(row.values?.relative ?? null) },
        { title: "max abs", width: "92px", end: true, value: (row) => row.values?.max_abs ?? null, cell: (row) => figure(row.values?.max_abs ?? null) }] : []),
      ],
    });
    this.search = searchBox("Search tensors", (text) => { this.wanted = text.toLowerCase(); this.picked = null; this.list(); });
    this.note = h("span", { class: "soft push" });
    this.legend = h("ul", { class: "legend" });
    panel.append(this.head, this.place);
  },

  async show([a, b]) {
    const known = shownCheckpoints();
    a ??= known[1] ?? known[0];
    b ??= known[0];
    const asked = (this.asked = `${a} ${b}`);
    replace(this.head, known.length > 0 && [
      checkpointChoice("from", a, (value) => go("diff", value, b)), checkpointChoice("to", b, (value) => go("diff", a, value))]);
    if (known.length < 2) {
      return replace(this.place, h("p", { class: "notice" }, LIVE ? "There are not two checkpoints yet."
        : "This report has the tensors of fewer than two steps: write it with --step for each of two, or use holdfast view."));
    }
    for (const name of [a, b]) if (!known.includes(name)) return replace(this.place, notHere(name));
    replace(this.place, h("p", { class: "empty" }, "Comparing checksums…"));
    let pair;
    try {
      pair = await Promise.all([checkpointOf(a), checkpointOf(b)]);
    } catch (error) {
      return replace(this.place, h("p", { class: "notice warn" }, error.message));
    }
    if (this.asked !== asked) return undefined;
    this.names = [a, b];
    this.rows = compared(...pair);
    this.picked = null;
    this.objects = pair.map((columns) => new Set(columns.objects.map(([name]) => name)));
    this.lay();
    return undefined;
  },

  lay() {
    const sums = {};
    for (const row of this.rows) sums[row.kind] = (sums[row.kind] ?? 0) + 1;
    const total = this.rows.reduce((sum, row) => sum + row.nbytes, 0);
    const moved = this.rows.reduce((sum, row) => sum + row.nbytes * (row.share ?? 0), 0);
    const [before, after] = this.objects;
    const came = [...after].filter((name) => !before.has(name)), went = [...before].filter((name) => !after.has(name));
    const parts = [...new Set(this.rows.map((row) => row.name.split(".")[0]))];
    if (!parts.includes(this.part)) this.part = parts.includes("model") ? "model" : "";
    this.values = h("span", { class: "bar" }, LIVE && h("button", { type: "button", onclick: () => this.readValues() }, "Compare values"));
    replace(this.place,
      card(null, null, h("dl", { class: "tiles" }, tile("bytes changed", percent(total ? moved / total : 0), `of ${bytes(total)}`),
        Object.keys(KINDS).filter((kind) => sums[kind]).map((kind) => tile(KINDS[kind], count(sums[kind]), "tensors"))),
      (came.length > 0 || went.length > 0) && h("p", { class: "notice", style: { "margin-top": "14px" } },
        `Objects added: ${came.slice(0, 8).join(", ") || "none"}; removed: ${went.slice(0, 8).join(", ") || "none"}.`)),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "By layer and kind"),
        h("div", { class: "bar" },
          choice("part", [["", "everything"], ...parts.map((part) => [part, part])], this.part, (value) => { this.part = value; this.picked = null; this.map(); this.list(); }),
          choice("show", Object.entries(MEASURES).filter(([key]) => LIVE || key === "share").map(([key, { title }]) => [key, title]), this.measure, (value) => { this.measure = value; this.map(); }),
          LIVE && this.values)),
      h("div", { class: "scroll", style: { "max-height": "560px", border: "0" }, tabindex: "0", role: "region", "aria-label": "Heat map, scrollable" }, this.heat.box), this.legend),
      h("section", { class: "card" }, h("header", {}, h("h2", {}, "Tensors"), this.note), h("div", { class: "bar", style: { "margin-bottom": "12px" } }, this.search), this.grid.box));
    this.map();
    this.list();
  },

  inPart() { return this.part ? this.rows.filter((row) => row.name.split(".")[0] === this.part) : this.rows; },

  /** Put tensors into cells by layer and kind, and size the picture. */
  map() {
    const cells = new Map(), layers = new Map(), kinds = new Map();
    for (const row of this.inPart()) {
      const [layer, kind] = layerAndKind(row.name);
      const key = `${layer}\n${kind}`;
      if (!cells.has(key)) cells.set(key, { layer, kind, rows: [] });
      cells.get(key).rows.push(row);
      layers.set(layer, (layers.get(layer) ?? 0) + 1);
      kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
    }
    this.layers = [...layers.keys()].sort(natural).slice(0, HEAT.rows);
    this.kinds = [...kinds].sort((a, b) => b[1] - a[1]).slice(0, HEAT.columns).map(([kind]) => kind).sort(natural);
    this.cells = cells;
    this.focus ??= [0, 0];
    this.most = MEASURES[this.measure].most ?? Math.max(1e-30, ...[...cells.values()].map((cell) => this.valueOf(cell) ?? 0));
    this.heat.box.style.height = `${HEAT.top + this.layers.length * HEAT.cell + 6}px`;
    const context = this.heat.canvas.getContext("2d"), shared = commonStart(this.layers);
    const widest = this.layers.reduce((most, layer) => Math.max(most, context.measureText(layer.slice(shared)).width), HEAT.least);
    this.left = Math.min(HEAT.left, Math.ceil(widest * 1.25) + 22);
    this.heat.box.style.width = `${Math.max(320, this.left + this.kinds.length * HEAT.cell + 60)}px`;
    const left = kinds.size - this.kinds.length + layers.size - this.layers.length;
    replace(this.legend, legendItem("nothing changed", "var(--sunk)", "framed"), legendItem(this.measure === "share" ? "all bytes changed" : `up to ${figure(this.most)}`, "var(--accent)"),
      legendItem("added, removed, reshaped", "var(--warn)"), legendItem("not compared", "color-mix(in srgb, var(--soft) 45%, transparent)"),
      left > 0 && h("li", {}, `${count(left)} rows and columns are left out; the table has all`));
    this.heat.again();
  },

  /** The value of a cell: of its tensors, weighed by size for shares, else the largest. */
  valueOf(cell) {
    const measure = MEASURES[this.measure];
    const known = cell.rows.filter((row) => isNumber(measure.of(row)));
    if (!known.length) return null;
    if (this.measure !== "share") return known.reduce((most, row) => Math.max(most, measure.of(row)), 0);
    const size = known.reduce((sum, row) => sum + row.nbytes, 0);
    return size ? known.reduce((sum, row) => sum + row.nbytes * row.share, 0) / size : 0;
  },

  cellText(cell) {
    const kinds = [...new Set(cell.rows.map((row) => KINDS[row.kind]))].join(", ");
    return `${cell.layer}\n${cell.kind}\n${kinds}; ${MEASURES[this.measure].text(this.valueOf(cell))}\n${plural(cell.rows.length, "tensor")}, ${bytes(cell.rows.reduce((sum, row) => sum + row.nbytes, 0))}`;
  },

  draw(context) {
    if (!this.layers) return;
    const { cell, top } = HEAT, { left } = this;
    context.textAlign = "right";
    context.fillStyle = ink("--soft");
    const shared = commonStart(this.layers);
    this.layers.forEach((layer, at) => context.fillText(fitted(context, layer.slice(shared), left - 20), left - 10, top + (at + 0.5) * cell));
    context.textAlign = "left";
    this.kinds.forEach((kind, at) => {
      context.save();
      context.translate(left + (at + 0.5) * cell, top - 8);
      context.rotate(-Math.PI / 3);
      context.fillText(fitted(context, kind, 116), 0, 0);
      context.restore();
    });
    if (shared) context.fillText(fitted(context, this.layers[0].slice(0, shared), left - 12), 0, top - 10);
    for (const [row, layer] of this.layers.entries()) {
      for (const [column, kind] of this.kinds.entries()) {
        const found = this.cells.get(`${layer}\n${kind}`);
        if (!found) continue;
        const value = this.valueOf(found);
        const odd = found.rows.some((tensor_) => ["added", "removed", "reshaped"].includes(tensor_.kind));
        context.fillStyle = odd ? ink("--warn") : value === null ? ink("--soft") : value === 0 ? ink("--sunk") : heat(this.measure === "share" ? value : Math.sqrt(value / this.most));
        context.beginPath();
        context.roundRect(left + column * cell + 1, top + row * cell + 1, cell - 2, cell - 2, 3);
        context.globalAlpha = value === null && !odd ? 0.45 : 1;
        context.fill();
        context.globalAlpha = 1;
        if (value === 0) {
          context.strokeStyle = ink("--line");
          context.lineWidth = 1;
          context.stroke();
        }
        if (found === this.picked || (document.activeElement === this.heat.box && this.focus[0] === row && this.focus[1] === column)) {
          context.strokeStyle = ink("--ink");
          context.lineWidth = 2;
          context.stroke();
        }
      }
    }
  },

  cellAt(event) {
    const column = Math.floor((event.offsetX - this.left) / HEAT.cell), row = Math.floor((event.offsetY - HEAT.top) / HEAT.cell);
    return this.cells?.get(`${this.layers[row]}\n${this.kinds[column]}`) ?? null;
  },

  pick(cell) {
    this.picked = this.picked === cell ? null : cell;
    this.list();
    this.heat.again();
  },

  pressed(event) {
    const [row, column] = this.focus;
    const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    if (moves[event.key]) {
      this.focus = [Math.max(0, Math.min(this.layers.length - 1, row + moves[event.key][0])), Math.max(0, Math.min(this.kinds.length - 1, column + moves[event.key][1]))];
      const cell = this.cells.get(`${this.layers[this.focus[0]]}\n${this.kinds[this.focus[1]]}`);
      announce(cell ? this.cellText(cell) : "no tensor");
      this.heat.again();
    } else if (event.key === "Enter" || event.key === " ") {
      const cell = this.cells.get(`${this.layers[row]}\n${this.kinds[column]}`);
      if (cell) this.pick(cell);
    } else return;
    event.preventDefault();
  },

  list() {
    const words = this.wanted.split(/\s+/).filter(Boolean);
    const rows = (this.picked ? this.picked.rows : this.inPart()).filter((row) => words.every((word) => `${row.name} ${KINDS[row.kind]}`.toLowerCase().includes(word)));
    this.grid.show(rows);
    this.note.textContent = `${plural(rows.length, "tensor")}${this.picked ? ` of ${this.picked.layer}, ${this.picked.kind}` : ""}`;
  },

  /** Ask for the values of what changed, the small ones first, four at a time, until all are there or it is stopped. */
  async readValues() {
    const wanted = this.grid.rows.filter((row) => row.kind === "changed" || row.kind === "unknown").filter((row) => !row.values).sort((a, b) => a.nbytes - b.nbytes).slice(0, 400);
    const [a, b] = this.names, asked = this.asked;
    let stopped = false, done = 0;
    const progress = h("span", { class: "soft" });
    replace(this.values, progress, h("button", { type: "button", onclick: () => { stopped = true; } }, "Stop"));
    const next = async () => {
      for (let row = wanted.shift(); row && !stopped && this.asked === asked; row = wanted.shift()) {
        row.values = await ask("difference", { a, b, tensor: row.name }).catch((error) => ({ error: error.message }));
        done += 1;
        progress.textContent = `${done} of ${done + wanted.length} tensors`;
        if (done % 16 === 0) { this.map(); this.grid.show(this.grid.rows); }
      }
    };
    if (this.measure === "share") this.measure = "relative";
    await Promise.all([next(), next(), next(), next()]);
    if (this.asked !== asked) return;
    announce(`compared the values of ${plural(done, "tensor")}`);
    this.lay();
  },

  update() {},
};

/** How long the start is that all names have, up to a dot. */
function commonStart(names) {
  if (names.length < 2) return 0;
  let length = names[0].length;
  for (const name of names) while (!name.startsWith(names[0].slice(0, length))) length -= 1;
  return names[0].slice(0, length).lastIndexOf(".") + 1;
}

views.push(diff);
