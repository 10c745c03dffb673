//! Remote models, served by another endpoint; here another llama-warden.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Identity, Outcome, Trouble, Warden, ports, wait_until};

/// Frequent probes and short retries.
const OFTEN: &str = "internal.remote.interval = \"200ms\"\ninternal.remote.retry_first = \"20ms\"";

/// Starts an endpoint with a model `far` on a fixed port, so that it can be restarted there.
pub(crate) async fn endpoint(top: &str, script: &Value) -> Result<(Warden, u16), Trouble> {
    let port = ports::free()?;
    let top = format!("server.port = {port}\n{top}");
    let there = Setup::new()?.top(&top).fake("far", script, "")?.start().await?;
    there.until_ready(1).await?;
    Ok((there, port))
}

/// A remote with further lines of configuration.
pub(crate) fn remote(url: &str, more: &str) -> String {
    format!("{OFTEN}\n[remotes.cloud]\nurl = \"{url}\"\nmodel = \"far\"\n{more}")
}

pub(crate) async fn until_state(here: &Warden, model: &str, state: &str) -> Outcome {
    wait_until(&format!("{model} is {state}"), SOON, async || {
        here.state(model).await.is_ok_and(|now| now == state)
    })
    .await
}

/// Writes a key named `here` to a file; the endpoint gets its hash.
async fn key(setup: &Setup, file: &Path) -> Result<String, Trouble> {
    let keys = setup.home.path().join("keys.toml");
    let ran =
        setup.home.warden(&["keys", "new", "here", "--file", &keys.display().to_string()], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let key = ran.stdout.trim().to_owned();
    std::fs::write(file, format!("{key}\n"))?;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))?;
    Ok(key)
}

#[tokio::test]
async fn a_model_of_an_endpoint_is_served_over_tls_with_its_key() -> Outcome {
    let identity = Identity::new()?;
    let (here, there) = (Setup::new()?, Setup::new()?);
    let secret = here.home.path().join("key");
    let key = key(&there, &secret).await?;
    let (cert, private) = identity.put(there.home.path())?;
    let top = format!(
        "server.tls_cert = '{}'\nserver.tls_key = '{}'\nserver.keys = '{}'",
        cert.display(),
        private.display(),
        there.home.path().join("keys.toml").display()
    );
    let there = there.top(&top).fake("far", &json!({}), "")?.start().await?;
    there.until_ready(1).await?;
    let url = format!("https://localhost:{}/v1", there.address().port());
    let mut here = here.top(&remote(&url, &format!("key_file = '{}'\naliases = [\"c\"]", secret.display())));
    here.home.env.insert("SSL_CERT_FILE".into(), cert.clone().into());
    let here = here.fake("near", &json!({}), "")?.start().await?;
    here.until_ready(1).await?;
    until_state(&here, "cloud", "loaded").await?;
    for (id, name, stream) in [("s", "cloud", true), ("w", "c", false)] {
        let answer = here.http.post(CHAT, &chat(id, name, "hi", 5, stream)).await?.answer()?;
        assert!(answer.is_whole(), "{answer:?}");
    }
    there.ledger().each_finished_once(["s", "w"])?;
    assert!(here.ledger().executions()?.is_empty(), "no process of ours was asked");
    let list = here.http.get("/v1/models").await?.json()?;
    let cloud = list["data"].as_array().and_then(|all| all.iter().find(|one| one["id"] == "cloud"));
    assert_eq!(cloud.context("it is listed")?["owned_by"], "remote");
    // The address is shown, but not the key.
    let shown = here.cli(&["status"]).await?.stdout + &here.cli(&["config", "show"]).await?.all();
    let metrics = here.admin().get("/metrics").await?.text();
    assert!(
        shown.contains(&url[..url.len() - 3])
            && !format!("{shown}{metrics}{}", here.kid.output()).contains(&key)
    );
    assert!(metrics.contains("model=\"cloud\""), "{metrics}");
    let refused = here.cli(&["drain", "cloud"]).await?;
    assert!(refused.code != 0 && refused.all().contains("has no process here"), "{refused:?}");
    assert_eq!(here.cli(&["restart", "cloud"]).await?.code, 0);
    Ok(())
}

#[tokio::test]
async fn an_endpoint_that_goes_is_passed_by_and_used_again_when_it_is_back() -> Outcome {
    let (there, port) = endpoint("", &json!({})).await?;
    let names = "[names.best]\nmodels = [\"cloud\", \"near\"]\n";
    let top = format!("{}\n{names}", remote(&format!("http://127.0.0.1:{port}"), ""));
    let here = Setup::new()?.top(&top).fake("near", &json!({}), "")?.start().await?;
    here.until_ready(1).await?;
    until_state(&here, "cloud", "loaded").await?;
    let ask = async |id: &str, name: &str| here.http.post(CHAT, &chat(id, name, "hi", 3, false)).await;
    assert!(ask("first", "best").await?.answer()?.is_whole());
    there.ledger().each_finished_once(["first"])?;

    let mut gone = there;
    gone.terminate(SOON).await?;
    until_state(&here, "cloud", "backoff").await?;
    let refused = ask("second", "cloud").await?;
    assert_eq!((refused.status.as_u16(), refused.header("x-warden-executed")), (503, "no"));
    assert!(refused.header("retry-after").parse::<u64>().is_ok(), "{:?}", refused.headers);
    assert!(refused.text().contains(&format!("the endpoint `http://127.0.0.1:{port}` does not serve")));
    assert!(ask("third", "best").await?.answer()?.is_whole());
    here.ledger().each_finished_once(["third"])?;
    let told = here.cli(&["events"]).await?.stdout;
    assert!(told.contains("does not serve") && told.contains("answers"), "{told}");

    let there = gone.again().await?;
    until_state(&here, "cloud", "loaded").await?;
    assert!(ask("fourth", "best").await?.answer()?.is_whole());
    wait_until("it went there", SOON, async || {
        there.ledger().executions().is_ok_and(|all| all.contains_key("fourth"))
    })
    .await
}

#[tokio::test]
async fn what_was_begun_at_an_endpoint_is_not_begun_again() -> Outcome {
    let (mut there, port) = endpoint("", &json!({ "ms_per_token": 20 })).await?;
    let top = remote(&format!("http://127.0.0.1:{port}/v1"), "");
    let here = Setup::new()?.top(&top).fake("near", &json!({}), "")?.start().await?;
    until_state(&here, "cloud", "loaded").await?;
    let mut flow = here.http.stream(CHAT, &chat("a", "cloud", "hi", 100, true)).await?;
    flow.event().await?.context("it has begun")?;
    let asked = chat("b", "cloud", "hi", 100, false);
    let unstreamed = here.http.post(CHAT, &asked);
    let dies = async {
        wait_until("the second one is there", SOON, async || {
            there.ledger().executions().is_ok_and(|all| all.contains_key("b"))
        })
        .await?;
        there.kid.signal(Signal::KILL);
        Ok(())
    };
    let (unstreamed, ()) = tokio::try_join!(unstreamed, dies)?;
    let (answer, _) = flow.rest().await;
    assert!(answer.error.is_some_and(|error| error.to_string().contains("in the middle of the answer")));
    assert_eq!((unstreamed.status.as_u16(), unstreamed.header("x-warden-executed")), (502, "maybe"));
    let begun = there.ledger().executions()?;
    assert_eq!((begun["a"].len(), begun["b"].len()), (1, 1));
    Ok(())
}

#[tokio::test]
async fn nothing_but_what_computes_an_answer_goes_to_an_endpoint() -> Outcome {
    let (there, port) = endpoint("", &json!({})).await?;
    let top = remote(&format!("http://127.0.0.1:{port}/v1"), "request.max_tokens = 2");
    let here = Setup::new()?.top(&top).fake("near", &json!({}), "")?.start().await?;
    until_state(&here, "cloud", "loaded").await?;
    let body = chat("a", "cloud", "hi", 9, false);
    for (target, body) in [
        ("/upstream/cloud/v1/chat/completions", Some(&body)),
        ("/upstream/cloud/../v1/chat/completions", Some(&body)),
        ("/v1/fine_tuning/jobs", Some(&body)),
        ("/lora-adapters?model=cloud", Some(&body)),
        ("/v1/files?model=cloud", None),
        ("/slots?model=cloud", None),
    ] {
        let answer = match body {
            Some(body) => here.http.post(target, body).await?,
            None => here.http.get(target).await?,
        };
        assert_eq!(answer.status.as_u16(), 404, "{target}: {}", answer.text());
        assert!(answer.text().contains("only routes that compute an answer"), "{target}: {}", answer.text());
    }
    assert!(there.ledger().executions()?.is_empty());
    // Limits apply to a remote request as well.
    let answer = here.http.post(CHAT, &body).await?.answer()?;
    assert_eq!(answer.text.split(' ').count(), 2, "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn who_ends_waits_for_what_runs_at_an_endpoint_and_for_nobody_else() -> Outcome {
    let (mut there, port) = endpoint("", &json!({ "ms_per_token": 20 })).await?;
    let top = remote(&format!("http://127.0.0.1:{port}"), "max_in_flight = 1");
    let mut here = Setup::new()?.top(&top).start().await?;
    until_state(&here, "cloud", "loaded").await?;
    let mut flow = here.http.stream(CHAT, &chat("a", "cloud", "hi", 40, true)).await?;
    flow.event().await?.context("it has begun")?;
    let asked = chat("b", "cloud", "hi", 2, false);
    let http = Http::Tcp(here.address());
    let queued = http.post(CHAT, &asked);
    let ends = async {
        wait_until("one waits", SOON, async || here.waiting("cloud").await.is_ok_and(|waiting| waiting == 1))
            .await?;
        here.kid.signal(Signal::TERM);
        flow.event().await?.context("it goes on")?;
        there.kid.signal(Signal::KILL);
        Ok(())
    };
    let (queued, ()) = tokio::try_join!(queued, ends)?;
    assert_eq!(queued.status.as_u16(), 503, "{}", queued.text());
    // Less than the whole deadline.
    assert_eq!(here.kid.exit(std::time::Duration::from_secs(15)).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_reload_moves_a_model_to_another_endpoint_and_a_running_answer_stays() -> Outcome {
    let slow = json!({ "ms_per_token": 30 });
    let ((one, first), (two, second)) = (endpoint("", &slow).await?, endpoint("", &slow).await?);
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    let mut here = Setup::new()?.top(&remote(&url(first), "")).start().await?;
    until_state(&here, "cloud", "loaded").await?;
    let mut flow = here.http.stream(CHAT, &chat("a", "cloud", "hi", 40, true)).await?;
    flow.event().await?.context("it has begun")?;
    let config = here.setup.config().replace(&url(first), &url(second));
    here.reload(&config)?;
    wait_until("it points elsewhere", SOON, async || {
        here.status("cloud")
            .await
            .is_ok_and(|now| now["remote"]["url"] == url(second) && now["state"] == "loaded")
    })
    .await?;
    assert!(here.http.post(CHAT, &chat("b", "cloud", "hi", 3, false)).await?.answer()?.is_whole());
    two.ledger().each_finished_once(["b"])?;
    let (rest, ended) = flow.rest().await;
    ended?;
    assert!(rest.error.is_none(), "{rest:?}");
    one.ledger().each_finished_once(["a"])?;
    // The remote is removed.
    here.reload(&config.replace("remotes.cloud", "remotes.other"))?;
    wait_until("the name is gone", SOON, async || {
        let asked = here.http.post(CHAT, &chat("c", "cloud", "hi", 3, false)).await;
        asked.is_ok_and(|answer| answer.status.as_u16() == 404)
    })
    .await
}

#[tokio::test]
async fn what_is_wrong_with_an_endpoint_is_told_before_the_start() -> Outcome {
    let setup = Setup::new()?;
    setup.home.file("empty", "\n")?;
    setup.home.sample_model("model.gguf").await?;
    for (lines, told) in [
        ("[remotes.x]\nurl = \"localhost:8080\"", "`remotes.x.url`"),
        ("[remotes.x]\nmodel = \"m\"", "url"),
        ("[remotes.x]\nurl = \"http://me:secret@host\"", "`remotes.x.url`: `http://***@host`"),
        ("[remotes.x]\nurl = \"http://host\"\nkey_file = \"no\"", "cannot be read"),
        ("[remotes.x]\nurl = \"http://host\"\nkey_file = \"empty\"", "has no key in it"),
        ("[remotes.x]\nurl = \"http://host\"\nmax_in_flight = 0", "`remotes.x.max_in_flight`"),
        ("[remotes.x]\nurl = \"http://host\"\ntimeout = \"0s\"", "`remotes.x.timeout`"),
        (
            "[remotes.x]\nurl = \"http://host\"\naliases = [\"m\"]\n[models.m]\nmodel = \"model.gguf\"",
            "unique",
        ),
        (
            "[remotes.x]\nurl = \"http://host\"\n[remotes.y]\nurl = \"http://host\"\n[names.x]\nmodels = [\"y\"]",
            "`names.x`",
        ),
    ] {
        let file = setup.home.file("warden.toml", lines)?;
        let ran = setup.home.warden(&["config", "check", &file.display().to_string()], SOON).await?;
        assert!(
            ran.code != 0 && ran.all().contains(told) && !ran.all().contains("secret"),
            "{lines}: {ran:?}"
        );
    }
    Ok(())
}
