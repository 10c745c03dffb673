// Walks over every view of the page in a real browser, and tells what it saw as JSON: complaints of the console, requests that left the
// origin, what axe-core finds, how fast things came, whether keys work. It judges nothing; tests/it/browser.rs does.
//
//   node walk.mjs URL FOLDER-OF-PACKAGES CHROMIUM MODEL
//
// Words on its input drive it from outside, each answered by a line of JSON on its output: `leaving` says that we will be gone, `away` waits
// until the page says so, `again` looks whether the page, never loaded
// again, follows an instance that was started anew; `end` ends it all.

import { readFile } from "node:fs/promises";
import path from "node:path";
import { tell, watch, words } from "./watch.mjs";

const [, , url, packages, executablePath, model] = process.argv;
const { browser, watched, judged, seen: all } = await watch(url, packages, executablePath);
const { complaints, elsewhere, dialogs } = all;

const VIEWS = ["", "memory", `memory?model=${encodeURIComponent(model)}`, "requests", "events", "logs", "configuration", "builds", "help"];

const page = await watched({ viewport: { width: 1280, height: 900 } });
const seen = {};
for (const view of VIEWS) {
  await page.goto(`${url}/page/${view}`);
  await page.waitForSelector("#live[data-state=live]");
  const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  seen[view] = { title: await page.title(), paint, wide, violations: await judged(page) };
}
for (const colorScheme of ["light", "dark"]) {
  const narrow = await watched({ viewport: { width: 360, height: 740 }, colorScheme });
  for (const view of VIEWS) {
    await narrow.goto(`${url}/page/${view}`);
    await narrow.waitForSelector("#live[data-state=live]");
    const wide = await narrow.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    seen[`${view} on a phone, ${colorScheme}`] = { wide, violations: await judged(narrow) };
  }
  await narrow.context().close();
}

// Without a script everything can be read, and done.
const plain = await watched({ javaScriptEnabled: false });
await plain.goto(`${url}/page/`);
const readable = { text: (await plain.locator("main").innerText()).includes(model), times: await plain.locator("time").first().innerText() };
// The address is the same before and after: it is the load that is waited for.
await Promise.all([plain.waitForEvent("load"), plain.locator(`button[value="restart ${model}"]`).click()]);
await plain.waitForURL(`${url}/page/`);
readable.done = await plain.locator("#notices").innerText();

// Keys.
await page.goto(`${url}/page/`);
await page.waitForSelector("#live[data-state=live]");
const keys = {};
await page.keyboard.press("j");
await page.keyboard.press("j");
await page.keyboard.press("k");
const row = () => [...document.querySelectorAll("main tr.row")].indexOf(document.activeElement);
keys.row = await page.evaluate(row);
// What comes meanwhile takes the focus from nobody.
await page.evaluate(() => new Promise((done) => addEventListener("page:changed", done, { once: true })));
keys.kept = await page.evaluate(row);
// Nor where a row above is gone, or rows have changed places: as if it had been otherwise before.
const still = (change) =>
  page.evaluate((change) => {
    const row = document.activeElement;
    if (change === "moved") row.before(row.nextElementSibling);
    else row.before(Object.assign(row.cloneNode(false), { id: "gone" }));
    const first = row.parentElement.firstElementChild !== row;
    return new Promise((done) => {
      addEventListener("page:changed", () => done(first && row.parentElement.firstElementChild === row && document.activeElement === row), { once: true });
    });
  }, change);
keys.removed = await still("removed");
keys.moved = await still("moved");
await page.keyboard.press("/");
keys.filter = await page.evaluate(() => document.activeElement.id);
await page.keyboard.type(model);
keys.typed = await page.evaluate(() => document.activeElement.value);
await page.keyboard.press("Escape");
await page.keyboard.press("4");
await page.waitForURL(`${url}/page/events`);
await page.keyboard.press("?");
await page.waitForURL(`${url}/page/help`);
keys.help = await page.title();
await page.goto(`${url}/page/`);
await page.waitForSelector("#live[data-state=live]");
await page.keyboard.press("Tab");
keys.skip = await page.evaluate(() => document.activeElement.className);

// An action by the script: no other page is loaded, and what comes of it is shown by itself.
const loaded = await page.evaluate(() => performance.timeOrigin);
await page.locator(`button[value="restart ${model}"]`).click();
await page.waitForFunction((name) => document.querySelector("#notices").textContent.includes(`restart of ${name}: done`), model);
const live = {};
for (const action of ["pin", "unpin"]) {
  await page.locator(`button[value="${action} ${model}"]`).click();
  await page.waitForFunction(([action, name]) => document.querySelector("#notices").textContent.includes(`${action} of ${name}: done`), [action, model]);
  await page.waitForSelector(`button[value="${action === "pin" ? "unpin" : "pin"} ${model.replaceAll('"', '\\"')}"]`);
  // Columns are as wide as they are whatever stands in them: nothing of it may lie in the next one.
  if (action === "pin") live.cut = await page.evaluate(() => [...document.querySelectorAll(".models :is(th,td)")].filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent));
}
await page.locator(`button[value="drain ${model}"]`).click();
live.dialogs = dialogs;
live.same = loaded === (await page.evaluate(() => performance.timeOrigin));

// How long after an event is written the page shows it: both clocks are this machine's.
await page.goto(`${url}/page/events`);
await page.waitForSelector("#live[data-state=live]");
await page.evaluate(() => {
  window.shown = [];
  const known = new Set([...document.querySelectorAll("main tr.row")].map((row) => row.id));
  new MutationObserver(() => {
    for (const row of document.querySelectorAll("main tr.row")) {
      if (known.has(row.id)) continue;
      known.add(row.id);
      window.shown.push({ id: row.id, at: Date.now() });
    }
  }).observe(document.querySelector("main"), { childList: true, subtree: true });
});

// In a tab of its own: the mark of a replacement in the plots of its model.
const memory = await watched({ viewport: { width: 1280, height: 900 }, timezoneId: "Asia/Kolkata", locale: "en-GB" });
await memory.goto(`${url}/page/memory?model=${encodeURIComponent(model)}`);
await memory.waitForSelector("#live[data-state=live]");
await memory.waitForSelector("svg.plot .mark.replacement");
const plots = { unit: await memory.locator("svg.plot text.unit").first().textContent() };
const point = async () => {
  const plot = await memory.locator("svg.plot").first().boundingBox();
  await memory.mouse.move(plot.x + plot.width / 2, plot.y + plot.height / 2);
};
await point();
plots.cursors = await memory.locator("svg.plot .cursor").count();
plots.all = await memory.locator("svg.plot").count();
plots.times = await memory.evaluate(() => [...document.querySelectorAll("main time")].slice(0, 3).map((time) => [time.dateTime, time.textContent]));
// Sent as a file, it opens where nothing of us is.
const [saved] = await Promise.all([memory.waitForEvent("download"), memory.locator("a[href*='file=1']").first().click()]);
const alone = await watched({});
await alone.setContent(await readFile(await saved.path(), "utf8"));
plots.file = { name: saved.suggestedFilename(), plots: await alone.locator("svg.plot").count(), scripts: await alone.locator("script").count() };
await alone.context().close();
await point();
await memory.evaluate(() => {
  window.marked = [];
  const count = () => document.querySelectorAll("main .mark.replacement").length;
  let known = count();
  new MutationObserver(() => {
    if (count() > known) window.marked.push(Date.now());
    known = count();
  }).observe(document.querySelector("main"), { childList: true, subtree: true });
});

tell({ seen, readable, keys, live, plots, complaints, elsewhere });

for await (const word of words) {
  if (word === "shown") {
    // Plots with a new mark were drawn anew, under a pointer that rests.
    const [marked, cursors] = [await memory.evaluate(() => window.marked), await memory.locator("svg.plot .cursor").count()];
    tell({ shown: await page.evaluate(() => window.shown), marked, cursors });
  } else if (word === "leaving") {
    // From now on whoever asks may be refused.
    all.away = true;
    await memory.context().close();
    tell({ away: all.away });
  } else if (word === "away") {
    await page.waitForSelector("#live[data-state=lost]");
    tell({ lost: true });
  } else if (word === "again") {
    const before = await page.evaluate(() => performance.timeOrigin);
    await page.waitForSelector("#live[data-state=live]", { timeout: 60000 });
    all.away = false;
    const token = await page.evaluate(() => document.querySelector("#act input[name=token]").value);
    const answer = await page.evaluate(async (name) => {
      const form = document.getElementById("act");
      const fields = new URLSearchParams(new FormData(form));
      fields.set("do", `restart ${name}`);
      return (await fetch("/page/act", { method: "POST", body: fields, headers: { accept: "application/json" } })).status;
    }, model);
    tell({ same: before === (await page.evaluate(() => performance.timeOrigin)), token: token.length, answer, complaints, elsewhere });
  } else break;
}
await browser.close();
