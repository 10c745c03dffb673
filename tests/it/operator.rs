//! Status, logs, events and metrics are on the admin socket, and never on the public listener.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, wait_until};

#[tokio::test]
async fn status_is_a_table_for_people_and_json_for_programs() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let warden = setup.fake("lazy", &json!({}), "preload = false\n")?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    wait_until("m is loaded", SOON, async || warden.state("m").await.is_ok_and(|state| state == "loaded"))
        .await?;
    let table = warden.cli(&["status"]).await?;
    assert_eq!(table.code, 0, "{table:?}");
    for word in ["m", "lazy", "loaded", "unloaded"] {
        assert!(table.stdout.contains(word), "{word} is not in\n{}", table.stdout);
    }
    let json = warden.cli(&["status", "--json"]).await?;
    let status: Value = serde_json::from_str(&json.stdout)?;
    assert_eq!(status["instance"]["pid"], warden.kid.pid());
    assert_eq!(status["fleet"]["models"][0]["backends"][0]["pid"], backend.pid);
    Ok(())
}

#[tokio::test]
async fn admin_routes_never_appear_on_the_public_listener() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    for target in ["/status", "/events", "/models/m/logs"] {
        let public = warden.http.get(target).await?;
        assert!(!public.status.is_success(), "{target}: {}", public.text());
        assert!(warden.admin().get(target).await?.status.is_success(), "{target}");
    }
    for target in ["/models/m/restart", "/models/m/drain"] {
        let public = warden.http.post(target, &json!({})).await?;
        assert!(!public.status.is_success(), "{target}: {}", public.text());
    }
    assert_eq!(warden.backends(), before);
    Ok(())
}

#[tokio::test]
async fn metrics_count_requests_tokens_and_replacements() -> Outcome {
    let warden =
        Setup::new()?.top("admin.address = \"127.0.0.1:0\"").fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    for n in 0..5 {
        let answer =
            warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "one two three", 7, n % 2 == 0)).await?;
        assert!(answer.answer()?.is_whole());
    }
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    let sum = |text: &str, name: &str, with: &str| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(with));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    wait_until("all is counted", SOON, async || {
        let Ok(answer) = warden.admin().get("/metrics").await else { return false };
        let text = answer.text();
        sum(&text, "llama_warden_requests_total", "model=\"m\"") >= 5.0
            && sum(&text, "llama_warden_backend_restarts_total", "operator") >= 1.0
    })
    .await
}

#[tokio::test]
async fn work_is_counted_from_what_passes_through() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    for n in 0..6_u32 {
        let mut request = chat(&format!("r-{n}"), "m", "one two three", 7, n.is_multiple_of(2));
        if n == 0 {
            request["messages"][0]["content"] = json!([{"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]);
        }
        let answer = warden.http.post(CHAT, &request).await?;
        assert!(answer.answer()?.is_whole());
    }
    wait_until("all work is counted", SOON, async || {
        let work =
            warden.status("m").await.map(|status| status["backends"][0]["work"].clone()).unwrap_or_default();
        work["requests"] == 6 && work["output_tokens"] == 42 && work["images"] == 1
    })
    .await
}

#[tokio::test]
async fn events_tell_the_life_of_a_backend_and_can_be_followed() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let mut follow = warden
        .admin()
        .open(hyper::Request::get("/events?follow=1").body(http_body_util::Full::default())?)
        .await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    let mut seen = String::new();
    let enough = async {
        while !seen.contains("recycle_done") {
            let piece = follow.piece().await?.context("the events ended")?;
            seen.push_str(&String::from_utf8_lossy(&piece));
        }
        Ok::<_, warden_rig::Trouble>(())
    };
    tokio::time::timeout(Duration::from_secs(20), enough).await??;
    for kind in ["starting", "ready", "draining", "stopped", "recycle_began"] {
        assert!(seen.contains(&format!("\"kind\":\"{kind}\"")), "{kind} is not in\n{seen}");
    }
    let told = warden.cli(&["events"]).await?;
    assert!(told.code == 0 && told.stdout.lines().count() >= 5, "{told:?}");
    Ok(())
}

#[tokio::test]
async fn an_operator_is_told_when_a_model_is_unknown_or_does_not_start() -> Outcome {
    let toml = "preload = false\nlifecycle.backoff_first = \"10ms\"\n";
    let setup = Setup::new()?.top("internal.lifecycle.breaker_failures = 2");
    let warden = setup.fake("m", &json!({"fail": "corrupt_model"}), toml)?.start().await?;
    let unknown = warden.cli(&["restart", "nope"]).await?;
    assert!(
        unknown.code == 1 && unknown.stderr.contains("nope") && unknown.stderr.contains("`m`"),
        "{unknown:?}"
    );
    let failed = warden.cli(&["restart", "m"]).await?;
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.stderr.contains("invalid magic"), "the child's own words: {failed:?}");
    Ok(())
}

#[tokio::test]
async fn what_a_client_sets_in_one_replica_is_set_in_all_and_in_those_that_follow() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "replicas = 3\n")?.start().await?;
    let first = warden.until_ready(3).await?;
    let adapters = json!([{ "id": 0, "scale": 0.25 }]);
    let props = json!({ "media_path": "/pictures" });
    assert!(warden.http.post("/lora-adapters", &adapters).await?.status.is_success());
    assert!(warden.http.post("/props", &props).await?.status.is_success());
    let all_have = async |processes: &[ProcessId]| {
        wait_until("each process has both", SOON, async || {
            for process in processes {
                let Some(http) = process.http() else { return false };
                let get = async |target: &str| http.get(target).await.ok()?.json().ok();
                let (Some(lora), Some(shown)) = (get("/lora-adapters").await, get("/props").await) else {
                    return false;
                };
                if lora != adapters || shown["set"] != props {
                    return false;
                }
            }
            true
        })
        .await
    };
    all_have(&first).await?;
    // Kill one process, then all.
    first[1].signal(Signal::KILL);
    wait_until("it is gone", SOON, async || !first[1].is_alive()).await?;
    all_have(&warden.until_ready(3).await?).await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    let last = warden.until_ready(3).await?;
    assert!(last.iter().all(|process| !first.contains(process)), "{last:?}");
    // The process answers at once, because its gate is not open yet.
    for process in &last {
        let http = process.http().context("a fake was told where to listen")?;
        assert_eq!(http.get("/lora-adapters").await?.json()?, adapters);
    }
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(!events.contains("is not set"), "{events}");
    Ok(())
}
