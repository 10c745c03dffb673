// Loads the overview again and again in a real browser, each time as for the first time, and tells as JSON how many milliseconds it takes:
// to the first byte, to the end of the document, to the first paint and to the first paint with something in it (PerformancePaintTiming).
//
//   node paint.mjs URL FOLDER-OF-PACKAGES CHROMIUM ROUNDS
//
// It judges nothing; tests/bench/paint.rs prints what it says.

import { createRequire } from "node:module";
import path from "node:path";

const [, , url, packages, executablePath, rounds] = process.argv;
const require = createRequire(path.join(packages, "package.json"));
const { chromium } = require("playwright-core");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const all = { first_byte: [], document: [], first_paint: [], first_contentful_paint: [], bytes: [] };
for (const kept of [false, true]) {
  // With nothing kept of earlier visits, and then with the files that never change.
  let page;
  for (let round = 0; round < Number(rounds); round++) {
    if (!kept || !page) {
      const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
      page = await context.newPage();
    }
    await page.goto(`${url}/page/`);
    await page.waitForSelector("#live[data-state=live]");
    const seen = await page.evaluate(() => {
      const [navigation] = performance.getEntriesByType("navigation");
      const paint = (name) => performance.getEntriesByName(name)[0]?.startTime ?? null;
      return { first_byte: navigation.responseStart, document: navigation.responseEnd, first_paint: paint("first-paint"), first_contentful_paint: paint("first-contentful-paint"), bytes: navigation.transferSize };
    });
    for (const [name, value] of Object.entries(seen)) all[name].push({ kept, value });
    if (!kept) await page.context().close();
  }
}
await browser.close();
process.stdout.write(`${JSON.stringify(all)}\n`);
