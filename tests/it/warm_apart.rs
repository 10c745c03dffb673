//! Promise: carrying conversations over never mixes them. More conversations than slots live through
//! replacements, exits and restores, and each answer is the one to its own conversation.
//!
//! `WARDEN_APART_ROUNDS=1000 cargo it never_mixes` runs longer: a round takes a second or less.

use futures_util::future::join_all;
use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{REPRODUCIBLE, Undisturbed, llama_server, sample_model};
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::words::Key;
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden};

/// Turns after which a conversation ends, and a new one begins.
const TURNS: usize = 8;
/// Tokens of an answer.
const TOKENS: u64 = 8;

#[derive(Clone, Debug)]
struct Secret {
    /// Number of the client, and of its conversation.
    number: (usize, usize),
    messages: Vec<Value>,
}

impl Secret {
    fn new(number: (usize, usize)) -> Self {
        let (client, conversation) = number;
        let words = |at: usize| format!("w{}", (at * 7 + client * 11 + conversation * 29) % 97);
        let text: Vec<String> = (0..150).map(words).collect();
        let own = format!("client {client} conversation {conversation} {}", text.join(" "));
        Self { number, messages: vec![json!({ "role": "user", "content": own })] }
    }

    fn body(&self) -> Value {
        json!({ "model": "m", "messages": self.messages, "max_tokens": TOKENS, "temperature": 0 })
    }

    fn add_answer(&mut self, text: &str) {
        if self.messages.len() / 2 + 1 >= TURNS {
            *self = Self::new((self.number.0, self.number.1 + 1));
            return;
        }
        self.messages.push(json!({ "role": "assistant", "content": text }));
        self.messages.push(json!({ "role": "user", "content": "and then" }));
    }
}

/// Text of the answer, and cached tokens.
async fn answer(http: &Http, body: &Value) -> Result<(String, u64), Trouble> {
    let answer = http.post(CHAT, body).await?.json()?;
    let text = answer["choices"][0]["message"]["content"].as_str().context(format!("{answer}"))?;
    Ok((text.to_owned(), answer["timings"]["cache_n"].as_u64().unwrap_or(0)))
}

/// Number of rounds: from `WARDEN_APART_ROUNDS`, or short.
fn rounds(short: usize) -> usize {
    std::env::var("WARDEN_APART_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(short)
}

/// Replaces the process after every second round; llama-warden itself exits and starts every sixth round.
async fn disturb(mut warden: Warden, round: usize) -> Result<Warden, Trouble> {
    if round % 6 == 5 {
        assert_eq!(warden.terminate(SOON).await?, 0);
        warden = warden.again().await?;
        warden.until_ready(1).await?;
    } else if round % 2 == 1 {
        warden.restart("m", 1).await?;
    }
    Ok(warden)
}

async fn fake_never_mixes(kept: &str, replace: &str) -> Outcome {
    let lines = format!("on_death = \"continue\"\nwarm = \"disk\"\nreplace = \"{replace}\"\n");
    let mut warden = Setup::new()?.fake("m", &json!({ "kept": kept }), &lines)?.start().await?;
    warden.until_ready(1).await?;
    let mut all: Vec<Secret> = (0..9).map(|client| Secret::new((client, 0))).collect();
    let mut reused = 0;
    for round in 0..rounds(12) {
        // Another order in each round, four at a time: as many as slots.
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.rotate_left(round * 5 % all.len());
        for four in order.chunks(4) {
            let bodies: Vec<Value> = four.iter().map(|client| all[*client].body()).collect();
            let answers = join_all(bodies.iter().map(|body| answer(&warden.http, body))).await;
            for ((client, body), answer) in four.iter().zip(&bodies).zip(answers) {
                let (text, cached) = answer?;
                assert_eq!(text, Key::of(body).text(TOKENS), "round {round}, client {client}");
                reused += usize::from(cached > 150);
                all[*client].add_answer(&text);
            }
        }
        warden = disturb(warden, round).await?;
    }
    assert!(reused > 0, "no prompt was reused, so nothing was tested");
    Ok(())
}

#[tokio::test]
async fn carrying_over_in_sequence_never_mixes_conversations() -> Outcome {
    fake_never_mixes("dense", "sequential").await
}

#[tokio::test]
async fn carrying_over_by_overlap_never_mixes_conversations() -> Outcome {
    fake_never_mixes("unified", "overlap").await
}

#[tokio::test]
async fn a_real_llama_server_that_is_replaced_never_mixes_conversations() -> Outcome {
    let model = sample_model(SamplePreset::Chat)?;
    let server = llama_server().await?;
    let mut flags = vec!["-c", "4096"];
    flags.extend(REPRODUCIBLE);
    let right = [&flags[..], &["-np", "1", "--cache-ram", "0"]].concat();
    let right = Undisturbed::start_model(&server, &model, &right, &[]).await?;
    flags.extend(["-np", "2"]);
    let args: Vec<String> = flags.iter().map(|flag| format!("{flag:?}")).collect();
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\nargs = [{}]\npreload = true\nreplace = \"sequential\"\nwarm = \"disk\"\n\
         on_death = \"continue\"\n",
        server.display(),
        model.display(),
        args.join(", ")
    );
    let mut warden = Setup::new()?.top("log.children = false").model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    let mut all: Vec<Secret> = (0..5).map(|client| Secret::new((client, 0))).collect();
    let mut reused = 0;
    for round in 0..rounds(8) {
        let mut expected: Vec<String> = Vec::new();
        for secret in &all {
            let mut body = secret.body();
            body["cache_prompt"] = json!(false);
            expected.push(answer(&right.http, &body).await?.0);
        }
        for (client, text) in expected.iter().enumerate() {
            assert!(!expected[..client].contains(text), "round {round}: {expected:?} do not differ");
        }
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.rotate_left(round * 3 % all.len());
        for two in order.chunks(2) {
            let bodies: Vec<Value> = two.iter().map(|client| all[*client].body()).collect();
            let answers = join_all(bodies.iter().map(|body| answer(&warden.http, body))).await;
            for (client, answer) in two.iter().zip(answers) {
                let (text, cached) = answer?;
                assert_eq!(text, expected[*client], "round {round}, client {client} of {expected:?}");
                reused += usize::from(cached > 150);
                all[*client].add_answer(&text);
            }
        }
        warden = disturb(warden, round).await?;
    }
    assert!(reused > 0, "no prompt was reused, so nothing was tested");
    Ok(())
}
