//! Client libraries get the same answers through llama-warden as from llama-server. The same programs make
//! the same calls on the same model both ways; only fields in `tests/clients/ignored.json` may differ.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use warden_builder::sample_model::SamplePreset;
use warden_rig::clients::{Ignored, Packages, difference};
use warden_rig::real::{OnPort, REPRODUCIBLE, model_lines_of, sample_model};
use warden_rig::real_weights::{self, is_sentence};
use warden_rig::warden::Setup;
use warden_rig::{Outcome, Trouble, Warden};

/// Results of a program, by the names of cases.
type Told = BTreeMap<String, Value>;

/// With one slot, the cached part of a prompt depends only on the order of calls.
fn flags(more: &[&str]) -> Vec<String> {
    let fixed = ["-a", "m", "-np", "1", "-c", "4096", "--cache-ram", "0"];
    let all = fixed.iter().chain(&REPRODUCIBLE).chain(more);
    all.map(|word| (*word).to_owned()).collect()
}

/// Flags for a server with tools, images and embeddings.
fn able() -> Result<Vec<String>, Trouble> {
    let mmproj = sample_model(SamplePreset::Mmproj)?;
    Ok(flags(&["--mmproj", &mmproj.to_string_lossy(), "--embeddings", "--pooling", "mean"]))
}

async fn behind_us(model: &Path, flags: &[String]) -> Result<Warden, Trouble> {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let lines = model_lines_of(model, &flags).await?;
    let warden = Setup::new()?.model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

/// Runs the program directly and through llama-warden, and compares the results. Each of `kinds` is a prefix
/// of case names, of which some must succeed: two equal failures would prove little.
async fn same_through_us(program: &str, model: &Path, flags: &[String], kinds: &[&str]) -> Outcome {
    Box::pin(same_cases_through_us(program, &[], model, flags, kinds)).await
}

/// Like [`same_through_us`], for the cases whose names begin with one of `only`; without any, for all.
async fn same_cases_through_us(
    program: &str,
    only: &[&str],
    model: &Path,
    flags: &[String],
    kinds: &[&str],
) -> Outcome {
    let Some(packages) = Packages::installed().await? else { return Ok(()) };
    let (direct, through) = tokio::join!(OnPort::start(model, flags), behind_us(model, flags));
    let (direct, through) = (direct?, through?);
    let url = through.url();
    let (mut here, mut there) = (vec![direct.url.as_str()], vec![url.as_str()]);
    here.extend(only);
    there.extend(only);
    let (direct, through) = tokio::join!(packages.run(program, &here), packages.run(program, &there));
    compare(program, direct?, through?, kinds)
}

fn compare(program: &str, mut direct: Told, mut through: Told, kinds: &[&str]) -> Outcome {
    let ignored = Ignored::read()?;
    for kind in kinds {
        let cases: Vec<_> = direct.iter().filter(|(name, _)| name.starts_with(kind)).collect();
        let failed = cases.iter().find(|(_, got)| got.get("raised").is_some());
        if let Some((name, got)) = failed {
            return Err(Trouble::new(format!("{program}: {name:?} is no success even directly: {got}")));
        }
        if cases.is_empty() {
            return Err(Trouble::new(format!("{program}: no case {kind:?}")));
        }
    }
    let mut wrong = Vec::new();
    if let Some(found) = difference("cases", &names(&direct), &names(&through)) {
        wrong.push(found);
    }
    for (name, one) in &mut direct {
        let Some(two) = through.get_mut(name) else { continue };
        ignored.strip(one);
        ignored.strip(two);
        wrong.extend(difference(name, one, two));
    }
    if wrong.is_empty() { Ok(()) } else { Err(Trouble::new(format!("{program}:\n{}", wrong.join("\n")))) }
}

fn names(told: &Told) -> Value {
    told.keys().map(String::as_str).collect()
}

#[tokio::test]
async fn the_openai_package_for_python_gets_the_same_through_us() -> Outcome {
    let kinds = ["chat", "tools", "an image", "completions", "embeddings", "responses", "models", "a tool"];
    Box::pin(same_through_us("openai_package.py", &sample_model(SamplePreset::Tools)?, &able()?, &kinds))
        .await
}

#[tokio::test]
async fn the_anthropic_package_for_python_gets_the_same_through_us() -> Outcome {
    let kinds = ["messages", "tools", "a system", "an image", "count_tokens"];
    Box::pin(same_through_us("anthropic_package.py", &sample_model(SamplePreset::Tools)?, &able()?, &kinds))
        .await
}

#[tokio::test]
async fn the_openai_package_for_node_gets_the_same_through_us() -> Outcome {
    let kinds = ["chat", "tools", "completions", "embeddings", "responses", "left", "and the next"];
    Box::pin(same_through_us("openai_package.mjs", &sample_model(SamplePreset::Tools)?, &able()?, &kinds))
        .await
}

#[tokio::test]
async fn curl_gets_the_same_through_us() -> Outcome {
    Box::pin(same_through_us(
        "with_curl.py",
        &sample_model(SamplePreset::Tools)?,
        &able()?,
        &["HTTP/", "Expect", "a body"],
    ))
    .await
}

#[tokio::test]
async fn what_a_server_without_images_and_embeddings_refuses_is_refused_the_same_through_us() -> Outcome {
    Box::pin(same_through_us(
        "with_curl.py",
        &sample_model(SamplePreset::Chat)?,
        &flags(&[]),
        &["HTTP/", "error"],
    ))
    .await
}

#[tokio::test]
async fn tool_calls_of_a_model_with_trained_weights_are_the_same_through_us() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let kinds = ["tools", "a tool", "responses, tools"];
    Box::pin(same_cases_through_us("openai_package.py", &kinds, &model, &flags(&[]), &kinds)).await
}

#[tokio::test]
async fn of_a_model_with_trained_weights_clients_read_sentences_and_why_they_ended() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let Some(packages) = Packages::installed().await? else { return Ok(()) };
    let flags = ["-np", "1", "-c", "2048", "-t", "1", "--cache-ram", "0"];
    let lines = model_lines_of(&model, &flags).await?;
    let warden = Setup::new()?.model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    let mut told = packages.run("sentences.py", &[&warden.url()]).await?;
    told.extend(packages.run("sentences.mjs", &[&warden.url()]).await?);
    let mut sentences = 0;
    for (name, answer) in &told {
        let (text, end) = (answer["text"].as_str().unwrap_or_default(), answer["end"].as_str());
        if name.ends_with("cut") {
            assert!(!text.is_empty() && !is_sentence(text), "{name}: {answer}");
            assert!(matches!(end, Some("length" | "max_tokens")), "{name}: {answer}");
        } else {
            assert!(is_sentence(text) && text.contains('7'), "{name}: {answer}");
            assert!(matches!(end, Some("stop" | "end_turn" | "completed")), "{name}: {answer}");
            let pieces = answer["pieces"].as_u64();
            assert!(pieces.is_none_or(|pieces| pieces >= 4), "a stream comes in pieces: {name}: {answer}");
            sentences += 1;
        }
    }
    assert_eq!((sentences, told.len()), (9, 11), "{told:?}");
    Ok(())
}
