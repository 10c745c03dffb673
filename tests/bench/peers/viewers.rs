//! Viewers of a llama-warden's page, which fetch like its script but without a browser. They run in a process
//! of their own, because the bench moves all its threads between CPUs.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use http_body_util::Full;
use hyper::Request;
use tokio::time::Instant;
use warden_rig::{Http, Trouble};

use crate::machine::LOAD;

/// Argument with which the bench starts itself as viewers.
pub(crate) const WORD: &str = "--look-at";
/// Shortest interval between two fetches of the script.
const LEAST: Duration = Duration::from_millis(250);

/// CPU of the viewers: the third, if there is one.
pub(crate) fn cpu() -> usize {
    let count = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    if count > 2 { LOAD + 1 } else { LOAD }
}

/// Fetches until the process is ended. Arguments: `ADDRESS COUNT`.
#[expect(clippy::print_stderr, reason = "its output is kept for an error")]
pub(crate) fn run(mut words: impl Iterator<Item = String>) -> ExitCode {
    let mut word = || words.next().unwrap_or_default();
    let (Ok(address), Ok(count)) = (word().parse(), word().parse::<usize>()) else {
        return ExitCode::from(2);
    };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let looked = runtime.block_on(futures_util::future::try_join_all((0..count).map(|_| look(address))));
    if let Err(trouble) = looked {
        eprintln!("a viewer gave up: {trouble}");
    }
    ExitCode::FAILURE
}

async fn look(address: SocketAddr) -> Result<(), Trouble> {
    let http = Http::Tcp(address);
    let get = |target: &str| {
        let request = Request::get(target).header("host", address.to_string());
        request.header("accept-encoding", "gzip").body(Full::default())
    };
    let mut told = http.open(get("/page/live")?).await?;
    let mut fetched: Option<Instant> = None;
    while told.event().await?.is_some() {
        if let Some(at) = fetched {
            tokio::time::sleep_until(at + LEAST).await;
        }
        let answer = http.send(get("/page/?fragment=1")?).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(format!("the page answers {}: {}", answer.status, answer.text())));
        }
        fetched = Some(Instant::now());
    }
    Err(Trouble::new("the page's stream ended"))
}
