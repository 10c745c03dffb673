//! The patch sets leave a real llama-server unchanged until a variable is set, and then do what they promise.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_builder::sample_model::SamplePreset;
use warden_rig::real::{
    REPRODUCIBLE, SERVER_VARIABLE, Undisturbed, llama_server, llama_server_plain, model_lines, sample_model,
};
use warden_rig::swarm::{requests, same, swarm};
use warden_rig::wait::wait_for;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, binaries, wait_until};

const CANCEL: &str = "LLAMA_WARDEN_CANCEL_NONSTREAM";
/// Line that a process prints at its start if the fix is on.
const ACTIVE: &str = "llama-warden: fix cancel-nonstream active";
/// Route that completes text without a template.
const COMPLETION: &str = "/completion";

/// Fields that differ from run to run.
const VOLATILE: [&str; 3] = ["id", "created", "timings"];

/// Two slots, each with the whole context of the slow model, and reproducible output.
fn flags() -> Vec<&'static str> {
    let mut flags = vec!["-np", "2", "-c", "16384", "--cache-ram", "0"];
    flags.extend(REPRODUCIBLE);
    flags
}

fn settled(mut value: Value) -> Value {
    if let Some(object) = value.as_object_mut() {
        object.retain(|key, _| !VOLATILE.contains(&key.as_str()));
    }
    value
}

/// Chat and completion, streamed and not, greedy and sampled; with token probabilities, which differ before
/// texts do.
fn questions() -> Vec<(&'static str, Value)> {
    let mut all = Vec::new();
    for words in ["hello", "tell me a story", "w1 w2 w3 w4 w5 w6 w7 w8", "Ünïcödé — 漢字", "{\"a\": [1, 2]}"]
    {
        for stream in [false, true] {
            for (temperature, seed) in [(0.0, 7), (0.9, 7), (0.9, 8)] {
                let mut body = chat("-", "m", words, 40, stream);
                body["temperature"] = json!(temperature);
                body["seed"] = json!(seed);
                body["logprobs"] = json!(true);
                body["top_logprobs"] = json!(3);
                all.push((CHAT, body));
                let body = json!({
                    "prompt": words, "stream": stream, "n_predict": 40, "temperature": temperature, "seed": seed,
                    "n_probs": 3, "return_tokens": true,
                });
                all.push((COMPLETION, body));
            }
        }
    }
    all
}

/// Returns one value per event of a stream, or the whole answer.
async fn asked(http: &Http, (route, body): &(&str, Value)) -> Result<Vec<Value>, Trouble> {
    let mut flow = http.stream(route, body).await?;
    assert_eq!(flow.status(), 200, "{route} {body}");
    if body["stream"] == false {
        return Ok(vec![settled(flow.whole().await?.json()?)]);
    }
    let mut all = Vec::new();
    while let Some(event) = flow.event().await? {
        all.push(if event == "[DONE]" { json!(event) } else { settled(serde_json::from_str(&event)?) });
    }
    Ok(all)
}

#[tokio::test]
async fn with_no_variable_a_patched_and_a_plain_llama_server_answer_byte_for_byte_the_same() -> Outcome {
    let (patched, plain) = (llama_server().await?, llama_server_plain().await?);
    assert_ne!(std::fs::read(&patched)?, std::fs::read(&plain)?, "they are two programs");
    let questions = questions();
    let many = requests("r", "m", 24, 24);
    let mut answers = Vec::new();
    for server in [&patched, &plain] {
        let running = Undisturbed::start_server(server, SamplePreset::Chat, &flags(), &[]).await?;
        let mut one_by_one = Vec::new();
        for question in &questions {
            one_by_one.push(asked(&running.http, question).await?);
        }
        // Two requests run and two wait, so results also wake the threads of other requests.
        answers.push((one_by_one, swarm(&running.http, &many, 4).await));
    }
    let [(patched, patched_many), (plain, plain_many)] = answers.as_slice() else {
        return Err(Trouble::new("two runs"));
    };
    for ((question, patched), plain) in questions.iter().zip(patched).zip(plain) {
        assert_eq!(patched, plain, "{question:?}");
    }
    // Each question must have a different answer, or the comparison would prove nothing.
    for (n, answer) in plain.iter().enumerate() {
        let tokens = answer.iter().any(|part| part.to_string().contains("prob"));
        assert!(tokens && !plain[..n].contains(answer), "{:?}: {answer:?}", questions[n]);
    }
    same(plain_many, patched_many)
}

/// llama-warden's lines in the output of a llama-server until it is ready.
async fn own_lines(server: &Path, variables: &[(&str, &str)]) -> Result<Vec<String>, Trouble> {
    let running = Undisturbed::start_server(server, SamplePreset::Chat, &flags(), variables).await?;
    let output = running.kid.output();
    assert!(!output.is_empty(), "llama-server says something of its own");
    Ok(output.lines().filter(|line| line.starts_with("llama-warden:")).map(str::to_owned).collect())
}

#[tokio::test]
async fn a_patched_llama_server_says_one_line_per_active_fix_and_none_when_none_is() -> Outcome {
    let patched = llama_server().await?;
    for off in [&[][..], &[(CANCEL, "")], &[(CANCEL, "0")]] {
        assert_eq!(own_lines(&patched, off).await?, Vec::<String>::new(), "{off:?}");
    }
    assert_eq!(own_lines(&patched, &[(CANCEL, "1")]).await?, [ACTIVE]);
    let lines = own_lines(&patched, &[(CANCEL, "perhaps")]).await?;
    let [line] = lines.as_slice() else { return Err(Trouble::new(format!("one warning: {lines:?}"))) };
    assert!(line.contains(CANCEL) && line.contains("perhaps") && line.contains("ignored"), "{line}");
    let plain = llama_server_plain().await?;
    assert_eq!(own_lines(&plain, &[(CANCEL, "1")]).await?, Vec::<String>::new(), "it is no patch of ours");
    Ok(())
}

/// Tokens of more than a minute's work; both slots have room for them.
const TOKENS: u64 = 8000;

fn work(slot: u64, stream: bool) -> Value {
    let mut body = chat("-", "m", "go on", TOKENS, stream);
    body["id_slot"] = json!(slot);
    body
}

/// A stream in slot 0 whose client reads on, and a client of slot 1 that requested a whole answer and left.
struct Left {
    direct: Http,
    progress: Arc<AtomicU64>,
    /// Tokens per second of the stream while both slots work.
    rate: f64,
    at: Instant,
    /// Tokens decoded in slot 1 when the client left, or a little before.
    decoded: u64,
    _reader: JoinSet<()>,
}

/// Reads from `/slots` if a slot works, and its number of decoded tokens.
async fn slot(direct: &Http, number: usize) -> Option<(bool, u64)> {
    let slots = direct.get("/slots").await.ok()?.json().ok()?;
    let slot = &slots[number];
    let decoded = slot["next_token"][0]["n_decoded"].as_u64().or(slot["next_token"]["n_decoded"].as_u64());
    Some((slot["is_processing"].as_bool()?, decoded.unwrap_or(0)))
}

impl Left {
    /// Sends both requests to `through`, waits until both run, and leaves.
    async fn set_up(through: &Http, direct: &Http) -> Result<Self, Trouble> {
        let progress = Arc::new(AtomicU64::new(0));
        let mut flow = through.stream(CHAT, &work(0, true)).await?;
        let mut reader = JoinSet::new();
        let counter = Arc::clone(&progress);
        reader.spawn(async move {
            while let Ok(Some(_)) = flow.event().await {
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut client = JoinSet::new();
        let own = through.clone();
        client.spawn(async move { own.post(CHAT, &work(1, false)).await.map(|whole| whole.text()) });
        wait_until("slot 1 decodes", SOON, async || matches!(slot(direct, 1).await, Some((true, 1..))))
            .await?;
        let mut left = Self {
            direct: direct.clone(),
            progress,
            rate: 0.0,
            at: Instant::now(),
            decoded: 0,
            _reader: reader,
        };
        let (begun, first) = (Instant::now(), left.streamed());
        left.until_streamed(first + 100, SOON).await?;
        #[expect(clippy::cast_precision_loss, reason = "a hundred")]
        let tokens = (left.streamed() - first) as f64;
        left.rate = tokens / begun.elapsed().as_secs_f64();
        left.decoded = slot(direct, 1).await.context("no slots")?.1;
        if let Some(answered) = client.try_join_next() {
            return Err(Trouble::new(format!("slot 1 has ended before its client left: {answered:?}")));
        }
        client.shutdown().await;
        left.at = Instant::now();
        Ok(left)
    }

    fn streamed(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    async fn until_streamed(&self, tokens: u64, deadline: Duration) -> Outcome {
        let what = format!("the stream has {tokens} tokens");
        wait_until(&what, deadline, async || self.streamed() >= tokens).await
    }

    /// Time of the rest of slot 1 if it is not stopped.
    fn rest(&self) -> Duration {
        #[expect(clippy::cast_precision_loss, reason = "thousands")]
        let tokens = TOKENS.saturating_sub(self.decoded) as f64;
        Duration::from_secs_f64(tokens / self.rate)
    }

    /// Waits until slot 1 is free while slot 0 continues; returns the time.
    async fn until_free(&self) -> Result<Duration, Trouble> {
        // A cut generation takes some 1 s, a whole one more than a minute.
        let deadline = self.rest() / 4;
        let what = format!("slot 1 is free (its rest takes {:?})", self.rest());
        let took = wait_for(&what, deadline, async || match slot(&self.direct, 1).await {
            Some((false, _)) => Some(self.at.elapsed()),
            _ => None,
        })
        .await?;
        let streamed = self.streamed();
        assert!(matches!(slot(&self.direct, 0).await, Some((true, _))), "slot 0 still works");
        self.until_streamed(streamed + 20, SOON).await?;
        Ok(took)
    }
}

async fn on_its_own(variables: &[(&str, &str)]) -> Result<(Undisturbed, Left), Trouble> {
    let server = llama_server().await?;
    let running = Undisturbed::start_server(&server, SamplePreset::Slow, &flags(), variables).await?;
    let left = Left::set_up(&running.http, &running.http).await?;
    Ok((running, left))
}

#[tokio::test]
async fn with_cancel_nonstream_a_slot_is_free_soon_after_its_client_left_though_a_stream_runs() -> Outcome {
    let (_running, left) = on_its_own(&[(CANCEL, "1")]).await?;
    let took = left.until_free().await?;
    eprintln!("free after {took:?}; {:.0} tokens/s, the rest takes {:?}", left.rate, left.rest());
    Ok(())
}

#[tokio::test]
async fn without_its_variable_the_same_slot_works_on_for_nobody() -> Outcome {
    let (_running, left) = on_its_own(&[]).await?;
    // Five seconds of the stream, at any machine's speed.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "thousands at most")]
    let more = ((left.rate * 5.0) as u64).max(400);
    assert!(left.streamed() + more < TOKENS, "too fast a machine for this model: {} tokens/s", left.rate);
    left.until_streamed(left.streamed() + more, Duration::from_secs(120)).await?;
    let (works, decoded) = slot(&left.direct, 1).await.context("no slots")?;
    assert!(works && decoded > left.decoded + more / 4, "works: {works}, {decoded} of {}", left.decoded);
    Ok(())
}

#[tokio::test]
async fn cancel_nonstream_as_a_mitigation_reaches_the_process_and_frees_slots_behind_the_proxy() -> Outcome {
    let lines = model_lines(SamplePreset::Slow, &flags()).await?;
    let setup = Setup::new()?.model("m", &format!("{lines}mitigations = [\"cancel-nonstream\"]\n"));
    let warden = setup.start().await?;
    let backend = warden.until_ready(1).await?[0];
    assert_eq!(backend.variable(CANCEL).as_deref(), Some("1".as_ref()));
    let log = warden.cli(&["logs", "m"]).await?;
    assert_eq!(log.stdout.matches(ACTIVE).count(), 1, "{}", log.all());
    let direct = Http::Unix(backend.socket().context("no socket")?);
    let left = Left::set_up(&warden.http, &direct).await?;
    let took = left.until_free().await?;
    eprintln!("free after {took:?}; {:.0} tokens/s, the rest takes {:?}", left.rate, left.rest());
    Ok(())
}

fn id(server: &Path) -> Result<String, Trouble> {
    let name = server.parent().and_then(Path::file_name).context("a build has a folder")?;
    Ok(name.to_string_lossy().into_owned())
}

#[tokio::test]
async fn a_mitigation_of_another_backend_is_left_out_and_one_that_the_build_lacks_is_refused() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        // A given server has no provenance with its backend.
        return Ok(());
    }
    let (patched, plain) = (id(&llama_server().await?)?, id(&llama_server_plain().await?)?);
    let mut setup = Setup::new()?;
    setup.home.env.insert("LLAMA_WARDEN_PATHS__DATA_DIR".into(), binaries::store()?.join("data").into());
    let lines = |build: &str, mitigation: &str| -> Result<String, Trouble> {
        let model = sample_model(SamplePreset::Chat)?;
        Ok(format!(
            "build = '{build}'\nmodel = '{}'\npreload = true\nmitigations = [\"{mitigation}\"]\n",
            model.display()
        ))
    };
    let config = format!("[models.m]\n{}", lines(&plain, "cancel-nonstream")?);
    let file = setup.home.file("plain.toml", config)?;
    let ran = setup.home.warden([Path::new("config"), "check".as_ref(), &file], SOON).await?;
    assert_eq!(ran.code, 2, "{}", ran.all());
    let wanted = format!(
        "mitigation cancel-nonstream needs a llama-server built with the patch set server; build {plain} has none"
    );
    assert!(ran.stderr.contains(&wanted), "{}", ran.stderr);

    let mut warden = setup.model("m", &lines(&patched, "graph-cache-cap")?).start().await?;
    let backend = warden.until_ready(1).await?[0];
    warden.says(&format!("and build {patched} computes on cpu: it is left out")).await?;
    assert_eq!(backend.variable("LLAMA_WARDEN_GRAPH_CACHE_CAP"), None);
    Ok(())
}

#[tokio::test]
async fn the_fix_is_on_by_itself_in_a_build_that_has_it_unless_the_operator_says_otherwise() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        // A given server has no provenance with its patches.
        return Ok(());
    }
    let patched = id(&llama_server().await?)?;
    let model = sample_model(SamplePreset::Chat)?;
    for (own, value) in [
        ("", Some("1")),
        ("cancel = \"off\"\n", None),
        ("env = { LLAMA_WARDEN_CANCEL_NONSTREAM = \"0\" }\n", Some("0")),
    ] {
        let mut setup = Setup::new()?;
        setup.home.env.insert("LLAMA_WARDEN_PATHS__DATA_DIR".into(), binaries::store()?.join("data").into());
        let lines = format!("build = '{patched}'\nmodel = '{}'\npreload = true\n{own}", model.display());
        let warden = setup.model("m", &lines).start().await?;
        let backend = warden.until_ready(1).await?[0];
        assert_eq!(backend.variable(CANCEL).as_deref(), value.map(AsRef::as_ref), "{own:?}");
    }
    Ok(())
}
