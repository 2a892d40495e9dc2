// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  if (value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value)) return value.toFixed(1);
  if (Math.abs(value) < 1e5) return whole.format(value);
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return whole.format(value);
}

export function exact(value) {
  return whole.format(value);
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" || value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function gigabytes(bytesPerSecond) {
  return `${(bytesPerSecond / 1e9).toFixed(bytesPerSecond < 1e10 ? 2 : 1)} GB/s`;
}

/** "25.0%"; a dash where there is nothing to have a share of. */
export function percent(part, all) {
  return all > 0 ? `${((100 * part) / all).toFixed(1)}%` : "–";
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  const parts = (large, small, one, other) => `${Math.floor(large)} ${one}${Math.floor(small) ? ` ${Math.floor(small)} ${other}` : ""}`;
  if (seconds < 3600) return parts(seconds / 60, 0, "min", "");
  if (seconds < 86400) return parts(seconds / 3600, (seconds % 3600) / 60, "h", "min");
  return parts(seconds / 86400, (seconds % 86400) / 3600, "d", "h");
}

/** "14:05", or "14:05:09", of the browser's time zone. */
export function clock(unixSeconds, withSeconds = false) {
  const two = (value) => String(value).padStart(2, "0");
  const time = new Date(unixSeconds * 1000);
  return `${two(time.getHours())}:${two(time.getMinutes())}${withSeconds ? `:${two(time.getSeconds())}` : ""}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${exact(number)} ${number === 1 ? one : many}`;
}
