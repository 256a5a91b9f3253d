// Where steps come from: branches of runs that went back, and weight versions with who has which.

const lineage = {
  id: "lineage",
  title: "Lineage",

  build(panel) {
    this.place = h("div", { class: "stack" });
    panel.append(this.place);
  },

  update() {
    replace(this.place, this.branches(), this.versions(), this.chains());
  },

  branches() {
    const rows = summary.steps.filter((row) => row.branch !== undefined && row.step !== null);
    if (!rows.length) return card("Branches", null, h("p", { class: "empty" }, "No checkpoint yet."));
    const known = new Map(summary.branches.map((branch) => [branch.branch, branch]));
    for (const branch of [...known.values()]) {
      for (let from = branch.from; from !== null && !known.has(from); from = null) known.set(from, { branch: from, from: null, at: null });
    }
    const order = [...known.keys()].sort((a, b) => a - b);
    const went = order.length - 1;
    return card("Branches", went ? `the run went back ${went === 1 ? "once" : `${went} times`}` : "the run never went back", branchPicture(rows, known, order),
      h("ul", { class: "legend" }, legendItem("what a run would resume from leads here", "var(--accent)"), legendItem("abandoned when the run went back", "var(--soft)")),
      went > 0 && h("details", { style: { "margin-top": "12px" } }, h("summary", {}, "As a table"), plainTable("Branches", ["branch", "goes on from", "steps", "newest"], order.map((number) => {
        const { from, at } = known.get(number);
        const own = rows.filter((row) => row.branch === number);
        return [String(number), from === null ? NONE : `step ${at} of branch ${from}`, count(own.length), own.length ? `step ${own.at(-1).step}` : NONE];
      }), [2])));
  },

  versions() {
    const events = summary.events.filter((event) => /^(version|receiver)\./.test(event.kind));
    if (!events.length) return null;
    const versions = new Map(), holders = new Map();
    for (const event of events) {
      if (event.kind === "receiver.left") {
        holders.delete(String(event.receiver));
        continue;
      }
      const known = versions.get(event.version) ?? { version: event.version, step: null, published: null };
      known.step ??= event.step ?? null;
      if (event.kind === "version.published") known.published = event.t;
      else holders.set(String(event.receiver), event);
      versions.set(event.version, known);
    }
    const newest = Math.max(-1, ...versions.keys());
    const saved = new Map(summary.steps.map((row) => [row.step, row.name]));
    const stepCell = ({ step }) => (step === null ? NONE : saved.has(step) ? h("button", { type: "button", class: "link", onclick: () => go("checkpoint", saved.get(step)) }, count(step)) : count(step));
    const have = ({ version }) => {
      const names = [...holders].filter(([, event]) => event.version === version).map(([name]) => name).sort(natural);
      return names.length > 8 ? `${names.slice(0, 6).join(", ")} and ${count(names.length - 6)} more` : names.join(", ") || NONE;
    };
    const columns = [["version", (row) => String(row.version)], ["step", stepCell],
      ["published", (row) => h("span", { class: "nowrap" }, when(row.published))], ["who has it now", have]];
    const known = { step: [...versions.values()].some((row) => row.step !== null), "who has it now": holders.size > 0 };
    const told = columns.filter(([title]) => known[title] ?? true);
    const ends = told.map(([title], at) => (title === "step" ? at : -1));
    return h("div", { class: "two" },
      card("Weight versions", "from the journal", plainTable("Versions, the newest first", told.map(([title]) => title),
        [...versions.values()].sort((a, b) => b.version - a.version).slice(0, 100).map((row) => told.map(([, cell]) => cell(row))), ends)),
      card("Who has which", null, !holders.size ? h("p", { class: "empty" }, "No receiver has one that this job knows of. Those that read a directory or a bucket tell only their own process.") : plainTable("Receivers", ["receiver", "version", "behind", "took", "since"], [...holders].sort(([a], [b]) => natural(a, b)).slice(0, 500).map(([name, event]) => [
        name, String(event.version), newest - event.version ? h("span", { class: "chip warn" }, count(newest - event.version)) : h("span", { class: "chip good" }, "newest"), seconds(event.seconds ?? null), `${ago(event.t)} ago`]), [])));
  },

  chains() {
    const rows = summary.steps.filter((row) => row.chain);
    if (!rows.length) return null;
    const needed = new Map();
    for (const row of rows) needed.set(row.chain[0], [...(needed.get(row.chain[0]) ?? []), row]);
    const anchors = [...needed].map(([anchor, deltas]) => {
      const whole = rowOf(anchor)?.nbytes ?? 0;
      const sum = deltas.reduce((total, row) => total + (row.nbytes ?? 0), 0);
      return [anchor, plural(deltas.length, "delta"), bytes(whole), bytes(sum / deltas.length), deltas.map((row) => row.name).join(" → ")];
    });
    return card("Delta chains", "a delta is read with all before it, up to its anchor",
      plainTable("Anchors and their deltas", ["anchor", "deltas", "anchor's size", "a delta, on average", "in their order"], anchors, [2, 3]));
  },
};

function branchPicture(rows, known, order) {
  const narrow = innerWidth < 760 && rows.length <= 40; // as many dots fit; more scroll sideways
  const width = narrow ? 420 : 1000, gap = 52, left = 92, right = 40, top = 26;
  const least = rows.reduce((found, row) => Math.min(found, row.step), Infinity), most = rows.reduce((found, row) => Math.max(found, row.step), 0);
  const height = top + (order.length - 1) * gap + 34;
  const x = linear(least, most, left, width - right);
  const y = (branch) => top + order.indexOf(branch) * gap + 12;
  const parts = [];
  for (const at of ticks(least, most, narrow ? 4 : 8)) {
    parts.push(svg("line", { x1: x(at), x2: x(at), y1: top - 6, y2: height, stroke: "var(--line)", "stroke-width": 0.6 }),
      svg("text", { x: x(at), y: 12, "text-anchor": "middle" }, count(at)));
  }
  for (const number of order) {
    const { from, at } = known.get(number);
    const own = rows.filter((row) => row.branch === number);
    const standing = own.some((row) => row.standing);
    parts.push(svg("text", { x: 0, y: y(number) + 4 }, `branch ${number}`));
    if (own.length) {
      const turn = x.inverse(x(Math.max(least, at ?? 0)) + 30);
      const start = from === null ? own[0].step : Math.min(own[0].step, turn);
      const kept = own.filter((row) => row.standing);
      const edge = kept.length ? kept.at(-1).step : start;
      const path = (a, b, colour) => b > a && svg("line", { x1: x(a), x2: x(b), y1: y(number), y2: y(number), stroke: colour, "stroke-width": 2.5, "stroke-linecap": "round" });
      parts.push(path(start, own.at(-1).step, "var(--line)"), path(start, edge, "var(--accent)"));
    }
    if (from !== null && own.length) {
      const start = x(Math.max(least, at));
      parts.push(svg("path", { d: `M${start} ${y(from)} C ${start} ${y(number)}, ${start} ${y(number)}, ${Math.min(x(own[0].step), start + 30)} ${y(number)}`, fill: "none", stroke: standing ? "var(--accent)" : "var(--line)", "stroke-width": 2.5 }));
    }
    const radius = own.length > 300 ? 1.6 : own.length > 80 ? 2.6 : 4.5;
    for (const row of own) {
      const told = `${row.name}\nbranch ${number}${row.standing ? "" : ", abandoned"}\n${when(row.created)}${Object.entries(row.metrics ?? {}).slice(0, 3).map(([name, value]) => `\n${name} ${figure(value)}`).join("")}`;
      parts.push(svg("circle", { cx: x(row.step), cy: y(number), r: row.latest ? radius + 1.5 : radius, fill: row.standing ? "var(--accent)" : "var(--soft)", stroke: "var(--card)", "stroke-width": own.length > 80 ? 0.5 : 1.5,
        onpointermove: (event) => showTip(event, told), onpointerleave: hideTip, onclick: () => go("checkpoint", row.name) }));
    }
  }
  return sideways("Branches", svg("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", style: { "min-width": narrow ? "0" : "760px" },
    "aria-label": `${plural(rows.length, "step")} on ${plural(order.length, "branch", "branches")}, from ${least} to ${most}` }, parts));
}

views.push(lineage);
