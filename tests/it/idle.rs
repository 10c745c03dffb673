//! An unused model is unloaded after its idle time, and no request pays more for that than a load.

use std::time::Duration;

use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Outcome, wait_until};

#[tokio::test]
async fn what_nobody_asks_for_ends_and_comes_back_for_the_next_request() -> Outcome {
    let toml = "ttl = \"1s\"\n";
    let setup = Setup::new()?.fake("m", &json!({}), toml)?.fake("other", &json!({}), "")?;
    let warden = setup.start().await?;
    let both = warden.until_ready(2).await?;
    wait_until("the one with a time is unloaded, the other is not", SOON, async || {
        let [left] = warden.backends()[..] else { return false };
        both.contains(&left)
            && warden.status("m").await.is_ok_and(|status| status["state"] == "unloaded")
            && warden.status("other").await.is_ok_and(|status| status["state"] == "loaded")
    })
    .await?;
    let events = warden.cli(&["events"]).await?.stdout;
    assert!(events.contains("no request for 1 s"), "{events}");
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.answer()?.is_whole());
    assert_eq!(warden.backends().len(), 2);
    Ok(())
}

#[tokio::test]
async fn requests_that_come_just_as_it_is_unloaded_are_all_served() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "ttl = \"1s\"\n")?;
    let warden = setup.start().await?;
    for n in 0..8_u64 {
        let answer = warden.http.post(CHAT, &chat(&format!("r-{n}"), "m", "hi", 2, n % 2 == 0)).await?;
        assert!(answer.status.is_success() && answer.answer()?.is_whole(), "{n}: {}", answer.text());
        // Requests a few milliseconds before, at and after the unloading must all succeed.
        tokio::time::sleep(Duration::from_millis(985 + 4 * n)).await;
    }
    wait_until("it is unloaded", SOON, async || warden.backends().is_empty()).await
}

#[tokio::test]
async fn who_only_looks_at_a_model_neither_keeps_it_nor_brings_it_back() -> Outcome {
    const LOOKS: [&str; 4] = ["/metrics?model=m", "/slots?model=m", "/props?model=m", "/upstream/m/health"];
    let warden = Setup::new()?.fake("m", &json!({}), "ttl = \"1s\"\n")?.start().await?;
    warden.until_ready(1).await?;
    for target in LOOKS {
        assert!(warden.http.get(target).await?.status.is_success(), "{target}");
    }
    // A collector would come ten times within the idle time.
    wait_until("it is unloaded, however often somebody looks", SOON, async || {
        for target in LOOKS {
            drop(warden.http.get(target).await);
        }
        warden.state("m").await.is_ok_and(|state| state == "unloaded")
    })
    .await?;
    for target in LOOKS {
        let answer = warden.http.get(target).await?;
        assert_eq!(answer.status.as_u16(), 503, "{target}: {}", answer.text());
        assert_eq!(answer.json()?["error"]["code"], "model_not_loaded", "{target}");
    }
    assert!(warden.backends().is_empty(), "nothing was started");
    assert!(warden.http.post(CHAT, &chat("a", "m", "hi", 2, false)).await?.answer()?.is_whole());
    Ok(())
}

#[tokio::test]
async fn a_look_at_a_model_waits_for_a_replacement_that_others_wait_for() -> Outcome {
    let warden =
        Setup::new()?.fake("m", &json!({"load_ms": 300}), "replace = \"sequential\"\n")?.start().await?;
    warden.until_ready(1).await?;
    let looks = async {
        for _ in 0..40 {
            let answer = warden.http.get("/props?model=m").await?;
            assert!(answer.status.is_success(), "{}", answer.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Outcome::Ok(())
    };
    let (looked, restarted) = tokio::join!(looks, warden.cli(&["restart", "m"]));
    restarted?;
    looked
}
