//! Models of a chosen size: `sample-model --arch` writes them, and llama-server loads them and looks at pictures.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use warden_rig::real::{Undisturbed, llama_server};
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome, Trouble};

/// A picture of this many pixels each way, whose colours depend on `shade`.
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

/// The answer to a question about a picture: its text, and the tokens that the prompt had.
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

/// Whether all of it is words of two or three syllables, as the vocabulary has them.
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

/// A model of this architecture answers questions about pictures on a real llama-server.
async fn sees(arch: &str) -> Outcome {
    let home = Home::new()?;
    let told = written(&home, &["--arch", arch, "--vision", "-o", "model.gguf"]).await?;
    assert!(told.contains("mmproj-model.gguf"), "{told}");
    let (model, mmproj) = (home.path().join("model.gguf"), home.path().join("mmproj-model.gguf"));
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
async fn single_numbers_change_a_size_and_the_file_says_so() -> Outcome {
    let home = Home::new()?;
    let told = written(
        &home,
        &["--arch", "gemma4", "--layers", "7", "--width", "96", "--context", "4096", "-o", "m"],
    )
    .await?;
    assert!(told.contains("gemma4, 7 layers, 96 wide, 4096 tokens of context"), "{told}");
    let before = std::fs::read(home.path().join("m"))?;
    let other =
        ["--arch", "gemma4", "--layers", "7", "--width", "96", "--context", "4096", "--seed", "2", "-o", "m"];
    written(&home, &other).await?;
    let after = std::fs::read(home.path().join("m"))?;
    assert!(before != after && before.len() == after.len());
    Ok(())
}

#[tokio::test]
async fn numbers_that_make_no_model_are_refused_before_anything_is_written() -> Outcome {
    let home = Home::new()?;
    let wrong: [(&[&str], &str); 3] = [
        (&["--arch", "llama", "--width", "100"], "width cannot be 100"),
        (&["--layers", "3"], "--arch"),
        (&["--arch", "gemma4", "--preset", "slow"], "--preset"),
    ];
    for (arguments, named) in wrong {
        let ran = home.warden([&["sample-model", "-o", "m"], arguments].concat(), SOON).await?;
        assert!(ran.code == 2 && ran.stderr.contains(named), "{arguments:?}: {ran:?}");
    }
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
