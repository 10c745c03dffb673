//! The page on the public listener needs a key with the right; every action names the key, and without one
//! nothing is shown.

use std::net::SocketAddr;

use serde_json::{Value, json};
use warden_rig::browser::Browser;
use warden_rig::warden::{SOON, Setup, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

use crate::page::{ask, form, token};

const OPERATOR: &str = "sk-operator-0123456789abcdef";
const CLIENT: &str = "sk-client-0123456789abcdef";

/// Starts with two keys, one of which opens the page if `right`.
async fn started(right: bool) -> Result<Warden, Trouble> {
    let setup = Setup::new()?.top("server.keys = \"keys.toml\"\n").fake("m", &json!({}), "")?;
    let keys = format!(
        "[olga]\nkey = \"{OPERATOR}\"\noperator = {right}\n[carl]\nkey = \"{CLIENT}\"\nmodels = [\"m\"]\n"
    );
    write_keys(&setup.home.path().join("keys.toml"), &keys)?;
    setup.start().await
}

fn write_keys(path: &std::path::Path, text: &str) -> Outcome {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(())
}

async fn sign_in(at: SocketAddr, own: &str) -> Result<String, Trouble> {
    let body = form(&[("key", OPERATOR), ("back", "/page/events")]);
    let done = ask(at, "POST", "/page/sign-in", &[("origin", own)], &body).await?;
    assert_eq!((done.status.as_u16(), done.header("location")), (303, "/page/events"), "{}", done.text());
    let set = done.header("set-cookie").to_owned();
    for part in ["; Path=/page;", "HttpOnly", "SameSite=Strict"] {
        assert!(set.contains(part), "{part} in {set}");
    }
    assert!(!set.contains("sk-"), "{set}");
    Ok(set.split(';').next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn the_page_outside_opens_for_a_key_with_the_right_and_for_nobody_else() -> Outcome {
    let warden = started(true).await?;
    let before = warden.until_ready(1).await?;
    let at = warden.address();
    let own = format!("http://{at}");
    let ours = ("origin", own.as_str());
    // Without a key there is only the form.
    let led = ask(at, "GET", "/page/memory?model=m", &[], "").await?;
    let wanted = "/page/sign-in?back=%2Fpage%2Fmemory%3Fmodel%3Dm";
    assert_eq!((led.status.as_u16(), led.header("location")), (303, wanted));
    let door = ask(at, "GET", wanted, &[], "").await?;
    assert!(door.status == 200 && door.text().contains("name=\"key\""), "{}", door.text());
    assert!(!door.text().contains("token"), "{}", door.text());
    for target in ["/page/?fragment=1", "/page/live"] {
        assert_eq!(ask(at, "GET", target, &[], "").await?.status.as_u16(), 401, "{target}");
    }
    let foreign = ("origin", "http://evil.example");
    let cross = ("sec-fetch-site", "cross-site");
    let act = form(&[("do", "restart m"), ("token", &"0".repeat(64))]);
    for (headers, wanted) in [(&[ours][..], 401), (&[], 403), (&[foreign], 403), (&[ours, cross], 403)] {
        let answer = ask(at, "POST", "/page/act", headers, &act).await?;
        assert_eq!(answer.status.as_u16(), wanted, "{headers:?}: {}", answer.text());
    }
    // Another site cannot sign a user in, and a key without the right opens nothing.
    let right = form(&[("key", OPERATOR)]);
    for headers in [&[foreign][..], &[], &[ours, cross]] {
        let answer = ask(at, "POST", "/page/sign-in", headers, &right).await?;
        assert!(answer.status == 403 && answer.header("set-cookie").is_empty(), "{headers:?}");
    }
    for (key, wanted) in [(CLIENT, 403), ("sk-guessed-0123456789", 401), ("", 401)] {
        let answer = ask(at, "POST", "/page/sign-in", &[ours], &form(&[("key", key), ("x", "y")])).await?;
        assert!(answer.status == wanted && answer.header("set-cookie").is_empty(), "{}", answer.text());
        let bearer = format!("Bearer {key}");
        let shown = ask(at, "GET", "/page/", &[("authorization", &bearer)], "").await?;
        assert!(!shown.text().contains("restart m"), "{key}");
    }
    // With the key all views are there, and actions name the key.
    let cookie = sign_in(at, &own).await?;
    let with = ("cookie", cookie.as_str());
    let page = ask(at, "GET", "/page/", &[with], "").await?;
    assert!(page.text().contains("Signed in with the key olga"), "{}", page.text());
    assert!(page.header("access-control-allow-origin").is_empty());
    let act = form(&[("do", "restart m"), ("token", &token(&page.text())?)]);
    for (headers, why) in
        [(&[with][..], "no origin"), (&[with, foreign], "another's"), (&[with, ours, cross], "elsewhere")]
    {
        assert_eq!(ask(at, "POST", "/page/act", headers, &act).await?.status.as_u16(), 403, "{why}");
    }
    assert_eq!(warden.backends(), before, "nothing was done so far");
    assert_eq!(ask(at, "POST", "/page/act", &[with, ours], &act).await?.status.as_u16(), 303);
    wait_until("the ledger tells who", SOON, async || {
        json_lines(&warden.recycles()).is_ok_and(|all| {
            all.iter().any(|entry| entry["by"].as_str() == Some("page, key olga, 127.0.0.1"))
        })
    })
    .await?;
    // A program sends its key with each request.
    let basic = ("authorization", "Basic dTpzay1vcGVyYXRvci0wMTIzNDU2Nzg5YWJjZGVm");
    assert_eq!(ask(at, "GET", "/page/requests", &[basic], "").await?.status.as_u16(), 200);
    // Signing out invalidates a copied cookie, too.
    let out = form(&[("token", &token(&page.text())?)]);
    assert_eq!(ask(at, "POST", "/page/sign-out", &[with, foreign], &out).await?.status.as_u16(), 403);
    assert_eq!(ask(at, "POST", "/page/sign-out", &[with, ours], &out).await?.status.as_u16(), 303);
    assert_eq!(ask(at, "GET", "/page/?fragment=1", &[with], "").await?.status.as_u16(), 401);
    // Wrong keys are soon ignored. The right key still works, because behind a proxy all clients have one
    // address.
    let wrong = form(&[("key", "sk-guessed-0123456789")]);
    for _ in 0..10 {
        ask(at, "POST", "/page/sign-in", &[ours], &wrong).await?;
    }
    let answer = ask(at, "POST", "/page/sign-in", &[ours], &wrong).await?;
    assert!(answer.status == 429 && !answer.header("retry-after").is_empty(), "{}", answer.text());
    assert_eq!(ask(at, "POST", "/page/sign-in", &[ours], &right).await?.status.as_u16(), 303);
    assert_eq!(ask(at, "GET", "/page/requests", &[basic], "").await?.status.as_u16(), 200);
    Ok(())
}

#[tokio::test]
async fn a_right_that_is_taken_closes_the_page_at_the_reload_and_its_paths_are_llama_servers_again() -> Outcome
{
    let mut warden = started(true).await?;
    warden.until_ready(1).await?;
    let at = warden.address();
    let cookie = sign_in(at, &format!("http://{at}")).await?;
    let with = ("cookie", cookie.as_str());
    assert_eq!(ask(at, "GET", "/page/", &[with], "").await?.status.as_u16(), 200);
    let keys = format!("[olga]\nkey = \"{OPERATOR}\"\n");
    write_keys(&warden.home().path().join("keys.toml"), &keys)?;
    let config = warden.setup.config();
    warden.reload(&config)?;
    wait_until("the page is gone", SOON, async || {
        ask(at, "GET", "/page/?fragment=1", &[with], "")
            .await
            .is_ok_and(|page| !page.text().contains("id=\"main\""))
    })
    .await?;
    let bearer = format!("Bearer {OPERATOR}");
    for target in ["/page/", "/page", "/page/sign-in"] {
        let passed = ask(at, "GET", target, &[("authorization", &bearer)], "").await?;
        assert_eq!(passed.status.as_u16(), 404, "{target}: {}", passed.text());
        assert!(!passed.text().contains("<html"), "{target}: {}", passed.text());
        assert_eq!(ask(at, "GET", target, &[with], "").await?.status.as_u16(), 401, "{target}");
    }
    Ok(())
}

#[tokio::test]
async fn in_a_browser_only_the_key_with_the_right_opens_it_and_who_loses_the_right_is_asked_again() -> Outcome
{
    let Some(browser) = Browser::here().await? else { return Ok(()) };
    let keys = |olga: bool| {
        format!(
            "[olga]\nkey = \"{OPERATOR}\"\noperator = {olga}\n[carl]\nkey = \"{CLIENT}\"\nmodels = [\"m\"]\n\
             [otto]\nkey = \"sk-otto-0123456789abcdef\"\noperator = true\n"
        )
    };
    let setup = Setup::new()?.top("server.keys = \"keys.toml\"\n").fake("m", &json!({}), "")?;
    let file = setup.home.path().join("keys.toml");
    write_keys(&file, &keys(true))?;
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    let url = format!("http://{}", warden.address());
    let mut walk = browser.rights(&url, "m", &["sk-guessed-0123456789", CLIENT, OPERATOR])?;
    let told = walk.says().await?;
    let (door, inside) = (&told["door"], &told["inside"]);
    assert_eq!((&door["title"], &door["violations"]), (&json!("Sign in"), &json!([])), "{told:#}");
    assert_eq!(door["font"], "0px", "its style is taken by its own policy");
    let refused = door["refused"].as_array().context("nothing was refused")?;
    assert_eq!(refused.len(), 2, "{told:#}");
    assert_eq!(
        (&inside["at"], &inside["violations"]),
        (&json!(format!("{url}/page/events")), &json!([])),
        "{told:#}"
    );
    let says = |what: &str, word: &str| inside[what].as_str().is_some_and(|text| text.contains(word));
    assert!(
        says("who", "Signed in with the key olga") && says("pinned", "pinned by page, key olga"),
        "{told:#}"
    );
    assert_eq!((&told["elsewhere"], &told["dialogs"]), (&json!([]), &json!([])));
    // A browser reports each page with such a status.
    let complaints = told["complaints"].as_array().context("no complaints")?;
    let is_known =
        |one: &Value| ["status of 401", "status of 403"].iter().any(|known| one.to_string().contains(known));
    assert!(complaints.iter().all(is_known), "{complaints:#?}");

    write_keys(&file, &keys(false))?;
    warden.kid.signal(rustix::process::Signal::HUP);
    let told = walk.asked("taken").await?;
    assert_eq!((&told["title"], &told["rows"]), (&json!("Sign in"), &json!(0)), "{told:#}");
    Ok(())
}
