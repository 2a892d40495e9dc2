// Elements of the page. Text of the daemon and of engines is only ever set as text, never as markup.

/** An element: `el("td", { class: "number", title: "exact" }, "text", child)`. Properties that are null or false are left out. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== false && child !== ""));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

export function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

const drawn = new Map(); // what each list was made of last

/** Replace the children of #id by what `make` returns for `data`, unless `data` is as it was: focus and selection stay. */
export function setList(id, data, make) {
  const text = JSON.stringify(data);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  byId(id).replaceChildren(...make(data));
}

/** A bar that shows `share` (0 to 1) of its width, in the pattern of class `kind`. Decoration: the number beside it is its text. */
export function bar(share, kind = "") {
  const inner = el("span", { class: `bar-part ${kind}` });
  inner.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
}

/** A table that can be scrolled by keyboard where it is wider than the screen. */
export function table(label, heads, rows) {
  const numeric = heads.map((head) => head.startsWith("#"));
  const cell = (value, column) => {
    const properties = { class: numeric[column] ? "number" : null };
    return column === 0 ? el("th", { scope: "row", ...properties }, value) : el("td", properties, value);
  };
  return el(
    "div",
    { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el("tr", {}, ...heads.map((head, column) => el("th", { scope: "col", class: numeric[column] ? "number" : null }, head.replace("#", "")))),
      ),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell)))),
    ),
  );
}
