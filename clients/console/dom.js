// Creates elements, and updates lists of elements from lists of values.

/** Creates an element: `el("li.kept", { title: "x" }, "text", child)`. Text is never parsed as HTML. */
export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** Creates an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Sets the text of an element only if it differs, so that a screen reader is not interrupted. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Updates the children of `parent` from `values`. `key(value)` identifies a child. `make(value)`
 * creates the element of a new key, and `update(element, value)` updates each element, even a new
 * one.
 */
export function follow(parent, values, key, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const value of values) {
    const name = String(key(value));
    let element = before.get(name);
    before.delete(name);
    if (!element) {
      element = make(value);
      element.dataset.key = name;
    }
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
    update(element, value);
  }
  for (const gone of before.values()) gone.remove();
}
