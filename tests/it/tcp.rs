//! With `socket = "tcp"`, a model's process serves on a port of 127.0.0.1 as on its socket, and no request
//! reaches another program that has taken the port.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use warden_rig::swarm::{all_whole, names, requests, same, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Fake, Http, Outcome, Trouble, Warden, binaries, wait_until};

const TCP: &str = "socket = \"tcp\"\n";

fn port(warden: &Warden) -> Option<SocketAddr> {
    let [backend] = warden.backends()[..] else { return None };
    match backend.http()? {
        Http::Tcp(address) => Some(address),
        _ => None,
    }
}

/// Another program on a port: answers 200, and records the bytes of each connection.
struct Stranger {
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

impl Stranger {
    fn at(listener: TcpListener) -> Self {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (heard, mut tasks) = (asked.clone(), JoinSet::new());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let heard = heard.clone();
                connections.spawn(async move {
                    let mut bytes = vec![0; 64 * 1024];
                    loop {
                        let length = stream.read(&mut bytes).await.unwrap_or(0);
                        let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                        heard.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                        if length == 0 {
                            break;
                        }
                        let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"status\":\"ok\"}";
                        let _gone = stream.write_all(answer).await;
                    }
                });
            }
        });
        Self { asked, _tasks: tasks }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn got_nothing(&self) -> Outcome {
        match self.asked().iter().find(|asked| !asked.is_empty()) {
            None => Ok(()),
            Some(asked) => Err(Trouble::new(format!("a stranger was sent {asked:?}"))),
        }
    }
}

#[tokio::test]
async fn a_process_behind_a_port_is_replaced_under_load_and_nothing_fails() -> Outcome {
    let paced = json!({"ms_per_token": 2});
    let all = requests("r", "m", 120, 10);
    let undisturbed = swarm(&Fake::start(&paced, &["-np", "4"]).await?.http, &all, 8).await;
    for replace in ["sequential", "overlap"] {
        let lines = format!("{TCP}replace = \"{replace}\"");
        let warden = Setup::new()?.fake("m", &paced, &lines)?.start().await?;
        warden.until_ready(1).await?;
        let first = port(&warden).context("no port")?;
        assert!(first.ip().is_loopback(), "{first}");
        let (disturbed, restarts) = tokio::join!(swarm(&warden.http, &all, 8), warden.restart("m", 2));
        restarts?;
        same(&undisturbed, &disturbed)?;
        warden.ledger().each_finished_once(names(&all))?;
        assert!(warden.ledger().generations()? >= 2, "{replace}: no restart fell into the load");
    }
    Ok(())
}

#[tokio::test]
async fn a_dead_process_behind_a_port_costs_those_nothing_who_come_after() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), TCP)?.start().await?;
    let first = warden.until_ready(1).await?[0];
    all_whole(&swarm(&warden.http, &requests("before", "m", 8, 4), 4).await)?;
    first.signal(Signal::KILL);
    // Connections stay open as long as one thread runs, and requests on them may be executed.
    let proc = format!("/proc/{}", first.pid);
    wait_until("it is reaped", SOON, async || !Path::new(&proc).exists()).await?;
    // Later requests wait for the next process, whether llama-warden has noticed the end or not.
    let after = requests("after", "m", 8, 4);
    all_whole(&swarm(&warden.http, &after, 4).await)?;
    assert_ne!(warden.until_ready(1).await?[0], first);
    Ok(())
}

/// A program that waits for the file `go` before it first listens, and then runs the fake.
fn waiting_fake(folder: &Path) -> Result<std::path::PathBuf, Trouble> {
    let (fake, here) = (binaries::fake_llama()?, folder.display());
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *--host*) ;; *) exec '{}' \"$@\";; esac\n\
         if [ ! -e '{here}/go' ]; then\n  : > '{here}/waits'\n  while [ ! -e '{here}/go' ]; do sleep 0.05; done\nfi\n\
         exec '{}' \"$@\"\n",
        fake.display(),
        fake.display(),
    );
    let path = folder.join("waiting-fake");
    std::fs::write(&path, script)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

#[tokio::test]
async fn a_port_that_another_program_took_first_gets_connections_and_not_a_byte() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), TCP)?;
    let folder = setup.home.path().to_owned();
    let fake = binaries::fake_llama()?;
    let waiting = waiting_fake(&folder)?;
    let config = setup
        .config()
        .replace(&format!("binary = '{}'", fake.display()), &format!("binary = '{}'", waiting.display()));
    let file = setup.home.file("warden.toml", config)?;
    let mut warden = setup.start_with(&["serve".into(), "--config".into(), file.into()]).await?;
    wait_until("the process is about to listen", SOON, async || {
        folder.join("waits").exists() && port(&warden).is_some()
    })
    .await?;
    let taken = port(&warden).context("no port")?;
    let stranger = Stranger::at(TcpListener::bind(taken).await.context(taken)?);
    let asking = {
        let http = warden.http.clone();
        JoinSet::from_iter([async move { http.post(CHAT, &chat("c", "m", "hi", 4, true)).await }])
    };
    wait_until("it is connected to the stranger again and again", SOON, async || stranger.asked().len() >= 5)
        .await?;
    wait_until("the request waits", SOON, async || {
        warden.waiting("m").await.is_ok_and(|waiting| waiting == 1)
    })
    .await?;
    assert_eq!(warden.state("m").await?, "loading", "an answer of somebody else counted");
    warden.says("another program listens on").await?;
    stranger.got_nothing()?;
    // The process finds its port taken and ends; the next one gets another port.
    std::fs::write(folder.join("go"), "")?;
    let answers = asking.join_all().await;
    let answer = answers.into_iter().next().context("no answer")??;
    assert!(answer.answer()?.is_whole(), "{}", answer.text());
    assert_ne!(port(&warden), Some(taken));
    warden.ledger().each_finished_once(["c"])?;
    stranger.got_nothing()
}

#[tokio::test]
async fn a_port_that_another_program_takes_over_from_a_dead_process_gets_nothing() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({"ms_per_token": 1}), TCP)?.start().await?;
    let mut strangers = Vec::new();
    for round in 0..3 {
        let backend = warden.until_ready(1).await?[0];
        let taken = port(&warden).context("no port")?;
        let all = requests(&format!("r{round}"), "m", 60, 4);
        let steal = async {
            backend.signal(Signal::KILL);
            loop {
                match TcpListener::bind(taken).await {
                    Ok(listener) => break Stranger::at(listener),
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let (answers, stranger) = tokio::join!(swarm(&warden.http, &all, 8), steal);
        // Each answer is whole, or an error after a possible execution.
        drop(answers);
        strangers.push(stranger);
        let next = requests(&format!("n{round}"), "m", 8, 4);
        all_whole(&swarm(&warden.http, &next, 4).await)?;
    }
    strangers.iter().try_for_each(Stranger::got_nothing)
}
