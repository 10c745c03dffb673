//! Continues answers of fake-llama for deaths before the head, between events and after the last token, for
//! builds of all eras; during a drain or shutdown; and with clients that are slow or gone.

use warden_rig::ledger::End;
use warden_rig::warden::SOON;

use super::*;

const LOOKING: &str = "internal.lifecycle.look_interval = \"50ms\"";
const TOKENS: usize = 12;

/// Requests whose answers cannot be resumed from their tokens, each with a name.
fn requests(tokens: usize) -> [(&'static str, Value); 3] {
    let common = json!({ "model": "m", "stream": true, "temperature": 0, "user": "a" });
    let with = |own: Value| {
        let mut body = common.clone();
        for (name, value) in own.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    let messages = json!([{ "role": "user", "content": "tell me" }]);
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let usage = json!({ "include_usage": true });
    [
        (
            CHAT,
            with(
                json!({ "messages": messages, "tools": tools, "max_tokens": tokens, "stream_options": usage }),
            ),
        ),
        ("/v1/messages", with(json!({ "messages": messages, "max_tokens": tokens }))),
        ("/infill", with(json!({ "input_prefix": "tell", "input_suffix": "end", "n_predict": tokens }))),
    ]
}

async fn stand_in(script: &Value) -> Result<Warden, Trouble> {
    let warden = Setup::new()?.top(LOOKING).fake("m", script, GOING_ON)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

async fn whole(warden: &Warden, path: &str, body: &Value) -> Result<Heard, Trouble> {
    let mut flow = warden.http.stream(path, body).await?;
    let mut events = Vec::new();
    while let Some(event) = flow.event().await? {
        events.push(event);
    }
    Ok(Heard::of(&events))
}

#[tokio::test]
async fn in_both_eras_it_goes_on_wherever_the_stand_in_died() -> Outcome {
    let places = tempfile::tempdir()?;
    for era in ["slot", "first_token"] {
        let warden = stand_in(&json!({ "stream_head": era })).await?;
        let mut continued = 0.0;
        for (path, body) in requests(TOKENS) {
            let wanted = whole(&warden, path, &body).await?;
            assert!(wanted.error.is_none() && wanted.text.split(' ').count() == TOKENS, "{path}: {wanted:?}");
            for after in [0, 1, 5, TOKENS - 1, TOKENS] {
                // Each request meets one death.
                let once = places.path().join(format!("{era}{}{after}", path.replace('/', "-")));
                let fault = json!({ "do": "crash", "signal": 9, "after_tokens": after, "once": once });
                warden.script("m", &json!({ "faults": [fault] })).await?;
                let heard = whole(&warden, path, &body).await?;
                assert_eq!(heard, wanted, "{path}, {era}, died after {after}");
                continued += 1.0;
                warden.until_ready(1).await?;
            }
        }
        let told = warden.metric("llama_warden_requests_continued_total{model=\"m\"}").await?;
        assert_eq!(told, Some(continued), "{era}");
    }
    Ok(())
}

#[tokio::test]
async fn a_second_death_ends_it_and_nothing_is_asked_a_third_time() -> Outcome {
    // Each process dies; the second before or after its first new text.
    for later in [5, 9] {
        let warden = stand_in(&json!({ "ms_per_token": 1 })).await?;
        let home = tempfile::tempdir()?;
        for (path, body) in requests(TOKENS) {
            let once = |n: u64| home.path().join(format!("{}{n}", path.replace('/', "-")));
            let faults = json!([
                { "do": "crash", "signal": 9, "after_tokens": 5, "once": once(1) },
                { "do": "crash", "signal": 9, "after_tokens": later, "once": once(2) },
            ]);
            warden.script("m", &json!({ "faults": faults })).await?;
            let begun = warden.ledger().executions()?.get("a").map_or(0, Vec::len);
            let heard = whole(&warden, path, &body).await?;
            let error = heard.error.context("it died twice")?;
            assert!(error.contains("ended in the middle of the answer"), "{path}: {error}");
            assert!(
                heard.ends.iter().all(String::is_empty) && heard.text.split(' ').count() <= later,
                "{path}"
            );
            warden.until_ready(1).await?;
            assert_eq!(warden.ledger().executions()?["a"].len(), begun + 2, "{path}");
        }
    }
    Ok(())
}

/// A stream whose server has died, and whose second execution has sent nothing new yet.
async fn catching_up(
    warden: &Warden,
    body: &Value,
    once: &std::path::Path,
) -> Result<(warden_rig::http::Flow, Vec<String>), Trouble> {
    let fault = json!({ "do": "crash", "signal": 9, "after_tokens": 20, "once": once });
    warden.script("m", &json!({ "faults": [fault] })).await?;
    let mut flow = warden.http.stream(CHAT, body).await?;
    let mut events = Vec::new();
    while events.len() < 20 {
        events.push(flow.event().await?.context("an event")?);
    }
    wait_until("it is executed once more", SOON, async || {
        warden.ledger().executions().is_ok_and(|all| all.get("a").is_some_and(|ends| ends.len() == 2))
    })
    .await?;
    Ok((flow, events))
}

#[tokio::test]
async fn whatever_happens_while_it_is_said_again_its_client_gets_it_whole() -> Outcome {
    let home = tempfile::tempdir()?;
    for what in ["restart", "end", "read slowly"] {
        let mut warden = stand_in(&json!({ "ms_per_token": 10 })).await?;
        let (_, body) = requests(40).into_iter().next().context("a request")?;
        let (mut flow, mut events) = catching_up(&warden, &body, &home.path().join(what)).await?;
        match what {
            "restart" => warden.restart("m", 1).await?,
            "end" => warden.kid.signal(Signal::TERM),
            _ => tokio::time::sleep(Duration::from_millis(900)).await,
        }
        while let Some(event) = flow.event().await? {
            events.push(event);
        }
        let heard = Heard::of(&events);
        assert!(heard.error.is_none() && heard.done && heard.behind == 0, "{what}: {heard:?}");
        assert_eq!(
            (heard.text.split(' ').count(), &heard.ends[..]),
            (40, &["length".to_owned()][..]),
            "{what}"
        );
        assert_eq!(heard.usage.map(|(_, made)| made), Some(40), "{what}");
        if what == "end" {
            assert_eq!(warden.kid.exit(SOON).await?, 0);
        }
    }
    Ok(())
}

#[tokio::test]
async fn whoever_leaves_while_it_is_said_again_leaves_nothing_running() -> Outcome {
    let home = tempfile::tempdir()?;
    let warden = stand_in(&json!({ "ms_per_token": 20 })).await?;
    let (_, body) = requests(400).into_iter().next().context("a request")?;
    let (flow, _) = catching_up(&warden, &body, &home.path().join("left")).await?;
    drop(flow);
    wait_until("its slot is free", SOON, async || {
        warden.ledger().executions().is_ok_and(|all| all["a"] == [End::Open, End::Cancelled])
    })
    .await?;
    // Other requests get the slot.
    let (path, body) = requests(3).into_iter().nth(1).context("a request")?;
    assert!(whole(&warden, path, &body).await?.error.is_none());
    Ok(())
}
