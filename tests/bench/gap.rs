//! How long a waiting request is held up while its model is replaced, in both ways.
//!
//! `cargo bench -p warden-tests --bench gap`: four clients send small requests without pause to a real llama-server with
//! a sample model; each replacement's figure is the longest time of any request that overlapped it. "quiet" is the same
//! over as many spells without a replacement.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warden_builder::sample_model::Preset;
use warden_rig::load::{millis, quantile};
use warden_rig::real::model_lines;
use warden_rig::warden::{CHAT, Setup};
use warden_rig::{Http, Trouble};

const REPLACEMENTS: usize = 20;
const CLIENTS: usize = 4;

/// Clients that send until told to stop; every request's start and time comes through the channel.
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
    let lines = model_lines(Preset::Chat, &["-t", "1", "-np", "4", "-c", "8192"]).await?;
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

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#[tokio::main]
async fn main() -> Result<(), Trouble> {
    println!(
        "| replacement | longest request without one, p50 ms | with one, p50 ms | with one, max ms | requests failed |"
    );
    println!("|---|---|---|---|---|");
    for replace in ["sequential", "overlap"] {
        // A failed request ends the benchmark with an error, so a row means none failed.
        let (mut quiet, mut replaced) = measure(replace).await?;
        println!(
            "| {replace} | {:.1} | {:.1} | {:.1} | 0 |",
            millis(quantile(&mut quiet, 0.5)),
            millis(quantile(&mut replaced, 0.5)),
            millis(quantile(&mut replaced, 1.0))
        );
    }
    Ok(())
}
