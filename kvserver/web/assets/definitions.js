// The definitions of the metrics that the page names, out of METRICS.md of this daemon's version.

import { getText } from "./api.js";
import { byId, el } from "./dom.js";

/** Fill #definitions, once. Links to `#metric-NAME` lead there. */
export async function showDefinitions() {
  const wanted = [...document.querySelectorAll("a[href^='#metric-']")].map((link) => link.hash.slice("#metric-".length));
  const found = parse(await getText("assets/METRICS.md"));
  byId("definitions").replaceChildren(
    ...[...new Set(wanted)].flatMap((name) => [
      el("dt", { id: `metric-${name}`, tabindex: "-1" }, el("code", {}, name)),
      el("dd", {}, ...withCode(found.get(name) ?? "METRICS.md has no definition of it.")),
    ]),
  );
}

/** Definition by name: the last cell of each row of a table whose first is a metric. */
export function parse(markdown) {
  const found = new Map();
  for (const line of markdown.split("\n")) {
    const name = /^\| `(\w+)` \|/.exec(line)?.[1];
    if (name) found.set(name, line.replace(/ \|$/, "").split(" | ").at(-1));
  }
  return found;
}

function withCode(text) {
  return text.split("`").map((part, number) => (number % 2 ? el("code", {}, part) : part));
}
