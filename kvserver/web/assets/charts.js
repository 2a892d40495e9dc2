// Charts of the last hour, by uPlot. Lines differ by dashes, areas by hatching: colour is never alone in stating which is which.

import { clock } from "./format.js";

const { uPlot } = window;
const HEIGHT = 180;
const DASHES = [[], [7, 4], [2, 3]];

function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** A canvas pattern in one colour: "solid", "lines", "dots" or "open". */
function pattern(kind, colour) {
  const side = Math.round(8 * devicePixelRatio);
  const tile = document.createElement("canvas");
  tile.width = tile.height = side;
  const context = tile.getContext("2d");
  context.fillStyle = context.strokeStyle = colour;
  context.globalAlpha = kind === "solid" ? 0.75 : kind === "open" ? 0.1 : 0.22;
  context.fillRect(0, 0, side, side);
  context.globalAlpha = 0.9;
  context.lineWidth = side / 6;
  if (kind === "lines") {
    for (const shift of [-side, 0, side]) {
      context.beginPath();
      context.moveTo(shift - 2, side + 2);
      context.lineTo(shift + side + 2, -2);
      context.stroke();
    }
  } else if (kind === "dots") {
    context.beginPath();
    context.arc(side / 2, side / 2, side / 5, 0, 2 * Math.PI);
    context.fill();
  }
  return context.createPattern(tile, "repeat");
}

class Chart {
  /** `place`: the element that it fills. `labels`: of its series. `format`: of values. `functions`: of a point of the History. */
  constructor(place, { labels, functions, format, names, patterns = null, top = null }) {
    Object.assign(this, { place, labels, functions, format, names, patterns, top, plot: null, history: null });
    new ResizeObserver(() => this.#resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#remake());
  }

  draw(history) {
    this.history = history;
    const data = this.#data();
    if (this.plot === null) this.plot = new uPlot(this.#options(), data, this.place);
    else this.plot.setData(data);
    const end = Math.max(history.points.at(-1)?.time ?? 0, 1);
    this.plot.setScale("x", { min: end - Math.max(60, Math.min(history.seconds, history.span)), max: end });
  }

  #data() {
    const [times, ...columns] = this.history.columns(this.functions);
    if (this.patterns === null) return [times, ...columns];
    // Stacked: each line is the sum of its series and those after it, so that the first is on top.
    for (let at = columns.length - 2; at >= 0; at -= 1) {
      columns[at] = columns[at].map((value, row) => (value === null ? null : value + columns[at + 1][row]));
    }
    return [times, ...columns];
  }

  #options() {
    const colour = colours();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      width: Math.max(200, this.place.clientWidth),
      height: HEIGHT,
      legend: { show: false }, // the page has its own, as text
      cursor: { show: false },
      scales: { y: { range: (_, __, most) => [0, this.top ?? (most > 0 ? most * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 30, grid: { show: false }, space: 70, values: (_, times) => times.map((time) => clock(time, this.history.span < 300)) },
        { ...axis, size: 58, space: 40, values: (_, values) => values.map(this.format) },
      ],
      series: [
        {},
        ...this.labels.map((label, at) => ({
          label,
          stroke: colour(this.names[at]),
          width: 2,
          dash: this.patterns === null ? DASHES[at % DASHES.length] : [],
          points: { show: false },
          fill: this.patterns !== null && at === this.labels.length - 1 ? () => pattern(this.patterns[at], colour(this.names[at])) : undefined,
        })),
      ],
      bands: this.patterns === null ? [] : this.labels.slice(0, -1).map((_, at) => ({ series: [at + 1, at + 2], fill: () => pattern(this.patterns[at], colour(this.names[at])) })),
    };
  }

  #resize() {
    if (this.plot !== null && this.place.clientWidth > 0) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
  }

  #remake() {
    if (this.plot === null) return;
    this.plot.destroy();
    this.plot = null;
    this.draw(this.history);
  }
}

export function areas(place, options) {
  return new Chart(place, options);
}

export function lines(place, options) {
  return new Chart(place, { ...options, patterns: null });
}
