// "Does it help?": prompt tokens by source, what lookups found, prefill time.

import { areas, lines } from "./charts.js";
import { bar, byId, el, setList, setText } from "./dom.js";
import { count, duration, exact, percent } from "./format.js";

const SOURCES = [
  { key: "l0", label: "L0, the engines' own cache", pattern: "solid" },
  { key: "l1", label: "L1, loaded from this daemon's memory", pattern: "lines" },
  { key: "l2", label: "L2, loaded from storage", pattern: "dots" },
  { key: "computed", label: "Computed", pattern: "open" },
];
const charts = {};

function chartOf(id, make) {
  charts[id] ??= make(byId(id));
  return charts[id];
}

/** How far back the page looks, in words: a daemon that is younger has counted nothing before. */
export function lately(history) {
  return history.seconds === 3600 ? "the last hour" : `the last ${duration(history.seconds)}`;
}

export function showHelp(history, instances) {
  const tokens = SOURCES.map((source) => history.sum(`prompt_tokens_${source.key}`));
  const all = tokens.reduce((sum, one) => sum + one, 0);
  const unreported = !all && instances.length > 0 && instances.every((one) => one.requests.prompt_tokens === null);
  const [l0, l1, l2, computed] = tokens;
  const when = lately(history);
  setText("help-answer", all
    ? `${percent(l1 + l2, all)} of the prompt tokens of ${when} were loaded from L1 and L2. The engines had ${percent(l0, all)} themselves, and computed ${percent(computed, all)}.`
    : unreported
      ? `Prompt tokens by source: not reported by ${instances.length === 1 ? "this engine" : "these engines"}. Lookups of ${when} found ${percent(history.sum("hit_tokens"), history.sum("lookup_tokens"))} of their tokens in L1.`
      : `No prompt has ended in ${when}.`);
  setList("help-figures", [tokens, unreported, ...saved(history), history.sum("hit_tokens"), history.sum("lookup_tokens")], () => [
    figure("Not computed", percent(all - computed, all), "of prompt tokens", "not-computed"),
    figure("Hit rate of L1", percent(history.sum("hit_tokens"), history.sum("lookup_tokens")), "of tokens looked up, before L2 is read", "hit-rate"),
    figure("Prefill time gained", unreported ? "–" : duration(Math.max(0, saved(history)[0])), unreported ? "not reported" : `${duration(Math.max(0, saved(history)[1]))} lost by slow or failed loads`, "gained"),
    figure("Prompt tokens", unreported ? "–" : count(all), unreported ? "not reported" : when, "prompt-tokens"),
  ]);
  setList("help-sources", [tokens, unreported], () => (unreported ? [] : SOURCES.map((source, at) => sourceRow(source, tokens[at], all))));
  drawCharts(history);
}

function saved(history) {
  return [history.sum("prefill_seconds_gained"), history.sum("prefill_seconds_lost")];
}

function figure(name, value, note, id) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, el("span", { class: "figure", "data-figure": id }, value), el("small", {}, note)));
}

function sourceRow(source, tokens, all) {
  return el(
    "li",
    { "data-source": source.key },
    el("span", { class: `key ${source.pattern} ${source.key}`, "aria-hidden": "true" }),
    el("span", {}, source.label),
    bar(all ? tokens / all : 0, `${source.pattern} ${source.key}`),
    el("span", { class: "number", title: exact(tokens), "data-tokens": tokens }, count(tokens)),
    el("span", { class: "number" }, percent(tokens, all)),
  );
}

function drawCharts(history) {
  const rate = (of) => (point) => (point.seconds ? of(point) / point.seconds : null);
  const share = (part, all) => (point) => (all(point) > 0 ? part(point) / all(point) : null);
  const prompt = (point) => SOURCES.reduce((sum, source) => sum + point[`prompt_tokens_${source.key}`], 0);
  // From the top of the stack down.
  const stack = [...SOURCES].reverse();
  chartOf("tokens-chart", (place) => areas(place, {
    labels: stack.map((source) => source.label),
    names: stack.map((source) => source.key),
    patterns: stack.map((source) => source.pattern),
    functions: stack.map((source) => rate((point) => point[`prompt_tokens_${source.key}`])),
    format: count,
  })).draw(history);
  chartOf("rate-chart", (place) => lines(place, {
    labels: ["Hit rate of L1", "Prompt tokens not computed"],
    names: ["l1", "ink"],
    functions: [share((point) => point.hit_tokens, (point) => point.lookup_tokens), share((point) => prompt(point) - point.prompt_tokens_computed, prompt)],
    format: (value) => `${Math.round(100 * value)}%`,
    top: 1,
  })).draw(history);
}
