//! What it costs to be traced: decode speed of a real llama-server with the tracer and without.
//!
//! `cargo bench -p warden-tests --bench tracer`: two servers, one under `LD_PRELOAD`, asked in turn on one thread; the figure
//! is the median of the ratios of neighbouring answers. `chat` is the worst case (a token takes a fraction of a
//! millisecond), `llama` a model whose tokens take some milliseconds, as real ones do on a CPU.

use std::path::Path;

use serde_json::json;
use warden_builder::sample_model::Preset;
use warden_builder::sample_model::sized::{Arch, Size, Sized, Sizes};
use warden_rig::load::median;
use warden_rig::real::{Undisturbed, llama_server, sample_model};
use warden_rig::{Context as _, Home, Trouble};
use warden_tracer_reader::{INTERVAL_VARIABLE, Snapshot, VARIABLE, write_library};

/// Answers of each server.
const ROUNDS: u64 = 40;
const FLAGS: [&str; 8] = ["-t", "1", "-np", "1", "-c", "4096", "--cache-ram", "0"];

/// Tokens generated in a second.
async fn speed(server: &Undisturbed, seed: u64, tokens: u64) -> Result<f64, Trouble> {
    let body = json!({"prompt": format!("tell me about {seed}"), "n_predict": tokens, "seed": seed,
        "cache_prompt": false, "ignore_eos": true});
    let answer = server.http.post("/completion", &body).await?.json()?;
    answer["timings"]["predicted_per_second"].as_f64().context("no timings")
}

async fn compare(name: &str, model: &Path, interval: &str, tokens: u64) -> Result<(), Trouble> {
    let home = Home::new()?;
    let library = write_library(home.path())?;
    let (library, folder) = (library.to_string_lossy(), home.path().to_string_lossy());
    let variables = [("LD_PRELOAD", &*library), (VARIABLE, &*folder), (INTERVAL_VARIABLE, interval)];
    let server = llama_server().await?;
    let plain = Undisturbed::start_model(&server, model, &FLAGS, &[]).await?;
    let traced = Undisturbed::start_model(&server, model, &FLAGS, &variables).await?;
    for server in [&plain, &traced] {
        speed(server, 0, tokens).await?;
    }
    let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let (one, other) = if round % 2 == 0 {
            let one = speed(&plain, round, tokens).await?;
            (one, speed(&traced, round, tokens).await?)
        } else {
            let other = speed(&traced, round, tokens).await?;
            (speed(&plain, round, tokens).await?, other)
        };
        without.push(one);
        with.push(other);
        ratios.push(other / one);
    }
    let walks = Snapshot::all_in(home.path())?.first().context("it was not traced")?.losses.walks;
    say(&format!(
        "{name:6} every {interval:>6} bytes: {:7.1} tokens/s, traced {:7.1}: ratio {:.3}; {walks} walks",
        median(&mut without),
        median(&mut with),
        median(&mut ratios)
    ));
    Ok(())
}

#[expect(clippy::print_stdout, reason = "a benchmark tells its figures")]
fn say(line: &str) {
    println!("{line}");
}

#[tokio::main]
async fn main() -> Result<(), Trouble> {
    let home = Home::new()?;
    let larger = home.path().join("llama.gguf");
    let sizes = Sizes { layers: 8, width: 1024, feed: 2816, heads: 16, ..Sizes::of(Arch::Llama, Size::Tiny) };
    Sized { arch: Arch::Llama, sizes, seed: 1 }.write(&larger)?;
    let chat = sample_model(Preset::Chat)?;
    for interval in ["16384", "65536", "524288"] {
        compare("chat", &chat, interval, 400).await?;
    }
    compare("llama", &larger, "65536", 60).await
}
