//! A model that nobody asks for is unloaded after its time, and no request pays for that with more than a load.

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
    assert!(events.contains("nobody has asked for it for 1 s"), "{events}");
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
        // A few milliseconds before, at and after the moment: what is tested is that none of them matters.
        tokio::time::sleep(Duration::from_millis(985 + 4 * n)).await;
    }
    wait_until("it is unloaded", SOON, async || warden.backends().is_empty()).await
}
