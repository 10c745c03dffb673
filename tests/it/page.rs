//! The operator's page: access, content and actions; foreign names and lines stay text; many viewers cost as
//! much as one.

use std::fmt::Write as _;
use std::io::Read as _;
use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use warden_rig::http::Whole;
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

pub(crate) const TCP: &str = "admin.address = \"127.0.0.1:0\"";

const HOSTILE: &str = "\\\"><script>alert(1)</script><img src=x onerror=alert(2)> 'a&b";

/// Address of the page, which is logged after the public address.
pub(crate) async fn address(warden: &Warden) -> Result<SocketAddr, Trouble> {
    let told = || {
        let output = warden.kid.output();
        output.lines().find_map(|line| Some(line.strip_prefix("admin address http://")?.to_owned()))
    };
    wait_until("the admin address is told", SOON, async || told().is_some()).await?;
    Ok(told().context("no admin address was told")?.parse()?)
}

/// Sends a request with these headers and the right host.
pub(crate) async fn ask(
    at: SocketAddr,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Whole, Trouble> {
    let mut request = Request::builder().method(method).uri(target);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", at.to_string());
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    if !body.is_empty() {
        request = request.header("content-type", "application/x-www-form-urlencoded");
    }
    Http::Tcp(at).send(request.body(Full::new(Bytes::from(body.to_owned())))?).await
}

pub(crate) async fn get(at: SocketAddr, target: &str) -> Result<Whole, Trouble> {
    ask(at, "GET", target, &[], "").await
}

pub(crate) fn token(page: &str) -> Result<String, Trouble> {
    let after = page.split_once("name=\"token\" value=\"").context("no token in the page")?.1;
    Ok(after.split('"').next().unwrap_or_default().to_owned())
}

pub(crate) fn form(pairs: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in pairs {
        let _infallible = write!(text, "{}{name}=", if text.is_empty() { "" } else { "&" });
        for byte in value.bytes() {
            let _infallible = write!(text, "%{byte:02X}");
        }
    }
    text
}

const VIEWS: [&str; 8] = [
    "/page/",
    "/page/memory",
    "/page/requests",
    "/page/events",
    "/page/logs",
    "/page/configuration",
    "/page/builds",
    "/page/help",
];

#[tokio::test]
async fn every_view_is_a_whole_page_of_ours_and_nothing_of_it_comes_from_elsewhere() -> Outcome {
    let warden =
        Setup::new()?.top(TCP).fake("m", &json!({}), "policy.host.soft = \"1GiB\"\n")?.start().await?;
    warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let lead = get(at, "/").await?;
    assert_eq!((lead.status.as_u16(), lead.header("location")), (303, "/page/"));
    let mut sent = 0;
    for view in VIEWS {
        sent += ask(at, "GET", view, &[("accept-encoding", "gzip")], "").await?.body.len();
        let page = get(at, view).await?;
        let text = page.text();
        assert_eq!(page.status.as_u16(), 200, "{view}: {text}");
        let policy = page.header("content-security-policy");
        for part in [
            "default-src 'none'",
            "script-src 'self'",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'self'",
        ] {
            assert!(policy.contains(part), "{view}: {part} is not in {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "same-origin"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
            ("cache-control", "no-store"),
        ] {
            assert_eq!(page.header(name), value, "{view}");
        }
        assert!(text.starts_with("<!doctype html>") && text.contains("<main"), "{view}");
        assert_eq!(text.contains("aria-current=\"page\""), view != "/page/help", "{view}");
        // The page has one style, which the policy names by its hash.
        let style =
            text.split_once("<style>").context("a style")?.1.split_once("</style>").context("its end")?.0;
        let digest = BASE64_STANDARD.encode(Sha256::digest(style));
        assert!(policy.contains(&format!("style-src 'sha256-{digest}';")), "{view}: {policy}");
        for (inline, most) in
            [(" style=", 0), (" onclick", 0), (" onload", 0), ("<style", 1), ("javascript:", 0)]
        {
            assert!(text.matches(inline).count() <= most, "{view} has {inline}");
        }
        let scripts = text.matches("<script").count();
        assert_eq!(scripts, 1, "{view}");
        // All files that the page loads exist, are small and never change.
        for file in text.split('"').filter(|part| part.starts_with("/page/files/")) {
            let loaded = ask(at, "GET", file, &[("accept-encoding", "gzip")], "").await?;
            assert_eq!((loaded.status.as_u16(), loaded.header("content-encoding")), (200, "gzip"), "{file}");
            assert!(loaded.header("cache-control").contains("immutable"), "{file}");
            assert!(loaded.body.len() < 30_000, "{file}: {}", loaded.body.len());
        }
        // With the tag of an unchanged fragment, the answer is empty.
        let fragment = format!("{view}?fragment=1");
        let one = get(at, &fragment).await?;
        assert!(one.text().contains("<main") && !one.text().contains("<html"), "{view}");
    }
    // Size of all views with the script.
    assert!((5_000..120_000).contains(&sent), "{sent}");
    assert_eq!(get(at, "/page/nothing").await?.status.as_u16(), 404);
    assert!(get(at, "/page/").await?.text().contains("127.0.0.1"), "who we are is in it");
    Ok(())
}

#[tokio::test]
async fn what_has_not_changed_is_not_sent_again() -> Outcome {
    let warden = Setup::new()?.top(TCP).fake("m", &json!({}), "preload = false\n")?.start().await?;
    let at = address(&warden).await?;
    let help = get(at, "/page/help?fragment=1").await?;
    let tag = help.header("etag").to_owned();
    let again = ask(at, "GET", "/page/help?fragment=1", &[("if-none-match", &tag)], "").await?;
    assert_eq!((again.status.as_u16(), again.body.len()), (304, 0));
    let other = ask(at, "GET", "/page/help?fragment=1", &[("if-none-match", "\"other\"")], "").await?;
    assert_eq!(other.status.as_u16(), 200);
    Ok(())
}

#[tokio::test]
async fn other_pages_names_and_programs_get_nothing_and_do_nothing() -> Outcome {
    let warden = Setup::new()?.top(TCP).fake("m", &json!({}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let own = format!("http://{at}");
    let right = token(&get(at, "/page/").await?.text())?;
    // Requests that read.
    for (headers, wanted) in [
        (&[("host", "evil.example")][..], 403),
        (&[("host", "evil.example:9090"), ("sec-fetch-site", "same-origin")], 403),
        (&[("origin", "http://evil.example")], 403),
        (&[("origin", "null")], 403),
        (
            &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "script")],
            403,
        ),
        (
            &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe")],
            403,
        ),
        (
            &[
                ("sec-fetch-site", "cross-site"),
                ("sec-fetch-mode", "navigate"),
                ("sec-fetch-dest", "document"),
            ],
            200,
        ),
        (&[("sec-fetch-site", "same-origin")], 200),
        (&[("sec-fetch-site", "none")], 200),
        (&[("host", "localhost:1")], 200),
    ] {
        let page = ask(at, "GET", "/page/", headers, "").await?;
        assert_eq!(page.status.as_u16(), wanted, "{headers:?}: {}", page.text());
        assert!(wanted == 200 || !page.text().contains("token\""), "{headers:?}");
        assert!(page.header("access-control-allow-origin").is_empty());
    }
    // A fragment is refused as a page of its own, even in a new tab.
    let tab =
        [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
    assert_eq!(ask(at, "GET", "/page/live", &tab, "").await?.status.as_u16(), 403);
    // Requests that act.
    let act = |token: &str| form(&[("token", token), ("do", "restart m")]);
    let ours = ("origin", own.as_str());
    let (good, wrong, none) = (act(&right), act(&"0".repeat(64)), form(&[("do", "restart m")]));
    for (headers, body, why) in [
        (&[ours][..], &wrong, "another token"),
        (&[ours], &none, "no token"),
        (&[][..], &good, "no origin"),
        (&[("origin", "http://evil.example")], &good, "another origin"),
        (&[("origin", "null")], &good, "an origin that is hidden"),
        (&[("origin", "http://127.0.0.1:1")], &good, "another port"),
        (&[ours, ("sec-fetch-site", "cross-site")], &good, "another site"),
        (
            &[("host", "evil.example"), ("origin", "http://evil.example")],
            &good,
            "a name that is pointed at us",
        ),
    ] {
        let answer = ask(at, "POST", "/page/act", headers, body).await?;
        assert_eq!(answer.status.as_u16(), 403, "{why}: {}", answer.text());
        assert!(answer.text().len() > 30, "{why} is told: {}", answer.text());
    }
    for method in ["GET", "PUT", "DELETE", "PATCH"] {
        let answer = ask(at, method, &format!("/page/act?{good}"), &[ours], "").await?;
        assert!(answer.status.is_client_error(), "{method}: {}", answer.status);
    }
    let large = format!("{good}&x={}", "x".repeat(100_000));
    assert_eq!(ask(at, "POST", "/page/act", &[ours], &large).await?.status.as_u16(), 413);
    assert_eq!(
        ask(at, "POST", "/page/act", &[ours], &form(&[("token", &right), ("do", "kill m")]))
            .await?
            .status
            .as_u16(),
        400
    );
    // Other routes stay closed to browsers, over the socket, too.
    for target in ["/status", "/metrics", "/events", "/models/m/logs?reveal=1"] {
        for headers in [
            &[("sec-fetch-site", "same-origin")][..],
            &[("origin", own.as_str())],
            &[("host", "evil.example")],
        ] {
            assert_eq!(
                ask(at, "GET", target, headers, "").await?.status.as_u16(),
                403,
                "{target} {headers:?}"
            );
        }
    }
    assert_eq!(ask(at, "POST", "/models/m/restart", &[ours], "").await?.status.as_u16(), 403);
    let led = Request::get("/status")
        .header("host", "localhost")
        .header("origin", "http://localhost")
        .body(Full::default())?;
    assert_eq!(warden.admin().send(led).await?.status.as_u16(), 403);
    assert_eq!(warden.backends(), before, "nothing was done");
    // The public listener has none of the views.
    for view in VIEWS {
        assert!(!warden.http.get(view).await?.text().contains("llama-warden</title>"), "{view}");
    }
    Ok(())
}

#[tokio::test]
async fn what_is_done_from_the_page_is_done_and_stands_in_events_and_ledger_with_who() -> Outcome {
    let mut warden = Setup::new()?.top(TCP).fake("m", &json!({}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let own = format!("http://{at}");
    let page = get(at, "/page/?q=m").await?.text();
    let right = token(&page)?;
    let act = async |what: &str, accept: &str| {
        let body = form(&[("token", &right), ("do", what), ("back", "/page/?q=m")]);
        ask(at, "POST", "/page/act", &[("origin", &own), ("accept", accept)], &body).await
    };
    let done = act("restart m", "text/html").await?;
    assert_eq!((done.status.as_u16(), done.header("location")), (303, "/page/?q=m"), "{}", done.text());
    wait_until("its notice says that it was done", SOON, async || {
        get(at, "/page/").await.is_ok_and(|page| page.text().contains("restart of m: done"))
    })
    .await?;
    assert_ne!(warden.until_ready(1).await?, before);
    let entry = json_lines(&warden.recycles())?.pop().context("no entry in the ledger")?;
    assert_eq!(
        (entry["reason"].as_str(), entry["by"].as_str()),
        (Some("operator"), Some("page, 127.0.0.1")),
        "{entry}"
    );
    assert!(warden.cli(&["events"]).await?.stdout.contains("page, 127.0.0.1 asks for: restart"));
    // A script gets the number of the notice.
    let done = act("drain m", "application/json").await?;
    assert_eq!((done.status.as_u16(), done.json()?["notice"].as_u64()), (202, Some(2)));
    wait_until("it is unloaded", SOON, async || {
        warden.state("m").await.is_ok_and(|state| state == "unloaded")
    })
    .await?;
    wait_until("it can be loaded", SOON, async || {
        get(at, "/page/").await.is_ok_and(|page| page.text().contains("value=\"load m\""))
    })
    .await?;
    act("load m", "application/json").await?;
    warden.until_ready(1).await?;
    // An impossible action gives its reason.
    act("reclaim m", "application/json").await?;
    act("restart nobody", "application/json").await?;
    wait_until("what was not done is told", SOON, async || {
        get(at, "/page/").await.is_ok_and(|page| page.text().matches("not done:").count() == 2)
    })
    .await?;
    assert!(get(at, "/page/").await?.text().contains("its build cannot be asked"));
    assert!(get(at, "/page/events?q=asks").await?.text().contains("asks for: load"));
    // A pinned model shows who pinned it, and stays pinned after a reload.
    act("pin m", "application/json").await?;
    let pinned = async |by: &str| {
        get(at, "/page/").await.is_ok_and(|page| {
            page.text().contains(&format!("pinned by {by}")) && page.text().contains("value=\"unpin m\"")
        })
    };
    wait_until("it is pinned", SOON, async || pinned("page, 127.0.0.1").await).await?;
    let config = warden.setup.config();
    warden.reload(&format!("{config}\n# read again\n"))?;
    warden.says("configuration").await?;
    assert!(pinned("page, 127.0.0.1").await);
    assert!(warden.cli(&["unpin", "m"]).await?.stdout.contains("may be unloaded for another model"));
    let history = warden.cli(&["history", "--since", "1h"]).await?.stdout;
    assert!(
        history.contains(
            "pinned: never unloaded for another model, against its configuration (by page, 127.0.0.1)"
        ) && history.contains("may be unloaded for another model (by uid"),
        "{history}"
    );
    Ok(())
}

#[tokio::test]
async fn names_lines_and_errors_of_others_stay_text() -> Outcome {
    let script = json!({});
    let setup = Setup::new()?.top(TCP).fake("plain", &script, "")?;
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\npreload = true\naliases = [\"<script>alert(3)</script>\"]\nenv = {{ FAKE_LLAMA_FAIL = \"corrupt_model\" }}\n",
        warden_rig::binaries::fake_llama()?.display(),
        setup.home.path().join("model.gguf").display(),
    );
    let warden = setup.model(HOSTILE, &lines).start().await?;
    let at = address(&warden).await?;
    wait_until("the hostile one has failed", SOON, async || {
        get(at, "/page/")
            .await
            .is_ok_and(|page| page.text().contains("failed") || page.text().contains("backoff"))
    })
    .await?;
    for view in VIEWS {
        for query in [
            String::new(),
            format!("?{}", form(&[("model", "\"><script>alert(1)</script>"), ("q", "<script>")])),
            format!(
                "?{}",
                form(&[("q", "\" autofocus onfocus=alert(1) x=\""), ("sort", "<b>"), ("part", "-1")])
            ),
        ] {
            let page = get(at, &format!("{view}{query}")).await?;
            let text = page.text();
            assert_eq!(page.status.as_u16(), 200, "{view}{query}");
            assert_eq!(text.matches("<script").count(), 1, "{view}{query}");
            for harm in ["<img", "onerror=alert(2)>", "\" onfocus", "<b>"] {
                assert!(!text.contains(harm), "{view}{query} has {harm}");
            }
        }
    }
    let overview = get(at, "/page/").await?.text();
    assert!(overview.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "it is shown as what it is");
    Ok(())
}

#[tokio::test]
async fn secrets_are_on_no_view() -> Outcome {
    let secret = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
    let setup = Setup::new()?.top(TCP).fake("m", &json!({}), "")?;
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\npreload = false\nenv = {{ HF_TOKEN = \"{secret}\", OTHER = \"{secret}\" }}\n",
        warden_rig::binaries::fake_llama()?.display(),
        setup.home.path().join("model.gguf").display(),
    );
    let warden = setup.model("n", &lines).start().await?;
    warden.until_ready(1).await?;
    let at = address(&warden).await?;
    for view in VIEWS {
        for query in ["", "?model=n", "?model=m"] {
            assert!(!get(at, &format!("{view}{query}")).await?.text().contains(secret), "{view}{query}");
        }
    }
    let configuration = get(at, "/page/configuration").await?.text();
    assert!(
        configuration.contains("HF_TOKEN")
            && configuration.contains("***")
            && configuration.contains("warden.toml:")
    );
    Ok(())
}

#[tokio::test]
async fn all_who_look_share_one_picture_and_one_that_does_not_read_holds_up_nobody() -> Outcome {
    let warden = Setup::new()?.top(TCP).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let mut viewers = Vec::new();
    for _ in 0..10 {
        let request = Request::get("/page/live").header("host", at.to_string()).body(Full::default())?;
        let mut viewer = Http::Tcp(at).open(request).await?;
        let hello = viewer.event().await?.context("the stream ended")?;
        assert!(hello.contains("\"token\"") && hello.contains("\"boot\""), "{hello}");
        viewers.push(viewer);
    }
    // The last viewer stops reading.
    let deaf = viewers.pop();
    let begun = Instant::now();
    warden.restart("m", 1).await?;
    for viewer in &mut viewers {
        let told = tokio::time::timeout(SOON, viewer.event()).await.context("no picture was told")??;
        let told = told.context("the stream ended")?;
        let numbers = told.split(' ').filter(|number| number.parse::<u64>().is_ok()).count();
        assert_eq!(numbers, 2, "of the picture and of the last event: {told}");
    }
    eprintln_line(&format!("ten viewers were told within {:?} of the restart's beginning", begun.elapsed()));
    for n in 0..20 {
        let answer = warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "one two", 3, true)).await?;
        assert!(answer.answer()?.is_whole());
    }
    drop(deaf);
    // Viewers beyond the limit are refused with a sentence, and can still read without the stream.
    let mut more = Vec::new();
    let refused = loop {
        let request = Request::get("/page/live").header("host", at.to_string()).body(Full::default())?;
        let viewer = Http::Tcp(at).open(request).await?;
        if !viewer.status().is_success() {
            break viewer.whole().await?;
        }
        more.push(viewer);
        if more.len() > 200 {
            return Err(Trouble::new("200 viewers and no end".to_owned()));
        }
    };
    assert_eq!(refused.status.as_u16(), 503, "{}", refused.text());
    assert_eq!(get(at, "/page/").await?.status.as_u16(), 200);
    drop((viewers, more));
    wait_until("who has left makes room", SOON, async || {
        let Ok(request) = Request::get("/page/live").header("host", at.to_string()).body(Full::default())
        else {
            return false;
        };
        Http::Tcp(at).open(request).await.is_ok_and(|viewer| viewer.status().is_success())
    })
    .await
}

#[tokio::test]
async fn the_end_does_not_wait_for_those_who_look() -> Outcome {
    let mut warden = Setup::new()?.top(TCP).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let at = address(&warden).await?;
    let request = Request::get("/page/live").header("host", at.to_string()).body(Full::default())?;
    let mut viewer = Http::Tcp(at).open(request).await?;
    assert_eq!(viewer.event().await?.map(|hello| hello.contains("boot")), Some(true));
    assert_eq!(warden.terminate(Duration::from_secs(20)).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_thousand_models_are_shown_in_parts_that_stay_small() -> Outcome {
    let mut setup = Setup::new()?.top(TCP);
    for n in 0..1000 {
        setup = setup.fake(&format!("org/model-{n:04}"), &json!({}), "preload = false\n")?;
    }
    let warden = setup.start().await?;
    let at = address(&warden).await?;
    let begun = Instant::now();
    let page = ask(at, "GET", "/page/", &[("accept-encoding", "gzip")], "").await?;
    let first = begun.elapsed();
    let mut text = String::new();
    flate2::read::GzDecoder::new(&page.body[..]).read_to_string(&mut text)?;
    eprintln_line(&format!(
        "1,000 models: {} bytes, compressed {}, in {first:?}",
        text.len(),
        page.body.len()
    ));
    assert_eq!(page.header("content-encoding"), "gzip");
    assert!(page.body.len() < 60_000, "{}", page.body.len());
    assert_eq!(text.matches("class=\"row\"").count(), 100);
    assert!(text.contains("1000 models"));
    let mut seen = std::collections::BTreeSet::new();
    for part in 0..11 {
        let page = get(at, &format!("/page/?sort=name&part={part}")).await?.text();
        seen.extend(
            page.split("value=\"load ").skip(1).filter_map(|rest| rest.split('"').next().map(str::to_owned)),
        );
    }
    assert_eq!(seen.len(), 1000);
    assert_eq!(get(at, "/page/?q=model-0999").await?.text().matches("class=\"row\"").count(), 1);
    let begun = Instant::now();
    let configuration = ask(at, "GET", "/page/configuration", &[("accept-encoding", "gzip")], "").await?;
    eprintln_line(&format!(
        "their configuration: compressed {} bytes in {:?}",
        configuration.body.len(),
        begun.elapsed()
    ));
    assert_eq!(configuration.status.as_u16(), 200);
    assert!(configuration.body.len() < 100_000, "{}", configuration.body.len());
    let one = get(at, "/page/configuration?q=model-0999").await?.text();
    assert!(one.contains("[models.&quot;org/model-0999&quot;]") && !one.contains("model-0998"), "{one}");
    Ok(())
}

#[expect(clippy::print_stderr, reason = "numbers that are told and not judged: they depend on the machine")]
fn eprintln_line(line: &str) {
    eprintln!("{line}");
}
