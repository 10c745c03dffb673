//! If llama-warden dies in any way, no child outlives it, and the next start is normal.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Outcome, Warden, wait_until};

const TWO_SECONDS: Duration = Duration::from_secs(2);

#[tokio::test]
async fn killed_it_leaves_no_child_two_seconds_later() -> Outcome {
    // The children ignore SIGTERM, so only the kernel can end them.
    let script = json!({"on_term": "ignore", "ms_per_token": 20});
    let mut warden =
        Setup::new()?.fake("a", &script, "replicas = 2")?.fake("b", &script, "")?.start().await?;
    let children = warden.until_ready(3).await?;
    let mut flow = warden.http.stream(CHAT, &chat("cut", "a", "go", 100_000, true)).await?;
    flow.event().await?;
    warden.kid.signal(Signal::KILL);
    assert_eq!(warden.kid.exit(SOON).await?, -9);
    Warden::until_gone(&children, TWO_SECONDS).await
}

#[tokio::test]
async fn killed_while_a_child_loads_it_leaves_none_either() -> Outcome {
    let script = json!({"load_ms": 600_000});
    let mut warden = Setup::new()?.fake("m", &script, "")?.start().await?;
    wait_until("the child runs", SOON, async || !warden.backends().is_empty()).await?;
    let children = warden.backends();
    warden.kid.signal(Signal::KILL);
    warden.kid.exit(SOON).await?;
    Warden::until_gone(&children, TWO_SECONDS).await
}

#[tokio::test]
async fn after_a_kill_the_next_one_in_the_same_directories_starts_and_serves() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    warden.kid.signal(Signal::KILL);
    warden.kid.exit(SOON).await?;
    let warden = warden.again().await?;
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}
