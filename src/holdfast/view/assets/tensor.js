// Values of one tensor: moments, what isn't finite, and a histogram. A live page asks for them; a report may have some.

const tensor = {
  id: "tensor",
  title: "Tensor",

  build(panel) {
    this.head = h("div", { class: "bar" });
    this.place = h("div", { class: "stack" });
    panel.append(this.head, this.place);
  },

  async show([name, wanted]) {
    name ??= shownCheckpoints()[0];
    this.name = name;
    const asked = (this.asked = `${name} ${wanted}`);
    const find = searchBox("Name of a tensor", (text) => this.suggest(name, text));
    this.found = h("div", { class: "bar" });
    replace(this.head, shownCheckpoints().length > 0 && checkpointChoice("checkpoint", name, (value) => go("tensor", value, ...(wanted ? [wanted] : []))), find, this.found);
    if (!name || !shownCheckpoints().includes(name)) return replace(this.place, name ? notHere(name) : h("p", { class: "empty" }, "There is no checkpoint."));
    let columns;
    try {
      columns = await checkpointOf(name);
    } catch (error) {
      return replace(this.place, h("p", { class: "notice warn" }, `${name}: ${error.message}`));
    }
    if (this.asked !== asked) return undefined;
    if (wanted === undefined) return replace(this.place, this.start(name, columns));
    const at = columns.find(wanted);
    if (at < 0) return replace(this.place, h("p", { class: "notice warn" }, `${name} has no tensor ${wanted}.`));
    const values = h("div", { class: "stack" }, h("p", { class: "soft" }, LIVE ? "Reading its values…" : ""));
    replace(this.place, h("div", { class: "two" },
      card(h("code", {}, wanted), `${shapeText(columns.shape(at))}, ${columns.dtype(at)}, ${bytes(columns.nbytes[at])}`, values),
      card("Where it lies", null, shardPicture(columns, at))));
    try {
      const found = await statisticsOf(name, wanted);
      if (this.asked === asked) replace(values, found ? this.statistics(found) : this.absent());
    } catch (error) {
      if (this.asked === asked) replace(values, h("p", { class: "notice warn" }, error.message));
    }
    return undefined;
  },

  start(name, columns) {
    const large = Array.from(columns.nbytes, (size, at) => [size, at]).sort((a, b) => b[0] - a[0]).slice(0, 12);
    return card("Choose a tensor", "the largest of this checkpoint; search for others, or open one from the Checkpoint view",
      plainTable("Largest tensors", ["tensor", "shape", "dtype", "size"], large.map(([size, at]) => [
        link(breakable(columns.names[at]), "tensor", name, columns.names[at]), h("span", { class: "nowrap" }, shapeText(columns.shape(at))), columns.dtype(at), bytes(size)]), [3], "named"));
  },

  async suggest(name, text) {
    if (!text) return replace(this.found);
    const columns = await checkpointOf(name);
    const words = text.toLowerCase().split(/\s+/);
    const found = columns.names.filter((known) => words.every((word) => known.toLowerCase().includes(word)));
    announce(`${plural(found.length, "tensor")} found`);
    return replace(this.found, found.slice(0, 6).map((known) => link(known, "tensor", name, known)),
      found.length > 6 && h("span", { class: "soft" }, `and ${count(found.length - 6)} others`));
  },

  absent() {
    const told = packedOf("statistics") && document.querySelector('script[data-kind="checkpoint"]').dataset.name;
    return h("p", { class: "notice" }, "This report has no statistics of this tensor. ", told && told !== this.name && [`It has those of ${told}. `],
      h("code", {}, "holdfast view"), " reads them when asked, ", h("code", {}, "holdfast report --stats"), " takes some along.");
  },

  statistics(found) {
    const odd = found.nan || found.inf, none = found.min === null && odd; // no finite value: nothing to add up
    return [
      odd ? h("p", { class: "notice warn" }, `${count(found.nan)} NaN and ${count(found.inf)} infinite of ${plural(found.elements, "value")}.`) : null,
      found.share_read < 1 && h("p", { class: "notice" }, `Read ${percent(found.share_read)} of it, evenly spread.`),
      found.histogram && histogram(found.histogram),
      facts([
        ["mean", figure(found.mean)], ["standard deviation", figure(found.std)], ["least, most", none ? NONE : `${figure(found.min)}, ${figure(found.max)}`],
        ["norm", none ? NONE : figure(found.norm)], ["zeros", `${count(found.zeros)} (${percent(found.elements ? found.zeros / found.elements : 0)})`],
        ["not finite", `${count(found.nan + found.inf)}`], ["elements", count(found.elements)],
      ]),
    ];
  },

  update() {},
};

function histogram({ low, high, counts }) {
  const width = 620, height = 220, bottom = 24, left = 4;
  const most = counts.reduce((found, number) => Math.max(found, number), 1);
  const x = linear(low, high, left, width - left);
  const each = (high - low) / counts.length;
  const bars = counts.map((number, at) => {
    const tall = (number / most) * (height - bottom - 8);
    const box = { x: x(low + at * each) + 0.5, width: Math.max(0.5, (width - 2 * left) / counts.length - 1), y: height - bottom - tall, height: tall };
    return svg("rect", { ...box, fill: "var(--mid)", rx: 1,
      onpointermove: (event) => showTip(event, `${figure(low + at * each)} to ${figure(low + (at + 1) * each)}\n${plural(number, "value")}`), onpointerleave: hideTip });
  });
  const peak = counts.indexOf(most);
  return svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `Histogram from ${figure(low)} to ${figure(high)}; most values, ${count(most)}, between ${figure(low + peak * each)} and ${figure(low + (peak + 1) * each)}`,
  }, bars, svg("line", { x1: left, x2: width - left, y1: height - bottom, y2: height - bottom, stroke: "var(--line)" }),
  ticks(low, high, 6).map((at) => svg("text", { x: Math.min(width - 24, Math.max(20, x(at))), y: height - 6, "text-anchor": "middle" }, figure(Math.abs(at) < each / 1e6 ? 0 : at))));
}

views.push(tensor);
