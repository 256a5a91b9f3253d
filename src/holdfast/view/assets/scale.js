// From values to places and colours.

/** A function from ``from``..``to`` to ``start``..``end``; its ``inverse`` leads back. */
function linear(from, to, start, end) {
  const scale = (value) => start + ((value - from) / (to - from || 1)) * (end - start);
  scale.inverse = (place) => from + ((place - start) / (end - start || 1)) * (to - from);
  return scale;
}

/** Round values between ``from`` and ``to``, about ``most`` of them. */
function ticks(from, to, most = 5) {
  const rough = (to - from) / most;
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) found.push(at);
  return found;
}

const TIME_STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900,
  1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2592000];

/** Times of day, or dates, between two, with their texts. */
function timeTicks(from, to, most) {
  const step = TIME_STEPS.find((size) => (to - from) / size <= most) ?? TIME_STEPS.at(-1) * Math.ceil((to - from) / TIME_STEPS.at(-1) / most);
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) {
    const date = new Date(Math.round(at * 1000)); // steps of milliseconds add up to a little less
    const text = step >= 86400
      ? date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })
      : date.toLocaleTimeString("en-GB", step >= 60 ? { hour: "2-digit", minute: "2-digit" } : {}) +
        (step < 1 ? `.${String(date.getMilliseconds()).padStart(3, "0")}` : "");
    found.push([at, text]);
  }
  return found;
}

const isDark = () => document.documentElement.dataset.theme === "dark";

/** A colour of its own for rank or file ``number``: hues apart, of one lightness. */
function hue(number) {
  const angle = (190 + number * 137.508) % 360;
  return isDark() ? `oklch(0.48 0.07 ${angle})` : `oklch(0.84 0.07 ${angle})`;
}

/** The accent, as strong as ``share`` of 0 to 1. */
function heat(share) {
  const strength = Math.round(12 + 88 * Math.max(0, Math.min(1, share)));
  return `color-mix(in oklab, ${ink("--accent")} ${strength}%, ${ink("--card")})`;
}

const median = (values) => {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};
