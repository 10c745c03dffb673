//! Measures llama-warden's own cost: memory when idle and with a thousand open streams, and the time from its
//! start to the first answer.
//!
//! `cargo bench -p warden-tests --bench footprint`: memory is PSS from `/proc/PID/smaps_rollup`; fake-llama
//! sends the streams. The start uses a real llama-server and a sample model, compared with a direct start of
//! that server.

use std::ffi::OsString;
use std::time::Duration;

use procfs::process::Process;
use serde_json::json;
use tokio::time::Instant;
use warden_builder::sample_model::SamplePreset;
use warden_rig::load::{median, millis};
use warden_rig::process::Kid;
use warden_rig::real::sample_model;
use warden_rig::wait::wait_for;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Trouble, binaries, wait_until};

const STREAMS: usize = 1000;
const STARTS: usize = 9;

fn pss_mib(pid: i32) -> Result<f64, Trouble> {
    let rollup = Process::new(pid).context("process")?.smaps_rollup().context("smaps_rollup")?;
    let bytes: u64 = rollup.memory_map_rollup.iter().filter_map(|map| map.extension.map.get("Pss")).sum();
    #[expect(clippy::cast_precision_loss, reason = "a display figure")]
    Ok(bytes as f64 / 1024.0 / 1024.0)
}

async fn memory() -> Result<[f64; 3], Trouble> {
    let script = json!({"ms_per_token": 500});
    let flags = "args = ['-np', '1100']\nmax_in_flight = 1100";
    let setup = Setup::new()?.fake("m", &script, flags)?.top("log.level = 'warn'");
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    let pid = warden.kid.pid();
    let idle = pss_mib(pid)?;
    let mut streams = Vec::new();
    for number in 0..STREAMS {
        // The head arrives when the request has its slot.
        let body = chat(&number.to_string(), "m", "hello", 10_000, true);
        streams.push(warden.http.stream(CHAT, &body).await?);
    }
    let busy = pss_mib(pid)?;
    drop(streams);
    wait_until("the streams have ended", SOON, async || {
        warden.status("m").await.is_ok_and(|status| status["backends"][0]["in_flight"] == 0)
    })
    .await?;
    Ok([idle, busy, pss_mib(pid)?])
}

/// Returns the time from `start` to the first answer of a completion.
async fn first_answer(http: &Http, start: Instant) -> Result<Duration, Trouble> {
    let body =
        json!({"model": "sample", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]});
    wait_for("a first answer", SOON, async || {
        let answer = http.post(CHAT, &body).await.ok()?;
        answer.status.is_success().then(|| start.elapsed())
    })
    .await
}

async fn start_times() -> Result<[f64; 2], Trouble> {
    let server = binaries::llama_server().await?;
    let (mut direct, mut through) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        let setup = Setup::new()?;
        let model = sample_model(SamplePreset::Chat)?;
        let port = || Ok::<_, Trouble>(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?);
        let flags = |address: std::net::SocketAddr| {
            let mut args: Vec<OsString> = ["-t", "1", "-c", "4096", "-m"].map(OsString::from).to_vec();
            args.extend([model.clone().into(), "--port".into(), address.port().to_string().into()]);
            args
        };
        let (home, env) = (setup.home.path(), &setup.home.env);
        let address = port()?;
        let start = Instant::now();
        let kid = Kid::start(&server, &flags(address), env, home, home.join("direct.log"))?;
        direct.push(millis(first_answer(&Http::Tcp(address), start).await?));
        drop(kid);
        let address = port()?;
        let mut env = env.clone();
        env.insert("LLAMA_WARDEN_DEFAULTS__BINARY".into(), server.clone().into());
        let mut args: Vec<OsString> = vec!["serve".into(), "--".into()];
        args.extend(flags(address));
        let start = Instant::now();
        let kid = Kid::start(&binaries::llama_warden()?, &args, &env, home, home.join("warden.log"))?;
        let time = first_answer(&Http::Tcp(address), start).await.context(kid.output())?;
        through.push(millis(time));
        drop(kid);
    }
    Ok([median(&mut direct), median(&mut through)])
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
#[tokio::main]
async fn main() -> Result<(), Trouble> {
    let [idle, busy, after] = memory().await?;
    println!("| memory of llama-warden | PSS, MiB |\n|---|---|");
    println!("| idle | {idle:.1} |\n| {STREAMS} open streams | {busy:.1} |\n| after them | {after:.1} |\n");
    let [direct, through] = start_times().await?;
    println!("| start to first answer | ms (median of {STARTS}) |\n|---|---|");
    println!(
        "| llama-server directly | {direct:.0} |\n| llama-warden, which starts llama-server | {through:.0} |"
    );
    println!("\nratio {:.2}", through / direct);
    Ok(())
}
