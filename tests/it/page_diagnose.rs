//! A diagnosis that is begun from the page: it runs beside what serves, one at a time, in a spare moment; it is watched and read there; and it
//! ends with whoever needs its memory, with us however we end, and for another program.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::process::{ProcessId, children_of};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, binaries, wait_until};

use crate::page::{TCP, address, ask, form, get, token};

/// A diagnosis of one kind of work with so few requests, on a loaded machine.
const DONE: Duration = Duration::from_secs(120);
/// As many as tell anything at all.
const FEW: &str = "diagnose.requests=24";

struct Page {
    at: SocketAddr,
    token: String,
}

impl Page {
    async fn of(warden: &Warden) -> Result<Self, Trouble> {
        let at = address(warden).await?;
        Ok(Self { at, token: token(&get(at, "/page/diagnose").await?.text())? })
    }

    /// Sends the form of an action; its status.
    async fn act(&self, fields: &[(&str, &str)]) -> Result<u16, Trouble> {
        let own = format!("http://{}", self.at);
        let all = [&[("token", self.token.as_str()), ("back", "/page/diagnose")], fields].concat();
        let headers = [("origin", own.as_str()), ("accept", "application/json")];
        Ok(ask(self.at, "POST", "/page/act", &headers, &form(&all)).await?.status.as_u16())
    }

    async fn begin(&self, model: &str, workload: &str) -> Result<u16, Trouble> {
        self.act(&[("do", "diagnose"), ("model", model), ("workload", workload)]).await
    }

    async fn view(&self) -> Result<String, Trouble> {
        Ok(get(self.at, "/page/diagnose").await?.text())
    }

    async fn until(&self, text: &str, within: Duration) -> Outcome {
        let shows = async || self.view().await.is_ok_and(|view| view.contains(text));
        wait_until(&format!("the page shows: {text}"), within, shows).await
    }
}

/// The process of the diagnosis, and those that it has.
fn diagnosing(warden: &Warden) -> Vec<ProcessId> {
    let all = children_of(warden.kid.pid());
    let own = |child: &ProcessId| child.command_line().get(1).is_some_and(|word| word == "diagnose");
    let found: Vec<ProcessId> = all.into_iter().filter(own).collect();
    let theirs: Vec<ProcessId> = found.iter().flat_map(|own| children_of(own.pid)).collect();
    found.into_iter().chain(theirs).collect()
}

/// A diagnosis that goes on for minutes, with its server.
async fn long(warden: &Warden, page: &Page) -> Result<Vec<ProcessId>, Trouble> {
    // The one before is over a moment after its processes are gone.
    wait_until("none runs", SOON, async || {
        page.view().await.is_ok_and(|view| !view.contains("A diagnosis runs"))
    })
    .await?;
    assert_eq!(page.begin("m", "").await?, 202);
    wait_until("its server runs", SOON, async || diagnosing(warden).len() >= 2).await?;
    Ok(diagnosing(warden))
}

#[tokio::test]
async fn it_is_begun_watched_and_read_there_one_at_a_time() -> Outcome {
    let setup = Setup::new()?.top(TCP).top(FEW).fake("m", &json!({"leak_kib_per_request": 4096}), "")?;
    let warden = setup.fake("n", &json!({}), "preload = false\n")?.start().await?;
    let before = warden.until_ready(1).await?;
    let page = Page::of(&warden).await?;
    assert!(page.view().await?.contains("There is none yet."));
    assert_eq!(page.begin("m", "short-text").await?, 202);
    page.until("A diagnosis runs of m, short-text; asked for by page, 127.0.0.1", SOON).await?;
    assert_eq!(page.begin("n", "short-text").await?, 202);
    page.until("a diagnosis of m runs: one at a time", SOON).await?;
    page.until("Read its report", DONE).await?;
    let view = page.view().await?;
    assert!(view.contains("short-text: ") && view.contains("leak"), "what it said is there: {view}");
    assert!(!view.contains("A diagnosis runs"), "{view}");
    let address = view.split('"').find(|part| part.starts_with("/page/reports/m-")).unwrap_or_default();
    let report = get(page.at, address).await?;
    assert_eq!(report.status.as_u16(), 200, "{address}");
    assert!(report.header("content-security-policy").contains("sandbox"));
    assert!(report.text().contains("short-text"));
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(
        events.contains("page, 127.0.0.1 asks for: diagnose") && events.contains("diagnosis ended:"),
        "{events}"
    );
    assert_eq!(warden.until_ready(1).await?, before, "what serves has not noticed");
    assert!(diagnosing(&warden).is_empty());
    Ok(())
}

#[tokio::test]
async fn what_means_nothing_is_refused_and_a_report_that_is_too_large_fills_nobodys_memory() -> Outcome {
    let warden = Setup::new()?.top(TCP).top(FEW).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let page = Page::of(&warden).await?;
    for (model, workload) in [("m", "--html=/tmp/x"), ("m", "replay"), ("m", "short-text,audio"), ("", "")] {
        assert_eq!(page.begin(model, workload).await?, 400, "{model} {workload}");
    }
    let own = format!("http://{}", page.at);
    let right = form(&[("token", &page.token), ("do", "diagnose"), ("model", "m")]);
    let wrong = form(&[("token", "0"), ("do", "diagnose"), ("model", "m")]);
    for (origin, body) in [("http://evil.example", &right), ("null", &right), (own.as_str(), &wrong)] {
        let answer = ask(page.at, "POST", "/page/act", &[("origin", origin)], body).await?;
        assert_eq!(answer.status.as_u16(), 403, "{origin}");
    }
    assert_eq!(page.begin("--config=/etc/passwd", "").await?, 202);
    page.until("diagnose of --config=/etc/passwd: not done", SOON).await?;
    assert_eq!(page.act(&[("do", "end-diagnosis m")]).await?, 202);
    page.until("no diagnosis runs", SOON).await?;
    assert!(diagnosing(&warden).is_empty());
    let ledger = warden.recycles();
    let reports = ledger.parent().context("no state directory")?.join("reports");
    std::fs::create_dir_all(&reports)?;
    std::fs::File::create(reports.join("large.html"))?.set_len(40 << 20)?;
    let view = page.view().await?;
    assert!(view.contains("too large to be shown") && !view.contains("/page/reports/large.html"), "{view}");
    assert_eq!(get(page.at, "/page/reports/large.html").await?.status.as_u16(), 404);
    Ok(())
}

#[tokio::test]
async fn it_waits_for_no_moment_that_is_not_spare_and_leaves_for_a_model_that_waits() -> Outcome {
    let lines = "loading.max_loaded = 1\ninternal.diagnose.settle = \"200ms\"";
    let setup = Setup::new()?.top(TCP).top(lines).fake("m", &json!({"ms_per_token": 20}), "")?;
    let warden = setup.fake("n", &json!({}), "preload = false\n")?.start().await?;
    warden.until_ready(1).await?;
    let page = Page::of(&warden).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 2000, true)).await?;
    flow.event().await?;
    assert_eq!(page.begin("m", "").await?, 202);
    page.until("1 request(s) are answered or wait", SOON).await?;
    drop(flow);
    wait_until("nothing is in flight", SOON, async || {
        warden.status("m").await.is_ok_and(|model| model["backends"][0]["in_flight"] == 0)
    })
    .await?;
    let all = long(&warden, &page).await?;
    let mut flow = warden.http.stream(CHAT, &chat("b", "m", "go", 2000, true)).await?;
    flow.event().await?;
    let (http, request) = (warden.http.clone(), chat("c", "n", "hi", 2, false));
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { http.post(CHAT, &request).await });
    page.until("n waits for memory: ", SOON).await?;
    Warden::until_gone(&all, SOON).await?;
    drop((flow, waiting));
    Ok(())
}

#[tokio::test]
async fn it_ends_when_it_is_told_to_when_its_time_is_over_and_with_us_however_we_end() -> Outcome {
    let slow = "internal.diagnose.settle = \"200ms\"\ninternal.diagnose.beside_limit = \"20s\"";
    let mut warden = Setup::new()?.top(TCP).top(slow).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let page = Page::of(&warden).await?;
    let all = long(&warden, &page).await?;
    assert_eq!(page.act(&[("do", "end-diagnosis m")]).await?, 202);
    page.until("ended by page, 127.0.0.1: it was interrupted", DONE).await?;
    Warden::until_gone(&all, SOON).await?;
    let all = long(&warden, &page).await?;
    page.until("its time was over", DONE).await?;
    Warden::until_gone(&all, SOON).await?;
    let all = long(&warden, &page).await?;
    warden.kid.signal(Signal::KILL);
    Warden::until_gone(&all, SOON).await
}

#[tokio::test]
async fn another_program_takes_our_place_without_waiting_for_it() -> Outcome {
    let slow = "internal.diagnose.settle = \"200ms\"";
    let mut warden = Setup::new()?.top(TCP).top(slow).fake("m", &json!({}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    for _ in 0..2 {
        let page = Page::of(&warden).await?;
        let all = long(&warden, &page).await?;
        let program = binaries::llama_warden()?;
        let ran = warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
        assert_eq!(ran.code, 0, "{}", ran.all());
        Warden::until_gone(&all, SOON).await?;
        // The next one begins its own, made by the first program's main thread.
        let page = Page::of(&warden).await?;
        let all = long(&warden, &page).await?;
        assert_eq!(page.act(&[("do", "end-diagnosis m")]).await?, 202);
        Warden::until_gone(&all, SOON).await?;
    }
    assert_eq!(warden.until_ready(1).await?, before);
    let page = Page::of(&warden).await?;
    let all = long(&warden, &page).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&all, SOON).await
}

#[tokio::test]
async fn programs_begin_watch_and_end_it_at_the_operators_address() -> Outcome {
    let slow = "internal.diagnose.settle = \"200ms\"";
    let setup = Setup::new()?.top(TCP).top(slow).fake("m", &json!({"ms_per_token": 5}), "")?;
    let warden = setup.fake("n", &json!({}), "preload = false\n")?.start().await?;
    warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let call = async |method: &str, path: &str| -> Result<(u16, Value), Trouble> {
        let answer = ask(at, method, path, &[], "").await?;
        Ok((answer.status.as_u16(), answer.json()?))
    };
    let nothing = json!({"now": null, "last": null});
    assert_eq!(call("GET", "/models/m/diagnosis").await?, (200, nothing.clone()));
    for (method, path, status, told) in [
        ("GET", "/models/nobody/diagnosis", 404, "nobody"),
        ("POST", "/models/m/diagnosis?workload=replay", 400, "short-text"),
        ("POST", "/models/m/diagnosis?work=audio", 400, "`work`"),
        ("DELETE", "/models/m/diagnosis", 409, "no diagnosis runs"),
        // Over TCP nobody says which program runs.
        ("POST", "/models/m/canary?binary=/bin/true", 403, "admin socket"),
        ("PUT", "/models/m/diagnosis", 405, "DELETE"),
    ] {
        let (answered, body) = call(method, path).await?;
        assert!(answered == status && body.to_string().contains(told), "{method} {path}: {answered} {body}");
    }
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 200, true)).await?;
    flow.event().await?;
    let (answered, body) = call("POST", "/models/m/diagnosis").await?;
    assert!(answered == 409 && body.to_string().contains("in flight"), "{answered} {body}");
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    let (answered, body) = call("POST", "/models/m/diagnosis").await?;
    assert_eq!((answered, &body["now"]["model"]), (202, &json!("m")), "{body}");
    assert_eq!(call("POST", "/models/n/diagnosis").await?.0, 409, "one at a time");
    assert_eq!(call("GET", "/models/n/diagnosis").await?, (200, nothing));
    wait_until("its server runs", SOON, async || diagnosing(&warden).len() >= 2).await?;
    let all = diagnosing(&warden);
    assert_eq!(call("DELETE", "/models/m/diagnosis").await?.0, 200);
    Warden::until_gone(&all, DONE).await?;
    wait_until("it is the last one", SOON, async || {
        let told = call("GET", "/models/m/diagnosis").await;
        told.is_ok_and(|(_, body)| {
            body["now"].is_null() && body["last"]["outcome"].to_string().contains("ended by")
        })
    })
    .await
}

#[tokio::test]
async fn a_model_of_a_folder_on_the_command_line_is_diagnosed_as_it_is_served() -> Outcome {
    let setup = Setup::new()?;
    std::fs::create_dir_all(setup.home.path().join("models/sub"))?;
    setup.home.sample_model("models/sub/small.gguf").await?;
    let folder = setup.home.path().join("models").display().to_string();
    let binary = binaries::fake_llama()?.display().to_string();
    let words = ["serve", "--models-dir", &folder, "--binary", &binary, "--port", "0"];
    let sets = [FEW, "admin.address=127.0.0.1:0"].into_iter().flat_map(|set| ["--set", set]);
    let args: Vec<std::ffi::OsString> = words.into_iter().chain(sets).map(Into::into).collect();
    let warden = setup.start_with(&args).await?;
    let at = address(&warden).await?;
    wait_until("the model is known", SOON, async || {
        warden.http.get("/v1/models").await.is_ok_and(|models| models.text().contains("small"))
    })
    .await?;
    let path = "/models/small/diagnosis";
    let begun = ask(at, "POST", &format!("{path}?workload=short-text"), &[], "").await?;
    assert_eq!(begun.status.as_u16(), 202, "{}", begun.text());
    let mut told = Value::Null;
    wait_until("it has ended", DONE, async || {
        let Ok(Ok(body)) = ask(at, "GET", path, &[], "").await.map(|answer| answer.json()) else {
            return false;
        };
        told = body;
        !told["last"].is_null()
    })
    .await?;
    assert!(told["last"]["outcome"].to_string().contains("too few readings to tell"), "{told}");
    Ok(())
}
