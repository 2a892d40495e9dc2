// "What would help more?": other sizes of L1, and the worst requests of the last hour.

import { bar, el, setList, setText, table } from "./dom.js";
import { bytes, count, duration, exact, percent } from "./format.js";

export function showMore(status, explained) {
  const curve = status.what_if;
  const measured = curve !== undefined && curve.looked_up_tokens > 0;
  setText("more-answer", measured ? answer(curve) : "What L1 of other sizes would have found is not measured yet.");
  setList("what-if", measured ? curve.sizes.map((one) => [one.size, one.size_bytes, one.would_hit_tokens]) : null, () => (measured ? [curveTable(curve)] : []));
  const worst = explained.requests.filter((request) => request.tokens.computed !== 0 && request.outcome !== "hit");
  setList("misses", worst.map((request) => [request.request_id, request.verdict, Math.round(request.age_seconds / 60)]), () =>
    worst.length ? [el("ol", {}, ...worst.map(miss))] : [el("p", { class: "note" }, "No request of the last hour computed tokens that whole chunks could have given.")]);
}

function nameOf(one) {
  return one.size === "unlimited" ? "unlimited" : one.size === "1" ? "as it is" : `${one.size} times`;
}

function answer(curve) {
  const now = curve.sizes.find((one) => one.size === "1");
  const larger = curve.sizes.filter((one) => one.size === "unlimited" || Number(one.size) > 1);
  if (!now || !larger.length) return "What L1 of other sizes would have found of what was looked up:";
  const gain = (one) => (one.would_hit_tokens - now.would_hit_tokens) / curve.looked_up_tokens;
  const best = Math.max(...larger.map(gain));
  if (best < 0.01) return `L1 is large enough: no larger one would have found as much as 1% more of what was looked up.`;
  const enough = larger.find((one) => gain(one) >= 0.8 * best);
  const what = enough.size === "unlimited" ? "An L1 without limit" : `An L1 ${enough.size} times as large`;
  return `${what} would have found ${percent(enough.would_hit_tokens, curve.looked_up_tokens)} of what was looked up, instead of ${percent(now.would_hit_tokens, curve.looked_up_tokens)}.`;
}

function curveTable(curve) {
  return table(
    "What L1 of other sizes would have found",
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

function miss(request) {
  return el(
    "li",
    {},
    el("p", { class: "verdict" }, `${request.verdict}.`),
    ...request.advice.map((text) => el("p", { class: "advice" }, text)),
    el("p", { class: "note" }, `${request.instance_id}, ${request.model_name}, ${duration(request.age_seconds)} ago, ${exact(request.tokens.avoidable)} tokens could have been had. `, el("code", {}, `kvserver explain ${request.request_id}`)),
  );
}
