// A browser in which everything that a page should not do is noted: what its console complains of, what it asks of others, what it asks
// whoever looks. Notes, and no verdict.

import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import path from "node:path";

// Words from outside, a line each, and what is said to them, a line of JSON each.
export const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
export const tell = (value) => process.stdout.write(`${JSON.stringify(value)}\n`);

export const watch = async (url, packages, executablePath) => {
  const require = createRequire(path.join(packages, "package.json"));
  const { chromium } = require("playwright-core");
  const axe = await readFile(require.resolve("axe-core/axe.min.js"), "utf8");
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
  // `dialogs`: what was asked before something is done; no is the answer. `away`: while the instance is, a browser says in its console
  // that it cannot be reached: that is what it is for.
  const seen = { complaints: [], elsewhere: [], dialogs: [], away: false };
  const watched = async (options) => {
    const context = await browser.newContext({ bypassCSP: false, ...options });
    const page = await context.newPage();
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type()) && !seen.away) seen.complaints.push(`${page.url()}: ${message.text()}`);
    });
    page.on("pageerror", (error) => seen.complaints.push(`${page.url()}: ${error.message}`));
    page.on("request", (request) => {
      if (!request.url().startsWith(url) && !request.url().startsWith("data:")) seen.elsewhere.push(request.url());
    });
    page.on("dialog", (dialog) => {
      seen.dialogs.push(dialog.message());
      return dialog.dismiss();
    });
    return page;
  };
  // axe runs where a page's policy does not reach: in the browser's own world for whoever drives it.
  const judged = async (page) => {
    const { result } = await (await page.context().newCDPSession(page)).send("Runtime.evaluate", {
      expression: `${axe}; axe.run(document, { resultTypes: ["violations"] }).then((all) => JSON.stringify(all.violations.map(({ id, help, nodes }) => ({ id, help, where: nodes.slice(0, 3).map((node) => node.html.slice(0, 200)) }))))`,
      awaitPromise: true,
      returnByValue: true,
    });
    return JSON.parse(result.value);
  };
  return { browser, watched, judged, seen };
};
