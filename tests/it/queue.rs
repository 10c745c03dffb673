//! Requests that cannot be served at once wait in a queue, bounded in number and time.

use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};
use warden_rig::swarm::{requests, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Outcome, Trouble, wait_until};

const ONE_SLOT: &str = "args = [\"-np\", \"1\"]\n";

#[tokio::test]
async fn a_model_starts_with_its_first_request_and_that_waits_for_it() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"load_ms": 300}), "preload = false")?.start().await?;
    assert!(warden.backends().is_empty(), "nobody has asked yet");
    assert_eq!(warden.http.get("/health").await?.status.as_u16(), 200);
    let begun = Instant::now();
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success() && begun.elapsed() >= Duration::from_millis(300), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn more_requests_than_slots_are_served_in_the_order_of_their_coming() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), ONE_SLOT)?.start().await?;
    warden.until_ready(1).await?;
    let mut first = warden.http.stream(CHAT, &chat("0", "m", "go", 60, true)).await?;
    let queued = async {
        let mut all = tokio::task::JoinSet::new();
        for n in 1..6_usize {
            let (http, request) =
                (warden.http.clone(), chat(&n.to_string(), "m", "go", 4, n.is_multiple_of(2)));
            all.spawn(async move { http.post(CHAT, &request).await.map(|answer| answer.status.as_u16()) });
            wait_until("it waits", SOON, async || {
                warden.waiting("m").await.is_ok_and(|waiting| waiting == n)
            })
            .await?;
        }
        Ok::<_, Trouble>(all.join_all().await)
    };
    let (head, queued) = tokio::join!(first.rest(), queued);
    assert!(head.0.is_whole(), "{head:?}");
    for status in queued? {
        assert_eq!(status?, 200);
    }
    let order: Vec<String> = warden
        .ledger()
        .lines()?
        .into_iter()
        .filter(|line| line.event == "begun")
        .map(|line| line.id)
        .collect();
    assert_eq!(order, ["0", "1", "2", "3", "4", "5"]);
    Ok(())
}

#[tokio::test]
async fn beyond_the_bound_it_is_503_with_retry_after_and_an_openai_error() -> Outcome {
    let toml = format!("{ONE_SLOT}queue.depth = 2\n");
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), &toml)?.start().await?;
    warden.until_ready(1).await?;
    let running = warden.http.stream(CHAT, &chat("0", "m", "go", 100_000, true)).await?;
    let (one, two) = (chat("1", "m", "go", 2, false), chat("2", "m", "go", 2, true));
    let waiting = async { tokio::join!(warden.http.post(CHAT, &one), warden.http.post(CHAT, &two)) };
    let refused = async {
        wait_until("both wait", SOON, async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 2))
            .await?;
        let refused = warden.http.post(CHAT, &chat("3", "m", "go", 2, false)).await;
        drop(running);
        refused
    };
    let ((one, two), refused) = tokio::join!(waiting, refused);
    let refused = refused?;
    assert_eq!(refused.status.as_u16(), 503, "{}", refused.text());
    assert!(refused.header("retry-after").parse::<u64>().is_ok(), "{:?}", refused.headers);
    assert!(refused.json()?["error"]["message"].is_string(), "{}", refused.text());
    assert!(one?.status.is_success() && two?.answer()?.is_whole());
    assert!(!warden.ledger().executions()?.contains_key("3"));
    Ok(())
}

#[tokio::test]
async fn who_waits_longer_than_allowed_is_told_and_was_not_executed() -> Outcome {
    let toml = format!("{ONE_SLOT}queue.wait = \"300ms\"\n");
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), &toml)?.start().await?;
    // The start may take longer than a request may wait.
    warden.until_ready(1).await?;
    let running = warden.http.stream(CHAT, &chat("0", "m", "go", 100_000, true)).await?;
    assert!(running.status().is_success());
    let begun = Instant::now();
    let late = warden.http.post(CHAT, &chat("late", "m", "go", 2, false)).await?;
    assert_eq!(late.status.as_u16(), 503, "{}", late.text());
    assert!(begun.elapsed() >= Duration::from_millis(300) && begun.elapsed() < Duration::from_secs(20));
    assert_eq!(late.header("x-warden-executed"), "no");
    assert!(!warden.ledger().executions()?.contains_key("late"));
    Ok(())
}

#[tokio::test]
async fn a_waiting_client_that_leaves_frees_its_place_and_is_never_executed() -> Outcome {
    let toml = format!("{ONE_SLOT}queue.depth = 1\n");
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), &toml)?.start().await?;
    warden.until_ready(1).await?;
    let running = warden.http.stream(CHAT, &chat("0", "m", "go", 100_000, true)).await?;
    let gone = chat("gone", "m", "go", 2, false);
    let waits = async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 1);
    tokio::select! {
        _ = warden.http.post(CHAT, &gone) => return Err(Trouble::new("there is no slot for it")),
        waits = wait_until("it waits", SOON, waits) => waits?,
    }
    wait_until("its place is free", SOON, async || {
        warden.waiting("m").await.is_ok_and(|waiting| waiting == 0)
    })
    .await?;
    let next = chat("next", "m", "go", 2, false);
    let (next, ()) = tokio::join!(warden.http.post(CHAT, &next), async {
        let waits = async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 1);
        let _shown_below = wait_until("the next one waits", SOON, waits).await;
        drop(running);
    });
    assert!(next?.status.is_success());
    assert!(!warden.ledger().executions()?.contains_key("gone"));
    Ok(())
}

#[tokio::test]
async fn two_replicas_share_the_work() -> Outcome {
    let toml = format!("{ONE_SLOT}replicas = 2\n");
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), &toml)?.start().await?;
    warden.until_ready(2).await?;
    let answers = swarm(&warden.http, &requests("r", "m", 20, 6), 4).await;
    assert!(answers.values().all(Result::is_ok), "{answers:?}");
    assert_eq!(warden.ledger().generations()?, 2);
    Ok(())
}

#[tokio::test]
async fn routes_that_need_no_slot_are_answered_while_all_slots_are_busy() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), ONE_SLOT)?.start().await?;
    let _running = warden.http.stream(CHAT, &chat("0", "m", "go", 100_000, true)).await?;
    for target in ["/props?model=m", "/slots?model=m", "/v1/models", "/health"] {
        let answer = timeout(SOON, warden.http.get(target)).await??;
        assert!(answer.status.is_success(), "{target}: {}", answer.text());
    }
    Ok(())
}

#[tokio::test]
async fn an_upload_holds_no_slot_before_its_last_byte_nor_does_a_bare_head() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), ONE_SLOT)?.start().await?;
    warden.until_ready(1).await?;
    let mut upload = warden.http.raw().await?;
    upload.write(b"POST /completion HTTP/1.1\r\nHost: h\r\nContent-Length: 400000\r\n\r\n").await?;
    let mut bare = warden.http.raw().await?;
    bare.write(b"POST /completion?model=m HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n").await?;
    let begun = [br#"{"model":"m","n_predict":2,"prompt":""#.as_slice(), &vec![b'x'; 300_000]].concat();
    upload.write(&begun).await?;
    for n in 0..5 {
        let body = chat(&format!("r-{n}"), "m", "hi", 2, false);
        let asked = warden.http.post(CHAT, &body);
        assert!(timeout(SOON, asked).await??.answer()?.is_whole(), "{n}");
    }
    let rest = [vec![b'x'; 400_000 - begun.len() - 2].as_slice(), br#""}"#].concat();
    upload.write(&rest).await?;
    let answer = upload.read(SOON).await?;
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    Ok(())
}
