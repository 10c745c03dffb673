//! Long operations: a drain that outlasts the watchdog's limit, also after an upgrade, and logrotate itself.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use flate2::read::GzDecoder;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::UnixDatagram;
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, binaries, wait_until};

/// Watchdog limit of the manager.
const LIMIT: Duration = Duration::from_millis(1500);
/// Time requested by each `EXTEND_TIMEOUT_USEC`.
const MORE: Duration = Duration::from_secs(15);

type Told = Vec<(Instant, String)>;

/// Records the manager's messages until the message `over`.
async fn listen(socket: UnixDatagram) -> Told {
    let (mut told, mut bytes) = (Told::new(), [0; 4096]);
    while let Ok(Ok(length)) = tokio::time::timeout(SOON * 2, socket.recv(&mut bytes)).await {
        let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
        if text == "over" {
            break;
        }
        told.push((Instant::now(), text));
    }
    told
}

/// A llama-warden with a watchdog, and a slow model.
struct Watched {
    warden: Warden,
    hearing: JoinSet<Told>,
    notify: PathBuf,
}

impl Watched {
    async fn start() -> Result<Self, Trouble> {
        let setup = Setup::new()?.top("server.shutdown_deadline = \"30s\"");
        let mut setup = setup.fake("m", &json!({"ms_per_token": 20}), "")?;
        let notify = setup.home.path().join("notify");
        let socket = UnixDatagram::bind(&notify)?;
        setup.home.env.insert("NOTIFY_SOCKET".into(), notify.clone().into());
        setup.home.env.insert("WATCHDOG_USEC".into(), LIMIT.as_micros().to_string().into());
        let mut hearing = JoinSet::new();
        hearing.spawn(listen(socket));
        let warden = setup.start().await?;
        warden.until_ready(1).await?;
        Ok(Self { warden, hearing, notify })
    }

    async fn told(mut self) -> Result<Told, Trouble> {
        UnixDatagram::unbound()?.send_to(b"over", &self.notify).await?;
        Ok(self.hearing.join_next().await.context("somebody listens")??)
    }
}

/// Longest time without a message that contains `word`, from the first such message to the end.
fn longest_without(told: &Told, word: &str, end: Instant) -> Duration {
    let said = told.iter().filter(|(_, text)| text.contains(word)).map(|(at, _)| *at);
    let times: Vec<Instant> = said.chain([end]).collect();
    times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(Duration::MAX)
}

/// Checks that the watchdog is always fed in time, and that the end is in time.
fn judge(told: &Told, began: Instant, ended: Instant) {
    assert!(ended - began > 2 * LIMIT, "it took {:?}: that shows nothing", ended - began);
    let unfed = longest_without(told, "WATCHDOG=1", ended);
    assert!(unfed < LIMIT, "not fed for {unfed:?}: {told:#?}");
    let stopping: Told = told.iter().filter(|(at, _)| *at >= began).cloned().collect();
    let unasked = longest_without(&stopping, "EXTEND_TIMEOUT_USEC=15000000", ended);
    assert!(unasked < MORE, "no time asked for within {unasked:?}: {stopping:#?}");
    assert!(stopping.iter().any(|(_, text)| text.contains("STOPPING=1")), "{told:#?}");
}

#[tokio::test]
async fn a_drain_longer_than_the_watchdogs_patience_is_fed_and_asks_for_more_time_until_its_end() -> Outcome {
    let mut watched = Watched::start().await?;
    let mut flow = watched.warden.http.stream(CHAT, &chat("a", "m", "go", 300, true)).await?;
    flow.event().await?;
    let began = Instant::now();
    watched.warden.kid.signal(Signal::TERM);
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(watched.warden.kid.exit(SOON).await?, 0);
    let ended = Instant::now();
    judge(&watched.told().await?, began, ended);
    Ok(())
}

#[tokio::test]
async fn so_is_one_behind_an_upgrade_whichever_program_has_the_streams() -> Outcome {
    let mut watched = Watched::start().await?;
    let mut old = watched.warden.http.stream(CHAT, &chat("old", "m", "go", 450, true)).await?;
    old.event().await?;
    let program = binaries::llama_warden()?;
    let ran = watched.warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let mut new = watched.warden.http.stream(CHAT, &chat("new", "m", "go", 250, true)).await?;
    new.event().await?;
    let began = Instant::now();
    watched.warden.kid.signal(Signal::TERM);
    for flow in [&mut old, &mut new] {
        let (answer, end) = flow.rest().await;
        assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    }
    assert_eq!(watched.warden.kid.exit(SOON).await?, 0);
    let ended = Instant::now();
    judge(&watched.told().await?, began, ended);
    Ok(())
}

fn lines_of(log: &Path) -> Result<Vec<String>, Trouble> {
    let mut lines = Vec::new();
    for entry in std::fs::read_dir(log.parent().context("a folder")?)? {
        let path = entry?.path();
        let bytes = std::fs::read(&path)?;
        let mut text = String::new();
        if path.extension().is_some_and(|end| end == "gz") {
            GzDecoder::new(&bytes[..]).read_to_string(&mut text)?;
        } else {
            text = String::from_utf8(bytes)?;
        }
        let is_whole = text.is_empty() || text.ends_with('\n');
        is_whole.then_some(()).context(format!("the last line of {} is cut", path.display()))?;
        lines.extend(text.lines().map(str::to_owned));
    }
    Ok(lines)
}

/// The rotation rules of the packages, for this log and this process.
fn snippet(log: &Path, pid: i32) -> Result<String, Trouble> {
    const OURS: [&str; 4] = [
        "/var/log/llama-warden/*.log",
        "systemctl reload llama-warden.service",
        "create 0640 llama-warden llama-warden",
        "\tsu llama-warden llama-warden\n",
    ];
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/logrotate");
    let mut text = std::fs::read_to_string(shipped)?;
    // The service's user and manager do not exist here.
    let here =
        [log.display().to_string(), format!("kill -HUP {pid}"), "create 0640".to_owned(), String::new()];
    for (part, instead) in OURS.into_iter().zip(here) {
        text.contains(part).then_some(()).context(format!("{part:?} in packaging/logrotate"))?;
        text = text.replace(part, &instead);
    }
    Ok(text)
}

/// Sends requests one after the other until `over`; returns their number.
async fn keep_asking(http: Http, client: usize, over: Arc<AtomicBool>) -> Result<usize, Trouble> {
    let mut asked = 0_usize;
    while !over.load(Ordering::SeqCst) {
        let request = chat(&format!("{client}-{asked}"), "m", "hello", 2, asked.is_multiple_of(2));
        let answer = http.post(CHAT, &request).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(answer.text()));
        }
        asked += 1;
    }
    Ok(asked)
}

#[tokio::test]
async fn logrotate_with_the_shipped_snippet_loses_and_cuts_no_line_under_load_and_across_an_upgrade()
-> Outcome {
    if std::process::Command::new("logrotate").arg("--version").output().is_err() {
        assert!(std::env::var_os("WARDEN_TEST_LOGROTATE").is_none(), "logrotate is not here");
        return Ok(());
    }
    let setup = Setup::new()?;
    let folder = setup.home.path().join("log");
    std::fs::create_dir(&folder)?;
    let log = folder.join("access.log");
    let top = format!("log.access = '{}'\nlog.format = \"json\"", log.display());
    let args = "args = [\"-np\", \"8\", \"--metrics\"]\n";
    let warden = setup.top(&top).fake("m", &json!({}), args)?.start().await?;
    warden.until_ready(1).await?;
    let rules = warden.home().file("rotate.conf", snippet(&log, warden.kid.pid())?)?;
    // logrotate refuses files that others can write.
    for (path, mode) in [(&rules, 0o644), (&folder, 0o755)] {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
    }
    let over = Arc::new(AtomicBool::new(false));
    let mut asking = JoinSet::new();
    for client in 0..4 {
        asking.spawn(keep_asking(warden.http.clone(), client, over.clone()));
    }
    let state = warden.home().path().join("rotate.state");
    let words = ["--force", "--state", &state.to_string_lossy(), &rules.to_string_lossy()].map(str::to_owned);
    for round in 1..=6 {
        if round == 4 {
            let program = binaries::llama_warden()?;
            let ran = warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
            assert_eq!(ran.code, 0, "{ran:?}");
        }
        let has_lines = || log.metadata().is_ok_and(|file| file.len() > 2000);
        wait_until("there are lines to rotate", SOON, async || has_lines()).await?;
        let ran = warden.home().run(Path::new("logrotate"), &words, SOON).await?;
        assert!(ran.code == 0 && ran.stderr.is_empty(), "{ran:?}");
        let files = std::fs::read_dir(&folder)?.count();
        assert!(files > round, "{files} files after {round} rounds: {ran:?}");
    }
    over.store(true, Ordering::SeqCst);
    let mut asked = 0;
    while let Some(one) = asking.join_next().await {
        asked += one??;
    }
    wait_until("all lines are written", SOON, async || {
        lines_of(&log).is_ok_and(|lines| lines.len() >= asked)
    })
    .await?;
    let lines = lines_of(&log)?;
    assert_eq!(lines.len(), asked);
    for line in &lines {
        let told: Value = serde_json::from_str(line).context(format!("a whole line: {line:?}"))?;
        assert_eq!(told["status"], 200, "{line}");
    }
    Ok(())
}
