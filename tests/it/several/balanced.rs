//! Three instances behind a real balancer.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hyper::StatusCode;
use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinSet;
use warden_rig::process::Kid;
use warden_rig::warden::{CHAT, SOON, chat};
use warden_rig::{Context as _, Home, Http, Outcome, Trouble, binaries, http, ports, wait_until};

use super::alone::Probed;

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
const CLIENTS: usize = 64;
const EACH: usize = 12;
const WORD: &str = "x-warden-conversation";

/// Path of a program; if it is missing and this variable requires it, the run fails.
#[expect(clippy::print_stderr, reason = "a test that is left out says so")]
fn program(name: &str, required: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file());
    assert!(found.is_some() || std::env::var_os(required).is_none(), "{name} must be installed here");
    if found.is_none() {
        eprintln!("skipped: {name} is not installed");
    }
    found
}

struct Group {
    all: Vec<Probed>,
    balancer: Kid,
    http: Http,
    _home: Home,
}

const HOSTS: [&str; 3] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"];

/// The shipped configuration of `HAProxy`, with the addresses of this machine.
fn haproxy_config(all: &[Probed], port: u16) -> Result<String, Trouble> {
    let text = std::fs::read_to_string(Path::new(DOCS).join("haproxy/haproxy.cfg"))?;
    let line = |line: &str| {
        let own = HOSTS.iter().zip(all).find(|(host, _)| line.contains(&format!(" {host}:8080")));
        let line = own.map_or_else(
            || line.to_owned(),
            |(host, own)| {
                line.replace(&format!("{host}:8080"), &own.warden.address().to_string())
                    .replace(" port 8081", &format!(" port {}", own.probe_port))
                    .replace("agent-port 8082", &format!("agent-port {}", own.agent.port()))
            },
        );
        line.replace("127.0.0.1:8000", &format!("127.0.0.1:{port}")) + "\n"
    };
    Ok(text.lines().map(line).collect())
}

/// The shipped configuration of Envoy, where a host's probe address follows its address.
fn envoy_config(all: &[Probed], port: u16) -> Result<String, Trouble> {
    let text = std::fs::read_to_string(Path::new(DOCS).join("envoy/envoy.yaml"))?;
    let mut text = text.replace("port_value: 8000", &format!("port_value: {port}"));
    for (host, own) in HOSTS.iter().zip(all) {
        let theirs = format!("address: {host}, port_value: 8080");
        let ours = format!("address: 127.0.0.1, port_value: {}", own.warden.address().port());
        let (before, after) = text.split_once(&theirs).context(format!("{host} is not in the file"))?;
        let after = after.replacen("port_value: 8081", &format!("port_value: {}", own.probe_port), 1);
        text = format!("{before}{ours}{after}");
    }
    Ok(text)
}

impl Group {
    async fn start(
        program: &Path,
        file: &str,
        config: fn(&[Probed], u16) -> Result<String, Trouble>,
        words: &[&str],
    ) -> Result<Self, Trouble> {
        let mut all = Vec::new();
        for _ in HOSTS {
            let top = "probe.drain_delay = \"2s\"\nserver.shutdown_deadline = \"20s\"";
            all.push(Probed::start(&json!({"ms_per_token": 5}), top, "").await?);
        }
        let (home, port) = (Home::new()?, ports::free()?);
        let config = home.file(file, config(&all, port)?)?;
        let args: Vec<OsString> = words.iter().map(OsString::from).chain([config.into()]).collect();
        let balancer = Kid::start(program, &args, &home.env, home.path(), home.path().join("balancer.log"))?;
        let http = Http::Tcp(([127, 0, 0, 1], port).into());
        let answers = async || http.get("/v1/models").await.is_ok_and(|answer| answer.status == 200);
        let ready = wait_until("the balancer answers", SOON, answers).await;
        ready.map_err(|late| Trouble::new(format!("{late}: {}", balancer.output())))?;
        Ok(Self { all, balancer, http, _home: home })
    }

    async fn haproxy() -> Result<Option<Self>, Trouble> {
        let Some(program) = program("haproxy", "WARDEN_TEST_HAPROXY") else { return Ok(None) };
        Self::start(&program, "haproxy.cfg", haproxy_config, &["-db", "-f"]).await.map(Some)
    }

    async fn envoy() -> Result<Option<Self>, Trouble> {
        let Some(program) = program("envoy", "WARDEN_TEST_ENVOY") else { return Ok(None) };
        let words = ["--concurrency", "2", "--use-dynamic-base-id", "--log-level", "warn", "-c"];
        Self::start(&program, "envoy.yaml", envoy_config, &words).await.map(Some)
    }

    fn executed(&self, id: &str) -> Result<Vec<usize>, Trouble> {
        let mut found = Vec::new();
        for (n, own) in self.all.iter().enumerate() {
            if own.warden.ledger().executions()?.contains_key(id) {
                found.push(n);
            }
        }
        Ok(found)
    }

    async fn turn(&self, id: &str, text: &str, word: Option<&str>) -> Result<String, Trouble> {
        let mut request = http::json_request(CHAT, &chat(id, "m", text, 3, false))?;
        if let Some(word) = word {
            request.headers_mut().insert(WORD, word.parse()?);
        }
        let answer = self.http.send(request).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(format!("{id}: {}: {}", answer.status, answer.text())));
        }
        Ok(answer.header(WORD).to_owned())
    }
}

#[derive(Default)]
struct Books {
    done: AtomicUsize,
    cut: AtomicUsize,
}

/// Sends requests one after the other, half of them streams; fails if the balancer could have repeated a
/// failed request.
async fn client(n: usize, http: Http, books: Arc<Books>) -> Outcome {
    for turn in 0..EACH {
        let (id, streams) = (format!("c{n}-{turn}"), turn % 2 == 0);
        let body = chat(&id, "m", &format!("words of client {n}"), 20, streams);
        let failed = |status: StatusCode, text: &str| Err(Trouble::new(format!("{id}: {status}: {text}")));
        if streams {
            let mut flow = http.stream(CHAT, &body).await.context(&id)?;
            if !flow.status().is_success() {
                return failed(flow.status(), "");
            }
            let (answer, end) = flow.rest().await;
            if !(end.is_ok() && answer.is_whole()) {
                books.cut.fetch_add(1, Ordering::Relaxed);
            }
        } else {
            let answer = http.post(CHAT, &body).await.context(&id)?;
            if !(answer.status.is_success() && answer.answer()?.is_whole()) {
                return failed(answer.status, &answer.text());
            }
        }
        books.done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// With 64 clients, one instance is drained and ended, one upgraded in place, one killed.
#[expect(clippy::print_stdout, reason = "figures for whoever reads the output")]
async fn troubles(mut group: Group) -> Outcome {
    let books = Arc::new(Books::default());
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        clients.spawn(client(n, group.http.clone(), books.clone()));
    }
    let done = async |share: usize| {
        let enough = async || books.done.load(Ordering::Relaxed) >= CLIENTS * EACH * share / 100;
        wait_until(&format!("{share} % are done"), SOON * 4, enough).await
    };
    let disturb = async {
        done(15).await?;
        group.all[0].warden.kid.signal(Signal::TERM);
        assert_eq!(group.all[0].warden.kid.exit(SOON * 2).await?, 0);
        assert_eq!(books.cut.load(Ordering::Relaxed), 0, "a drain cuts no stream");
        let third = &group.all[2].warden;
        let before = third.until_ready(1).await?;
        let program = binaries::llama_warden()?.display().to_string();
        let ran = third.cli(&["upgrade", "--to", &program]).await?;
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(third.until_ready(1).await?, before, "its llama-server goes on");
        assert_eq!(books.cut.load(Ordering::Relaxed), 0, "an upgrade cuts no stream");
        let so_far = books.done.load(Ordering::Relaxed);
        assert!(so_far < CLIENTS * EACH, "it was upgraded under load");
        done(50).await?;
        group.all[1].warden.kid.signal(Signal::KILL);
        Outcome::Ok(())
    };
    let all = async {
        while let Some(ended) = clients.join_next().await {
            ended??;
        }
        Outcome::Ok(())
    };
    if let Err(trouble) = tokio::try_join!(disturb, all) {
        return Err(Trouble::new(format!("{trouble}\n{}", group.balancer.output())));
    }
    let (done, cut) = (books.done.load(Ordering::Relaxed), books.cut.load(Ordering::Relaxed));
    println!(
        "{done} requests, 1 instance drained, 1 upgraded, 1 killed: 0 requests failed, {cut} streams cut by the kill"
    );
    assert_eq!(done, CLIENTS * EACH);
    // Only streams on that instance may be cut, and at most half of the clients stream at a time.
    assert!(cut <= CLIENTS, "{cut}");
    assert!(group.balancer.ended().is_none(), "{}", group.balancer.output());
    Ok(())
}

#[tokio::test]
async fn behind_haproxy_a_drain_an_upgrade_and_a_kill_cost_64_clients_no_request() -> Outcome {
    let Some(group) = Group::haproxy().await? else { return Ok(()) };
    troubles(group).await
}

#[tokio::test]
async fn behind_envoy_a_drain_an_upgrade_and_a_kill_cost_64_clients_no_request() -> Outcome {
    let Some(group) = Group::envoy().await? else { return Ok(()) };
    troubles(group).await
}

/// If an instance dies during a very long prompt, the balancer sends it to another one.
async fn long_prompt(mut group: Group) -> Outcome {
    let text = "word ".repeat(800 * 1024 / 5);
    let (http, request) = (group.http.clone(), chat("long", "m", &text, 400, false));
    let asking = http.post(CHAT, &request);
    let killing = async {
        wait_until("somebody has it", SOON, async || group.executed("long").is_ok_and(|at| at.len() == 1))
            .await?;
        let at = group.executed("long")?[0];
        group.all[at].warden.kid.signal(Signal::KILL);
        Ok::<_, Trouble>(at)
    };
    let (answer, first) = tokio::join!(asking, killing);
    let (answer, first) = (answer?, first?);
    assert!(answer.status.is_success(), "{}: {}", answer.status, answer.text());
    assert!(answer.answer()?.is_whole());
    let executed = group.executed("long")?;
    assert!(executed.len() == 2 && executed.contains(&first), "{executed:?}");
    Ok(())
}

#[tokio::test]
async fn behind_haproxy_a_long_prompt_is_sent_again() -> Outcome {
    let Some(group) = Group::haproxy().await? else { return Ok(()) };
    long_prompt(group).await
}

#[tokio::test]
async fn behind_envoy_a_long_prompt_is_sent_again() -> Outcome {
    let Some(group) = Group::envoy().await? else { return Ok(()) };
    long_prompt(group).await
}

/// A conversation stays at its instance, and after a drain at another one.
async fn conversation(mut group: Group, from_the_first: bool) -> Outcome {
    let word = group.turn("t0", "a long prompt", None).await?;
    assert_eq!(word.len(), 16, "{word:?}");
    let mut places = Vec::new();
    for n in 1..9 {
        let id = format!("t{n}");
        assert_eq!(group.turn(&id, "a long prompt and more", Some(&word)).await?, word, "the word stays");
        places.push(group.executed(&id)?);
    }
    assert!(places.iter().all(|place| *place == places[0] && place.len() == 1), "{places:?}");
    if from_the_first {
        assert_eq!(group.executed("t0")?, places[0], "the first turn, too");
    }
    let home = places[0][0];
    group.all[home].warden.kid.signal(Signal::TERM);
    let (mut n, mut last) = (0, home);
    let moved = wait_until("it goes on elsewhere", SOON, async || {
        n += 1;
        let id = format!("m{n}");
        // No request fails meanwhile.
        let turn = group.turn(&id, "a long prompt and more", Some(&word)).await;
        assert!(turn.is_ok(), "{turn:?}");
        last = group.executed(&id).ok().and_then(|at| at.first().copied()).unwrap_or(home);
        last != home
    });
    moved.await?;
    assert_eq!(group.all[home].warden.kid.exit(SOON * 2).await?, 0);
    for n in 0..8 {
        let id = format!("s{n}");
        group.turn(&id, "a long prompt and more", Some(&word)).await?;
        assert_eq!(group.executed(&id)?, [last], "it stays there");
    }
    Ok(())
}

#[tokio::test]
async fn behind_haproxy_a_conversation_goes_back_to_where_it_was() -> Outcome {
    let Some(group) = Group::haproxy().await? else { return Ok(()) };
    conversation(group, true).await
}

#[tokio::test]
async fn behind_envoy_a_conversation_goes_back_to_where_it_was() -> Outcome {
    let Some(group) = Group::envoy().await? else { return Ok(()) };
    conversation(group, false).await
}

const TOGETHER: usize = 12;

async fn shares(group: &Group, round: usize) -> Result<[usize; 3], Trouble> {
    let mut asking = JoinSet::new();
    for n in 0..TOGETHER {
        let (http, id) = (group.http.clone(), format!("r{round}-{n}"));
        // Long answers, so that all requests overlap.
        let body = chat(&id, "m", "other words", 200, false);
        asking.spawn(async move {
            let answer = http.post(CHAT, &body).await?;
            if answer.status.is_success() { Ok(id) } else { Err(Trouble::new(answer.text())) }
        });
    }
    let mut shares = [0; 3];
    while let Some(id) = asking.join_next().await {
        for place in group.executed(&id??)? {
            shares[place] += 1;
        }
    }
    Ok(shares)
}

#[tokio::test]
async fn haproxy_hears_how_much_each_can_take_and_who_leaves() -> Outcome {
    let Some(group) = Group::haproxy().await? else { return Ok(()) };
    let own = &group.all[0];
    let mut round = 0;
    let mut until = async |what: &str, holds: fn([usize; 3]) -> bool| {
        wait_until(what, SOON * 2, async || {
            round += 1;
            shares(&group, round).await.is_ok_and(holds)
        })
        .await
    };
    until("each gets a third", |shares| shares.iter().all(|share| (3..=5).contains(share))).await?;
    // Clients that HAProxy does not see take three of its four slots.
    let mut flows = Vec::new();
    for n in 0..3 {
        let body = chat(&format!("direct-{n}"), "m", "go", 1_000_000, true);
        let mut flow = own.warden.http.stream(CHAT, &body).await?;
        flow.event().await?;
        flows.push(flow);
    }
    let busy = async || own.line().await.is_ok_and(|line| line == "ready up 33% maxconn:8\n");
    wait_until("its weight sinks", SOON, busy).await?;
    until("the busy one gets little", |shares| (1..=2).contains(&shares[0])).await?;
    drop(flows);
    assert_eq!(own.warden.cli(&["drain", "--all"]).await?.code, 0);
    until("who leaves gets nothing", |shares| shares[0] == 0).await?;
    assert_eq!(own.warden.cli(&["drain", "--all", "--undo"]).await?.code, 0);
    until("who is back gets its share", |shares| shares[0] >= 3).await
}
