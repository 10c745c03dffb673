//! Probes and shutdown of a single instance.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

/// An instance with a listener for probes and one for `HAProxy`.
pub(super) struct Probed {
    pub(super) warden: Warden,
    pub(super) probe: Http,
    pub(super) probe_port: u16,
    pub(super) agent: SocketAddr,
}

fn address(warden: &Warden, words: &str) -> Result<SocketAddr, Trouble> {
    let output = warden.kid.output();
    let line = output.lines().find_map(|line| line.strip_prefix(words));
    Ok(line.context(format!("no {words} in {output}"))?.parse()?)
}

impl Probed {
    pub(super) async fn start(script: &serde_json::Value, top: &str, model: &str) -> Result<Self, Trouble> {
        let top = format!("probe.address = \"127.0.0.1:0\"\nprobe.agent = \"127.0.0.1:0\"\n{top}");
        let model = format!("on_death = \"continue\"\n{model}");
        let mut warden = Setup::new()?.top(&top).fake("m", script, &model)?.start().await?;
        warden.kid.says("agent address", SOON).await?;
        warden.until_ready(1).await?;
        let probe = address(&warden, "probe address http://")?;
        let agent = address(&warden, "agent address ")?;
        let own = Self { warden, probe: Http::Tcp(probe), probe_port: probe.port(), agent };
        wait_until("it is ready", SOON, async || own.readyz().await.is_ok_and(|(status, _)| status == 200))
            .await?;
        Ok(own)
    }

    pub(super) async fn readyz(&self) -> Result<(u16, String), Trouble> {
        let answer = self.probe.get("/readyz").await?;
        Ok((answer.status.as_u16(), answer.text()))
    }

    pub(super) async fn line(&self) -> Result<String, Trouble> {
        let mut stream = TcpStream::connect(self.agent).await?;
        let mut line = String::new();
        timeout(SOON, stream.read_to_string(&mut line)).await??;
        Ok(line)
    }
}

#[tokio::test]
async fn others_learn_whether_it_lives_and_takes_requests_and_can_do_nothing() -> Outcome {
    let own = Probed::start(&json!({}), "probe.vllm = true", "aliases = [\"org/m\"]\n").await?;
    assert_eq!(own.readyz().await?, (200, "ok\n".into()));
    assert_eq!(own.probe.get("/livez").await?.status, 200);
    wait_until("all slots are free", SOON, async || {
        own.line().await.is_ok_and(|line| line == "ready up 100% maxconn:8\n")
    })
    .await?;
    let text = own.probe.get("/metrics").await?.text();
    for line in [
        "llama_warden_pool_requests_waiting 0",
        "llama_warden_pool_slots 4",
        "llama_warden_pool_ready 1",
        "vllm:num_requests_waiting 0",
        "vllm:num_requests_running 0",
        "vllm:kv_cache_usage_perc 0",
    ] {
        assert!(
            text.lines().any(|have| have.split(".0").next() == Some(line)),
            "{line} is missing in {text}"
        );
    }
    // Both metrics name the model.
    for metric in ["llama_warden_pool_models_info", "vllm:lora_requests_info"] {
        let labels = "{max_lora=\"2\",running_lora_adapters=\"m,org/m\",waiting_lora_adapters=\"\"} ";
        assert!(text.contains(&format!("{metric}{labels}")), "{metric}{labels} is missing in {text}");
    }
    for path in ["/status", "/drain", "/models/m/restart", "/page/", "/v1/models", "/"] {
        assert_eq!(own.probe.get(path).await?.status, 404, "{path}");
        assert_eq!(own.probe.post(path, &json!({})).await?.status, 404, "{path}");
    }
    Ok(())
}

#[tokio::test]
async fn a_crowd_that_holds_connections_keeps_no_probe_out() -> Outcome {
    let own = Probed::start(&json!({}), "", "").await?;
    let address = SocketAddr::from(([127, 0, 0, 1], own.probe_port));
    let mut crowd = Vec::new();
    for _ in 0..200 {
        crowd.push(TcpStream::connect(address).await?);
    }
    let mut times = Vec::new();
    for _ in 0..50 {
        let begun = Instant::now();
        assert_eq!(own.readyz().await?.0, 200);
        times.push(begun.elapsed());
    }
    times.sort();
    // A generous limit, because the machine may be busy.
    assert!(times[25] < Duration::from_millis(100), "{times:?}");
    Ok(())
}

/// Opens connections repeatedly, many at a time, until `over`.
async fn flood(address: SocketAddr, over: Arc<AtomicBool>) {
    while !over.load(Ordering::Relaxed) {
        let mut all = JoinSet::new();
        for _ in 0..100 {
            all.spawn(async move {
                let stream = TcpStream::connect(address).await;
                // Close at once, so that the port is free for the next connection.
                stream.map(|stream| stream.set_zero_linger())
            });
        }
        all.join_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_that_connects_again_and_again_keeps_no_probe_out() -> Outcome {
    let own = Probed::start(&json!({}), "", "").await?;
    let address = SocketAddr::from(([127, 0, 0, 1], own.probe_port));
    let over = Arc::new(AtomicBool::new(false));
    let mut crowd = JoinSet::new();
    for _ in 0..2 {
        crowd.spawn(flood(address, over.clone()));
    }
    for round in 0..60 {
        // A kubelet tolerates two failed probes.
        let mut tries = 0;
        while !own.readyz().await.is_ok_and(|(status, _)| status == 200) {
            tries += 1;
            assert!(tries < 3, "round {round}");
        }
    }
    over.store(true, Ordering::Relaxed);
    crowd.join_all().await;
    Ok(())
}

#[tokio::test]
async fn an_operator_sends_balancers_away_and_calls_them_back_and_nobody_is_refused() -> Outcome {
    let own = Probed::start(&json!({}), "", "").await?;
    let ran = own.warden.cli(&["drain", "--all"]).await?;
    assert!(
        ran.code == 0 && ran.stdout.contains("load balancers are told to send no more requests"),
        "{ran:?}"
    );
    let (status, why) = own.readyz().await?;
    assert!(status == 503 && why.starts_with("draining: "), "{status} {why}");
    assert_eq!(own.line().await?, "drain\n");
    assert_eq!(own.probe.get("/livez").await?.status, 200);
    assert_eq!(own.warden.http.get("/health").await?.status, 503);
    let answer = own.warden.http.post(CHAT, &chat("late", "m", "go", 3, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    let ran = own.warden.cli(&["drain", "--all", "--undo"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains("it is available again"), "{ran:?}");
    assert_eq!(own.readyz().await?.0, 200);
    assert_eq!(own.warden.http.get("/health").await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn after_sigterm_balancers_are_told_at_once_and_who_still_comes_is_served() -> Outcome {
    let top = "probe.drain_delay = \"3s\"";
    let mut own = Probed::start(&json!({"ms_per_token": 10}), top, "").await?;
    let begun = Instant::now();
    own.warden.kid.signal(Signal::TERM);
    wait_until("readyz says so", SOON, async || own.readyz().await.is_ok_and(|(status, _)| status == 503))
        .await?;
    if begun.elapsed() < Duration::from_secs(2) {
        let answer = own.warden.http.post(CHAT, &chat("late", "m", "go", 10, false)).await?;
        assert!(answer.status.is_success() && answer.answer()?.is_whole(), "{}", answer.text());
        assert_eq!(own.probe.get("/livez").await?.status, 200);
    }
    assert_eq!(own.warden.kid.exit(SOON).await?, 0);
    assert!(begun.elapsed() >= Duration::from_millis(2900), "{:?}", begun.elapsed());
    Ok(())
}

#[tokio::test]
async fn a_second_signal_does_not_wait_for_balancers() -> Outcome {
    let mut own = Probed::start(&json!({}), "probe.drain_delay = \"10m\"", "").await?;
    own.warden.kid.signal(Signal::TERM);
    wait_until("readyz says so", SOON, async || own.readyz().await.is_ok_and(|(status, _)| status == 503))
        .await?;
    // A signal within a second of the first counts as the same; a later one ends the drain.
    let ended = async || {
        own.warden.kid.signal(Signal::TERM);
        own.warden.kid.ended().is_some()
    };
    wait_until("it ends at once", SOON, ended).await
}
