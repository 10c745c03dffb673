// Makes one tree like another with as few changes as possible, so that focus, selection, scroll positions and opened details stay.

const same = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || "") === (b.id || "");

// A node that is taken out and put in again loses the focus; where browsers can move one, it does not.
const move = (parent, node, before) => {
  if (parent.moveBefore) return parent.moveBefore(node, before);
  const focused = node.contains(document.activeElement) ? document.activeElement : undefined;
  parent.insertBefore(node, before);
  focused?.focus({ preventScroll: true });
};

const morph = (old, now) => {
  if (old.isEqualNode(now)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
    return;
  }
  // Whether details are open is whoever's who looks; that a row can have the focus is the keys' (keys.js): without it the row would lose it.
  const ours = (name) => (name === "open" && old.nodeName === "DETAILS") || (name === "tabindex" && old.nodeName === "TR");
  for (const { name } of [...old.attributes]) if (!ours(name) && !now.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of now.attributes) if (!ours(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  const known = new Map();
  for (const child of old.children) if (child.id) known.set(child.id, child);
  const stays = new Set([...now.children].map((child) => child.id));
  let at = old.firstChild;
  for (const wanted of [...now.childNodes]) {
    // What is gone goes first: the rows after it need not move.
    while (at?.id && !stays.has(at.id)) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
    const named = wanted.id ? known.get(wanted.id) : undefined;
    if (named && named !== at && same(named, wanted)) {
      move(old, named, at);
      morph(named, wanted);
    } else if (at && same(at, wanted)) {
      const next = at.nextSibling;
      morph(at, wanted);
      at = next;
    } else {
      old.insertBefore(wanted, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
};
