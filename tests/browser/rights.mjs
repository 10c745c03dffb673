// The page where a key is asked for: comes without one, with a wrong one, with one that has no right and with one that has, does something,
// and stays until the right is taken away. Tells what it saw as JSON, and judges nothing; tests/it/page_outside.rs does.
//
//   node rights.mjs URL FOLDER-OF-PACKAGES CHROMIUM MODEL KEY...    keys in the order in which they are tried; the last one has the right
//
// The word `taken` on its input: the right is gone now.

import { tell, watch, words } from "./watch.mjs";

const [, , url, packages, executablePath, model, ...keys] = process.argv;
const { browser, watched, judged, seen } = await watch(url, packages, executablePath);
const page = await watched({ viewport: { width: 1280, height: 900 } });
await page.goto(`${url}/page/events`);
const door = { title: await page.title(), violations: await judged(page), font: await page.evaluate(() => getComputedStyle(document.body).marginTop), refused: [] };
for (const key of keys) {
  await page.fill("#key", key);
  await Promise.all([page.waitForEvent("load"), page.locator("form button").first().click()]);
  const why = page.locator("[role=alert]");
  if ((await why.count()) > 0) door.refused.push(await why.innerText());
}
await page.waitForSelector("#live[data-state=live]");
const inside = { at: page.url(), who: await page.locator("#sign-out").innerText(), violations: await judged(page) };
await page.goto(`${url}/page/`);
await page.waitForSelector("#live[data-state=live]");
await page.locator(`button[value="pin ${model}"]`).click();
await page.waitForFunction((name) => document.querySelector("#notices").textContent.includes(`pin of ${name}: done`), model);
inside.pinned = await page.locator("main tr.row").first().innerText();
tell({ door, inside, ...seen });
for await (const word of words) {
  if (word !== "taken") break;
  // Nobody loads the page anew but the page.
  await page.waitForSelector("#key", { timeout: 60000 });
  tell({ title: await page.title(), rows: await page.locator("tr.row").count(), ...seen });
}
await browser.close();
