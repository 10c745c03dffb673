// Takes the screenshots of docs/pictures: views of the page in three sizes, light and dark.
//
//   node pictures.mjs URL FOLDER-OF-PACKAGES CHROMIUM MODEL FOLDER-FOR-PICTURES

import path from "node:path";
import { tell, watch } from "./watch.mjs";

const [, , url, packages, executablePath, model, pictures] = process.argv;
const { browser, watched, seen } = await watch(url, packages, executablePath);
const sizes = { wide: [1400, 900], tablet: [820, 1100], phone: [390, 800] };
const files = [];
for (const [size, [width, height]] of Object.entries(sizes)) {
  for (const colorScheme of ["light", "dark"]) {
    const page = await watched({ viewport: { width, height }, colorScheme, timezoneId: "UTC", locale: "en-GB" });
    const views = { overview: "", memory: `memory?model=${encodeURIComponent(model)}` };
    // The other views show paths of the machine on which the screenshots are taken.
    if (size === "wide") for (const view of ["requests", "events"]) views[view] = view;
    for (const [view, address] of Object.entries(views)) {
      await page.goto(`${url}/page/${address}`);
      await page.waitForSelector("#live[data-state=live]");
      files.push(`page-${view}-${size}-${colorScheme}.png`);
      await page.screenshot({ path: path.join(pictures, files.at(-1)) });
    }
    await page.context().close();
  }
}
tell({ files, ...seen });
await browser.close();
