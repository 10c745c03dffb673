// Times in the zone of whoever looks. The page has them in UTC.

const today = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const earlier = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const axisTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const axisDate = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

// What a plot calls its times, where they are those of whoever looks.
const zone = new Intl.DateTimeFormat(undefined, { timeZoneName: "short" }).formatToParts(new Date()).find((part) => part.type === "timeZoneName")?.value ?? "";

const localize = (root) => {
  const day = new Date().toDateString();
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    time.title = time.dateTime;
    time.textContent = (at.toDateString() === day ? today : earlier).format(at);
  }
  for (const label of root.querySelectorAll("text[data-time]")) {
    const at = new Date(Number(label.dataset.time) * 1000);
    if (Number.isNaN(at.getTime())) continue;
    label.textContent = (Number(label.dataset.step) < 86400 ? axisTime : axisDate).format(at);
  }
  for (const unit of root.querySelectorAll("text.unit")) if (unit.textContent === "UTC") unit.textContent = zone;
};
