// Paints the steps: columns of threads by class above, real and predicted times below.
import { threadOf } from "./threads.js";
import { millis } from "./ui.js";

const LEFT_PX = 52; // for the scales
const TOP_PX = 22; // for marks of recoveries
const TIMES = 0.3; // of the height
const BETWEEN_PX = 26; // between the two parts
const GAP_PX = 18; // of a recovery
const PAUSE_S = 2; // without a step that are shown as a pause

/** Where each step stands, newest at the right; what does not fit is left out. */
export function placed(steps, recoveries, width) {
  const column = width < 520 ? 5 : 7;
  const began = new Map(recoveries.map((recovery) => [recovery.n, recovery]));
  const columns = [];
  let x = width - 4;
  for (let index = steps.length - 1; index >= 0 && x - column > LEFT_PX; index--) {
    const step = steps[index];
    x -= column;
    const recovery = began.get(step.n);
    const before = steps[index - 1];
    const paused = !recovery && before !== undefined && step.at - before.at - before.ms / 1000 > PAUSE_S;
    columns.unshift({ step, x, width: column - 1.5, recovery, paused });
    if (recovery) x -= GAP_PX;
    else if (paused) x -= column;
  }
  return columns;
}

const sum = (counts) => Object.values(counts).reduce((total, value) => total + value, 0);

/** A number above all values that is easy to read: 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-3)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value);
}

export class Weave {
  #canvas;
  #probe = document.createElement("i");
  #colours = new Map();

  constructor(canvas) {
    this.#canvas = canvas;
    canvas.parentElement.append(this.#probe);
    this.#probe.hidden = true;
  }

  forgetColours() {
    this.#colours.clear();
  }

  #colour(name) {
    if (!this.#colours.has(name)) {
      this.#probe.style.color = `var(--${name})`;
      this.#colours.set(name, getComputedStyle(this.#probe).color);
    }
    return this.#colours.get(name);
  }

  /** Paint; returns the columns, for whoever points at one. */
  paint(steps, names, recoveries, chosen) {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * scale) || this.#canvas.height !== Math.round(height * scale)) {
      this.#canvas.width = Math.round(width * scale);
      this.#canvas.height = Math.round(height * scale);
    }
    const pen = this.#canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    const columns = placed(steps, recoveries, width);
    const timesTop = height - Math.round((height - TOP_PX) * TIMES);
    const bottom = timesTop - BETWEEN_PX;
    this.#threads(pen, columns, names, bottom, width);
    this.#times(pen, columns, timesTop, height - 6, width);
    this.#marks(pen, columns, height, chosen);
    return columns;
  }

  #scale(pen, top, bottom, width, most, share, words) {
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [1, share]) {
      const y = bottom - (bottom - top) * (part === 1 ? 1 : words.height(share));
      pen.fillStyle = this.#colour("rule");
      pen.fillRect(LEFT_PX, Math.round(y), width - LEFT_PX, 1);
      pen.fillStyle = this.#colour("muted");
      pen.fillText(words.of(most * part), LEFT_PX - 8, y);
    }
    pen.fillStyle = this.#colour("rule");
    pen.fillRect(LEFT_PX, Math.round(bottom), width - LEFT_PX, 1);
  }

  /** Tokens of each step. The height grows as their square root: a decode beside a prompt is seen. */
  #threads(pen, columns, names, bottom, width) {
    const totals = columns.map(({ step }) => sum(step.prefill) + sum(step.decode));
    const most = ceiling(Math.max(10, ...totals));
    const room = bottom - TOP_PX;
    const words = { of: (value) => `${Math.round(value)}`, height: Math.sqrt };
    this.#scale(pen, TOP_PX, bottom, width, most, 0.2, words);
    pen.textAlign = "left";
    pen.fillStyle = this.#colour("muted");
    pen.fillText("tokens per step", LEFT_PX, 8);
    columns.forEach(({ step, x, width: wide }, index) => {
      const whole = Math.sqrt(totals[index] / most) * room;
      let y = bottom;
      for (const name of names.toReversed()) {
        pen.fillStyle = this.#colour(`thread-${threadOf(name, names)}`);
        for (const [kind, counts] of [["decode", step.decode], ["prefill", step.prefill]]) {
          const tokens = counts[name] ?? 0;
          if (!tokens) continue;
          const high = Math.max(2, (tokens / totals[index]) * whole);
          if (kind === "prefill") pen.fillRect(x, y - high, wide, high - 0.5);
          else for (let at = 0; at < high; at += 3) pen.fillRect(x, y - at - 1.6, wide, 1.6);
          y -= high;
        }
      }
    });
  }

  /** Times of each step as bars, and what was predicted as a line across them. */
  #times(pen, columns, top, bottom, width) {
    const most = ceiling(highest(columns.flatMap(({ step }) => [step.ms, step.predicted_ms ?? 0])));
    const words = { of: millis, height: (share) => share };
    this.#scale(pen, top, bottom, width, most, 0.5, words);
    pen.textAlign = "left";
    pen.fillStyle = this.#colour("muted");
    pen.fillText("time of each step", LEFT_PX, top - 10);
    const y = (ms) => bottom - Math.min(1.03, ms / most) * (bottom - top);
    for (const { step, x, width: wide } of columns) {
      pen.fillStyle = this.#colour("bar");
      pen.fillRect(x, y(step.ms), wide, bottom - y(step.ms));
      if (step.predicted_ms === null) continue;
      pen.fillStyle = this.#colour("accent");
      pen.fillRect(x - 0.75, y(step.predicted_ms) - 1, wide + 1.5, 2);
    }
  }

  /** Words beside a mark, on the side that has room. */
  #label(pen, words, x) {
    const wide = pen.measureText(words).width + 10;
    const left = x + wide > this.#canvas.clientWidth ? x - wide - 4 : x + 6;
    pen.fillStyle = this.#colour("raised");
    pen.fillRect(left, TOP_PX + 4, wide, 16);
    pen.fillStyle = this.#colour("danger");
    pen.textAlign = "left";
    pen.fillText(words, left + 5, TOP_PX + 12);
  }

  #marks(pen, columns, height, chosen) {
    for (const { step, x, width, recovery, paused } of columns) {
      if (recovery) {
        const middle = Math.round(x - GAP_PX / 2);
        pen.fillStyle = this.#colour("danger");
        for (let y = TOP_PX - 4; y < height - 6; y += 6) pen.fillRect(middle, y, 1.5, 3.5);
        this.#label(pen, `new engine after ${millis(recovery.gap_s * 1000)}`, middle);
      } else if (paused) {
        pen.fillStyle = this.#colour("rule");
        pen.fillRect(x - width / 2 - 1, TOP_PX, 1, height - TOP_PX - 6);
      }
      if (chosen === step.n) {
        pen.strokeStyle = this.#colour("ink");
        pen.strokeRect(x - 1, TOP_PX - 0.5, width + 2, height - TOP_PX - 6);
      }
    }
  }
}

/** The highest value but for a few: one slow step shall not flatten all others. */
function highest(values) {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 1;
}
