// The last hour, from samples of counters: what was counted between each two, and the sums. Goes on through a daemon's restart.

const GAUGES = new Set(["time", "l1_used_bytes", "l2_used_bytes", "engines"]);

export class History {
  constructor() {
    this.points = []; // {time, seconds, <counter>: growth, <gauge>: value}, the oldest first
    this.seconds = 3600;
    this.next = 0;
    this.bootId = "";
    this.last = null; // the last sample
  }

  get path() {
    return `history?since=${this.next}`;
  }

  /** Add an answer of /history. False if it is another daemon's, whose samples must be requested from the first on. */
  add(answer) {
    if (this.bootId !== answer.boot_id) {
      const restarted = this.next > 0;
      Object.assign(this, { bootId: answer.boot_id, next: 0, last: null });
      if (restarted) return false;
    }
    this.seconds = answer.seconds;
    if (answer.first > this.next) this.last = null; // some are no longer kept
    for (const [number, row] of answer.rows.entries()) {
      const sample = Object.fromEntries(answer.names.map((name, column) => [name, row[column]]));
      this.#addSample(sample, answer.first + number === 0, answer.interval_seconds);
    }
    this.next = answer.first + answer.rows.length;
    return true;
  }

  #addSample(sample, isFirst, interval) {
    const before = this.last;
    this.last = sample;
    if (before === null && !isFirst) return;
    const seconds = before === null ? interval : sample.time - before.time;
    if (this.points.length && seconds > 3 * interval) this.points.push({ time: sample.time - interval, seconds: 0, gap: true });
    const point = { time: sample.time, seconds };
    for (const [name, value] of Object.entries(sample)) {
      if (!GAUGES.has(name)) point[name] = value - (before === null ? 0 : before[name]); // a daemon counts from 0 on
      else if (name !== "time") point[name] = value;
    }
    this.points.push(point);
    while (this.points[0].time < sample.time - this.seconds) this.points.shift();
  }

  /** Growth of a counter in the time that is kept. */
  sum(name) {
    return this.points.reduce((sum, point) => sum + (point[name] ?? 0), 0);
  }

  /** Seconds from the first point to the last. */
  get span() {
    return this.points.length ? this.points.at(-1).time - this.points[0].time + this.points[0].seconds : 0;
  }

  /** Columns for a chart: times and, for each function, its value of a point; neighbours are joined so that at most `most` remain. */
  columns(functions, most = 120) {
    const size = Math.max(1, Math.ceil(this.points.length / most));
    const joined = [];
    for (const point of this.points) {
      const open = joined.at(-1);
      if (point.gap || !open || open.gap || open.size >= size) joined.push({ ...point, size: 1 });
      else merge(open, point);
    }
    return [joined.map((point) => point.time), ...functions.map((of) => joined.map((point) => (point.gap ? null : of(point))))];
  }
}

function merge(open, point) {
  for (const [name, value] of Object.entries(point)) open[name] = GAUGES.has(name) ? value : open[name] + value;
  open.size += 1;
}
