// Requests to the daemon, with the token that the user has entered. The token is kept for this tab only, and is sent in a header:
// it is in no address, and in nothing that other sites' pages could make a browser send.

const KEY = "kvserver.token";

export class NotReachable extends Error {}
export class TokenRequired extends Error {} // its message is the daemon's reason

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

export function forgetToken() {
  sessionStorage.removeItem(KEY);
}

async function request(path, seconds) {
  const token = sessionStorage.getItem(KEY);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(seconds * 1000) });
  } catch (error) {
    throw new NotReachable(error.message);
  }
  if (answer.status === 401 || answer.status === 403) {
    const reason = await answer.json().catch(() => ({}));
    throw new TokenRequired(reason.error === "bad_token" ? "The daemon does not accept that token." : "");
  }
  return answer;
}

/** The JSON of a page. NotReachable, TokenRequired, or Error for another code than 200. */
export async function getJson(path, seconds = 5) {
  const answer = await request(path, seconds);
  if (answer.status >= 500) throw new NotReachable(`${path} answers ${answer.status}`);
  if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
  try {
    return await answer.json();
  } catch (error) {
    throw new NotReachable(error.message); // it ended in the middle
  }
}

/** The text of a page, whatever its code. */
export async function getText(path, seconds = 5) {
  const answer = await request(path, seconds);
  return await answer.text();
}
