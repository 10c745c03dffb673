//! Measures how long a replacement delays waiting requests, in both ways, and llama-server's own part in a
//! sequential one.
//!
//! `cargo bench -p warden-tests --bench gap`: four clients send small requests without a pause to a real
//! llama-server with a sample model. The figure of a replacement is the longest time of any request that
//! overlapped it; "quiet" is the same over as many periods without a replacement. Then models of two sizes,
//! without load: the ledger's figures of each sequential replacement, alternating with direct starts of the
//! same llama-server. `WARDEN_GAP_MIB=2048` sets the larger size, `WARDEN_GAP_FLAGS` further flags (`-ngl 99`
//! with a GPU).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warden_builder::sample_model::SamplePreset;
use warden_rig::load::{median, millis, quantile};
use warden_rig::process::Kid;
use warden_rig::real::{llama_server, model_lines, sample_model};
use warden_rig::warden::{CHAT, Setup, json_lines};
use warden_rig::{Home, Http, Trouble};

const REPLACEMENTS: usize = 20;
const CLIENTS: usize = 4;

/// Runs clients until stopped; sends the start and the time of every request through the channel.
fn clients(
    http: &Http,
    stop: &CancellationToken,
    to: &mpsc::UnboundedSender<(Instant, Duration)>,
) -> JoinSet<Result<(), Trouble>> {
    let mut set = JoinSet::new();
    for client in 0..CLIENTS {
        let (http, stop, to) = (http.clone(), stop.clone(), to.clone());
        set.spawn(async move {
            let mut number = 0_usize;
            while !stop.is_cancelled() {
                number += 1;
                let messages =
                    json!([{"role": "user", "content": format!("client {client} request {number}")}]);
                let body = json!({"model": "sample", "max_tokens": 8, "messages": messages});
                let start = Instant::now();
                let answer = http.post(CHAT, &body).await?;
                if !answer.status.is_success() {
                    return Err(Trouble::new(answer.text()));
                }
                if to.send((start, start.elapsed())).is_err() {
                    break;
                }
            }
            Ok(())
        });
    }
    set
}

async fn measure(replace: &str) -> Result<(Vec<Duration>, Vec<Duration>), Trouble> {
    let lines = model_lines(SamplePreset::Chat, &["-t", "1", "-np", "4", "-c", "8192"]).await?;
    let setup = Setup::new()?.model("sample", &format!("{lines}replace = '{replace}'"));
    let warden = Arc::new(setup.top("log.level = 'warn'").start().await?);
    warden.until_ready(1).await?;
    let (to, mut from) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let mut load = clients(&warden.http, &stop, &to);
    drop(to);
    let mut longest = |since: Instant| {
        let mut most = Duration::ZERO;
        while let Ok((start, time)) = from.try_recv() {
            if start + time >= since {
                most = most.max(time);
            }
        }
        most
    };
    let (mut quiet, mut replaced) = (Vec::new(), Vec::new());
    for _ in 0..REPLACEMENTS {
        let since = Instant::now();
        sleep(Duration::from_millis(300)).await;
        quiet.push(longest(since));
        let since = Instant::now();
        let answer = warden.admin().post("/models/sample/restart", &json!({})).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(answer.text()));
        }
        sleep(Duration::from_millis(100)).await;
        replaced.push(longest(since));
    }
    stop.cancel();
    while let Some(client) = load.join_next().await {
        client??;
    }
    Ok((quiet, replaced))
}

/// Number of sequential replacements, and of direct starts between them.
const PARTS: usize = 9;
const ASKED: Duration = Duration::from_millis(1);
const MINUTES: Duration = Duration::from_secs(300);

/// Writes a model of about this size: each layer of this width has some 86 MiB.
async fn large_model(home: &Home, mib: u32) -> Result<PathBuf, Trouble> {
    let path = home.path().join("large.gguf");
    let layers = format!("layers={}", (mib / 86).max(1));
    home.sized_model("llama-gpu", &path, &[&layers]).await?;
    Ok(path)
}

/// Returns the time from the spawn of a llama-server to its first good answer.
async fn own_start(server: &Path, model: &Path, flags: &[String]) -> Result<Duration, Trouble> {
    let home = Home::new()?;
    let socket = home.path().join("direct.sock");
    let mut args: Vec<std::ffi::OsString> =
        vec!["-m".into(), model.into(), "--host".into(), socket.clone().into()];
    args.extend(flags.iter().map(std::ffi::OsString::from));
    let begun = Instant::now();
    let mut kid = Kid::start(server, &args, &home.env, home.path(), home.path().join("log"))?;
    let http = Http::Unix(socket);
    while !http.get("/health").await.is_ok_and(|answer| answer.status.is_success()) {
        if let Some(ended) = kid.ended() {
            return Err(Trouble::new(format!("llama-server has ended ({ended}):\n{}", kid.output())));
        }
        if begun.elapsed() > MINUTES {
            return Err(Trouble::new("llama-server does not get ready"));
        }
        sleep(ASKED).await;
    }
    Ok(begun.elapsed())
}

/// Returns medians in milliseconds: the direct start; from the ledger the gap, the old process's end, the new
/// one's start and llama-warden's part; and the largest such part.
async fn parts(model: &Path, flags: &[String]) -> Result<[f64; 6], Trouble> {
    let server = llama_server().await?;
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\nargs = {}\npreload = true\nreplace = 'sequential'\nlifecycle.start_timeout = '5m'",
        server.display(),
        model.display(),
        json!(flags)
    );
    let warden = Setup::new()?.model("sample", &lines).top("log.level = 'warn'").start().await?;
    warden.until_ready(1).await?;
    let mut by_hand = Vec::new();
    for _ in 0..PARTS {
        by_hand.push(millis(own_start(&server, model, flags).await?));
        let answer = warden.admin().post("/models/sample/restart", &json!({})).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(answer.text()));
        }
    }
    let entries = json_lines(&warden.recycles())?;
    let column = |name: &str| -> Result<Vec<f64>, Trouble> {
        let figure = |entry: &serde_json::Value| entry[name].as_f64();
        let known: Option<Vec<f64>> = entries.iter().map(figure).collect();
        known
            .filter(|known| known.len() == PARTS)
            .ok_or_else(|| Trouble::new(format!("{name} is not in each entry of the ledger")))
    };
    let mut ours = column("ours_ms")?;
    let most = ours.iter().copied().fold(0.0, f64::max);
    Ok([
        median(&mut by_hand),
        median(&mut column("gap_ms")?),
        median(&mut column("exit_ms")?),
        median(&mut column("start_ms")?),
        median(&mut ours),
        most,
    ])
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
async fn print_parts() -> Result<(), Trouble> {
    let number = |name: &str, default: u32| match std::env::var(name) {
        Ok(text) => text.parse().map_err(|_| Trouble::new(format!("{name}={text} is no whole number"))),
        Err(_) => Ok(default),
    };
    let mib = number("WARDEN_GAP_MIB", 2048)?;
    let mut flags: Vec<String> = ["-np", "4", "-c", "8192"].map(str::to_owned).into();
    flags.extend(std::env::var("WARDEN_GAP_FLAGS").unwrap_or_default().split_whitespace().map(str::to_owned));
    let home = Home::new()?;
    let large = large_model(&home, mib).await?;
    println!(
        "\n| model | a start by hand, ms | gap, ms | the old one's end, ms | the new one's start, ms | ours, ms (median, most) |"
    );
    println!("|---|---|---|---|---|---|");
    for (name, model) in
        [("0.8 MB".to_owned(), sample_model(SamplePreset::Chat)?), (format!("{mib} MiB"), large)]
    {
        let [by_hand, gap, exit, start, ours, most] = parts(&model, &flags).await?;
        println!("| {name} | {by_hand:.0} | {gap:.0} | {exit:.0} | {start:.0} | {ours:.0}, {most:.0} |");
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#[tokio::main]
async fn main() -> Result<(), Trouble> {
    println!(
        "| replacement | longest request without one, p50 ms | with one, p50 ms | with one, max ms | requests failed |"
    );
    println!("|---|---|---|---|---|");
    for replace in ["sequential", "overlap"] {
        // A failed request ends the benchmark, so every row means that none failed.
        let (mut quiet, mut replaced) = measure(replace).await?;
        println!(
            "| {replace} | {:.1} | {:.1} | {:.1} | 0 |",
            millis(quantile(&mut quiet, 0.5)),
            millis(quantile(&mut replaced, 0.5)),
            millis(quantile(&mut replaced, 1.0))
        );
    }
    print_parts().await
}
