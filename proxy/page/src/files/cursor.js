// One cursor over all plots of time: where the pointer is in one, all that show this moment have a line there.

const plots = () => [...document.querySelectorAll("svg.plot")];
const number = (plot, name) => Number(plot.dataset[name]);

const put = (plot, at) => {
  let line = plot.querySelector(".cursor");
  const [from, to, left, right] = ["xFrom", "xTo", "left", "right"].map((name) => number(plot, name));
  if (at === null || !(at >= from && at <= to)) {
    line?.remove();
    return;
  }
  if (!line) {
    line = document.createElementNS(plot.namespaceURI, "g");
    line.setAttribute("class", "cursor");
    line.append(document.createElementNS(plot.namespaceURI, "line"), document.createElementNS(plot.namespaceURI, "text"));
    plot.append(line);
  }
  const x = left + ((at - from) / (to - from)) * (right - left);
  const [rule, label] = line.children;
  const set = (element, all) => Object.entries(all).forEach(([name, value]) => element.setAttribute(name, value));
  set(rule, { x1: x, x2: x, y1: number(plot, "top"), y2: number(plot, "bottom") });
  const late = x > (left + right) / 2;
  set(label, { x: x + (late ? -6 : 6), y: number(plot, "top") + 12, "text-anchor": late ? "end" : "start" });
  label.textContent = earlier.format(new Date(at * 1000));
};

// Where the pointer was last, or null.
let pointer = null;

const follow = (target) => {
  const plot = pointer && target?.closest?.("svg.plot");
  let at = null;
  if (plot) {
    const place = new DOMPoint(pointer.x, pointer.y).matrixTransform(plot.getScreenCTM().inverse());
    const [from, to, left, right] = ["xFrom", "xTo", "left", "right"].map((name) => number(plot, name));
    at = from + ((place.x - left) / (right - left)) * (to - from);
  }
  plots().forEach((each) => put(each, at));
};

document.addEventListener("pointermove", ({ clientX: x, clientY: y, target }) => {
  pointer = { x, y };
  follow(target);
}, { passive: true });
// A finger that is lifted leaves what it pointed at.
document.documentElement.addEventListener("pointerleave", ({ pointerType }) => pointerType !== "touch" && follow((pointer = null)));
// What is drawn anew has no line: the pointer may rest.
addEventListener("page:changed", () => pointer && follow(document.elementFromPoint(pointer.x, pointer.y)));
