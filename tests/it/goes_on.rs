//! Promise: if llama-server is killed during a streamed answer, the same stream continues, and the whole is
//! byte for byte the undisturbed answer.

mod anew;
mod differs;
mod stand_in;
mod trained;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{REPRODUCIBLE, model_lines};
use warden_rig::warden::{CHAT, Setup};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

const GOING_ON: &str =
    "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";

/// A busy machine may need this time.
const DEADLINE: Duration = Duration::from_secs(120);

/// Starts a llama-server that gives the same answer to the same request.
async fn started(preset: SamplePreset, slots: &str, more: &[&str]) -> Result<Warden, Trouble> {
    started_with(preset, slots, more, "").await
}

/// Like [`started`], with more keys of the model.
async fn started_with(
    preset: SamplePreset,
    slots: &str,
    more: &[&str],
    keys: &str,
) -> Result<Warden, Trouble> {
    let mut flags = vec!["-np", slots, "-c", "8192", "--cache-ram", "0"];
    flags.extend(REPRODUCIBLE);
    flags.extend(more);
    let lines = model_lines(preset, &flags).await? + GOING_ON + keys;
    let warden = Setup::new()?.top("log.children = false").model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

/// Events of a stream as its client sees them.
#[derive(Clone, Debug, Default, PartialEq)]
struct Heard {
    text: String,
    /// Different ids of events; another answer in the stream would add one.
    ids: usize,
    has_role: bool,
    /// Roles after the first text. Before it, each event about the prompt may have one.
    late_roles: usize,
    ends: Vec<String>,
    usage: Option<(u64, u64)>,
    done: bool,
    error: Option<String>,
    behind: usize,
    reasoning: String,
    calls: String,
    /// Number of ids of calls, which differ between answers.
    call_ids: usize,
}

impl Heard {
    fn of(events: &[String]) -> Self {
        let mut heard = Self::default();
        let mut ids = BTreeSet::new();
        for event in events {
            if event == "[DONE]" {
                heard.done = true;
                continue;
            }
            let event: Value = serde_json::from_str(event).unwrap_or_default();
            heard.behind += usize::from(heard.done);
            if let Some(error) = event["error"]["message"].as_str() {
                heard.error = Some(error.to_owned());
            }
            let choice = &event["choices"][0];
            heard.other_routes(&event, &mut ids);
            let call = &choice["delta"]["tool_calls"][0];
            heard.call_ids += usize::from(call["id"].is_string());
            for part in [&call["function"]["name"], &call["function"]["arguments"]] {
                heard.calls.push_str(part.as_str().unwrap_or_default());
            }
            heard.reasoning.push_str(choice["delta"]["reasoning_content"].as_str().unwrap_or_default());
            for text in [&choice["delta"]["content"], &choice["text"], &event["content"]] {
                heard.text.push_str(text.as_str().unwrap_or_default());
            }
            let has_role = choice["delta"]["role"].is_string();
            heard.has_role |= has_role;
            heard.late_roles += usize::from(has_role && !heard.text.is_empty());
            for end in [&choice["finish_reason"], &event["stop_type"]] {
                heard.ends.extend(end.as_str().map(str::to_owned));
            }
            let counted = |usage: &Value, prompt: &str, made: &str| {
                Some((usage[prompt].as_u64()?, usage[made].as_u64()?))
            };
            heard.usage = counted(&event["usage"], "prompt_tokens", "completion_tokens")
                .or_else(|| counted(&event, "tokens_evaluated", "tokens_predicted"))
                .or(heard.usage);
        }
        heard.ids = ids.len();
        heard
    }

    fn other_routes(&mut self, event: &Value, ids: &mut BTreeSet<String>) {
        let kind = event["type"].as_str().unwrap_or_default();
        let (delta, item) = (&event["delta"], &event["item"]);
        let of_response = &event["response"];
        if kind.is_empty() {
            ids.insert(event["id"].to_string());
            return;
        }
        for (of, id) in [("message", &event["message"]["id"]), ("response", &of_response["id"])] {
            ids.extend(id.as_str().map(|id| format!("{of} {id}")));
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.text += &text(&delta["text"]);
        self.reasoning += &text(&delta["thinking"]);
        self.calls += &text(&delta["partial_json"]);
        match kind {
            "content_block_start" => {
                self.calls += &text(&event["content_block"]["name"]);
                self.call_ids += usize::from(event["content_block"]["id"].is_string());
            }
            "response.output_item.added" => {
                self.calls += &text(&item["name"]);
                self.call_ids += usize::from(item["call_id"].is_string());
            }
            "response.output_text.delta" => self.text += &text(delta),
            "response.reasoning_text.delta" => self.reasoning += &text(delta),
            "response.function_call_arguments.delta" => self.calls += &text(delta),
            "message_delta" => self.ends.push(text(&delta["stop_reason"])),
            "response.completed" => {
                self.ends.push(text(&of_response["status"]));
                // The last event repeats the whole answer, under the ids that the client knows.
                for item in of_response["output"].as_array().into_iter().flatten() {
                    self.behind += usize::from(
                        item["content"][0]["text"] != self.text.as_str()
                            && item["content"][0]["text"] != self.reasoning.as_str()
                            && item["type"] != "function_call",
                    );
                }
            }
            _ => {}
        }
        let counted =
            |usage: &Value| Some((usage["input_tokens"].as_u64()?, usage["output_tokens"].as_u64()?));
        self.usage = counted(&of_response["usage"])
            .or_else(|| Some((0, event["usage"]["output_tokens"].as_u64()?)))
            .or(self.usage);
        self.done |= ["message_stop", "response.completed"].contains(&kind);
        if kind == "error" {
            self.error = event["message"].as_str().map(str::to_owned).or_else(|| self.error.take());
        }
    }
}

/// Sends a request; kills its server after this number of events.
async fn asked(warden: &Warden, path: &str, body: &Value, kill_at: Option<usize>) -> Result<Heard, Trouble> {
    let victim = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(path, body).await?;
    let mut events = Vec::new();
    loop {
        if kill_at == Some(events.len()) {
            victim[0].signal(Signal::KILL);
        }
        match flow.event().await? {
            Some(event) => events.push(event),
            None => return Ok(Heard::of(&events)),
        }
    }
}

fn bodies(tokens: u64) -> [(&'static str, Value); 7] {
    let messages =
        json!([{ "role": "system", "content": "be brief" }, { "role": "user", "content": "tell — 漢字" }]);
    let options = json!({ "include_usage": true });
    let common = json!({ "model": "m", "stream": true, "temperature": 0 });
    let with = |own: Value| {
        let mut body = common.clone();
        for (name, value) in own.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    [
        (CHAT, with(json!({ "messages": messages, "max_tokens": tokens, "stream_options": options }))),
        (
            CHAT,
            with(
                json!({ "messages": messages, "max_tokens": tokens, "repeat_penalty": 1.3, "timings_per_token": true }),
            ),
        ),
        ("/completion", with(json!({ "prompt": "once upon a time", "n_predict": tokens }))),
        (
            "/v1/completions",
            with(json!({ "prompt": "once upon a time", "max_tokens": tokens, "stream_options": options })),
        ),
        ("/v1/completions", with(json!({ "prompt": "and then", "max_tokens": tokens }))),
        // Events about the prompt have a token 0.
        (
            "/completion",
            with(json!({ "prompt": "once upon a time 漢字", "n_predict": tokens, "return_progress": true })),
        ),
        (CHAT, with(json!({ "messages": messages, "max_tokens": tokens, "return_progress": true }))),
    ]
}

/// Number of kills per request: `WARDEN_KILLS`.
fn kills() -> u64 {
    std::env::var("WARDEN_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(3)
}

#[tokio::test]
async fn killed_anywhere_in_it_an_answer_is_the_one_that_nobody_disturbed() -> Outcome {
    let tokens = 48;
    let warden = started(SamplePreset::Slow, "1", &[]).await?;
    let mut continued = 0;
    for (path, body) in bodies(tokens) {
        let wanted = asked(&warden, path, &body, None).await?;
        assert!(wanted.error.is_none() && !wanted.ends.is_empty(), "{path}: {wanted:?}");
        for kill in 0..kills() {
            // Positions are spread over the answer.
            let at = 1 + (kill + 1) * 29 % (tokens - 8);
            let heard = asked(&warden, path, &body, Some(usize::try_from(at).context("small")?)).await?;
            assert_eq!(heard, wanted, "{path}, killed at event {at}");
            continued += 1;
        }
    }
    let told = warden.metric("llama_warden_requests_continued_total{model=\"m\"}").await?;
    assert!(told.is_some_and(|told| told >= f64::from(continued)), "{told:?} of {continued}");
    Ok(())
}

/// Kills the server of a request at each of these events. Returns how many answers were whole, and how many
/// ended with an error that contains these words; fails on a mixture of two answers.
async fn disturbed(
    warden: &Warden,
    path: &str,
    body: &Value,
    at: impl Iterator<Item = usize>,
    why: &str,
) -> Result<(u64, u64), Trouble> {
    let wanted = asked(warden, path, body, None).await?;
    assert!(wanted.error.is_none() && !wanted.ends.is_empty(), "{path}: {wanted:?}");
    let (mut whole, mut ended) = (0, 0);
    for at in at {
        let heard = asked(warden, path, body, Some(at)).await?;
        match &heard.error {
            None => {
                assert_eq!(heard, wanted, "{path} {body}, killed at event {at}");
                whole += 1;
            }
            Some(error) => {
                assert!(error.contains(why), "{path} {body}, killed at event {at}: {error}");
                assert!(
                    wanted.text.starts_with(&heard.text) && heard.ends.is_empty(),
                    "{heard:?}, {wanted:?}"
                );
                ended += 1;
            }
        }
    }
    Ok((whole, ended))
}

#[tokio::test]
async fn text_that_is_held_back_for_stop_words_is_not_passed_over() -> Outcome {
    let warden = started(SamplePreset::Slow, "1", &[]).await?;
    let (mut whole, mut ended) = (0, 0);
    for (path, mut body) in bodies(24).into_iter().filter(|(_, body)| body["stream_options"].is_null()) {
        let undisturbed = asked(&warden, path, &body, None).await?.text;
        let words: Vec<&str> = undisturbed.split(' ').skip(1).collect();
        let [.., before_last, last] = words[..] else { panic!("{undisturbed}") };
        // The first stop word begins in the text but does not complete; the second is the end.
        body["stop"] = json!([format!(" {}QQQ", words[8]), format!(" {before_last} {last}")]);
        let why = "stop words may begin there";
        let (all, none) = disturbed(&warden, path, &body, 7..14, why).await?;
        (whole, ended) = (whole + all, ended + none);
        let (all, none) = disturbed(&warden, path, &body, 20..24, why).await?;
        (whole, ended) = (whole + all, ended + none);
    }
    // Some answers in llama-server's own dialect cannot be resumed from tokens, so the request is sent again.
    assert!(ended == 0 && whole > 20, "{whole} whole, {ended} ended");
    Ok(())
}

/// Renders earlier thoughts, and no thought on request, as the templates of thinking models do.
const THINKS: &str = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n\
    {%- if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif -%}\
    {{ m.content }}<|im_end|>\n{% endfor -%}\
    {%- if add_generation_prompt %}<|im_start|>assistant\n\
    {%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif -%}";

#[tokio::test]
async fn what_a_build_takes_out_of_an_answer_is_not_passed_over() -> Outcome {
    let home = tempfile::tempdir()?;
    let template = home.path().join("thinks.jinja");
    std::fs::write(&template, THINKS)?;
    let flags = ["--jinja", "--chat-template-file", template.to_str().context("a path")?];
    let warden = started(SamplePreset::Slow, "1", &flags).await?;
    let messages = json!([{ "role": "user", "content": "tell" }]);
    let mut body =
        json!({ "model": "m", "stream": true, "temperature": 0, "max_tokens": 24, "messages": messages });
    let why = "removes parts of the model's text";
    // The parser removes the blank at the model's beginning, so the tokens are unknown and the request is
    // sent again.
    let (whole, ended) = disturbed(&warden, CHAT, &body, (1..24).step_by(6), why).await?;
    assert_eq!((whole, ended), (4, 0));
    // A thought that the prompt has ended is handled alike; with a temperature, no probe can tell.
    body["temperature"] = json!(0.8);
    let mut flow = warden.http.stream(CHAT, &body).await?;
    let mut events = Vec::new();
    while let Some(event) = flow.event().await? {
        events.push(event);
        if events.len() == 6 {
            warden.until_ready(1).await?[0].signal(Signal::KILL);
        }
    }
    let heard = Heard::of(&events);
    let error = heard.error.context("it cannot go on")?;
    assert!(error.contains(why) || error.contains("may have reasoned"), "{error}");
    Ok(())
}

/// Duration and interval of the kills: from `WARDEN_SOAK_SECONDS`, or short.
fn soak() -> (Duration, Duration) {
    let told = std::env::var("WARDEN_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    match told {
        Some(seconds) => (Duration::from_secs(seconds), Duration::from_secs(10)),
        None => (Duration::from_secs(3), Duration::ZERO),
    }
}

/// Sends different requests one after the other until stopped; returns the number of whole answers.
async fn client(
    http: Http,
    number: usize,
    answered: &[AtomicU64],
    stop: &CancellationToken,
) -> Result<(), Trouble> {
    for turn in 0.. {
        if stop.is_cancelled() {
            break;
        }
        let words = format!("client {number}, turn {turn}");
        let body = json!({ "model": "m", "max_tokens": 40, "stream": number % 4 != 3,
            "messages": [{ "role": "user", "content": words }], "prompt": words });
        let path = [CHAT, "/completion", "/v1/completions", CHAT][number % 4];
        let mut body = body;
        body.as_object_mut().context("an object")?.remove(if path == CHAT { "prompt" } else { "messages" });
        if number % 4 == 3 {
            let answer = http.post(path, &body).await?;
            if !answer.status.is_success() {
                return Err(Trouble::new(format!("{path} {words}: {} {}", answer.status, answer.text())));
            }
        } else {
            let mut flow = http.stream(path, &body).await?;
            let mut events = Vec::new();
            while let Some(event) = flow.event().await? {
                events.push(event);
            }
            let heard = Heard::of(&events);
            if heard.error.is_some() || heard.ends.len() != 1 || heard.behind > 0 {
                return Err(Trouble::new(format!("{path} {words}: {heard:?}")));
            }
        }
        answered[number].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

#[tokio::test]
async fn killed_every_so_often_under_load_no_request_fails() -> Outcome {
    let warden = started(SamplePreset::Slow, "4", &[]).await?;
    let (length, pause) = soak();
    let answered: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let stop = CancellationToken::new();
    let clients = (0..answered.len()).map(|number| client(warden.http.clone(), number, &answered, &stop));
    let kills = async {
        let begun = Instant::now();
        let mut kills = 0;
        while begun.elapsed() < length {
            let before: Vec<u64> = answered.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            // Not two deaths during one request: another test checks that.
            wait_until("each client has had two answers since", DEADLINE, async || {
                answered.iter().zip(&before).all(|(now, before)| now.load(Ordering::Relaxed) >= before + 2)
            })
            .await?;
            tokio::time::sleep(pause).await;
            warden.until_ready(1).await?[0].signal(Signal::KILL);
            kills += 1;
        }
        stop.cancel();
        Ok::<_, Trouble>(kills)
    };
    let (_, kills) = tokio::try_join!(futures_util::future::try_join_all(clients), kills)?;
    let all: u64 = answered.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    let continued = warden.metric("llama_warden_requests_continued_total{model=\"m\"}").await?;
    println!("{all} requests, {kills} kills, {} went on, 0 requests failed", continued.unwrap_or_default());
    Ok(())
}
