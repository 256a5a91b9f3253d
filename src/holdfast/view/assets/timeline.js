// Saves over time: runs, stall, throughput, and a lane for each rank; goodput with what it lost.

const views = [];  // filled by each view, in the order of the tabs; page.js shows them

const PHASES = [["stall", "--warn"], ["staging", "--mid"], ["persist", "--pale"], ["commit", "--soft"]];
const LANES = { top: 190, least: 3, most: 16, left: 78, right: 14 };

/** Where the copies of a rank, [rank, began, stall, staging, persist, bytes], are durable. */
const durableAt = (save, [, began, , staging, persist]) => (began ?? save.began) + (staging ?? 0) + (persist ?? 0);
const startOf = (save) => save.ranks.reduce((first, row) => Math.min(first, row[1] ?? first), save.began);
const endOf = (save) => (save.outcome === "published" || save.ranks.length
  ? Math.max(...ranksOf(save).map((row) => durableAt(save, row))) + (save.commit_s ?? 0) : save.t);
const speedOf = (save) => {
  const took = (save.staging_s ?? 0) + (save.persist_s ?? 0);
  return save.outcome === "published" && save.nbytes && took ? save.nbytes / took : null;
};
const saveTitle = (save) => `${save.name ?? (save.step === null ? "save" : `step ${save.step}`)}`;

/** The phases of one rank: [name, start, end]; a phase follows the one before, the stall lies at their start. */
function phasesOf(save, rank) {
  const [, began, stall, staging] = rank;
  const start = began ?? save.began;
  const copied = start + (staging ?? 0);
  const found = [["staging", start, copied], ["persist", copied, durableAt(save, rank)]];
  if (save.outcome === "published" && save.commit_s) found.push(["commit", endOf(save) - save.commit_s, endOf(save)]);
  found.push(["stall", start, start + (stall ?? 0)]);
  return found.filter(([, from, to]) => to > from);
}

const ranksOf = (save) => (save.ranks.length ? save.ranks
  : [[0, save.began, save.stall_s, save.staging_s, save.persist_s, save.nbytes]]);

const timeline = {
  id: "timeline",
  title: "Timeline",
  chosen: null,
  span: null,  // [from, to] in sight; null: all

  build(panel) {
    this.tiles = h("div", {});
    this.notice = h("div", {});
    this.plot = drawing(360, (context, width, height) => this.draw(context, width, height), {
      tabindex: "0", role: "application",
      "aria-label": "Saves over time, a lane for each rank. Left and right choose a save, plus and minus zoom, 0 shows all.",
      onkeydown: (event) => this.pressed(event),
      onpointermove: (event) => this.pointed(event), onpointerleave: hideTip,
      onpointerdown: (event) => this.grabbed(event), ondblclick: () => this.zoom(0.25),
    });
    this.plot.box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX);
      else this.pan(event.deltaX);
    }, { passive: false });
    const button = (text, label, act) => h("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.detail = h("div", { class: "stack" });
    this.grid = new Grid({
      caption: "Saves", height: 380, sort: { at: 1, down: true }, least: 940, key: (save) => `${save.t} ${save.step}`,
      open: (save) => this.choose(save, true),
      columns: [
        { title: "save", value: saveTitle, cell: saveTitle, width: "12%" },
        { title: "began", value: (save) => save.began, cell: (save) => when(save.began), width: "190px" },
        { title: "outcome", value: (save) => save.outcome, cell: outcomeChip, width: "17%" },
        { title: "size", end: true, value: (save) => save.nbytes, cell: (save) => bytes(save.nbytes) },
        { title: "stall", end: true, value: (save) => save.stall_s, cell: (save) => seconds(save.stall_s) },
        { title: "staging", end: true, value: (save) => save.staging_s, cell: (save) => seconds(save.staging_s) },
        { title: "persist", end: true, value: (save) => save.persist_s, cell: (save) => seconds(save.persist_s) },
        { title: "commit", end: true, value: (save) => save.commit_s, cell: (save) => seconds(save.commit_s) },
        { title: "speed", end: true, value: speedOf, cell: (save) => (speedOf(save) ? `${bytes(speedOf(save))}/s` : NONE) },
      ],
    });
    this.events = h("div", {});
    panel.append(this.notice, this.tiles,
      h("section", { class: "card" },
        h("header", {}, h("h2", {}, "Saves over time"),
          h("div", { class: "bar" }, button("−", "zoom out", () => this.zoom(2)), button("+", "zoom in", () => this.zoom(0.5)),
            button("Show all", null, () => this.look(null)))),
        this.plot.box,
        summary.journal.present && h("ul", { class: "legend" }, PHASES.map(([name, colour]) => legendItem(name === "stall" ? "stall: training waits" : name, `var(${colour})`)),
          legendItem("failed", "var(--bad)"))),
      this.detail,
      card("All saves", null, this.grid.box),
      this.events);
  },

  update() {
    const { saves, journal } = summary;
    replace(this.notice, !journal.present && h("p", { class: "notice" },
      "This root has no journal: stalls, phases, failures and goodput are unknown. What is shown comes from manifests: when each checkpoint was published, and its size."));
    replace(this.tiles, goodputCard());
    const ranks = Math.max(1, ...saves.map((save) => save.ranks.length));
    this.lane = Math.max(LANES.least, Math.min(LANES.most, 300 / ranks));
    this.plot.box.style.height = `${journal.present ? Math.ceil(LANES.top + ranks * this.lane + 30) : LANES.top}px`;
    this.ranks = ranks;
    this.grid.show(saves);
    this.chosen = this.chosen && (saves.find((save) => save.t === this.chosen.t && save.step === this.chosen.step) ?? null);
    if (!this.chosen || !this.picked) this.chosen = saves.at(-1) ?? null;
    this.tell();
    replace(this.events, eventsCard());
    this.plot.again();
  },

  all() {
    const { saves, runs } = summary;
    const from = Math.min(...saves.map(startOf), ...runs.map((run) => run.started));
    const to = Math.max(...saves.map(endOf), ...runs.map((run) => run.last));
    if (!Number.isFinite(from)) return [summary.generated - 60, summary.generated];
    const edge = Math.max(0.5, (to - from) * 0.02);
    return [from - edge, to + edge];
  },

  look(span) {
    const [from, to] = this.all();
    if (span) {
      const length = Math.max(0.05, Math.min(to - from, span[1] - span[0]));
      const start = Math.max(from, Math.min(to - length, span[0]));
      span = length >= to - from ? null : [start, start + length];
    }
    this.span = span;
    this.plot.again();
  },

  zoom(factor, at = null) {
    const [from, to] = this.span ?? this.all();
    const width = this.plot.box.clientWidth - LANES.left - LANES.right;
    const chosen = this.chosen && this.chosen.began >= from && this.chosen.began <= to ? this.chosen.began : (from + to) / 2;
    const centre = at === null ? chosen : from + ((at - LANES.left) / width) * (to - from);
    this.look([centre - (centre - from) * factor, centre + (to - centre) * factor]);
  },

  pan(pixels) {
    const [from, to] = this.span ?? this.all();
    const shift = (pixels / (this.plot.box.clientWidth - LANES.left - LANES.right)) * (to - from);
    this.look([from + shift, to + shift]);
  },

  choose(save, closely) {
    this.chosen = save;
    this.picked = true; // until then the newest is shown, also of a job that goes on
    if (closely) {
      const length = Math.max(endOf(save) - startOf(save), 0.02);
      this.look([startOf(save) - length * 0.1, endOf(save) + length * 0.15]);
      this.plot.box.scrollIntoView({ block: "nearest" });
    }
    this.tell();
    this.plot.again();
    announce(`${saveTitle(save)}, ${save.outcome}, stall ${seconds(save.stall_s)}, ${bytes(save.nbytes)}`);
  },

  tell() {
    const save = this.chosen;
    if (!save) return replace(this.detail, card("Saves", null, h("p", { class: "empty" }, "No save yet.")));
    const rows = save.ranks.slice(0, 512).map((row) => [String(row[0]), seconds(row[1] === null ? null : row[1] - save.began), seconds(row[2]),
      seconds(row[3]), seconds(row[4]), bytes(row[5])]);
    const slowest = [...save.ranks].sort((a, b) => (b[3] ?? 0) + (b[4] ?? 0) - (a[3] ?? 0) - (a[4] ?? 0))[0];
    const known = rowOf(save.name)?.state === "published";
    replace(this.detail, card(saveTitle(save), when(save.began),
      h("div", { class: "stack" },
        save.outcome === "failed" && h("p", { class: "notice warn" },
          h("strong", {}, save.error ?? "failed"), save.rank !== null ? ` on rank ${save.rank}` : "", save.message ? `: ${save.message}` : ""),
        facts([
          ["outcome", outcomeChip(save)],
          ["stall", isNumber(save.stall_s) ? seconds(save.stall_s) : null],
          ["staging, persist, commit", isNumber(save.persist_s) ? `${seconds(save.staging_s)}, ${seconds(save.persist_s)}, ${seconds(save.commit_s)}` : null],
          ["size", isNumber(save.nbytes) ? bytes(save.nbytes) : null],
          ["speed", speedOf(save) ? `${bytes(speedOf(save))}/s` : null],
          ["slowest rank", slowest && save.ranks.length > 1 ? `${slowest[0]}: ${seconds((slowest[3] ?? 0) + (slowest[4] ?? 0))}` : null],
          ["tensors", known && save.kind === "checkpoint" ? link("open the checkpoint", "checkpoint", save.name) : null],
        ]),
        rows.length > 1 && h("details", {}, h("summary", {}, `The ${plural(rows.length, "rank")} of this save`),
          plainTable("Phases on each rank", ["rank", "began after", "stall", "staging", "persist", "size"], rows, [1, 2, 3, 4, 5])),
        save.ranks_left_out && h("p", { class: "soft" }, "Rows of ranks are kept for newer saves only."))));
  },

  draw(context, width, height) {
    const [from, to] = this.span ?? this.all();
    const x = linear(from, to, LANES.left, width - LANES.right);
    this.x = x;
    this.drawTimes(context, x, from, to, width, height);
    this.drawRuns(context, x, width);
    const near = summary.saves.filter((save) => endOf(save) >= from && startOf(save) <= to);
    if (summary.journal.present) {
      this.drawSeries(context, x, near, { top: 44, tall: 52, title: "stall", value: (save) => save.stall_s, text: seconds, colour: "--warn" });
      this.drawSeries(context, x, near, { top: 118, tall: 44, title: "speed", value: speedOf, text: (value) => `${bytes(value)}/s`, colour: "--accent" });
      this.drawLanes(context, x, near, width);
    } else this.drawSeries(context, x, near, { top: 44, tall: 116, title: "size", value: (save) => save.nbytes, text: bytes, colour: "--mid" });
  },

  drawTimes(context, x, from, to, width, height) {
    context.textAlign = "center";
    for (const [at, text] of timeTicks(from, to, Math.max(2, width / 110))) {
      context.fillStyle = ink("--line");
      context.fillRect(Math.round(x(at)), 30, 1, height - 52);
      context.fillStyle = ink("--soft");
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(width - half, Math.max(half, x(at))), height - 10);
    }
  },

  drawRuns(context, x, width) {
    context.textAlign = "left";
    const clip = (at) => Math.max(LANES.left, Math.min(width - LANES.right, x(at)));
    context.fillStyle = ink("--soft");
    if (summary.runs.length) context.fillText("runs", 4, 15);
    for (const [number, run] of summary.runs.entries()) {
      const start = clip(run.started), end = clip(run.last);
      if (end <= start && (x(run.last) < LANES.left || x(run.started) > width)) continue;
      context.fillStyle = ink("--sunk");
      context.beginPath();
      context.roundRect(start, 6, Math.max(2, end - start), 18, 4);
      context.fill();
      context.fillStyle = ink("--ink");
      const name = `run ${number + 1}`, whole = run.resumed_from === null ? name : `${name}, from step ${run.resumed_from}`;
      const shown = [whole, name, String(number + 1)].find((text) => context.measureText(text).width <= end - start - 12);
      context.fillText(shown ?? "", start + 6, 15);
      const live = LIVE && number === summary.runs.length - 1 && summary.held_by;
      if (run.ended !== "closed" && run.ended !== "exited" && !live) {
        context.fillStyle = ink("--bad");
        context.fillRect(end - 2, 6, 2, 18);
      }
    }
  },

  drawSeries(context, x, saves, { top, tall, title, value, text, colour }) {
    const known = saves.filter((save) => isNumber(value(save)));
    context.textAlign = "left";
    context.fillStyle = ink("--soft");
    context.fillText(title, 4, top + tall - 6);
    context.fillStyle = ink("--line");
    context.fillRect(LANES.left, top + tall, context.canvas.clientWidth - LANES.left - LANES.right, 1);
    if (!known.length) return;
    const most = known.reduce((found, save) => Math.max(found, value(save)), 0) || 1;
    const y = linear(0, most, top + tall, top);
    context.fillStyle = ink("--soft");
    context.fillText(fitted(context, text(most), 74), 4, top + 4);
    context.fillStyle = ink(colour);
    const broad = Math.max(2, Math.min(7, (context.canvas.clientWidth - 80) / saves.length - 1));
    for (const save of known) {
      context.globalAlpha = save === this.chosen ? 1 : 0.72;
      const tip = Math.min(y(value(save)), top + tall - 1);
      context.fillRect(x(save.began) - broad / 2, tip, broad, top + tall - tip);
    }
    context.globalAlpha = 1;
  },

  drawLanes(context, x, saves, width) {
    const { top, left, right } = LANES;
    context.textAlign = "left";
    context.fillStyle = ink("--soft");
    const every = Math.ceil(14 / this.lane);
    for (let lane = 0; lane < this.ranks; lane += every) {
      context.fillText(this.ranks === 1 ? "save" : lane === 0 ? "rank 0" : String(lane), 4, top + (lane + 0.5) * this.lane);
    }
    context.save();
    context.beginPath();
    context.rect(left, top - 6, width - left - right, this.ranks * this.lane + 12);
    context.clip();
    const colours = Object.fromEntries(PHASES.map(([name, colour]) => [name, ink(colour)]));
    const bad = ink("--bad");
    for (const save of saves) {
      const failed = save.outcome === "failed";
      if (save === this.chosen) {
        context.fillStyle = ink("--accent-soft");
        context.fillRect(x(startOf(save)) - 3, top - 6, Math.max(6, x(endOf(save)) - x(startOf(save)) + 6), this.ranks * this.lane + 12);
      }
      const rows = save.ranks.length ? save.ranks : ranksOf(save);
      const wholly = save.ranks.length ? 1 : this.ranks;
      rows.forEach((rank, at) => {
        const y = top + at * this.lane, tall = Math.max(2, this.lane * wholly - (this.lane > 5 ? 3 : 1));
        const start = x(rank[1] ?? save.began);
        context.fillStyle = failed ? bad : colours.persist;
        context.fillRect(start - 0.75, y, 1.5, tall);
        for (const [name, begins, ends] of phasesOf(save, rank)) {
          context.fillStyle = failed && name !== "stall" ? bad : colours[name];
          const thin = name === "stall" || name === "commit" ? Math.max(2, tall / 3) : tall;
          context.fillRect(x(begins), name === "commit" ? y + (tall - thin) / 2 : y, Math.max(1, x(ends) - x(begins)), thin);
        }
      });
      if (failed && !save.ranks.length) {
        context.fillStyle = bad;
        context.fillRect(x(save.began) - 1.5, top, Math.max(3, x(save.t) - x(save.began)), this.ranks * this.lane - 2);
      }
    }
    context.restore();
  },

  nearest(offset) {
    let found = null, least = 26;
    for (const save of summary.saves) {
      const start = this.x(startOf(save)), end = this.x(endOf(save));
      const distance = offset < start ? start - offset : offset > end ? offset - end : 0;
      if (distance < least) [found, least] = [save, distance];
    }
    return found;
  },

  pointed(event) {
    if (this.dragging) return;
    const save = this.nearest(event.offsetX);
    if (!save) return hideTip();
    const lane = Math.floor((event.offsetY - LANES.top) / this.lane);
    const rank = save.ranks[lane];
    const lines = [`${saveTitle(save)}: ${save.outcome}`, when(save.began)];
    if (isNumber(save.stall_s)) lines.push(`stall ${seconds(save.stall_s)}`);
    if (isNumber(save.nbytes)) lines.push(bytes(save.nbytes) + (speedOf(save) ? `, ${bytes(speedOf(save))}/s` : ""));
    if (save.outcome === "failed") lines.push(`${save.error ?? ""} ${save.message ?? ""}`);
    if (rank) lines.push(`rank ${rank[0]}: staging ${seconds(rank[3])}, persist ${seconds(rank[4])}, ${bytes(rank[5])}`);
    showTip(event, lines.join("\n"));
  },

  grabbed(event) {
    const begin = event.offsetX;
    let last = begin;
    this.dragging = false;
    const moved = (next) => {
      if (Math.abs(next.offsetX - begin) > 4) this.dragging = true;
      if (this.dragging) this.pan(last - next.offsetX);
      last = next.offsetX;
    };
    const ended = () => {
      this.plot.box.removeEventListener("pointermove", moved);
      if (!this.dragging) {
        const save = this.nearest(begin);
        if (save) this.choose(save, false);
      }
      this.dragging = false;
    };
    this.plot.box.setPointerCapture?.(event.pointerId);
    this.plot.box.addEventListener("pointermove", moved);
    this.plot.box.addEventListener("pointerup", ended, { once: true });
    this.plot.box.addEventListener("pointercancel", ended, { once: true });
    hideTip();
  },

  pressed(event) {
    const at = summary.saves.indexOf(this.chosen);
    switch (event.key) {
      case "ArrowRight": if (summary.saves[at + 1]) this.choose(summary.saves[at + 1], Boolean(this.span)); break;
      case "ArrowLeft": if (summary.saves[at - 1]) this.choose(summary.saves[at - 1], Boolean(this.span)); break;
      case "+": case "=": this.zoom(0.5); break;
      case "-": this.zoom(2); break;
      case "0": case "Escape": this.look(null); break;
      case "Enter": if (this.chosen) this.choose(this.chosen, true); break;
      default: return;
    }
    event.preventDefault();
    event.stopPropagation();
  },
};

function outcomeChip(save) {
  const kind = { published: "good", "rolled forward": "good", failed: "bad" }[save.outcome] ?? "warn";
  const text = save.outcome === "started" ? "in work" : save.outcome;
  return h("span", {}, h("span", { class: `chip ${kind}` }, text), save.outcome === "failed" ? (save.error ?? "") : "");
}

const legendItem = (text, colour, look = "") => h("li", {}, h("span", { class: `swatch ${look}`, style: { background: colour } }), text);

const link = (text, ...route) => h("a", { href: `#${route.map(encodeURIComponent).join("/")}` }, text);

function goodputCard() {
  const { goodput, saves } = summary;
  const published = saves.filter((save) => save.outcome === "published");
  const failed = saves.filter((save) => save.outcome === "failed").length;
  const missed = summary.events.filter((event) => event.kind === "save.missed").length;
  const stalls = published.filter((save) => save.kind !== "export").map((save) => save.stall_s); // as the metrics count
  const longest = stalls.filter(isNumber).reduce((most, stall) => Math.max(most, stall), 0);
  const body = [h("dl", { class: "tiles" },
    goodput && tile("goodput", percent(goodput.share), `of ${seconds(goodput.wall_s)}`),
    tile("saves", count(published.length), [failed && `${failed} failed`, missed && `${missed} missed`].filter(Boolean).join(", ")),
    median(stalls) !== null && tile("stall, median", seconds(median(stalls)), `most ${seconds(longest)}`),
    median(published.map(speedOf)) !== null && tile("throughput, median", bytes(median(published.map(speedOf))), "per second"),
    tile("newest", published.length ? ago(published.at(-1).t) : NONE, published.length ? `ago, ${bytes(published.at(-1).nbytes)}` : ""))];
  if (goodput) {
    const lost = Object.values(goodput.lost).reduce((sum, part) => sum + part, 0);
    const parts = [
      ["training", Math.max(0, goodput.wall_s - lost), "--accent"], ["waiting for saves", goodput.lost.stall, "--warn"],
      ["restarts", goodput.lost.restart, "--mid"], ["repeated steps", goodput.lost.repeated, "--soft"],
    ];
    body.push(h("div", { style: { "margin-top": "18px" } },
      h("div", { class: "share", role: "img", "aria-label": parts.map(([name, part]) => `${name} ${percent(part / goodput.wall_s)}`).join(", ") },
        parts.filter(([, part]) => part > 0).map(([, part, colour]) => h("span", { style: { flex: String(part), background: `var(${colour})` } }))),
      h("ul", { class: "legend" }, parts.map(([name, part, colour]) =>
        legendItem(`${name} ${seconds(part)} (${percent(part / goodput.wall_s)})`, `var(${colour})`)))));
  }
  return card(null, null, ...body);
}

const EVENT_TEXT = {
  "save.missed": (event) => `step ${event.step}: ${event.reason ?? "an earlier save was in work"}`,
  "checkpoint.deleted": (event) => `${event.name ?? `step ${event.step}`}${event.reason ? `: ${event.reason}` : ""}`,
  "load.finished": (event) => `${event.name ?? `step ${event.step}`} in ${seconds(event.seconds)}${isNumber(event.nbytes) ? `, ${bytes(event.nbytes)}` : ""}`,
  "load.fallback": (event) => `${event.name ?? `step ${event.step}`} was passed over: ${event.error ?? ""}`,
  recovery: (event) => `${event.name ?? ""} ${String(event.what ?? "").replaceAll("_", " ")}`,
  signal: (event) => String(event.signal ?? ""),
  warning: (event) => `${event.what ?? ""}${event.step === undefined ? "" : ` at step ${event.step}`}: ${event.message ?? (event.tensors ?? []).join(", ")}`,
  verify: (event) => `${event.name ?? ""}: ${event.problems ? plural(event.problems, "problem") : "no problem"}`,
};

function eventsCard() {
  const rows = summary.events.filter((event) => !/^(version|receiver)\./.test(event.kind)).slice(-200).reverse();
  if (!rows.length) return null;
  return card("What else happened", rows.length === 200 ? "the newest 200" : null,
    plainTable("Other events, the newest first", ["when", "what", "of what"], rows.map((event) => [
      h("span", { class: "nowrap" }, when(event.t)),
      h("span", { class: `chip ${event.kind === "warning" || event.kind === "load.fallback" ? "warn" : ""}` }, event.kind.replaceAll(".", " ")),
      breakable(EVENT_TEXT[event.kind]?.(event) ?? "")]), [], "events"));
}

views.push(timeline);
