// Whether a page of very many models stutters: while a model is pinned and let loose again and again, and rows are gone through by key,
// counts frames, the longest of them, and tasks of 50 ms or more (PerformanceObserver, `longtask`). Tells it as JSON, a line a view.
//
//   node many.mjs URL FOLDER-OF-PACKAGES CHROMIUM MODEL    for an instance of one's own, with as many models as one likes
//
// The packages are those of package.json: npm ci --prefix FOLDER.

import { tell, watch } from "./watch.mjs";

const [, , url, packages, executablePath, model] = process.argv;
const { browser, watched } = await watch(url, packages, executablePath);
for (const view of ["", "memory", "events", "configuration"]) {
  const page = await watched({ viewport: { width: 1280, height: 900 } });
  await page.goto(`${url}/page/${view}`);
  await page.waitForSelector("#live[data-state=live]");
  await page.evaluate(() => {
    Object.assign(window, { long: [], frames: [], changed: 0 });
    new PerformanceObserver((list) => window.long.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: "longtask" });
    addEventListener("page:changed", () => window.changed++);
    let last = performance.now();
    const frame = (now) => {
      window.frames.push(now - last);
      last = now;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
  for (let round = 0; round < 10; round++) {
    await page.evaluate(async (what) => {
      const fields = new URLSearchParams(new FormData(document.getElementById("act")));
      fields.set("do", what);
      await fetch("/page/act", { method: "POST", body: fields, headers: { accept: "application/json" } });
    }, `${round % 2 ? "unpin" : "pin"} ${model}`);
    for (let key = 0; key < 8; key++) {
      await page.keyboard.press("j");
      await page.waitForTimeout(100);
    }
  }
  tell(await page.evaluate((view) => ({ view, rows: document.querySelectorAll("main tbody tr").length, refreshed: window.changed, frames: window.frames.length, longest_ms: Math.round(Math.max(...window.frames)), long_tasks: window.long.length }), view || "overview"));
  await page.context().close();
}
await browser.close();
process.exit(0);
