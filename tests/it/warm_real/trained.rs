//! Replacements with trained, quantised models: dense SmolLM2 is carried over by slot files; Gemma 3 has
//! sliding windows and uses restored slots only with their checkpoints.

use std::path::Path;

use warden_rig::real::model_lines_of;
use warden_rig::real_weights::{gemma3, smollm2};

use super::*;

/// Two conversations, long enough to be carried over.
fn talks() -> Talks {
    let about = |(hero, place): (&str, &str)| {
        let story = format!(
            "{hero} lived in a small house in {place}. Every morning {hero} walked to the market and bought bread, \
             apples and cheese. At noon {hero} sat in the garden and read the letters of old friends. In the evening \
             {hero} played the piano for the neighbours, who brought soup and cake. "
        );
        format!("{}\nWhat is the story about? Answer in one sentence.", story.repeat(5))
    };
    Talks::begin_with([("Martha", "Norway"), ("Peter", "Portugal")].map(about).into_iter())
}

fn flags() -> Vec<&'static str> {
    let mut flags = vec!["-c", "4096", "-np", "2", "--cache-ram", "0"];
    flags.extend(REPRODUCIBLE);
    flags
}

/// Turns of a llama-server that is not replaced.
async fn undisturbed_turns(model: &Path, rounds: usize) -> Result<Vec<Vec<Turn>>, Trouble> {
    let undisturbed = Undisturbed::start_model(&llama_server().await?, model, &flags(), &[]).await?;
    let (mut talks, mut all) = (talks(), Vec::new());
    for _ in 0..rounds {
        all.push(talks.turns(&undisturbed.http).await?);
    }
    Ok(all)
}

async fn started(model: &Path, more: &str) -> Result<Warden, Trouble> {
    let lines =
        model_lines_of(model, &flags()).await? + "replace = \"sequential\"\non_death = \"continue\"\n" + more;
    // A busy machine needs longer to show that restored slots are used.
    let top = "log.children = false\ninternal.lifecycle.slot_shows_within = \"4s\"";
    let warden = Setup::new()?.top(top).model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

fn texts(turns: &[Turn]) -> Vec<&str> {
    turns.iter().map(|(text, ..)| text.as_str()).collect()
}

#[tokio::test]
async fn a_dense_model_with_trained_weights_is_carried_and_says_what_it_would_have_said() -> Outcome {
    let Some(model) = smollm2().await? else { return Ok(()) };
    let expected = undisturbed_turns(&model, 2).await?;
    let warden = started(&model, "").await?;
    let mut talks = talks();
    let first = talks.turns(&warden.http).await?;
    assert_eq!(texts(&first), texts(&expected[0]));
    warden.restart("m", 1).await?;
    let second = talks.turns(&warden.http).await?;
    assert_eq!(texts(&second), texts(&expected[1]));
    for ((_, cached, evaluated), (_, _, undisturbed)) in second.iter().zip(&expected[1]) {
        assert!(*cached > 256 && *evaluated <= undisturbed + 2, "{second:?} instead of {expected:?}");
    }
    Ok(())
}

#[tokio::test]
async fn sliding_windows_with_trained_weights_are_evaluated_again_and_their_slots_are_given_up() -> Outcome {
    let Some(model) = gemma3().await? else { return Ok(()) };
    let expected = undisturbed_turns(&model, 3).await?;
    let warden = started(&model, "").await?;
    let mut talks = talks();
    for (round, expected) in expected.iter().enumerate() {
        if round > 0 {
            warden.restart("m", 1).await?;
            let entries = json_lines(&warden.recycles())?;
            let entry = entries.last().context("no entry")?;
            let warm = &entry["warm"];
            assert_eq!((&entry["failed"], &warm["carried"]), (&Value::Null, &json!(0)), "{entry}");
            if round > 1 {
                // The first replacement has shown that restored slots are not used, so no later one waits for
                // them.
                assert_eq!((&warm["no_file"], &warm["bytes"]), (&json!("not_reused"), &json!(0)), "{warm}");
                wait_until("prompts are evaluated behind the gate", SOON * 4, async || {
                    warden.status("m").await.is_ok_and(|model| model["warm"]["evaluated"] == 2)
                })
                .await?;
            }
        }
        let turns = talks.turns(&warden.http).await?;
        assert_eq!(texts(&turns), texts(expected), "round {round}");
        if round > 1 {
            assert!(turns.iter().all(|(_, cached, _)| *cached > 256), "{turns:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn sliding_windows_with_trained_weights_and_saved_checkpoints_are_carried() -> Outcome {
    let Some(model) = gemma3().await? else { return Ok(()) };
    let expected = undisturbed_turns(&model, 3).await?;
    let warden = started(&model, "mitigations = [\"slot-checkpoints\"]\n").await?;
    let mut talks = talks();
    for (round, expected) in expected.iter().enumerate() {
        if round > 0 {
            warden.restart("m", 1).await?;
            let warm = last(&warden).await?;
            assert_eq!((&warm["carried"], &warm["evaluated"]), (&json!(2), &json!(0)), "{warm}");
        }
        let turns = talks.turns(&warden.http).await?;
        assert_eq!(texts(&turns), texts(expected), "round {round}");
        for ((_, cached, evaluated), (_, _, undisturbed)) in turns.iter().zip(expected) {
            assert!(round == 0 || *cached > 256, "{turns:?}");
            assert!(*evaluated <= undisturbed + 2, "{turns:?} instead of {expected:?}");
        }
    }
    Ok(())
}

/// After an exit and a start of llama-warden, conversations continue as without them.
async fn goes_on_after_an_exit(model: &Path, more: &str) -> Outcome {
    let expected = undisturbed_turns(model, 3).await?;
    let mut warden = started(model, &format!("warm = \"disk\"\n{more}")).await?;
    let mut talks = talks();
    for (round, expected) in expected.iter().enumerate() {
        if round > 0 {
            assert_eq!(warden.terminate(SOON * 2).await?, 0);
            warden = warden.again().await?;
            warden.until_ready(1).await?;
        }
        let turns = talks.turns(&warden.http).await?;
        assert_eq!(texts(&turns), texts(expected), "round {round}");
        for ((_, cached, evaluated), (_, _, undisturbed)) in turns.iter().zip(expected) {
            assert!(round == 0 || *cached > 256, "{turns:?}");
            assert!(*evaluated <= undisturbed + 2, "{turns:?} instead of {expected:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_dense_model_with_trained_weights_goes_on_after_an_exit() -> Outcome {
    match smollm2().await? {
        Some(model) => goes_on_after_an_exit(&model, "").await,
        None => Ok(()),
    }
}

#[tokio::test]
async fn sliding_windows_with_trained_weights_go_on_after_an_exit() -> Outcome {
    match gemma3().await? {
        Some(model) => goes_on_after_an_exit(&model, "mitigations = [\"slot-checkpoints\"]\n").await,
        None => Ok(()),
    }
}
