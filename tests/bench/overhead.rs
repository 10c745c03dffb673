//! Measures the time that llama-warden adds to a request, compared with a direct TCP connection to the same
//! llama-server.
//!
//! `cargo bench -p warden-tests --bench overhead`: alternating rounds; medians over rounds of each round's
//! p50 and p99.

use std::ffi::OsString;

use serde_json::json;
use warden_builder::sample_model::SamplePreset;
use warden_rig::http::json_request;
use warden_rig::load::{Make, closed_loop, median, millis, quantile};
use warden_rig::process::Kid;
use warden_rig::real::{model_lines, sample_model};
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Http, Trouble, binaries, wait_until};

const ROUNDS: usize = 7;
const FLAGS: [&str; 6] = ["-t", "1", "-np", "4", "-c", "8192"];

fn tokenize(number: usize) -> Result<hyper::Request<http_body_util::Full<bytes::Bytes>>, Trouble> {
    json_request("/tokenize", &json!({"content": format!("request {number}")}))
}

fn chat(number: usize) -> Result<hyper::Request<http_body_util::Full<bytes::Bytes>>, Trouble> {
    let messages = json!([{"role": "user", "content": format!("request {number}")}]);
    json_request(CHAT, &json!({"model": "sample", "max_tokens": 1, "temperature": 0, "messages": messages}))
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#[tokio::main]
async fn main() -> Result<(), Trouble> {
    let server = binaries::llama_server().await?;
    let model = sample_model(SamplePreset::Chat)?;
    let lines = model_lines(SamplePreset::Chat, &FLAGS).await?;
    let setup = Setup::new()?.model("sample", &lines).top("log.level = 'warn'");

    // llama-server reports a port of its own choice only in its log, so choose a port that was just free.
    let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut args: Vec<OsString> = vec!["-m".into(), model.into()];
    args.extend(FLAGS.iter().map(OsString::from));
    args.extend(["--host".into(), "127.0.0.1".into(), "--port".into(), address.port().to_string().into()]);
    let log = setup.home.path().join("direct.log");
    let direct_server = Kid::start(&server, &args, &setup.home.env, setup.home.path(), log)?;
    let direct = Http::Tcp(address);
    wait_until("the direct server is ready", SOON, async || {
        direct.get("/health").await.is_ok_and(|answer| answer.status.is_success())
    })
    .await?;
    let warden = setup.start().await?;
    warden.until_ready(1).await?;

    println!(
        "| request | clients | direct p50 ms | warden p50 ms | added p50 ms | ratio | direct p99 ms | warden p99 ms | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let cases: [(&str, Make, usize, usize); 4] = [
        ("tokenize", tokenize, 1, 500),
        ("chat, 1 token", chat, 1, 200),
        ("tokenize", tokenize, 64, 40),
        ("chat, 1 token", chat, 64, 20),
    ];
    for (name, make, clients, each) in cases {
        let mut figures: [Vec<f64>; 4] = Default::default();
        // The first round warms caches and connections, and does not count.
        for round in 0..=ROUNDS {
            for (side, http) in [&direct, &warden.http].into_iter().enumerate() {
                let mut times = closed_loop(http, clients, each, make).await?;
                if round > 0 {
                    figures[side].push(millis(quantile(&mut times, 0.5)));
                    figures[side + 2].push(millis(quantile(&mut times, 0.99)));
                }
            }
        }
        let [direct50, warden50, direct99, warden99] = figures.each_mut().map(|all| median(all));
        println!(
            "| {name} | {clients} | {direct50:.2} | {warden50:.2} | {:+.2} | {:.2} | {direct99:.2} | {warden99:.2} | {:.2} |",
            warden50 - direct50,
            warden50 / direct50,
            warden99 / direct99
        );
    }
    drop(direct_server);
    Ok(())
}
