// What the page shows: the summary, and checkpoints in columns, out of this file or from the server it came from.

const LIVE = document.documentElement.dataset.mode === "live";
let summary = JSON.parse(byId("summary").textContent);

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const packedOf = (kind, name = null) => [...document.querySelectorAll(`script[data-kind="${kind}"]`)]
  .find((node) => name === null || node.dataset.name === name);

async function ask(place, asked = {}) {
  const reply = await fetch(`/api/${place}?${new URLSearchParams(asked)}`);
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.message || reply.statusText);
  return found;
}

/** Names of the checkpoints whose tensors can be shown, the newest first. */
function shownCheckpoints() {
  const rows = summary.steps.filter((row) => row.state === "published" || row.state === "stock");
  const names = rows.map((row) => row.name).reverse();
  return LIVE ? names : names.filter((name) => packedOf("checkpoint", name));
}

const rowOf = (name) => summary.steps.find((row) => row.name === name);
const titleOf = (row) => (row.step === null || row.step === undefined ? row.name : `step ${row.step}`);

const decoded = new Map();

/** The columns of a checkpoint, decoded once; of another attempt under the same name anew. */
function checkpointOf(name) {
  const key = `${name} ${rowOf(name)?.attempt}`;
  if (!decoded.has(key)) {
    const found = (async () => {
      const packed = packedOf("checkpoint", name);
      return new Columns(packed && !LIVE ? await unpacked(packed.textContent) : await ask("checkpoint", { name }));
    })();
    found.catch(() => decoded.delete(key));
    decoded.set(key, found);
    if (decoded.size > 4) decoded.delete(decoded.keys().next().value);
  }
  return decoded.get(key);
}

/** A checkpoint's tensors by number, in the order of their names. */
class Columns {
  constructor(told) {
    Object.assign(this, { told, files: told.files, objects: told.objects, extra: told.extra });
    this.names = told.tensors.name;
    this.size = this.names.length;
    const volumes = told.shapes.map((shape) => shape.reduce((product, length) => product * length, 1));
    this.nbytes = new Float64Array(this.size);
    this.first = new Uint32Array(this.size + 1);
    for (let at = 0; at < this.size; at++) {
      this.nbytes[at] = volumes[told.tensors.shape[at]] * told.dtypes[told.tensors.dtype[at]][1];
      this.first[at + 1] = this.first[at] + told.tensors.shards[at];
    }
    this.total = this.nbytes.reduce((sum, size) => sum + size, 0);
    this.sums = told.shards.sums === null ? null : words(told.shards.sums);
  }
  shape(at) { return this.told.shapes[this.told.tensors.shape[at]]; }
  dtype(at) { return this.told.dtypes[this.told.tensors.dtype[at]][0]; }
  find(name) {
    let low = 0, high = this.size - 1;
    while (low <= high) {  // sorted by Python: by code points, as < compares but for pairs of surrogates
      const middle = (low + high) >> 1;
      if (this.names[middle] === name) return middle;
      if (this.names[middle] < name) low = middle + 1;
      else high = middle - 1;
    }
    return this.names.indexOf(name);
  }
  /** [{offsets, sizes, file, rank, at, nbytes}] of one tensor. */
  shards(at) {
    const { box, file, at: offset } = this.told.shards;
    const item = this.told.dtypes[this.told.tensors.dtype[at]][1];
    return Array.from({ length: this.first[at + 1] - this.first[at] }, (_, index) => {
      const shard = this.first[at] + index;
      const [offsets, sizes] = this.told.boxes[box[shard]];
      const [name, , rank] = this.files[file[shard]];
      const nbytes = sizes.reduce((product, size) => product * size, item);
      return { offsets, sizes, file: name, rank, at: offset[shard], nbytes };
    });
  }
}

function words(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new BigUint64Array(packed.buffer);
}

let embedded = null;

/** Statistics of a tensor: asked for, or out of the report; null if that has none of it. */
async function statisticsOf(name, tensor) {
  if (LIVE) return ask("tensor", { name, tensor });
  const packed = packedOf("statistics");
  if (!packed || name !== document.querySelector('script[data-kind="checkpoint"]')?.dataset.name) return null;
  embedded ??= await unpacked(packed.textContent);
  return Object.hasOwn(embedded, tensor) ? embedded[tensor] : null;
}

/** Ask for the summary again and again, and call ``changed`` when it is another. */
function follow(changed) {
  let tag = "", failed = 0;
  const look = async () => {
    if (!document.hidden) {
      try {
        const reply = await fetch("/api/summary", tag ? { headers: { "If-None-Match": tag } } : {});
        if (reply.status === 200) {
          const first = tag === "";
          tag = reply.headers.get("ETag") ?? "";
          summary = await reply.json();
          changed({ lost: false, first });
        } else if (failed) changed({ lost: false, first: false });
        failed = reply.ok || reply.status === 304 ? 0 : failed + 1;
      } catch {
        failed += 1;
      }
      if (failed === 1) changed({ lost: true, first: false });
    }
    setTimeout(look, 1500);
  };
  look();
}
