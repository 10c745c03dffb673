//! A real llama-server loads models with random weights and answers questions about pictures.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use warden_rig::real::{Undisturbed, llama_server};
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome, Trouble};

pub(super) fn picture(edge: u8, shade: u8) -> String {
    let row = usize::from(edge) * 3;
    let mut bitmap = b"BM\0\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0".to_vec();
    for number in [u32::from(edge), u32::from(edge), 0x0018_0001, 0, 0, 0, 0, 0, 0] {
        bitmap.extend(number.to_le_bytes());
    }
    for line in 0..edge {
        let pixels = (0..edge).flat_map(|column| [shade, line.wrapping_mul(shade), column.wrapping_mul(7)]);
        bitmap.extend(pixels);
        bitmap.resize(bitmap.len() + row.next_multiple_of(4) - row, 0);
    }
    format!("data:image/bmp;base64,{}", STANDARD.encode(bitmap))
}

/// Text and prompt tokens of an answer about a picture.
async fn look(server: &Undisturbed, picture: &str) -> Result<(String, u64), Trouble> {
    let body = json!({"temperature": 0, "max_tokens": 12, "cache_prompt": false, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": picture}}]}]});
    let answer = server.http.post("/v1/chat/completions", &body).await?;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json()?;
    let text = answer["choices"][0]["message"]["content"].as_str().context("no text")?.to_owned();
    assert_eq!(answer["usage"]["completion_tokens"], 12, "it never ends by itself: {answer}");
    Ok((text, answer["usage"]["prompt_tokens"].as_u64().context("no usage")?))
}

/// Returns true if a text consists of words of two or three syllables, as in the vocabulary.
fn is_words(text: &str) -> bool {
    let word =
        |word: &str| (4..=6).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_lowercase());
    text.split_whitespace().count() == 12 && text.split_whitespace().all(word)
}

async fn written(home: &Home, arguments: &[&str]) -> Result<String, Trouble> {
    let ran = home.warden([&["sample-model"], arguments].concat(), SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Ok(ran.stdout)
}

async fn sees(preset: &str) -> Outcome {
    let home = Home::new()?;
    let (model, mmproj) = (home.path().join("model.gguf"), home.path().join("mmproj.gguf"));
    home.sized_model(preset, &model, &[]).await?;
    home.sized_model("gemma4-vision", &mmproj, &[]).await?;
    let flags =
        ["--mmproj", &mmproj.to_string_lossy(), "-t", "1", "-np", "1", "-c", "2048", "--cache-ram", "0"];
    let server = Undisturbed::start_model(&llama_server().await?, &model, &flags, &[]).await?;
    let (text, tokens) = look(&server, &picture(48, 200)).await?;
    assert!(is_words(&text), "{text:?}");
    assert!(tokens > 70, "a picture is 70 tokens or more: {tokens}");
    assert_eq!(look(&server, &picture(48, 200)).await?.0, text, "the same picture, the same answer");
    assert_ne!(look(&server, &picture(48, 9)).await?.0, text, "another picture, another answer");
    Ok(())
}

#[tokio::test]
async fn a_gemma4_model_with_its_projector_answers_about_pictures_on_a_real_llama_server() -> Outcome {
    sees("gemma4").await
}

#[tokio::test]
async fn a_llama_model_with_the_same_projector_does_too() -> Outcome {
    sees("llama").await
}

#[tokio::test]
async fn weights_that_a_preset_does_not_have_are_refused_before_anything_is_written() -> Outcome {
    let home = Home::new()?;
    let ran =
        home.warden(["sample-model", "-o", "m", "--preset", "mmproj", "--weights", "q4_0"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("mmproj"), "{ran:?}");
    assert!(!home.path().join("m").exists());
    Ok(())
}

#[tokio::test]
async fn a_preset_is_written_as_ever() -> Outcome {
    let home = Home::new()?;
    let told = written(&home, &["-o", "m"]).await?;
    assert!(told.contains("preset chat"), "{told}");
    Ok(())
}
