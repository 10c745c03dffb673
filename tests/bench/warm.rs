//! Measures the time to the first token of a turn after a planned replacement: undisturbed, warm and cold.
//!
//! `cargo bench -p warden-tests --bench warm`: eight conversations of about 4,000 tokens on a real
//! llama-server with a sample model have a turn each, one more undisturbed, and one more after a replacement;
//! then the same with `warm = "off"`. They run one after the other, so the first token shows only the
//! prompt's time. The last column is the ledger's line. `WARDEN_WARM_SIZE=gpu` uses models of some gigabytes;
//! `WARDEN_WARM_FLAGS` adds flags (`-ngl 99` with a GPU).

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warden_rig::load::{millis, quantile};
use warden_rig::real::llama_server;
use warden_rig::warden::{CHAT, Setup, json_lines};
use warden_rig::{Context as _, Http, Trouble, Warden, wait_until};

const CONVERSATIONS: usize = 8;
/// Words of the first message, of some four tokens each.
const WORDS: usize = 980;

/// One turn of each conversation: times to the first tokens, and evaluated prompt tokens.
#[derive(Debug, Default)]
struct Turns {
    times: Vec<Duration>,
    tokens: Vec<u64>,
}

impl Turns {
    fn first_token(&mut self) -> f64 {
        millis(quantile(&mut self.times, 0.5))
    }

    fn evaluated(&mut self) -> u64 {
        self.tokens.sort_unstable();
        self.tokens.get(self.tokens.len() / 2).copied().unwrap_or(0)
    }
}

async fn turns(http: &Http, talks: &mut [Vec<Value>]) -> Result<Turns, Trouble> {
    let mut all = Turns::default();
    for messages in talks {
        let body =
            json!({ "model": "m", "messages": messages, "max_tokens": 16, "temperature": 0, "stream": true });
        let begun = Instant::now();
        let mut flow = http.stream(CHAT, &body).await?;
        let (mut text, mut first) = (String::new(), None);
        while let Some(event) = flow.event().await? {
            let event: Value = serde_json::from_str(&event).unwrap_or_default();
            let said = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            if !said.is_empty() {
                first.get_or_insert_with(|| begun.elapsed());
            }
            text.push_str(said);
            all.tokens.extend(event["timings"]["prompt_n"].as_u64());
        }
        all.times.push(first.context("an answer without a token")?);
        messages.push(json!({ "role": "assistant", "content": text }));
        messages.push(json!({ "role": "user", "content": "and what came then" }));
    }
    Ok(all)
}

fn talks() -> Vec<Vec<Value>> {
    let text =
        |n: usize| (0..WORDS).map(|k| format!("w{}", (k * 7 + n * 13) % 97)).collect::<Vec<_>>().join(" ");
    (0..CONVERSATIONS).map(|n| vec![json!({ "role": "user", "content": text(n) })]).collect()
}

#[derive(Clone, Copy, Debug)]
struct Loaded {
    name: &'static str,
    arch: &'static str,
    /// Also loads a projector, although the conversations have no images.
    projector: bool,
}

const ALL: [Loaded; 3] = [
    Loaded { name: "dense", arch: "llama", projector: false },
    Loaded { name: "sliding windows", arch: "gemma4", projector: false },
    Loaded { name: "sliding windows and a projector", arch: "gemma4", projector: true },
];

async fn started(loaded: Loaded, replace: &str, warm: &str) -> Result<Warden, Trouble> {
    let setup = Setup::new()?;
    let model: PathBuf = setup.home.path().join("m.gguf");
    let shown = model.to_string_lossy().into_owned();
    let size = std::env::var("WARDEN_WARM_SIZE").unwrap_or_else(|_| "tiny".to_owned());
    let suffix = if size == "gpu" { "-gpu" } else { "" };
    let mut models = vec![(format!("{}{suffix}", loaded.arch), shown.clone())];
    let mut flags: Vec<String> = ["-t", "1", "-np", "8", "-c", "49152"].map(str::to_owned).into();
    if loaded.projector {
        let projector = setup.home.path().join("mmproj.gguf").to_string_lossy().into_owned();
        flags.extend(["--mmproj".to_owned(), projector.clone()]);
        models.push((format!("gemma4-vision{suffix}"), projector));
    }
    for (preset, path) in models {
        setup.home.sized_model(&preset, path.as_ref(), &[]).await?;
    }
    flags
        .extend(std::env::var("WARDEN_WARM_FLAGS").unwrap_or_default().split_whitespace().map(str::to_owned));
    let lines = format!(
        "binary = '{}'\nmodel = '{shown}'\nargs = {}\npreload = true\n\
         replace = \"{replace}\"\nwarm = \"{warm}\"\non_death = \"continue\"\n",
        llama_server().await?.display(),
        json!(flags)
    );
    let warden = setup.top("log.level = 'warn'").model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

/// Returns the turns before and after a replacement, and the ledger's line.
async fn measure(loaded: Loaded, replace: &str, warm: &str) -> Result<(Turns, Turns, String), Trouble> {
    let warden = started(loaded, replace, warm).await?;
    let mut talks = talks();
    turns(&warden.http, &mut talks).await?;
    let before = turns(&warden.http, &mut talks).await?;
    warden.restart("m", 1).await?;
    let entries = json_lines(&warden.recycles())?;
    let entry = entries.last().context("no entry")?;
    let mut line = entry["warm"].to_string();
    if !entry["warm"].is_null() {
        wait_until("nothing is due behind the gate", Duration::from_secs(300), async || {
            warden.status("m").await.is_ok_and(|model| model["warm"]["later"] == 0)
        })
        .await?;
        line = warden.status("m").await?["warm"].to_string();
    }
    let after = turns(&warden.http, &mut talks).await?;
    Ok((before, after, format!("gap {} ms, {line}", entry["gap_ms"])))
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#[tokio::main]
async fn main() -> Result<(), Trouble> {
    println!(
        "| model | replacement | undisturbed, p50 ms | warm, p50 ms | cold, p50 ms | warm / undisturbed | cold / undisturbed | tokens evaluated, p50 | ledger |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for loaded in ALL {
        for replace in ["sequential", "overlap"] {
            let (mut before, mut warm, line) = measure(loaded, replace, "auto").await?;
            let (_, mut cold, _) = measure(loaded, replace, "off").await?;
            let [undisturbed, after, fresh] = [&mut before, &mut warm, &mut cold].map(Turns::first_token);
            println!(
                "| {} | {replace} | {undisturbed:.1} | {after:.1} | {fresh:.1} | {:.2} | {:.1} | {}, {}, {} | {line} |",
                loaded.name,
                after / undisturbed,
                fresh / undisturbed,
                before.evaluated(),
                warm.evaluated(),
                cold.evaluated()
            );
        }
    }
    Ok(())
}
