// How one tensor lies over ranks and files: the boxes of its shards on its global shape, and what mesh made them.

const SHARDS_DRAWN = 4096;

/** In how many parts each dimension is cut, if the boxes are a grid that fills the tensor; else null. */
function gridOf(shape, shards) {
  const cuts = shape.map((_, dim) => new Set(shards.map((shard) => shard.offsets[dim])).size);
  const cells = new Set(shards.map((shard) => shard.offsets.join())).size;
  const product = cuts.reduce((all, number) => all * number, 1);
  const volume = (sizes) => sizes.reduce((all, size) => all * size, 1);
  const distinct = new Map(shards.map((shard) => [shard.offsets.join(), volume(shard.sizes)]));
  const filled = [...distinct.values()].reduce((sum, part) => sum + part, 0);
  return product === cells && filled === volume(shape) ? cuts : null;
}

/** What the offsets tell of mesh and placements, in words. */
function placementText(shape, shards) {
  const ranks = new Set(shards.map((shard) => shard.rank).filter((rank) => rank !== null)).size;
  const cuts = gridOf(shape, shards);
  if (shards.length === 1) return "Whole in one place: not sharded, or one rank wrote it for all replicas.";
  if (!cuts) return `${plural(shards.length, "shard")} that are no even grid: cut by flat offsets, or unevenly.`;
  const cut = cuts.map((number, dim) => [dim, number]).filter(([, number]) => number > 1);
  const cells = cut.reduce((all, [, number]) => all * number, 1);
  const mesh = cut.map(([, number]) => number).join(" × ");
  const placed = cut.map(([dim]) => `Shard(${dim})`).join(", ");
  const spread = ranks ? `, written by ${plural(ranks, "rank")}` : "";
  const twice = shards.length > cells ? `; ${shards.length - cells} boxes are stored twice` : "";
  return `Cut in ${mesh} along ${cut.length > 1 ? "dimensions" : "dimension"} ${cut.map(([dim]) => dim).join(" and ")}: as ${placed} on a mesh of ${mesh}${spread}${twice}.`;
}

/** The two dimensions to draw, rows and columns: those that are cut most, in their order; the others are said. */
function drawnDimensions(shape, shards) {
  if (shape.length === 0) return [-1, -1];
  if (shape.length === 1) return [-1, 0];
  const cuts = shape.map((_, dim) => [new Set(shards.map((shard) => shard.offsets[dim])).size, shape[dim] > 1 ? 1 : 0, -dim]);
  const order = shape.map((_, dim) => dim).sort((a, b) => cuts[b][0] - cuts[a][0] || cuts[b][1] - cuts[a][1] || cuts[b][2] - cuts[a][2]);
  return order.slice(0, 2).sort((a, b) => a - b);
}

function shardPicture(columns, at) {
  const shape = columns.shape(at), shards = columns.shards(at);
  const [rows, across] = drawnDimensions(shape, shards);
  const tall = rows < 0 ? 1 : shape[rows], wide = across < 0 ? 1 : shape[across];
  const width = 460, height = rows < 0 ? 56 : Math.max(80, Math.min(300, (width * tall) / Math.max(1, wide)));
  const left = rows < 0 ? 8 : 58, top = 26;
  const x = linear(0, wide || 1, left, width - 8), y = linear(0, tall || 1, top, top + height);
  const files = [...new Set(shards.map((shard) => shard.file))];
  const drawn = shards.slice(0, SHARDS_DRAWN).map((shard) => {
    const [r0, rn] = rows < 0 ? [0, 1] : [shard.offsets[rows], shard.sizes[rows]];
    const [c0, cn] = across < 0 ? [0, 1] : [shard.offsets[across], shard.sizes[across]];
    const number = shard.rank ?? files.indexOf(shard.file);
    const box = { x: x(c0), y: y(r0), width: Math.max(1, x(c0 + cn) - x(c0)), height: Math.max(1, y(r0 + rn) - y(r0)) };
    const label = shard.rank === null ? shard.file : `rank ${shard.rank}`;
    const fits = box.width > 7 * label.length + 8 && box.height > 16;
    const range = shard.offsets.map((offset, dim) => `${offset}:${offset + shard.sizes[dim]}`).join(", ");
    const told = `${label}\n[${range}]\n${shard.file}, byte ${count(shard.at)}\n${bytes(shard.nbytes)}`;
    return svg("g", { onpointermove: (event) => showTip(event, told), onpointerleave: hideTip },
      svg("rect", { ...box, rx: Math.min(3, box.width / 4, box.height / 4), fill: hue(number), stroke: "var(--card)", "stroke-width": shards.length > 400 ? 0.3 : 1.5 }),
      fits && svg("text", { class: "name", x: box.x + box.width / 2, y: box.y + box.height / 2 + 4, "text-anchor": "middle" }, label));
  });
  const others = shape.map((_, dim) => dim).filter((dim) => dim !== rows && dim !== across);
  const text = placementText(shape, shards);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${top + height + 8}`, width: "100%", role: "img",
    "aria-label": `Shards of ${columns.names[at]}, shape ${shapeText(shape)}. ${text}`,
  },
  across >= 0 && svg("text", { x: left, y: 14 }, `dimension ${across}: ${count(wide)}`),
  rows >= 0 && svg("text", { x: 8, y: top + 12 }, `dim ${rows}`), rows >= 0 && svg("text", { x: 8, y: top + 28 }, count(tall)),
  drawn);
  return h("div", { class: "stack" }, h("p", {}, text), picture,
    others.length > 0 && h("p", { class: "soft" }, `Not drawn: ${others.map((dim) => `dimension ${dim} (${count(shape[dim])})`).join(", ")}.`),
    shards.length > SHARDS_DRAWN && h("p", { class: "soft" }, `The first ${count(SHARDS_DRAWN)} of ${count(shards.length)} shards.`),
    h("details", {}, h("summary", {}, `Where the ${plural(shards.length, "shard")} ${shards.length === 1 ? "lies" : "lie"}`),
      plainTable("Shards", ["rank", "part", "file", "at byte", "size"], shards.slice(0, 256).map((shard) => [
        shard.rank === null ? NONE : String(shard.rank),
        `[${shard.offsets.map((offset, dim) => `${offset}:${offset + shard.sizes[dim]}`).join(", ")}]`,
        shard.file, count(shard.at), bytes(shard.nbytes)]), [3, 4])));
}
