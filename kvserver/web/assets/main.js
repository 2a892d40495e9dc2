// The page: requests what the daemon shows of itself every two seconds while someone looks, and draws it.

import { NotReachable, TokenRequired, forgetToken, getJson, getText, hasToken, setToken } from "./api.js";
import { showDefinitions } from "./definitions.js";
import { byId, setText } from "./dom.js";
import { clock, duration } from "./format.js";
import { showHealth } from "./healthy.js";
import { showHelp } from "./help.js";
import { History } from "./history.js";
import { showMore } from "./more.js";
import { showOn } from "./on.js";

const LOOK_MS = 2000;
const EXPLAIN_MS = 15000;

const history = new History();
let explained = { requests: [] };
let explainedAt = -Infinity;
let lastAnswer = null; // when the daemon answered last, in seconds since 1970
let failedSince = null;
let timer = null;
let looking = false;

async function look() {
  if (looking) return;
  looking = true;
  clearTimeout(timer);
  try {
    await show();
    reachable();
  } catch (error) {
    if (error instanceof TokenRequired) askForToken(error.message);
    else if (error instanceof NotReachable) unreachable();
    else fail(error);
  } finally {
    looking = false;
  }
  // Nobody looks at a hidden page, and one that waits for a token has nothing to show.
  if (!document.hidden && byId("token").hidden) timer = setTimeout(look, LOOK_MS);
}

async function show() {
  const status = await getJson("status");
  let data = await getJson(history.path);
  if (!history.add(data)) {
    data = await getJson(history.path);
    history.add(data);
    explainedAt = -Infinity;
  }
  if (performance.now() - explainedAt > EXPLAIN_MS) {
    explained = await getJson("explain?minutes=60&limit=50");
    explainedAt = performance.now();
  }
  byId("token").hidden = true;
  byId("content").hidden = false;
  byId("forget").hidden = !hasToken();
  setText("identity", `kvserver ${status.version}, up ${duration(status.uptime_seconds)}, boot ${status.boot_id}`);
  setText("ready", status.ready ? "Ready" : "Not ready");
  byId("ready").className = `mark ${status.ready ? "good" : "bad"}`;
  showOn(status, status.ready ? "" : (await getText("readyz")).trim());
  showHelp(history, status.instances);
  showHealth(status, history, data);
  showMore(status, explained);
  if (!byId("definitions").hasChildNodes()) await showDefinitions();
}

function reachable() {
  failedSince = null;
  lastAnswer = Date.now() / 1000;
  byId("unreachable").hidden = true;
  document.body.classList.remove("old");
  setText("updated", `updated ${clock(lastAnswer, true)}`);
}

function unreachable() {
  failedSince ??= Date.now() / 1000;
  setText("unreachable", `Not reachable since ${clock(failedSince, true)}. ${lastAnswer === null ? "" : `What is below is of ${clock(lastAnswer, true)}. `}Trying again every two seconds.`);
  byId("unreachable").hidden = false;
  document.body.classList.add("old");
  setText("ready", "Not reachable");
  byId("ready").className = "mark bad";
}

function fail(error) {
  setText("unreachable", `This page cannot show what the daemon answers: ${error.message}`);
  byId("unreachable").hidden = false;
  console.error(error);
}

function askForToken(reason) {
  forgetToken();
  byId("content").hidden = true;
  byId("token").hidden = false;
  byId("forget").hidden = true;
  byId("unreachable").hidden = true;
  setText("ready", "Locked");
  byId("ready").className = "mark off";
  setText("token-error", reason);
  byId("token-input").focus();
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = byId("token-input");
  setToken(input.value.trim());
  input.value = "";
  byId("token").hidden = true;
  look();
});
byId("forget").addEventListener("click", () => askForToken(""));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
look();
