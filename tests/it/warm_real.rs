//! Promise: after a planned replacement of a real llama-server, the next turn of each conversation evaluates
//! no more tokens than undisturbed, and gives the same bytes. A dense model uses slot files; sliding windows
//! use slot files with checkpoints, and without checkpoints need evaluation, as a projector does.

use std::path::PathBuf;

use serde_json::{Value, json};
use warden_rig::real::{REPRODUCIBLE, Undisturbed, llama_server};
use warden_rig::warden::{CHAT, SOON, Setup, json_lines};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

use crate::sample_models::picture;

mod trained;

const CONVERSATIONS: usize = 3;

/// Flags with a slot for each conversation, and one more.
fn flags<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut flags = vec!["-c", "8192"];
    flags.extend(more);
    flags.extend(REPRODUCIBLE);
    flags
}

/// Text of a turn, cached tokens and evaluated tokens.
type Turn = (String, u64, u64);

/// Turns of each conversation; the second half after a replacement.
#[derive(Debug)]
struct Talks {
    messages: Vec<Vec<Value>>,
}

impl Talks {
    fn new() -> Self {
        let text =
            |n: usize| (0..150).map(|k| format!("w{}", (k * 7 + n * 11) % 97)).collect::<Vec<_>>().join(" ");
        Self::begin_with((0..CONVERSATIONS).map(text))
    }

    fn begin_with(texts: impl Iterator<Item = String>) -> Self {
        let messages = texts.map(|text| vec![json!({ "role": "user", "content": text })]);
        Self { messages: messages.collect() }
    }

    async fn turns(&mut self, http: &Http) -> Result<Vec<Turn>, Trouble> {
        let mut said = Vec::new();
        for (n, messages) in self.messages.iter_mut().enumerate() {
            let streams = n % 2 == 1;
            let body = json!({ "model": "m", "messages": messages, "max_tokens": 20, "temperature": 0, "stream": streams });
            let (mut text, mut timings) = (String::new(), Value::Null);
            if streams {
                let mut flow = http.stream(CHAT, &body).await?;
                while let Some(event) = flow.event().await? {
                    let event: Value = serde_json::from_str(&event).unwrap_or_default();
                    text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
                    if event["timings"].is_object() {
                        timings = event["timings"].clone();
                    }
                }
            } else {
                let answer = http.post(CHAT, &body).await?.json()?;
                answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().clone_into(&mut text);
                timings = answer["timings"].clone();
            }
            messages.push(json!({ "role": "assistant", "content": text }));
            messages.push(json!({ "role": "user", "content": "and then" }));
            let counted = timings["cache_n"].as_u64().zip(timings["prompt_n"].as_u64());
            let (cached, evaluated) = counted.context(format!("no timings in {timings}"))?;
            said.push((text, cached, evaluated));
        }
        Ok(said)
    }
}

/// A sample model of this architecture, with a projector if `sees`.
async fn model(setup: &Setup, arch: &str, sees: bool) -> Result<(PathBuf, Option<String>), Trouble> {
    let path = setup.home.path().join(format!("{arch}.gguf"));
    let projector = setup.home.path().join("mmproj.gguf");
    setup.home.sized_model(arch, &path, &[]).await?;
    if !sees {
        return Ok((path, None));
    }
    setup.home.sized_model("gemma4-vision", &projector, &[]).await?;
    Ok((path, Some(projector.to_string_lossy().into_owned())))
}

async fn last(warden: &Warden) -> Result<Value, Trouble> {
    let entries = json_lines(&warden.recycles())?;
    let entry = entries.last().context("no entry")?;
    if !entry["failed"].is_null() || entry["warm"].is_null() {
        return Err(Trouble::new(format!("{entry}")));
    }
    wait_until("nothing is due behind the gate", SOON, async || {
        warden.status("m").await.is_ok_and(|model| model["warm"]["later"] == 0)
    })
    .await?;
    Ok(warden.status("m").await?["warm"].clone())
}

/// Way in which slots reach the next process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Files,
    /// By slot files with their checkpoints.
    Checkpoints,
    Evaluated,
    /// By slot files, on a server with a projector.
    Projector,
}

async fn replaced(arch: &str, replace: &str, more: &[&'static str], how: How) -> Outcome {
    let setup = Setup::new()?;
    let sees = how == How::Projector;
    let (model, projector) = model(&setup, arch, sees).await?;
    let mut flags = flags(more);
    if let Some(projector) = &projector {
        flags.extend(["--mmproj", projector]);
    }
    let server = llama_server().await?;
    let undisturbed = Undisturbed::start_model(&server, &model, &flags, &[]).await?;
    let mut talks = Talks::new();
    let mut expected = Vec::new();
    for _ in 0..3 {
        expected.push(talks.turns(&undisturbed.http).await?);
    }
    drop(undisturbed);

    let args: Vec<String> = flags.iter().map(|flag| format!("{flag:?}")).collect();
    let mut lines = format!(
        "binary = '{}'\nmodel = '{}'\nargs = [{}]\npreload = true\nreplace = \"{replace}\"\non_death = \"continue\"\n",
        server.display(),
        model.display(),
        args.join(", ")
    );
    if how == How::Checkpoints {
        lines.push_str("mitigations = [\"slot-checkpoints\"]\n");
    }
    let warden = setup
        .top("log.children = false\ninternal.lifecycle.slot_shows_within = \"4s\"")
        .model("m", &lines)
        .start()
        .await?;
    warden.until_ready(1).await?;
    let mut talks = Talks::new();
    for (round, expected) in expected.iter().enumerate() {
        if round > 0 {
            if sees {
                let question = "what is this ".repeat(120);
                let parts = json!([{"type": "text", "text": question},
                    {"type": "image_url", "image_url": {"url": picture(48, 200)}}]);
                let body = json!({ "model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}] });
                assert_eq!(warden.http.post(CHAT, &body).await?.status, 200);
            }
            warden.restart("m", 1).await?;
            let warm = last(&warden).await?;
            let (carried, evaluated) = match how {
                How::Files | How::Checkpoints => (CONVERSATIONS, 0),
                How::Evaluated | How::Projector => (0, CONVERSATIONS),
            };
            assert_eq!(warm["cold"]["media"], if sees { json!(1) } else { Value::Null }, "{warm}");
            assert_eq!(
                (&warm["carried"], &warm["evaluated"]),
                (&json!(carried), &json!(evaluated)),
                "{warm}"
            );
        }
        for (said, expected) in talks.turns(&warden.http).await?.iter().zip(expected) {
            assert_eq!(said.0, expected.0, "round {round}: the same text");
            // The boundary at an answer's last token may move by one.
            assert!(said.2 <= expected.2 + 2, "round {round}: {said:?} instead of {expected:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_dense_model_is_carried_in_sequence() -> Outcome {
    replaced("llama", "sequential", &["-np", "4"], How::Files).await
}

#[tokio::test]
async fn a_dense_model_is_carried_by_overlap() -> Outcome {
    replaced("llama", "overlap", &["-np", "4"], How::Files).await
}

#[tokio::test]
async fn a_dense_model_with_a_unified_cache_is_carried_in_sequence() -> Outcome {
    replaced("llama", "sequential", &[], How::Files).await
}

#[tokio::test]
async fn a_model_with_sliding_windows_is_evaluated_again_in_sequence() -> Outcome {
    replaced("gemma4", "sequential", &["-np", "4"], How::Evaluated).await
}

#[tokio::test]
async fn a_model_with_sliding_windows_is_evaluated_again_by_overlap() -> Outcome {
    replaced("gemma4", "overlap", &["-np", "4"], How::Evaluated).await
}

#[tokio::test]
async fn with_saved_checkpoints_sliding_windows_are_carried_in_sequence() -> Outcome {
    replaced("gemma4", "sequential", &["-np", "4"], How::Checkpoints).await
}

#[tokio::test]
async fn with_saved_checkpoints_sliding_windows_are_carried_by_overlap() -> Outcome {
    replaced("gemma4", "overlap", &["-np", "4"], How::Checkpoints).await
}

#[tokio::test]
async fn with_saved_checkpoints_a_dense_model_is_carried_as_before() -> Outcome {
    replaced("llama", "sequential", &["-np", "4"], How::Checkpoints).await
}

#[tokio::test]
async fn with_the_whole_window_kept_sliding_windows_are_carried_like_a_dense_model() -> Outcome {
    replaced("gemma4", "sequential", &["-np", "4", "--swa-full"], How::Files).await
}

#[tokio::test]
async fn a_model_that_sees_is_evaluated_again_in_sequence_and_its_pictures_are_named() -> Outcome {
    replaced("gemma4", "sequential", &["-np", "5"], How::Projector).await
}

#[tokio::test]
async fn a_model_that_sees_is_evaluated_again_by_overlap() -> Outcome {
    replaced("gemma4", "overlap", &["-np", "5"], How::Projector).await
}
