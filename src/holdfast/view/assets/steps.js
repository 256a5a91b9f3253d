// Every entry of the root as a row: size, metrics, age, verification, and why retention keeps it.

const STATE_KIND = { published: "", corrupt: "bad", newer: "warn", "in work": "good", "left behind": "warn", trash: "", stock: "warn" };

const writer = (row) => Object.entries(row.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
const keptText = (row) => (row.kept ?? []).map((reason) => reason.replace(/^the /, ""));

function metricNames() {
  const seen = new Map();
  for (const row of summary.steps) for (const name of Object.keys(row.metrics ?? {})) seen.set(name, (seen.get(name) ?? 0) + 1);
  return [...seen].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name]) => name);
}

const metricNumber = (value) => (typeof value === "string" ? ({ inf: Infinity, "-inf": -Infinity }[value] ?? NaN) : value);

const steps = {
  id: "steps",
  title: "Steps",
  wanted: "",
  state: "all",

  build(panel) {
    this.search = searchBox("Search steps", (text) => { this.wanted = text.toLowerCase(); this.filter(); });
    this.states = choice("state", [["all", "all"]], "all", (value) => { this.state = value; this.filter(); });
    this.note = h("p", { class: "soft" });
    this.place = h("div", {});
    panel.append(h("section", { class: "card" },
      h("header", {}, h("h2", {}, "Steps"), this.note),
      h("div", { class: "bar", style: { "margin-bottom": "12px" } }, this.search, this.states), this.place));
  },

  columns(metrics) {
    return [
      { title: "step", end: true, width: "76px", value: (row) => row.step, cell: (row) => (row.step === null ? NONE : count(row.step)) },
      { title: "name", width: "100px", value: (row) => row.name, cell: (row) => row.name },
      { title: "state", width: "168px", value: (row) => row.state, cell: stateChips },
      { title: "size", end: true, width: "88px", value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
      { title: "age", end: true, width: "78px", value: (row) => (row.created === null ? null : -row.created), cell: (row) => ago(row.created) },
      ...metrics.map((name) => ({
        title: name, end: true, width: "104px", value: (row) => metricNumber(row.metrics?.[name] ?? null),
        cell: (row) => figure(row.metrics?.[name] ?? null),
      })),
      { title: "kept because", width: "256px", value: (row) => keptText(row).join(" "), cell: keptChips },
      { title: "verified", width: "104px", value: (row) => row.verified?.t ?? null, cell: verifiedChip },
      { title: "ranks", end: true, width: "66px", value: (row) => row.world, cell: (row) => count(row.world) },
      { title: "written by", width: "184px", value: writer, cell: (row) => writer(row) || NONE },
    ];
  },

  update() {
    const metrics = metricNames();
    if (!this.grid || metrics.join() !== this.metrics) {
      this.metrics = metrics.join();
      this.grid = new Grid({
        caption: "Entries of this root", columns: this.columns(metrics), height: 620, least: 1120 + 104 * metrics.length,
        sort: { at: 4, down: false }, key: (row) => row.name, open: (row) => this.open(row),
      });
      replace(this.place, this.grid.box);
    }
    const states = [...new Set(summary.steps.map((row) => row.state))];
    const select = this.states.querySelector("select");
    if ([...select.options].map((option) => option.value).join() !== ["all", ...states].join()) {
      replace(select, ["all", ...states].map((state) => h("option", { value: state, selected: state === this.state }, state)));
    }
    this.filter();
  },

  filter() {
    const words = this.wanted.split(/\s+/).filter(Boolean);
    const rows = summary.steps.filter((row) => {
      if (this.state !== "all" && row.state !== this.state) return false;
      if (!words.length) return true;
      const text = [row.step, row.name, row.state, row.kind, writer(row), row.error, row.pinned ? "pinned" : "", ...keptText(row),
        ...Object.entries(row.metrics ?? {}).flat()].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.grid.show(rows);
    const size = rows.reduce((sum, row) => sum + (row.nbytes ?? 0), 0);
    const unknown = summary.keep ? "" : "; the run's retention is unknown: only what holds whatever it is";
    this.note.textContent = `${plural(rows.length, "entry", "entries")}, ${bytes(size)}${unknown}`;
    if (words.length) announce(`${plural(rows.length, "entry", "entries")} found`);
  },

  open(row) {
    if (row.state === "published" || row.state === "stock") go("checkpoint", row.name);
    else announce(row.error ?? `${row.name} is ${row.state}`);
  },
};

function stateChips(row) {
  const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);
  const told = [row.state === "published" ? null : chip(row.state, STATE_KIND[row.state]),
    row.suspicious && chip("suspicious", "bad"), row.latest && chip("latest", "good"), row.pinned && chip("pinned", "good"), row.kind === "export" && chip("export"),
    row.kind === "checkpoint" && row.state === "published" && !row.resumable && chip("model only"),
    row.chain && chip(`delta to ${row.chain.at(-1)}`), row.standing === false && chip("abandoned", "warn")].filter(Boolean);
  const why = row.error ?? row.held_by ?? row.suspicious?.map((one) => one.message).join("\n") ?? null;
  return h("span", { title: why || null }, told.length ? told : h("span", { class: "soft" }, "durable"));
}

function keptChips(row) {
  if (!row.kept) return NONE;
  const texts = keptText(row);
  return texts.length ? h("span", { title: texts.join(", ") }, texts.map((text) => h("span", { class: "chip" }, text)))
    : h("span", { class: "soft" }, summary.keep ? "may go" : NONE);
}

function verifiedChip(row) {
  if (!row.verified) return h("span", { class: "soft" }, row.state === "published" ? "not noted" : NONE);
  return row.verified.problems ? h("span", { class: "chip bad" }, plural(row.verified.problems, "problem")) : `${ago(row.verified.t)} ago`;
}

views.push(steps);
