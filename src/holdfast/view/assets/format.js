// Numbers as people read them. What is unknown is an en dash.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function bytes(count) {
  if (!isNumber(count)) return NONE;
  let value = count, unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    if (Math.abs(value) < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return unit === "B" ? `${count} B` : `${value.toFixed(value < 99.95 ? 1 : 0)} ${unit}`;
}

const count = (value) => (isNumber(value) ? value.toLocaleString("en-GB").replaceAll(",", "\u202f") : NONE);

function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

function ago(at) {
  if (!isNumber(at)) return NONE;
  const age = Math.max(0, Date.now() / 1000 - at);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (age >= 2 * length) return `${Math.round(age / length)} ${unit}`;
  }
  return `${Math.round(age)} s`;
}

const WHEN = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const when = (at) => (isNumber(at) && Math.abs(at) < 1e11 ? WHEN.format(new Date(at * 1000)) : NONE);

const percent = (share) => {
  if (!isNumber(share)) return NONE;
  const value = share * 100;
  if (value === 0 || value === 100) return `${value} %`;
  return value < 0.1 ? "< 0.1 %" : value > 99.9 ? "> 99.9 %" : `${value.toFixed(1)} %`;
};

/** A value of a metric, a statistic: up to four digits that count. */
function figure(value) {
  if (typeof value === "string") return value;
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

const shapeText = (shape) => (shape.length ? shape.join(" × ") : "scalar");
const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

const natural = new Intl.Collator("en", { numeric: true }).compare;
