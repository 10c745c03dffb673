//! Measures the latency of probes, idle and with all cores busy, compared with `HAProxy`'s own `monitor-uri`
//! on the same machine at the same time.
//!
//! `cargo bench -p warden-tests --bench probes`: 64 clients send small requests without a pause through
//! `HAProxy` and llama-warden to fake-llama. Each probe has a new connection, as a kubelet's, from one
//! thread.
//! There is no verdict: on a busy machine the scheduler decides.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warden_rig::load::{closed_loop, millis, quantile};
use warden_rig::process::Kid;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Home, Http, Trouble, http, ports, wait_until};

const CLIENTS: usize = 64;
const QUESTIONS: usize = 2000;
/// A picker probes every 50 ms; with this pause all probes take some seconds.
const PAUSE: Duration = Duration::from_millis(2);

/// Returns the time from the connect to the end of the answer.
async fn ask(address: SocketAddr, path: &str) -> Result<Duration, Trouble> {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let took = begun.elapsed();
    if answer.starts_with(b"HTTP/1.1 200") || answer.starts_with(b"HTTP/1.0 200") {
        return Ok(took);
    }
    Err(Trouble::new(format!("{path}: {}", String::from_utf8_lossy(&answer))))
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
/// Prints the figures of each probe; probes alternate, so that all have the same conditions.
async fn measure(what: &str, questions: &[(&str, SocketAddr, &str)]) -> Result<(), Trouble> {
    let mut times = vec![Vec::with_capacity(QUESTIONS); questions.len()];
    for _ in 0..QUESTIONS {
        for ((_, address, path), times) in questions.iter().zip(&mut times) {
            times.push(ask(*address, path).await?);
        }
        sleep(PAUSE).await;
    }
    for ((name, ..), mut times) in questions.iter().zip(times) {
        let mut at = |share| millis(quantile(&mut times, share));
        let (middle, most, longest) = (at(0.5), at(0.99), at(1.0));
        println!("{what:7} {name:24} {middle:8.3} {most:8.3} {longest:8.3}");
    }
    Ok(())
}

fn proxy(home: &Home, port: u16, to: SocketAddr) -> Result<Kid, Trouble> {
    let text = format!(
        "defaults\n mode http\n timeout connect 5s\n timeout client 1m\n timeout server 1m\n\
         frontend f\n bind 127.0.0.1:{port}\n monitor-uri /alive\n default_backend b\nbackend b\n server w {to}\n"
    );
    let args: [OsString; 3] = ["-db".into(), "-f".into(), home.file("haproxy.cfg", text)?.into()];
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let program =
        std::env::split_paths(&folders).map(|folder| folder.join("haproxy")).find(|path| path.is_file());
    Kid::start(
        &program.context("HAProxy must be in PATH")?,
        &args,
        &home.env,
        home.path(),
        home.path().join("log"),
    )
}

#[expect(clippy::print_stdout, reason = "a benchmark prints its figures")]
async fn run() -> Result<(), Trouble> {
    let top = "probe.address = \"127.0.0.1:0\"\nlog.level = 'warn'";
    let setup = Setup::new()?.top(top).fake("m", &json!({}), "args = ['-np', '64']")?;
    let mut warden = setup.start().await?;
    warden.kid.says("probe address", SOON).await?;
    warden.until_ready(1).await?;
    let output = warden.kid.output();
    let line = output.lines().find_map(|line| line.strip_prefix("probe address http://"));
    let probe: SocketAddr = line.context("no address for probes")?.parse()?;
    let (home, port) = (Home::new()?, ports::free()?);
    let front = SocketAddr::from(([127, 0, 0, 1], port));
    let _balancer = proxy(&home, port, warden.address())?;
    wait_until("HAProxy answers", SOON, async || ask(front, "/alive").await.is_ok()).await?;
    wait_until("it is ready", SOON, async || ask(probe, "/readyz").await.is_ok()).await?;
    println!("{:32} {:>8} {:>8} {:>8}  ms", "", "p50", "p99", "max");
    let questions = [
        ("/livez", probe, "/livez"),
        ("/readyz", probe, "/readyz"),
        ("/metrics", probe, "/metrics"),
        ("HAProxy's monitor-uri", front, "/alive"),
    ];
    measure("idle", &questions).await?;
    let (stop, load) = (CancellationToken::new(), runtime::Builder::new_multi_thread().enable_all().build()?);
    let over = stop.clone();
    let sending = load.spawn(async move {
        let http = Http::Tcp(front);
        let mut sent = 0;
        while !over.is_cancelled() {
            let make = |n: usize| http::json_request(CHAT, &chat(&n.to_string(), "m", "hello", 4, false));
            sent += closed_loop(&http, CLIENTS, 50, make).await?.len();
        }
        Ok::<_, Trouble>(sent)
    });
    let begun = Instant::now();
    measure("busy", &questions).await?;
    stop.cancel();
    let (sent, took) = (sending.await??, begun.elapsed());
    println!("meanwhile {sent} requests in {:.1} s", took.as_secs_f64());
    load.shutdown_background();
    Ok(())
}

fn main() -> Result<(), Trouble> {
    if std::env::args().any(|arg| arg == "--list") {
        return Ok(());
    }
    runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}
