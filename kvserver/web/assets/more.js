// "What would help more?": other sizes of L1, and the worst requests of the last hour.

import { bar, el, setList, setText, table } from "./dom.js";
import { bytes, count, exact, percent, plural } from "./format.js";

const MOST_CAUSES = 5;

export function showMore(status, explained) {
  const curve = status.what_if;
  const measured = curve !== undefined && curve.looked_up_tokens > 0;
  setText("more-answer", measured ? curve.advice : "What L1 of other sizes would have found is not measured yet.");
  setList("what-if", measured ? curve.sizes.map((one) => [one.size, one.size_bytes, one.would_hit_tokens]) : null, () => (measured ? [curveTable(curve)] : []));
  const causes = causesOf(explained.requests.filter((request) => request.tokens.computed !== 0 && request.outcome !== "hit"));
  setList("misses", causes.map((requests) => requests.map((request) => [request.request_id, request.verdict])), () =>
    causes.length ? [el("ol", {}, ...causes.map(cause))] : [el("p", { class: "note" }, "Requests of the last hour had all that was found for them.")]);
}

/** Requests of one outcome that missed tokens for the same reasons together: the worst first, as the daemon orders them. */
function causesOf(requests) {
  const causes = new Map();
  for (const request of requests) {
    const key = [request.outcome, request.failure, request.not_loaded, ...Object.keys(request.missed_tokens)].join(" ");
    causes.set(key, [...(causes.get(key) ?? []), request]);
  }
  return [...causes.values()].slice(0, MOST_CAUSES);
}

function nameOf(one) {
  return one.size === "unlimited" ? "unlimited" : one.size === "1" ? "as it is" : `${one.size} times`;
}

function curveTable(curve) {
  return table(
    "What L1 alone, of other sizes, would have found",
    ["L1", "#Size", "Would have found", "#Tokens", "#Of tokens looked up"],
    curve.sizes.map((one) => [
      one.size === "1" ? el("strong", {}, nameOf(one)) : nameOf(one),
      one.size_bytes ? bytes(one.size_bytes) : "–",
      bar(one.would_hit_tokens / curve.looked_up_tokens, one.size === "1" ? "l1 solid" : "l1 lines"),
      el("span", { title: exact(one.would_hit_tokens) }, count(one.would_hit_tokens)),
      percent(one.would_hit_tokens, curve.looked_up_tokens),
    ]),
  );
}

function named(requests, field) {
  return [...new Set(requests.map((request) => request[field]))].join(", ");
}

function cause(requests) {
  const [worst] = requests;
  const tokens = requests.reduce((sum, request) => sum + request.tokens.avoidable, 0);
  return el(
    "li",
    {},
    el("p", { class: "verdict" }, `${worst.verdict}.`),
    ...worst.advice.map((text) => el("p", {}, text)),
    el("p", { class: "note" },
      `${plural(requests.length, "request")} of ${named(requests, "instance_id")} (${named(requests, "model_name")}); `,
      tokens ? `${exact(tokens)} of ${requests.length === 1 ? "its" : "their"} tokens ${tokens === 1 ? "was" : "were"} or had been in L1. ` : "none of the computed tokens had been in L1. ", el("code", {}, `kvserver explain ${worst.request_id}`)),
  );
}
