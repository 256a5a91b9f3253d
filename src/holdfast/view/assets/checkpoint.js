// One checkpoint: tensors as a tree and a treemap, how the chosen one lies over ranks and files, objects, files, metrics.

/** A select of the checkpoints whose tensors are here. */
function checkpointChoice(label, value, onchange) {
  const names = shownCheckpoints();
  return choice(label, names.map((name) => [name, `${titleOf(rowOf(name))}${rowOf(name).step === null ? "" : `  (${name})`}`]), value, onchange);
}

function notHere(name) {
  const row = rowOf(name);
  const known = row && (row.state === "published" || row.state === "stock");
  return h("p", { class: "notice warn" }, known && !LIVE
    ? `The tensors of ${name} are not in this report. Write it with  --step ${row.step ?? ""}  or use  holdfast view.`
    : `There is no checkpoint ${name} in this root.`);
}

const checkpoint = {
  id: "checkpoint",
  title: "Checkpoint",

  build(panel) {
    this.panel = panel;
    this.head = h("div", { class: "bar" });
    this.place = h("div", { class: "stack" });
    this.treemap = new Treemap((node) => this.choose(node.tensor));
    this.tree = new Grid({
      caption: "Tensors", height: 560, least: 560, open: (node) => this.choose(node.tensor), key: (node) => node.path,
      tree: {
        level: (node) => node.level,
        expanded: (node) => (node.children.size ? node.open : null),
        toggle: (node) => { node.open = !node.open; this.tree.show(this.names.rows()); },
      },
      columns: [
        { title: "name", cell: (node) => treeName(node, node.shown) },
        { title: "shape", width: "130px", cell: (node) => (node.tensor < 0 ? h("span", { class: "soft" }, plural(node.count, "tensor")) : shapeText(this.columns.shape(node.tensor))) },
        { title: "dtype", width: "92px", cell: (node) => (node.tensor < 0 ? "" : this.columns.dtype(node.tensor)) },
        { title: "size", width: "90px", end: true, cell: (node) => bytes(node.nbytes) },
        { title: "shards", width: "78px", end: true, cell: (node) => (node.tensor < 0 ? "" : count(this.columns.first[node.tensor + 1] - this.columns.first[node.tensor])) },
      ],
    });
    this.list = new Grid({
      caption: "Tensors found", height: 560, least: 560, open: (at) => this.choose(at), key: (at) => at, sort: { at: 0, down: false },
      columns: [
        { title: "name", value: (at) => this.columns.names[at], cell: (at) => h("code", { title: this.columns.names[at] }, this.columns.names[at]) },
        { title: "shape", width: "130px", value: (at) => shapeText(this.columns.shape(at)), cell: (at) => shapeText(this.columns.shape(at)) },
        { title: "dtype", width: "92px", value: (at) => this.columns.dtype(at), cell: (at) => this.columns.dtype(at) },
        { title: "size", width: "90px", end: true, value: (at) => this.columns.nbytes[at], cell: (at) => bytes(this.columns.nbytes[at]) },
        { title: "shards", width: "78px", end: true, value: (at) => this.columns.first[at + 1] - this.columns.first[at], cell: (at) => count(this.columns.first[at + 1] - this.columns.first[at]) },
      ],
    });
    this.search = searchBox("Search tensors", (text) => this.filter(text));
    this.note = h("span", { class: "soft push" });
    this.lists = h("div", {}, this.tree.box);
    this.chosen = h("div", {});
    this.rest = h("div", { class: "two" });
    panel.append(this.head, this.place);
  },

  async show([name, tensor]) {
    name ??= shownCheckpoints()[0];
    this.name = name;
    replace(this.head, shownCheckpoints().length > 0 && checkpointChoice("checkpoint", name, (value) => go("checkpoint", value)));
    if (!name) return replace(this.place, h("p", { class: "empty" }, "There is no checkpoint whose tensors could be shown."));
    if (!shownCheckpoints().includes(name)) return replace(this.place, notHere(name));
    if (this.shown !== name) replace(this.place, h("p", { class: "empty" }, "Reading the reports…"));
    let columns;
    try {
      columns = await checkpointOf(name);
    } catch (error) {
      return replace(this.place, h("p", { class: "notice warn" }, `${name}: ${error.message}`));
    }
    if (this.name !== name) return undefined;  // another was asked for meanwhile
    if (this.columns !== columns || this.shown !== name) this.lay(columns);
    this.shown = name;
    const at = tensor === undefined ? -1 : columns.find(tensor);
    if (at >= 0) this.picture(at);
    else replace(this.chosen, card("How it lies", null, h("p", { class: "empty" }, "Choose a tensor to see how it lies over ranks and files.")));
    return undefined;
  },

  lay(columns) {
    this.columns = columns;
    this.names = new Names(columns);
    const top = this.names.below(this.names.root);
    if (top.length <= 6) for (const node of top) node.open = node.children.size > 0 && node.children.size <= 40;
    this.search.value = "";
    replace(this.place, this.facts(),
      h("div", { class: "two" },
        h("section", { class: "card" }, h("header", {}, h("h2", {}, "Tensors"), this.note),
          h("div", { class: "bar", style: { "margin-bottom": "12px" } }, this.search), this.lists),
        this.chosen),
      card("Sizes", "choose a box to go into it", this.treemap.box), this.rest);
    this.filter("");
    this.treemap.show(this.names);
    replace(this.rest, this.filesCard(), this.objectsCard());
  },

  facts() {
    const row = rowOf(this.name), { columns } = this;
    const metrics = Object.entries(row.metrics ?? {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    return card(titleOf(row), h("code", {}, columns.told.path),
      (row.suspicious ?? []).map((one) => h("p", { class: "notice warn", style: { "margin-bottom": "16px" } }, h("strong", {}, `Suspicious: ${one.what}`), ": ", breakable(one.message))),
      h("dl", { class: "tiles" }, tile("tensors", count(columns.size)), tile("bytes of tensors", bytes(columns.total)),
        tile("ranks", count(columns.told.world)), tile("saved", ago(row.created), "ago"), tile("objects", count(columns.objects.length))),
      h("div", { style: { "margin-top": "16px" } }, facts([
        ["saved", when(row.created)], ["written by", writer(row)], ["metrics", metrics], ["kept because", keptText(row).join(", ")],
        ["delta to", (row.chain ?? []).join(", ")], ["attempt", row.attempt && h("code", {}, row.attempt)],
      ])));
  },

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      replace(this.lists, this.tree.box);
      this.tree.show(this.names.rows());
      this.note.textContent = `${plural(this.columns.size, "tensor")}, ${bytes(this.columns.total)}`;
      return;
    }
    const found = [];
    for (let at = 0; at < this.columns.size; at++) {
      const text_ = `${this.columns.names[at]} ${this.columns.dtype(at)}`.toLowerCase();
      if (words.every((word) => text_.includes(word))) found.push(at);
    }
    replace(this.lists, this.list.box);
    this.list.show(found);
    this.note.textContent = `${plural(found.length, "tensor")}, ${bytes(found.reduce((sum, at) => sum + this.columns.nbytes[at], 0))}`;
    announce(`${plural(found.length, "tensor")} found`);
  },

  choose(at) { go("checkpoint", this.name, this.columns.names[at]); },

  picture(at) {
    const name = this.columns.names[at];
    replace(this.chosen, card(h("code", {}, name), `${shapeText(this.columns.shape(at))}, ${this.columns.dtype(at)}, ${bytes(this.columns.nbytes[at])}`,
      shardPicture(this.columns, at),
      h("p", { style: { "margin-top": "12px" } }, link("Statistics and histogram", "tensor", this.name, name))));
    announce(`${name}, ${shapeText(this.columns.shape(at))}. ${placementText(this.columns.shape(at), this.columns.shards(at))}`);
  },

  filesCard() {
    const { files, extra } = this.columns;
    const most = files.reduce((found, [, size]) => Math.max(found, size), 1);
    const rows = files.slice(0, 512).map(([name, size, rank]) => [
      rank === null ? NONE : String(rank), h("code", {}, name), bytes(size),
      h("span", { class: "share", style: { width: "90px" } }, h("span", { style: { width: `${(100 * size) / most}%`, background: "var(--mid)" } }))]);
    for (const [name, size] of extra.slice(0, 200)) rows.push([NONE, h("code", {}, name), bytes(size), ""]);
    return card("Files", plural(files.length + extra.length, "file"), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Files of the checkpoint", style: { "max-height": "340px", padding: "0 12px" } },
      plainTable("Data files by rank, then small files", ["rank", "file", "size", "share"], rows, [2])));
  },

  objectsCard() {
    const rows = this.columns.objects.slice(0, 1000).map(([name, file, , size]) => [h("code", {}, breakable(name)), h("code", { class: "nowrap" }, this.columns.files[file]?.[0] ?? NONE), h("span", { class: "nowrap" }, bytes(size))]);
    return card("Objects", plural(this.columns.objects.length, "object"), rows.length
      ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Objects of the checkpoint", style: { "max-height": "340px", padding: "0 12px" } }, plainTable("Plain objects, pickled", ["object", "file", "size"], rows, [2]))
      : h("p", { class: "empty" }, "No objects."));
  },

  update() { this.show(routeOf().slice(1)); },
};

function treeName(node, text) {
  return h("span", { style: { "padding-inline-start": `${node.level * 16}px` }, title: node.path },
    h("span", { class: "twist", "aria-hidden": "true" }, node.children.size ? (node.open ? "▾" : "▸") : ""), text);
}

views.push(checkpoint);
