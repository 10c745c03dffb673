//! Measures the cost of tracing: decode speed of a real llama-server with and without the tracer.
//!
//! `cargo bench -p warden-tests --bench tracer [CASE]`: two servers, one under `LD_PRELOAD`, answer
//! alternately on one thread. Figures are medians; ratios are those of neighbouring answers. `chat` is the
//! worst case (a token takes a fraction of a millisecond); tokens of `llama` take some milliseconds, as real
//! ones do on a CPU. The processor time per token is less affected by a busy machine.

use std::path::Path;

use serde_json::json;
use warden_builder::sample_model::SamplePreset;
use warden_rig::load::median;
use warden_rig::real::{Undisturbed, llama_server, sample_model};
use warden_rig::{Context as _, Home, Trouble};
use warden_tracer_reader::{TRACE_VARIABLE, TraceSnapshot, write_library};

const INTERVAL_VARIABLE: &str = "LLAMA_WARDEN_TRACE_INTERVAL";
const ROUNDS: u64 = 40;
const FLAGS: [&str; 8] = ["-t", "1", "-np", "1", "-c", "4096", "--cache-ram", "0"];

#[derive(Clone, Copy)]
struct Cost {
    speed: f64,
    /// Microseconds of processor time per token, including the prompt.
    processor: f64,
}

/// Returns the CPU time of a process in nanoseconds, as the sum over its threads: the kernel's usual count
/// has hundredths.
fn ran(pid: i32) -> Result<u64, Trouble> {
    let mut all = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let told = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        all +=
            told.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).context("schedstat")?;
    }
    Ok(all)
}

async fn ask(server: &Undisturbed, seed: u64, tokens: u64) -> Result<Cost, Trouble> {
    let body = json!({"prompt": format!("tell me about {seed}"), "n_predict": tokens, "seed": seed,
        "cache_prompt": false, "ignore_eos": true});
    let before = ran(server.kid.pid())?;
    let answer = server.http.post("/completion", &body).await?.json()?;
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let processor = (ran(server.kid.pid())? - before) as f64 / 1000.0 / tokens as f64;
    let told = answer["timings"]["predicted_per_second"].as_f64();
    Ok(Cost { speed: told.context("no timings")?, processor })
}

async fn compare(name: &str, model: &Path, interval: &str, tokens: u64) -> Result<(), Trouble> {
    let home = Home::new()?;
    let library = write_library(home.path())?;
    let (library, folder) = (library.to_string_lossy(), home.path().to_string_lossy());
    let variables = [("LD_PRELOAD", &*library), (TRACE_VARIABLE, &*folder), (INTERVAL_VARIABLE, interval)];
    let server = llama_server().await?;
    let plain = Undisturbed::start_model(&server, model, &FLAGS, &[]).await?;
    let traced = Undisturbed::start_model(&server, model, &FLAGS, &variables).await?;
    for server in [&plain, &traced] {
        ask(server, 0, tokens).await?;
    }
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        // Alternate the order, so that changes of the machine's speed favour no side.
        let (first, second) = if round % 2 == 0 { (&plain, &traced) } else { (&traced, &plain) };
        let costs = (ask(first, round, tokens).await?, ask(second, round, tokens).await?);
        let (one, other) = if round % 2 == 0 { costs } else { (costs.1, costs.0) };
        without.push(one);
        with.push(other);
    }
    let walks = TraceSnapshot::all_in(home.path())?.first().context("it was not traced")?.losses.walks;
    let figures = |part: fn(&Cost) -> f64| {
        let mut both = [&without, &with].map(|costs| costs.iter().map(part).collect::<Vec<f64>>());
        let mut ratios: Vec<f64> = both[0].iter().zip(&both[1]).map(|(one, other)| other / one).collect();
        let [without, with] = &mut both;
        (median(without), median(with), median(&mut ratios))
    };
    let (speed, processor) = (figures(|cost| cost.speed), figures(|cost| cost.processor));
    say(&format!(
        "{name:6} every {interval:>6} bytes: {:7.1} tokens/s, traced {:7.1}: ratio {:.3}; {:7.1} us of a processor a token, traced {:7.1}: ratio {:.3}; {walks} walks",
        speed.0, speed.1, speed.2, processor.0, processor.1, processor.2
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
    home.sized_model("llama", &larger, &["layers=8", "width=1024", "feed=2816", "heads=16"]).await?;
    let chat = sample_model(SamplePreset::Chat)?;
    // Cargo's own arguments begin with two dashes.
    let only = std::env::args().skip(1).find(|word| !word.starts_with("--"));
    for interval in ["16384", "65536", "524288"] {
        let name = format!("chat-{interval}");
        if only.as_ref().is_none_or(|only| name.starts_with(only.as_str())) {
            compare("chat", &chat, interval, 400).await?;
        }
    }
    if only.is_none_or(|only| "llama".starts_with(only.as_str())) {
        compare("llama", &larger, "65536", 60).await?;
    }
    Ok(())
}
