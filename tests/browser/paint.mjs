// Loads the overview again and again in a real browser, each time as for the first time, and tells as JSON how many milliseconds it takes:
// to the first byte, to the end of the document, to the first paint and to the first paint with something in it (PerformancePaintTiming).
// Each load is followed by one of a page of one word, from a server of our own here: what a browser takes for any page at all.
//
//   node paint.mjs URL FOLDER-OF-PACKAGES CHROMIUM ROUNDS
//
// It judges nothing; tests/bench/paint.rs prints what it says.

import { createServer } from "node:http";
import { createRequire } from "node:module";
import path from "node:path";

const [, , url, packages, executablePath, rounds] = process.argv;
const require = createRequire(path.join(packages, "package.json"));
const { chromium } = require("playwright-core");
const server = createServer((_, answer) => answer.setHeader("content-type", "text/html").end("<!doctype html><title>a word</title><p>word</p>"));
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const pages = [
  { name: "page", at: `${url}/page/`, whole: (page) => page.waitForSelector("#live[data-state=live]") },
  { name: "word", at: `http://127.0.0.1:${server.address().port}/`, whole: (page) => page.waitForSelector("p") },
];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const all = [];
for (const kept of [false, true]) {
  // With nothing kept of earlier visits, and then with the files that never change.
  const open = {};
  for (let round = 0; round < Number(rounds); round++) {
    for (const { name, at, whole } of pages) {
      if (!kept || !open[name]) {
        const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
        open[name] = await context.newPage();
      }
      const page = open[name];
      await page.goto(at);
      await whole(page);
      const seen = await page.evaluate(() => {
        const [navigation] = performance.getEntriesByType("navigation");
        const paint = (name) => performance.getEntriesByName(name)[0]?.startTime ?? null;
        return { first_byte: navigation.responseStart, document: navigation.responseEnd, first_paint: paint("first-paint"), first_contentful_paint: paint("first-contentful-paint"), bytes: navigation.transferSize };
      });
      for (const [what, value] of Object.entries(seen)) all.push({ page: name, kept, what, value });
      if (!kept) await page.context().close();
    }
  }
}
await browser.close();
server.close();
process.stdout.write(`${JSON.stringify(all)}\n`);
