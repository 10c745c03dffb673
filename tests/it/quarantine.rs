//! A request that kills its server costs two deaths: it is retried alone once and then refused. All other
//! requests are served.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::storm::{Told, one};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

const HASTY: &str = "lifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";

fn poisonous() -> Value {
    json!({"ms_per_token": 2, "faults": [{"do": "crash", "body_has": "POISON"}]})
}

async fn known(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    let status = warden.status("m").await?;
    status["quarantine"]["requests"].as_array().cloned().context("a list of requests")
}

async fn crashes(warden: &Warden) -> Result<u64, Trouble> {
    warden.status("m").await?["crashes"].as_u64().context("a number of crashes")
}

/// Waits until the deaths are counted, which happens after a client's answer.
async fn until_crashed(warden: &Warden, least: u64) -> Result<u64, Trouble> {
    wait_until("its deaths are counted, and it serves", SOON, async || {
        crashes(warden).await.is_ok_and(|deaths| deaths >= least)
            && warden.state("m").await.is_ok_and(|state| state == "loaded")
    })
    .await?;
    crashes(warden).await
}

/// Sends the request again and again, as a retrying client does, until it is quarantined.
async fn until_refused(warden: &Warden, request: &Value) -> Result<(u32, Value, String), Trouble> {
    for sent in 1..=4 {
        let answer = warden.http.post(CHAT, request).await?;
        if answer.status.as_u16() == 422 {
            assert_eq!(answer.header("retry-after"), "", "{}", answer.text());
            return Ok((sent, answer.json()?, answer.header("x-warden-executed").to_owned()));
        }
        assert!(!answer.status.is_success(), "{}", answer.text());
    }
    Err(Trouble::new("never refused"))
}

#[tokio::test]
async fn two_poisonous_requests_are_refused_and_a_hundred_others_are_served() -> Outcome {
    let warden = Setup::new()?.fake("m", &poisonous(), HASTY)?.start().await?;
    warden.until_ready(1).await?;
    let http = warden.http.clone();
    let mut others = JoinSet::new();
    for client in 0..10_u64 {
        let http = http.clone();
        others.spawn(async move {
            let mut cut = 0;
            for n in 0..10_u64 {
                let request = chat(&format!("o{client}-{n}"), "m", "hi", 10, n.is_multiple_of(2));
                // A request in flight at a death is cut; its repetition must be served.
                let mut told = one(&http, &request, None).await?;
                for _ in 0..4 {
                    if matches!(told, Told::Whole(_)) {
                        break;
                    }
                    cut += 1;
                    told = one(&http, &request, None).await?;
                }
                if !matches!(told, Told::Whole(_)) {
                    return Err(Trouble::new(format!("o{client}-{n}: {told:?}")));
                }
            }
            Ok(cut)
        });
    }
    let (one, two) = (chat("p1", "m", "POISON 1", 9, true), chat("p2", "m", "POISON 2", 9, true));
    let (one_ended, two_ended) = tokio::join!(until_refused(&warden, &one), until_refused(&warden, &two));
    for ended in [one_ended?, two_ended?] {
        assert_eq!(ended.1["error"]["code"], "request_quarantined", "{ended:?}");
        assert_eq!(ended.1["error"]["type"], "invalid_request_error");
    }
    while let Some(ended) = others.join_next().await {
        ended??;
    }
    // At most two deaths each, and none for a known request.
    let deaths = until_crashed(&warden, 3).await?;
    assert!((3..=4).contains(&deaths), "{deaths}");
    for request in [&one, &two] {
        let (sent, _, executed) = until_refused(&warden, request).await?;
        assert_eq!((sent, executed.as_str()), (1, "no"));
    }
    assert_eq!((crashes(&warden).await?, warden.state("m").await?.as_str()), (deaths, "loaded"));
    wait_until("only the two are known", SOON, async || {
        known(&warden).await.is_ok_and(|all| all.len() == 2 && all.iter().all(|one| one["refused"] == true))
    })
    .await
    .context(format!("{:?}", known(&warden).await))?;
    warden
        .until_metrics(&[
            "llama_warden_quarantine_known{model=\"m\",kind=\"refused\"} 2",
            "llama_warden_quarantined_requests_total{model=\"m\"} 2",
        ])
        .await?;
    let events = warden.cli(&["events"]).await?;
    assert!(events.stdout.contains("quarantine release"), "{events:?}");
    Ok(())
}

#[tokio::test]
async fn an_operator_lists_and_releases_what_is_refused() -> Outcome {
    let warden = Setup::new()?.fake("m", &poisonous(), HASTY)?.start().await?;
    let poison = chat("p", "m", "POISON", 4, false);
    let (sent, body, executed) = until_refused(&warden, &poison).await?;
    // The retry ran alone, and may have been executed.
    assert_eq!((sent, executed.as_str()), (2, "maybe"));
    let print = body["error"]["details"]["fingerprint"].as_str().context("a fingerprint")?.to_owned();
    let status = warden.cli(&["status"]).await?;
    assert!(status.stdout.contains("1 request(s) refused"), "{status:?}");
    let list = warden.cli(&["quarantine", "list"]).await?;
    assert!(list.stdout.contains(&print) && list.stdout.contains("refused"), "{list:?}");
    assert!(!list.stdout.contains("POISON") && !body.to_string().contains("POISON"), "no text is told");
    let wrong = warden.cli(&["quarantine", "release", "nobody"]).await?;
    assert!(wrong.code != 0 && wrong.stderr.contains("nobody"), "{wrong:?}");
    // The fault is repaired.
    warden.script("m", &json!({"faults": []})).await?;
    let released = warden.cli(&["quarantine", "release", &print]).await?;
    assert!(released.stdout.contains("1 request(s) released"), "{released:?}");
    assert!(known(&warden).await?.is_empty());
    warden.restart("m", 1).await?;
    let answer = warden.http.post(CHAT, &poison).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn a_large_body_is_known_again_although_it_is_never_held() -> Outcome {
    let warden = Setup::new()?.fake("m", &poisonous(), HASTY)?.start().await?;
    let words = format!("POISON {}", "word ".repeat(400_000));
    let poison = chat("p", "m", &words, 4, true);
    let (sent, ..) = until_refused(&warden, &poison).await?;
    assert_eq!(sent, 2);
    let deaths = until_crashed(&warden, 2).await?;
    let (sent, _, executed) = until_refused(&warden, &poison).await?;
    assert_eq!((sent, executed.as_str(), crashes(&warden).await?), (1, "no", deaths));
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn who_was_in_flight_with_a_poisonous_request_is_served_when_it_comes_again() -> Outcome {
    let script = json!({"ms_per_token": 20, "faults": [{"do": "crash", "body_has": "POISON"}]});
    let warden = Setup::new()?.fake("m", &script, HASTY)?.start().await?;
    warden.until_ready(1).await?;
    let innocent = chat("innocent", "m", "hi", 40, true);
    let mut flow = warden.http.stream(CHAT, &innocent).await?;
    flow.event().await?;
    let poison = warden.http.post(CHAT, &chat("p", "m", "POISON", 4, false)).await?;
    assert_eq!(poison.status.as_u16(), 502, "{}", poison.text());
    let (cut, _) = flow.rest().await;
    assert!(!cut.is_whole());
    wait_until("both are suspects", SOON, async || {
        known(&warden).await.is_ok_and(|all| all.len() == 2 && all.iter().all(|one| one["refused"] == false))
    })
    .await?;
    // While the suspect runs alone, other requests wait and are then served.
    let other = chat("other", "m", "hi", 4, false);
    let (again, other) = tokio::join!(warden.http.post(CHAT, &innocent), warden.http.post(CHAT, &other));
    assert!(again?.answer()?.is_whole());
    assert!(other?.status.is_success());
    wait_until("one is left", SOON, async || known(&warden).await.is_ok_and(|all| all.len() == 1)).await?;
    assert_eq!(crashes(&warden).await?, 1);
    Ok(())
}

#[tokio::test]
async fn a_death_that_comes_from_outside_makes_no_suspects() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 20}), HASTY)?.start().await?;
    let first = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 1000, true)).await?;
    flow.event().await?;
    first[0].signal(Signal::KILL);
    let (cut, _) = flow.rest().await;
    assert!(!cut.is_whole());
    warden.until_ready(1).await?;
    let answer = warden.http.post(CHAT, &chat("b", "m", "hi", 4, true)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(known(&warden).await?, Vec::<Value>::new());
    Ok(())
}

#[tokio::test]
async fn a_client_that_never_waits_for_the_death_of_its_server_is_refused_all_the_same() -> Outcome {
    let script = json!({"faults": [{"do": "crash", "ms": 300, "body_has": "POISON"}]});
    let warden = Setup::new()?.fake("m", &script, HASTY)?.start().await?;
    warden.until_ready(1).await?;
    let poison = chat("p", "m", "POISON", 4, false);
    let leaves = async || {
        // The client leaves long before the answer.
        drop(tokio::time::timeout(Duration::from_millis(100), warden.http.post(CHAT, &poison)).await);
    };
    wait_until("it was in flight, whoever waited for it, then alone, and is refused", SOON, async || {
        leaves().await;
        known(&warden).await.is_ok_and(|all| all.iter().any(|one| one["refused"] == true))
    })
    .await?;
    until_crashed(&warden, 2).await?;
    let (sent, _, executed) = until_refused(&warden, &poison).await?;
    assert_eq!((sent, executed.as_str(), crashes(&warden).await?), (1, "no", 2));
    Ok(())
}
