// Keeps the page as new as the fleet: the server tells the number of each picture, and what is shown is fetched again and put in place.

const body = document.body;
const said = document.getElementById("live");
const news = document.createElement("div");
news.id = "news";
news.className = "unseen";
news.setAttribute("aria-live", "polite");
document.querySelector("header").append(news);

// Plots and long lists need not move each second; what has happened is shown at once.
const soon = 250;
const usual = { memory: 5000, logs: 1000, requests: 1000, configuration: 10000, builds: 10000, help: 3600000 }[body.dataset.view] ?? soon;
let least = usual;
let last = "";

let tag = "";
let fetched = 0;
let busy = false;
let again = 0;
let stream;
let greeting = "live";
let heard = performance.now();
// The server says something every 15 s.
const silent = 45000;

const tell = (text, state) => {
  if (said.textContent !== text) said.textContent = text;
  said.dataset.state = state;
};

// What is worth saying aloud: a model whose state is another one now.
const states = () => new Map([...document.querySelectorAll("main tr.row")].map((row) => [row.id, [row.querySelector("th")?.textContent, row.querySelector(".badge")?.textContent]]));

const refresh = async () => {
  const wait = fetched + least - performance.now();
  if (busy || wait > 0) {
    clearTimeout(again);
    again = setTimeout(refresh, Math.max(wait, 50));
    return;
  }
  clearTimeout(again);
  busy = true;
  least = usual;
  try {
    // As text: what is read and written anew has a plus sign for each blank of a name.
    const here = `${location.pathname}${location.search ? `${location.search}&` : "?"}fragment=1`;
    const answer = await fetch(here, { cache: "no-store", headers: tag ? { "if-none-match": tag } : {} });
    // Signed out, here or in another tab: the form for a key.
    if (answer.status === 401) return location.reload();
    if (answer.status !== 304 && !answer.ok) throw new Error(await answer.text());
    if (said.dataset.state === "lost" && stream?.readyState === EventSource.OPEN) tell(greeting, "live");
    if (answer.status === 304) return;
    tag = answer.headers.get("etag") ?? "";
    const now = new DOMParser().parseFromString(await answer.text(), "text/html");
    localize(now);
    const before = body.dataset.view ? new Map() : states();
    for (const id of ["notices", "main"]) {
      const [old, wanted] = [document.getElementById(id), now.getElementById(id)];
      if (old && wanted) morph(old, wanted);
    }
    dispatchEvent(new Event("page:changed"));
    const changed = [...states()].filter(([id, [, state]]) => before.has(id) && before.get(id)[1] !== state);
    if (changed.length > 0) news.textContent = changed.slice(0, 3).map(([, [name, state]]) => `${name}: ${state}`).join(", ");
  } catch (error) {
    tell(`not refreshed: ${error.message}`, "lost");
  } finally {
    busy = false;
    fetched = performance.now();
  }
};

const listen = () => {
  stream?.close();
  stream = new EventSource("/page/live");
  heard = performance.now();
  stream.addEventListener("hello", (event) => {
    heard = performance.now();
    const hello = JSON.parse(event.data);
    document.querySelector("#act input[name=token]").value = hello.token;
    greeting = hello.files === body.dataset.files ? "live" : "live; llama-warden was upgraded: reload the page";
    tell(greeting, "live");
    if (hello.boot !== body.dataset.boot) {
      body.dataset.boot = hello.boot;
      tag = "";
    }
    refresh();
  });
  stream.addEventListener("picture", ({ data }) => {
    heard = performance.now();
    const event = data.split(" ")[1];
    if (event !== last) least = Math.min(usual, soon);
    last = event;
    refresh();
  });
  stream.addEventListener("still", () => (heard = performance.now()));
  stream.addEventListener("error", () => {
    tell("connection lost: retrying", "lost");
    // A browser tries again by itself unless it was refused; why, the page itself is told.
    if (stream.readyState !== EventSource.CLOSED) return;
    refresh();
    setTimeout(listen, 3000);
  });
};

// What a server says comes without a new picture.
if (body.dataset.view === "logs") setInterval(() => document.hidden || refresh(), 1000);

// A connection whose other end has vanished looks like one on which nothing happens.
setInterval(() => {
  if (document.hidden || performance.now() - heard < silent) return;
  tell("no data from the server: retrying", "lost");
  listen();
}, 5000);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return stream?.close();
  tell("connecting", "lost");
  listen();
});

// Stays until something else is done, or has been read.
const refuse = (text) => {
  tell(text, "refused");
  setTimeout(() => said.dataset.state === "refused" && said.textContent === text && tell(greeting, "live"), 20000);
};

document.addEventListener("submit", async (event) => {
  const { target: form, submitter } = event;
  if (form.method !== "post" || !submitter || form.id === "sign-out") return;
  event.preventDefault();
  if (submitter.value.startsWith("drain ") && !confirm(`${submitter.getAttribute("aria-label")}: ${submitter.title}`)) return;
  const fields = new URLSearchParams(new FormData(form));
  if (submitter.name) fields.set(submitter.name, submitter.value);
  submitter.disabled = true;
  try {
    const answer = await fetch(form.getAttribute("action"), { method: "POST", body: fields, headers: { accept: "application/json" } });
    if (!answer.ok) refuse(await answer.text());
    else if (said.dataset.state === "refused") tell(greeting, "live");
  } catch (error) {
    refuse(`nothing was done: ${error.message}`);
  } finally {
    submitter.disabled = false;
    submitter.focus();
    refresh();
  }
});

localize(document);
dispatchEvent(new Event("page:changed"));
listen();
