// Keys: j and k or arrows go through rows, Enter opens what a row is about, / goes to the filter, digits are views, ? lists all.

const typing = (target) => target.closest?.("input, select, textarea, [contenteditable]");

const go = (step) => {
  const rows = [...document.querySelectorAll("main tbody tr")];
  if (rows.length === 0) return false;
  const now = rows.indexOf(document.activeElement?.closest?.("tbody tr"));
  const row = rows[Math.min(rows.length - 1, Math.max(0, now < 0 ? (step > 0 ? 0 : rows.length - 1) : now + step))];
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
  return true;
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
  const { key, target } = event;
  if (key === "Escape" && typing(target)) target.blur();
  if (typing(target)) return;
  const inside = target.closest?.(".scroll, .log, pre, details, .plot");
  let done = true;
  if (key === "j" || (key === "ArrowDown" && !inside)) done = go(1);
  else if (key === "k" || (key === "ArrowUp" && !inside)) done = go(-1);
  else if (key === "Enter" && target.matches?.("tbody tr")) target.querySelector("a")?.click();
  else if (key === "/") {
    const filter = document.getElementById("filter");
    filter?.focus();
    filter?.select();
    done = Boolean(filter);
  } else if (key === "?") document.getElementById("help-link")?.click();
  else if (key >= "1" && key <= "7") document.querySelector(`nav a[data-key="${key}"]`)?.click();
  else done = false;
  if (done) event.preventDefault();
});
