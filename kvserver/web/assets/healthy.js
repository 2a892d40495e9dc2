// "Is it healthy?": the tiers and the ages of what they have, copies beside memcpy, errors.

import { bar, el, setList, setText, table } from "./dom.js";
import { bytes, duration, exact, gigabytes, percent } from "./format.js";
import { lately } from "./help.js";

const AGES = ["up to 1 min", "up to 10 min", "up to 1 h", "up to 1 d", "older"];

export function showHealth(status, history, extra) {
  const faults = faultsOf(status, history);
  const wrong = problems(status, faults);
  setText("health-answer", wrong.length ? `Look at this: ${wrong.join("; ")}.` : "Yes: nothing failed and nothing is behind.");
  const tiers = [l1Of(status.l1), ...status.l2];
  setList("tiers", tiers.map((tier) => [tier.name, tier.state, tier.failure, tier.used_bytes, tier.size_bytes, tier.objects, tier.evictions]), () => [tierTable(tiers)]);
  setList("ages", [extra.ages, status.l2.length], () => ageRows(extra.ages, status.l2));
  showCopies(history, extra.memcpy_bytes_per_second);
  setList("faults", faults, () => faultList(faults, lately(history)));
}

function l1Of(l1) {
  return { name: "L1", state: "ready", used_bytes: l1.used_bytes, size_bytes: l1.size_bytes, objects: l1.chunks, evictions: l1.evictions };
}

function faultList(faults, when) {
  const happened = faults.filter(([, recent, all]) => recent || all);
  const none = faults.filter((fault) => !happened.includes(fault)).map(([name]) => name.toLowerCase());
  const number = (value) => (value === null ? "–" : exact(value));
  return [
    happened.length ? table("Errors and events", ["What", `#${when}`, "#since the start"], happened.map(([name, recent, all]) => [name, el("span", { class: recent ? "mark bad" : null }, number(recent)), number(all)])) : null,
    none.length ? el("p", { class: "note" }, `None since the start: ${none.join(", ")}.`) : null,
  ].filter(Boolean);
}

/** Name, number lately (null: not known), number since the start. */
function faultsOf(status, history) {
  const { totals, books, events } = status;
  const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);
  return [
    ["Failed stores", history.sum("failed_stores"), totals.failed_stores],
    ["Failed loads", history.sum("failed_loads"), totals.failed_loads],
    ["Errors answered to engines", history.sum("errors"), totals.errors],
    ["Replies that did not arrive", null, totals.undelivered_replies],
    ["Refused registrations", null, sum(status.refused_registrations)],
    ["Engines that died", null, status.connects.disconnected.died ?? 0],
    ["Events dropped", history.sum("dropped_events"), events.dropped],
    ["Errors of subscribers to events", null, events.subscribers.reduce((all, one) => all + one.errors, 0)],
    ["Audits that did not balance", null, books.unbalanced],
    ["Requests to these pages refused", null, sum(status.http?.refused ?? {})],
  ];
}

function problems(status, faults) {
  const found = [];
  if (status.stale_seconds !== undefined) found.push(`the event loop has not answered for ${duration(status.stale_seconds)}`);
  if (!status.ready) found.push("the daemon is not ready");
  for (const gpu of status.gpus) if (gpu.lost) found.push(`GPU ${gpu.device} is lost: ${gpu.lost}`);
  for (const tier of status.l2) if (!["ready", "read_only", "opening"].includes(tier.state)) found.push(`${tier.name} of L2 is ${tier.state}${tier.failure && `: ${tier.failure}`}`);
  if (status.loop_lag_seconds > 1) found.push(`the longest turn of the event loop took ${duration(status.loop_lag_seconds)}`);
  if (status.books.unbalanced) found.push("the accounting did not balance: please report it with the log");
  for (const [name, recent] of faults) if (recent) found.push(`${name.toLowerCase()}: ${exact(recent)}`);
  return found;
}

function tierTable(tiers) {
  return table(
    "Tiers",
    ["Tier", "State", "Use", "#Used", "#Size", "#Chunks or objects", "#Evicted"],
    tiers.map((tier) => [
      el("strong", {}, tier.name),
      el("span", { class: `mark ${["ready", "read_only"].includes(tier.state) ? "good" : tier.state === "opening" ? "off" : "bad"}` }, tier.state.replace("_", " "), tier.failure ? `: ${tier.failure}` : ""),
      tier.size_bytes ? el("span", { class: "use" }, bar(tier.used_bytes / tier.size_bytes, "l1 solid"), el("small", {}, percent(tier.used_bytes, tier.size_bytes))) : el("small", {}, "the storage has the limit"),
      el("span", { title: exact(tier.used_bytes) }, bytes(tier.used_bytes)),
      tier.size_bytes ? bytes(tier.size_bytes) : "–",
      exact(tier.objects),
      exact(tier.evictions),
    ]),
  );
}

function ageRows(ages, l2) {
  const shown = [["L1", ages.l1], ...(l2.length ? [["L2", ages.l2]] : [])];
  const rows = shown.map(([name, counts]) => {
    const all = counts.counts.reduce((sum, one) => sum + one, counts.unknown);
    return [name, ...[...counts.counts, counts.unknown].map((one) => percent(one, all)), counts.oldest_seconds ? duration(counts.oldest_seconds) : "–"];
  });
  const sampled = shown.some(([, counts]) => counts.share < 1);
  return [
    table("Ages of chunks", ["Stored", ...AGES.map((age) => `#${age}`), "#unknown", "#oldest"], rows),
    el("p", { class: "note" }, `Time since the chunks that are there now were stored${sampled ? ", of a sample of them" : ""}. Unknown: before this daemon started, or in storage that machines share.`),
  ];
}

function showCopies(history, memcpy) {
  const speed = (what) => {
    const nanos = history.sum(`${what}_nanos`);
    return nanos ? (history.sum(what === "store" ? "stored_bytes" : "loaded_bytes") * 1e9) / nanos : null;
  };
  const rows = [["Stores, L0 to L1", speed("store"), history.sum("stored_bytes")], ["Loads, L1 to L0", speed("load"), history.sum("loaded_bytes")]];
  setList("copies", [rows, memcpy, lately(history)], () => [
    table(
      "Copies",
      ["Copies", `#Bytes in ${lately(history)}`, "#Speed", "#Of memcpy", ""],
      rows.map(([name, value, moved]) => [
        name,
        bytes(moved),
        value === null ? "–" : gigabytes(value),
        value === null || memcpy === null ? "–" : (value / memcpy).toFixed(2),
        bar(value !== null && memcpy !== null ? value / memcpy : 0, "l1 lines"),
      ]),
    ),
    el("p", { class: "note" }, memcpy === null ? "This machine's memcpy is being measured, or was not because little memory is free." : `This machine's memcpy, measured once: ${gigabytes(memcpy)}. Copies of GPUs have another ceiling.`),
  ]);
}
