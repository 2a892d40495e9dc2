// "Is it on?": whether the daemon serves, and which engines use it.

import { el, setList, setText, table } from "./dom.js";
import { count, duration, exact, percent, plural } from "./format.js";

/** State of an engine, and why it has no cache or not all of it. */
function stateOf(instance, hasSharedTier, serving) {
  const ranks = `${instance.workers.length} of ${instance.world_size}`;
  if (!instance.namespace) return { word: "Without cache", why: `waits until all ranks are registered and agree: ${ranks} registered so far`, on: false };
  if (serving === "off") return { word: "Without cache", why: "serving is switched off", on: false };
  if (instance.private) return { word: "On, alone", why: `shares KV with no other engine: ${instance.private}`, on: true };
  if (instance.machine_only && hasSharedTier) return { word: "On", why: `uses L2 in files only: ${instance.machine_only}`, on: true };
  return { word: "On", why: instance.requests.lookups ? "" : "no lookup yet", on: true };
}

export function showOn(status, notReady) {
  const hasSharedTier = status.l2.some((tier) => tier.kind !== "file");
  const states = status.instances.map((instance) => stateOf(instance, hasSharedTier, status.serving));
  const refused = (status.refused_engines ?? []).filter((one) => !status.instances.some((known) => known.instance_id === one.instance_id));
  setText("on-answer", answer(status, states, refused, notReady));
  setList("engines", [status.instances.map(shownOf), status.departed.map(departedOf), refused, states], () => [
    engines(status, states, refused),
  ]);
}

function answer(status, states, refused, notReady) {
  if (!status.ready) return `No: ${notReady || "the daemon is not ready"}.`;
  if (status.serving === "off") return "No: serving is switched off (POST /config/serving): no lookup finds a chunk, no store is taken.";
  const all = states.length + refused.length;
  const without = states.filter((state) => !state.on).length + refused.length;
  if (all === 0) return "Yes, but no engine is connected.";
  if (without === all) return all === 1 ? "No: the only engine runs without cache." : `No: all ${plural(all, "engine")} run without cache.`;
  if (without) return `In part: ${exact(without)} of ${plural(all, "engine")} ${without === 1 ? "runs" : "run"} without cache.`;
  if (status.serving === "stores-off") return "In part: stores are switched off (POST /config/serving); lookups find what is there.";
  return all === 1 ? "Yes: one engine is connected and uses the cache." : `Yes: ${plural(all, "engine")} are connected and use the cache.`;
}

// What a row shows: a table that would look the same is not made anew.
function shownOf(instance) {
  const { load, requests } = instance;
  return [instance.instance_id, instance.model_name, load && [load.running, load.waiting, load.kv_cache_usage, load.stale], requests.prompt_tokens, requests.lookups];
}

function departedOf(one) {
  return [one.instance_id, one.model_name, duration(one.gone_seconds)];
}

function engines(status, states, refused) {
  if (status.instances.length + status.departed.length + refused.length === 0) {
    return el("p", { class: "note" }, "Engines connect by themselves when their connector has this daemon's endpoint: see the guide of the first hour.");
  }
  const none = "–";
  return table(
    "Engines",
    ["Engine", "Cache", "#Running", "#Waiting", "#KV cache", "#Prompt tokens", "#Not computed"],
    [
      ...status.instances.map((instance, at) => {
        const load = instance.load ?? null;
        const of = instance.requests.prompt_tokens ?? {};
        const all = Object.values(of).reduce((sum, tokens) => sum + tokens, 0);
        return [
          name(instance),
          state(states[at].word, [states[at].why, unreported(instance), load?.stale ? "its engine stats are old" : ""], states[at].on),
          load ? exact(load.running) : none,
          load ? exact(load.waiting) : none,
          load ? percent(load.kv_cache_usage, 1) : none,
          instance.requests.prompt_tokens ? el("span", { title: exact(all) }, count(all)) : none,
          percent(all - (of.computed ?? 0), all),
        ];
      }),
      ...refused.map((one) => [name(one), state("Without cache", [`refused: ${one.message} (${one.code})`], false), none, none, none, none, none]),
      ...status.departed.map((one) => [name(one), state("Disconnected", [`${duration(one.gone_seconds)} ago`], null), none, none, none, none, none]),
    ],
  );
}

const UNREPORTED = { blocks: "blocks of L0", requests: "prompt tokens by source", sessions: "sessions of lookups", stats: "running and waiting requests" };

function unreported(instance) {
  const what = (instance.unreported ?? []).map((one) => UNREPORTED[one] ?? one);
  return what.length ? `${what.join(", ")}: not reported by this engine` : "";
}

function name(one) {
  const engine = [one.engine, one.engine_version].filter(Boolean).join(" ");
  return el("span", {}, el("strong", {}, one.instance_id), el("small", {}, one.model_name), ...(engine ? [el("small", {}, engine)] : []));
}

function state(word, why, on) {
  const mark = on === null ? "off" : on ? "good" : "bad";
  return el("span", {}, el("span", { class: `mark ${mark}` }, word), ...why.filter(Boolean).map((text) => el("small", {}, text)));
}
