//! Another program replaces a running llama-warden: no request fails, no stream breaks, no model reloads. A
//! failed upgrade has no effect.

mod books;
mod deaths;
mod flat;
mod refused;
mod told;
mod waiting;
mod ways;
mod where_it_lies;

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::Response;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONNECTION, HOST};
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::http::{Socket, json_request};
use warden_rig::process::{ProcessId, children_of};
use warden_rig::warden::{CHAT, SOON, Setup, chat, json_lines};
use warden_rig::{Context as _, Identity, Outcome, Trouble, Warden, binaries, swarm, wait_until};

/// Programs of an instance, without llama-servers: the serving one, and those that are ending.
fn programs(warden: &Warden) -> Vec<ProcessId> {
    children_of(warden.kid.pid()).into_iter().filter(|child| child.http().is_none()).collect()
}

async fn until_alone(warden: &Warden) -> Result<ProcessId, Trouble> {
    wait_until("only the one that serves is left", SOON, async || programs(warden).len() == 1).await?;
    programs(warden).first().copied().context("nobody serves")
}

async fn upgrade(warden: &Warden) -> Outcome {
    upgrade_to(warden, &binaries::llama_warden()?).await
}

async fn upgrade_to(warden: &Warden, program: &Path) -> Outcome {
    let ran = warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
    if ran.code == 0 { Ok(()) } else { Err(Trouble::new(ran.all())) }
}

/// A program that reports llama-warden's version, and then does something else.
fn double(warden: &Warden, name: &str, does: &str) -> Result<PathBuf, Trouble> {
    let real = binaries::llama_warden()?;
    let script =
        format!("#!/bin/sh\ncase \"$1\" in --version) exec '{}' --version;; esac\n{does}\n", real.display());
    let path = warden.home().file(name, script)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

#[tokio::test]
async fn what_an_operator_does_afterwards_works_and_the_instance_keeps_its_number() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    let pid = warden.admin().get("/status").await?.json()?["instance"]["pid"].clone();
    warden.cli(&["pin", "m"]).await?;
    upgrade(&warden).await?;
    let status = warden.admin().get("/status").await?.json()?;
    assert_eq!(status["fleet"]["models"][0]["pin"]["pinned"], true, "what was said by hand is known");
    assert_eq!(status["instance"]["pid"], pid);
    assert_eq!(warden.until_ready(1).await?, before);
    // The root process starts the replacement, and the ledger has it like any other.
    warden.restart("m", 1).await?;
    let after = warden.until_ready(1).await?;
    assert_ne!(after, before);
    let mut entries = json_lines(&warden.recycles())?;
    assert_eq!(entries[0]["kind"], "pin", "what was said before the upgrade: {entries:?}");
    entries.remove(0);
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(entries[0]["reason"], "operator");
    // Processes of the first and of the second instance are both carried over.
    upgrade(&warden).await?;
    assert_eq!(warden.until_ready(1).await?, after);
    let config = warden.setup.config().replace("replicas = 1", "");
    warden.reload(&format!("{config}\n# read again\n"))?;
    warden.says("configuration").await?;
    let answer = warden.http.post(CHAT, &chat("a", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&after, SOON).await?;
    assert!(!warden.admin_socket().exists(), "its admin socket is left behind");
    Ok(())
}

#[tokio::test]
async fn a_program_that_fails_hangs_or_dies_changes_nothing() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 5}), "")?.start().await?;
    let before = warden.until_ready(1).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 400, true)).await?;
    flow.event().await?;
    for (name, does, told) in [
        ("fails", "exit 3", "it has ended"),
        ("hangs", "sleep 600", "in time"),
        // The program connects like a successor, and ends.
        (
            "dies",
            "exec python3 -c \"import os,socket; s=socket.socket(fileno=int(os.environ['WARDEN_SUCCEEDS'].split()[2])); m=b'{}'; s.sendall(len(m).to_bytes(4,'big')+m)\"",
            "next program",
        ),
    ] {
        let program = double(&warden, name, does)?;
        let ran = warden.cli(&["upgrade", "--wait", "3s", "--to", &program.to_string_lossy()]).await?;
        assert_ne!(ran.code, 0, "{name}: {ran:?}");
        assert!(ran.all().contains("everything continues as before"), "{name}: {}", ran.all());
        assert!(ran.all().contains(told), "{name}: {}", ran.all());
    }
    wait_until("none of them is left", SOON, async || programs(&warden).is_empty()).await?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.until_ready(1).await?, before);
    // The failed upgrade leaves no trace.
    warden.restart("m", 1).await?;
    upgrade(&warden).await
}

#[tokio::test]
async fn what_is_no_program_of_ours_is_refused() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let refused = async |program: &Path, why: &str| -> Outcome {
        let ran = warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
        assert!(ran.code != 0 && ran.all().contains(why), "{}", ran.all());
        Ok(())
    };
    refused(Path::new("/bin/true"), "does not say that it is llama-warden").await?;
    refused(Path::new("/nowhere/at/all"), "No such file").await?;
    let loose = double(&warden, "loose", "exit 0")?;
    std::fs::set_permissions(&loose, std::fs::Permissions::from_mode(0o777))?;
    refused(&loose, "others can write").await
}

#[tokio::test]
async fn whoever_of_them_is_killed_nobody_outlives_it() -> Outcome {
    for root in [true, false] {
        let script = json!({"on_term": "ignore", "ms_per_token": 20});
        let mut warden = Setup::new()?.fake("m", &script, "replicas = 2")?.start().await?;
        upgrade(&warden).await?;
        let mut all = warden.until_ready(2).await?;
        let serving = programs(&warden);
        all.extend(serving.iter().copied());
        if root {
            warden.kid.signal(Signal::KILL);
            assert_eq!(warden.kid.exit(SOON).await?, -9);
        } else {
            serving[0].signal(Signal::KILL);
            assert_eq!(warden.kid.exit(SOON).await?, 1, "a service manager starts anew");
        }
        Warden::until_gone(&all, Duration::from_secs(2)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn sigterm_drains_whoever_serves_and_what_still_runs_in_the_one_before() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    let mut old = warden.http.stream(CHAT, &chat("old", "m", "go", 200, true)).await?;
    old.event().await?;
    upgrade(&warden).await?;
    let mut new = warden.http.stream(CHAT, &chat("new", "m", "go", 200, true)).await?;
    new.event().await?;
    warden.kid.signal(Signal::TERM);
    let (answer, end) = new.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    let (answer, end) = old.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Warden::until_gone(&children, SOON).await?;
    warden.ledger().each_finished_once(["old", "new"])
}

#[tokio::test]
async fn slots_are_not_given_twice_while_the_one_before_still_uses_them() -> Outcome {
    let toml = "args = [\"-np\", \"1\"]\n";
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 10}), toml)?.start().await?;
    warden.until_ready(1).await?;
    let mut old = warden.http.stream(CHAT, &chat("old", "m", "go", 300, true)).await?;
    old.event().await?;
    upgrade(&warden).await?;
    let status = warden.status("m").await?;
    assert_eq!(status["backends"][0]["in_flight"], 1, "{status}");
    let http = warden.http.clone();
    let request = chat("new", "m", "go", 2, false);
    let mut waiting = JoinSet::new();
    waiting.spawn(async move { http.post(CHAT, &request).await });
    wait_until("it waits", SOON, async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 1))
        .await?;
    let (answer, end) = old.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert!(waiting.join_next().await.context("it was asked")???.status.is_success());
    wait_until("nothing is counted any more", SOON, async || {
        warden.status("m").await.is_ok_and(|status| status["backends"][0]["in_flight"] == 0)
    })
    .await
}

#[tokio::test]
async fn two_at_the_same_time_are_one_and_a_load_is_waited_for() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"load_ms": 1500}), "")?.start().await?;
    let program = binaries::llama_warden()?;
    let to = program.to_string_lossy().into_owned();
    let words = ["upgrade", "--to", to.as_str()];
    let one = warden.cli(&words);
    let other = async {
        wait_until("one is under way", SOON, async || !programs(&warden).is_empty()).await?;
        warden.cli(&words).await
    };
    let (one, other) = tokio::join!(one, other);
    // The order of the two is open: a child between fork and exec looks like a second program, too.
    let (one, other) = (one?, other?);
    let (done, refused) = if one.code == 0 { (one, other) } else { (other, one) };
    assert_eq!(done.code, 0, "{done:?}");
    assert!(refused.code != 0 && refused.all().contains("under way"), "{}", refused.all());
    warden.until_ready(1).await.map(drop)
}

#[tokio::test]
async fn what_is_known_of_memory_goes_along() -> Outcome {
    let script = json!({"leak_kib_per_request": 512});
    let top = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
               internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"";
    let plain =
        "args = [\"-np\", \"4\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n";
    let warden = Setup::new()?.top(top).fake("m", &script, plain)?.start().await?;
    warden.until_ready(1).await?;
    let ask = async |from: usize| -> Outcome {
        let requests: Vec<Value> =
            (from..from + 40).map(|n| chat(&format!("g-{n}"), "m", "hi", 2, false)).collect();
        swarm::all_whole(&swarm::swarm(&warden.http, &requests, 4).await)
    };
    let growth = async || -> Result<Value, Trouble> {
        Ok(warden.status("m").await?["backends"][0]["memory"]["growth"][0].clone())
    };
    let work = async || -> Result<u64, Trouble> {
        warden.status("m").await?["backends"][0]["work"]["requests"].as_u64().context("no work")
    };
    let mut asked = 0;
    while growth().await?["verdict"] != "leaking" {
        assert!(asked < 2000, "{}", growth().await?);
        ask(asked).await?;
        asked += 40;
    }
    let (before, done) = (growth().await?, work().await?);
    upgrade(&warden).await?;
    let (after, still) = (growth().await?, work().await?);
    assert_eq!(after["verdict"], before["verdict"], "{before} {after}");
    assert!(still >= done, "{done} {still}");
    // The history still counts after a few more requests.
    ask(asked).await?;
    assert_eq!(growth().await?["verdict"], "leaking");
    wait_until("its work is counted on", SOON, async || work().await.is_ok_and(|all| all >= done + 40)).await
}

struct Client {
    sender: SendRequest<Full<Bytes>>,
    _connection: JoinSet<()>,
}

impl Client {
    async fn over(stream: impl Socket + 'static) -> Result<Self, Trouble> {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut driven = JoinSet::new();
        driven.spawn(async move { drop(connection.await) });
        Ok(Self { sender, _connection: driven })
    }

    /// Sends a chat request; returns at the head of the answer.
    async fn begin(&mut self, id: &str, body: &Value) -> Result<Response<Incoming>, Trouble> {
        self.post(CHAT, id, body).await
    }

    async fn post(&mut self, target: &str, id: &str, body: &Value) -> Result<Response<Incoming>, Trouble> {
        let mut request = json_request(target, body)?;
        request.headers_mut().insert(HOST, "localhost".parse()?);
        self.sender.send_request(request).await.context(id.to_owned())
    }

    /// Sends a request; returns true if the answer closed the connection.
    async fn ask(&mut self, id: &str, body: &Value) -> Result<bool, Trouble> {
        let answer = self.begin(id, body).await?;
        let closes = answer.headers().get(CONNECTION).is_some_and(|value| value == "close");
        let (status, body) = (answer.status(), answer.into_body().collect().await?.to_bytes());
        let good = status.is_success() && !body.is_empty();
        good.then_some(closes).context(format!("{id}: {status} {body:?}"))
    }
}

/// Sends requests on kept TLS connections. A connection that announces its end is replaced; any other end
/// fails the test.
async fn keep_asking(
    identity: Identity,
    address: SocketAddr,
    over: Arc<AtomicBool>,
    pause: Duration,
) -> Result<usize, Trouble> {
    let mut asked = 0;
    'connections: loop {
        let mut client = Client::over(identity.connect(address, &["http/1.1"]).await?).await?;
        loop {
            let id = format!("k{asked}");
            let closes = client.ask(&id, &chat(&id, "m", "hi", 4, asked % 2 == 0)).await?;
            asked += 1;
            if over.load(Ordering::SeqCst) {
                return Ok(asked);
            }
            tokio::time::sleep(pause).await;
            if closes {
                continue 'connections;
            }
        }
    }
}

#[tokio::test]
async fn clients_that_keep_their_connections_lose_no_request_over_tls() -> Outcome {
    let identity = Identity::new()?;
    let setup = Setup::new()?;
    let (cert, key) = identity.put(setup.home.path())?;
    let top = format!("server.tls_cert = '{}'\nserver.tls_key = '{}'", cert.display(), key.display());
    let warden = setup.top(&top).fake("m", &json!({"ms_per_token": 2}), "")?.start().await?;
    warden.until_ready(1).await?;
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for pause in [0, 0, 1, 3, 10, 30, 100, 300] {
        let pause = Duration::from_millis(pause);
        clients.spawn(keep_asking(identity.clone(), warden.address(), Arc::clone(&over), pause));
    }
    for _ in 0..3 {
        upgrade(&warden).await?;
    }
    over.store(true, Ordering::SeqCst);
    while let Some(asked) = clients.join_next().await {
        assert!(asked?? > 0);
    }
    Ok(())
}
