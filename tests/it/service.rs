//! As a service, llama-warden reports its state to the service manager, accepts sockets and credentials, and
//! logs for it.
//!
//! A socket that records messages plays the manager; `service_under_systemd` uses a real one.

mod lasting;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::http::json_request;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Home, Http, Outcome, Trouble, Warden, wait_until};

struct Manager {
    told: Vec<String>,
    more: Receiver<String>,
}

impl Manager {
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    fn at(path: &Path) -> Result<Self, Trouble> {
        let socket = UnixDatagram::bind(path)?;
        let (tell, more) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length) = socket.recv(&mut bytes) {
                if tell.send(String::from_utf8_lossy(&bytes[..length]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { told: Vec::new(), more })
    }

    fn all(&mut self) -> &[String] {
        self.told.extend(self.more.try_iter());
        &self.told
    }

    /// Waits for this number of messages that contain the text.
    async fn hears(&mut self, what: &str, times: usize) -> Outcome {
        let label = format!("the manager hears {what:?} {times} times");
        let heard = wait_until(&label, SOON, async || {
            self.all().iter().filter(|message| message.contains(what)).count() >= times
        });
        match heard.await {
            Ok(()) => Ok(()),
            Err(late) => Err(Trouble::new(format!("{late}; it heard {:#?}", self.all()))),
        }
    }

    fn first(&mut self, what: &str) -> usize {
        self.all().iter().position(|message| message.contains(what)).unwrap_or(usize::MAX)
    }
}

fn managed(setup: Setup) -> Result<(Setup, Manager), Trouble> {
    let mut setup = setup;
    let path = setup.home.path().join("notify");
    let manager = Manager::at(&path)?;
    setup.home.env.insert("NOTIFY_SOCKET".into(), path.into());
    Ok((setup, manager))
}

#[tokio::test]
async fn the_manager_is_told_of_readiness_reloads_requests_and_the_end() -> Outcome {
    let setup = Setup::new()?.top("server.shutdown_deadline = \"20s\"").fake(
        "m",
        &json!({"ms_per_token": 10}),
        "",
    )?;
    let (mut setup, mut manager) = managed(setup)?;
    setup.home.env.insert("WATCHDOG_USEC".into(), "800000".into());
    let mut warden = setup.start().await?;
    manager.hears("READY=1", 1).await?;
    // The watchdog is fed repeatedly while all loops run.
    manager.hears("WATCHDOG=1", 3).await?;
    manager.hears("STATUS=1 of 1 models ready; 0 requests in flight", 1).await?;
    let child = warden.until_ready(1).await?[0];
    assert_eq!(child.variable("NOTIFY_SOCKET"), None, "a child would speak in our name");
    warden.kid.signal(Signal::HUP);
    manager.hears("RELOADING=1\nMONOTONIC_USEC=", 1).await?;
    manager.hears("READY=1", 2).await?;
    let mut flow = warden.http.stream(CHAT, &chat("a", "m", "go", 300, true)).await?;
    flow.event().await?;
    manager.hears("1 requests in flight", 1).await?;
    warden.kid.signal(Signal::TERM);
    manager
        .hears("STOPPING=1\nEXTEND_TIMEOUT_USEC=15000000\nSTATUS=stopping: 1 requests in flight", 1)
        .await?;
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    let (ready, reloading, stopping) =
        (manager.first("READY=1"), manager.first("RELOADING"), manager.first("STOPPING"));
    assert!(ready < reloading && reloading < stopping, "{:#?}", manager.all());
    let lines: Vec<&str> = manager.all().iter().flat_map(|message| message.lines()).collect();
    let known = [
        "READY=",
        "RELOADING=",
        "MONOTONIC_USEC=",
        "STATUS=",
        "STOPPING=",
        "WATCHDOG=",
        "EXTEND_TIMEOUT_USEC=",
    ];
    assert!(lines.iter().all(|line| known.iter().any(|known| line.starts_with(known))), "{lines:#?}");
    Ok(())
}

#[tokio::test]
async fn whoever_is_stopped_as_a_whole_feeds_no_watchdog() -> Outcome {
    let (mut setup, mut manager) = managed(Setup::new()?.fake("m", &json!({}), "")?)?;
    setup.home.env.insert("WATCHDOG_USEC".into(), "400000".into());
    let mut warden = setup.start().await?;
    manager.hears("WATCHDOG=1", 2).await?;
    warden.kid.signal(Signal::STOP);
    wait_until("it says nothing any more", SOON, async || {
        let before = manager.all().len();
        tokio::time::sleep(Duration::from_millis(800)).await;
        manager.all().len() == before
    })
    .await?;
    warden.kid.signal(Signal::CONT);
    let before = manager.all().iter().filter(|message| *message == "WATCHDOG=1").count();
    manager.hears("WATCHDOG=1", before + 2).await
}

#[tokio::test]
async fn why_it_could_not_start_is_told_in_its_status() -> Outcome {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = taken.local_addr()?.port();
    let setup = Setup::new()?.top(&format!("server.port = {port}")).fake("m", &json!({}), "")?;
    let (setup, mut manager) = managed(setup)?;
    assert!(setup.start().await.is_err());
    manager.hears(&format!("STATUS=error: cannot listen on 127.0.0.1:{port}"), 1).await?;
    assert_eq!(manager.first("READY=1"), usize::MAX);
    Ok(())
}

/// Opens these sockets as descriptors from 3 on, and becomes `llama-warden`, as systemd does.
const ACTIVATE: &str = r#"
import os, socket, sys
kinds, names, address, program = sys.argv[1].split(","), sys.argv[2], sys.argv[3], sys.argv[4:]
for number, kind in enumerate(kinds):
    if kind == "unix":
        one = socket.socket(socket.AF_UNIX); one.bind(address)
    elif kind == "udp":
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); one.bind(("127.0.0.1", 0))
    else:
        one = socket.socket(); one.bind(("127.0.0.1", 0))
    if kind in ("unix", "tcp"):
        one.listen(64)
    os.dup2(one.detach(), 3 + number)
    os.set_inheritable(3 + number, True)
os.environ.update(LISTEN_FDS=str(len(kinds)), LISTEN_FDNAMES=names, LISTEN_PID=str(os.getpid()))
os.execv(program[0], program)
"#;

/// Starts llama-warden with sockets of these kinds and names; `Err` has its output.
async fn activated(kinds: &str, names: &str) -> Result<Warden, Trouble> {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let program = warden_rig::binaries::llama_warden()?;
    let admin = setup.home.path().join("handed.sock");
    let args = ["-c", ACTIVATE, kinds, names].into_iter().map(Into::into);
    let words = [admin.into_os_string(), program.into(), "serve".into(), "--config".into(), config.into()];
    setup.start_program(Path::new("/usr/bin/python3"), &args.chain(words).collect::<Vec<_>>()).await
}

#[tokio::test]
async fn sockets_that_the_manager_opened_are_served_and_stay_when_it_ends() -> Outcome {
    let mut warden = activated("tcp,unix", "public:admin").await?;
    let admin = warden.home().path().join("handed.sock");
    let status = Http::unix(&admin).get("/status").await?.json()?;
    assert_eq!(status["instance"]["admin_socket"], json!(admin), "{status}");
    assert!(!warden.admin_socket().exists(), "the configured one is not made as well");
    let answer = warden.http.post(CHAT, &chat("a", "m", "hello", 3, false)).await?;
    assert!(answer.status.is_success(), "{answer:?}");
    warden.kid.signal(Signal::TERM);
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    assert!(admin.exists(), "the file is the manager's");
    Ok(())
}

#[tokio::test]
async fn a_socket_of_the_wrong_kind_is_named_with_what_is_needed() -> Outcome {
    for (kinds, names, wanted) in [
        ("udp", "public", "ListenStream=8080"),
        ("unix", "public", "ListenStream=8080"),
        ("unbound", "public", "does not listen"),
        ("tcp", "metrics", "`metrics`"),
        ("udp", "admin", "ListenStream=/run/llama-warden/admin.sock"),
    ] {
        let told = activated(kinds, names).await.map(drop).err().context(kinds)?.to_string();
        assert!(
            told.contains(wanted) && told.contains("error:") && told.contains("hint:"),
            "{kinds}: {told}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn keys_can_be_credentials_of_the_service() -> Outcome {
    let mut setup = Setup::new()?.top("server.keys = 'credential:keys.toml'").fake("m", &json!({}), "")?;
    std::fs::create_dir_all(setup.home.path().join("handed"))?;
    let made = setup.home.warden(["keys", "new", "alice", "--file", "handed/keys.toml"], SOON).await?;
    assert_eq!(made.code, 0, "{made:?}");
    let handed = setup.home.path().join("handed");
    setup.home.env.insert("CREDENTIALS_DIRECTORY".into(), handed.into());
    let warden = setup.start().await?;
    let asked = chat("a", "m", "hello", 3, false);
    assert_eq!(warden.http.post(CHAT, &asked).await?.status, 401, "without a key");
    let mut request = json_request(CHAT, &asked)?;
    request.headers_mut().insert("authorization", format!("Bearer {}", made.stdout.trim()).parse()?);
    let answer = warden.http.send(request).await?;
    assert!(answer.status.is_success(), "{answer:?}");
    Ok(())
}

#[tokio::test]
async fn no_line_of_the_access_log_is_lost_when_it_is_rotated_under_load() -> Outcome {
    let setup = Setup::new()?;
    let log = setup.home.path().join("access.log");
    let top = format!("log.access = '{}'", log.display());
    let mut warden = setup.top(&top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let rotated = |number: usize| log.with_extension(format!("log.{number}"));
    let lines = |path: &Path| std::fs::read_to_string(path).unwrap_or_default().lines().count();
    let (rounds, each) = (6, 25);
    for round in 1..=rounds {
        let asking = async {
            for number in 0..each {
                let id = format!("{round}-{number}");
                let answer = warden.http.post(CHAT, &chat(&id, "m", "hello", 1, false)).await?;
                assert!(answer.status.is_success(), "{answer:?}");
            }
            Ok::<_, Trouble>(())
        };
        let rotating = async {
            // logrotate renames the old file, creates a new one, and then signals llama-warden.
            std::fs::rename(&log, rotated(round))?;
            if round % 2 == 0 {
                drop(std::fs::File::create(&log)?);
            }
            let pid = rustix::process::Pid::from_raw(warden.kid.pid()).context("a process")?;
            rustix::process::kill_process(pid, Signal::HUP)?;
            let again = || std::fs::metadata(&log).is_ok();
            wait_until("the file is opened anew", SOON, async || again()).await
        };
        let (asked, rotated) = tokio::join!(asking, rotating);
        asked.and(rotated)?;
    }
    let all = || (1..=rounds).map(rotated).chain([log.clone()]).map(|path| lines(&path)).sum::<usize>();
    wait_until(&format!("{} lines, there are {}", rounds * each, all()), SOON, async || {
        all() == rounds * each
    })
    .await?;
    warden.kid.signal(Signal::TERM);
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    assert_eq!(all(), rounds * each);
    Ok(())
}

#[tokio::test]
async fn a_unit_is_installed_shown_and_taken_away_and_nobodys_change_is_lost() -> Outcome {
    let setup = Setup::new()?.top("server.shutdown_deadline = \"5m\"").fake(
        "m",
        &json!({}),
        "lifecycle.stop_grace = \"20s\"",
    )?;
    let home = &setup.home;
    let config = home.file("warden.toml", setup.config())?;
    let run = async |words: &[&str]| {
        let words: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
        home.warden(words, SOON).await
    };
    let config = config.to_str().context("a path")?;
    let unit = home.path().join("config/systemd/user/llama-warden.service");
    let installed = run(&["service", "install", "--user", "--config", config]).await?;
    assert!(
        installed.code == 0 && installed.stdout.contains("systemctl --user enable --now"),
        "{installed:?}"
    );
    let text = std::fs::read_to_string(&unit)?;
    assert!(text.contains("TimeoutStopSec=335\n"), "300 s, 20 s and 15 s: {text}");
    assert_eq!(run(&["service", "show", "--user", "--config", config]).await?.stdout, text);
    std::fs::write(&unit, text.replace("Restart=on-failure", "Restart=always"))?;
    let refused = run(&["service", "install", "--user", "--config", config]).await?;
    assert!(refused.code == 1 && refused.stderr.contains("--force"), "{refused:?}");
    let forced = run(&["service", "install", "--user", "--config", config, "--force"]).await?;
    assert!(forced.code == 0 && forced.stdout.contains("llama-warden.service.old"), "{forced:?}");
    assert!(std::fs::read_to_string(unit.with_extension("service.old"))?.contains("Restart=always"));
    assert_eq!(std::fs::read_to_string(&unit)?, text);
    let gone = run(&["service", "uninstall", "--user"]).await?;
    assert!(gone.code == 0 && !unit.exists(), "{gone:?}");
    let wrong = home.file("wrong.toml", "server.prot = 1")?;
    let wrong = run(&["service", "install", "--user", "--config", wrong.to_str().context("a path")?]).await?;
    assert!(
        wrong.code == 2 && !unit.exists(),
        "a configuration that would not start is told at once: {wrong:?}"
    );
    Ok(())
}

#[tokio::test]
async fn what_the_services_user_cannot_read_or_run_is_told_with_the_command_that_mends_it() -> Outcome {
    let home = Home::new()?;
    let root = home.path().join("root");
    let put = |path: &str, text: &str, mode: u32| -> Outcome {
        let path = root.join(path);
        let folder = path.parent().context("a folder")?;
        std::fs::create_dir_all(folder)?;
        std::fs::write(&path, text)?;
        Ok(std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?)
    };
    put("etc/passwd", "llama-warden:x:901:901::/:\n", 0o644)?;
    put("etc/llama-warden/warden.toml", "[models.m]\nmodel = \"/root/models/m.gguf\"\n", 0o600)?;
    put("root/models/m.gguf", "", 0o644)?;
    put("opt/llama-warden", "", 0o755)?;
    std::fs::set_permissions(root.join("root"), std::fs::Permissions::from_mode(0o700))?;
    let install = async || {
        let args = ["service", "install", "--program", "/opt/llama-warden", "--root"];
        home.warden(args.into_iter().chain(root.to_str()), SOON).await
    };
    let told = install().await?;
    assert_eq!(told.code, 0, "{}", told.all());
    for line in [
        "warning: it could not start: user `llama-warden` cannot read the configuration, /etc/llama-warden/warden.toml\n",
        "warning: it could not start: user `llama-warden` cannot enter /root on the way to models.m.model, /root/models/m.gguf\n",
        "  setfacl -m u:llama-warden:r /etc/llama-warden/warden.toml\n",
        "  setfacl -m u:llama-warden:x /root ",
    ] {
        assert!(told.stdout.contains(line), "{line}: {}", told.all());
    }
    for (path, mode) in [("root", 0o711), ("etc/llama-warden/warden.toml", 0o644)] {
        std::fs::set_permissions(root.join(path), std::fs::Permissions::from_mode(mode))?;
    }
    let told = install().await?;
    assert!(!told.all().contains("warning"), "{}", told.all());
    Ok(())
}

#[tokio::test]
async fn systemd_finds_nothing_wrong_with_the_units() -> Outcome {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return Ok(());
    }
    let setup = Setup::new()?;
    let home = &setup.home;
    let root = home.path().join("root");
    let program = warden_rig::binaries::llama_warden()?;
    let program = program.to_str().context("a path")?;
    for systemd in ["252", "255"] {
        let args = ["service", "install", "--root", root.to_str().context("a path")?];
        let more = ["--socket", "--force", "--run-as", "root", "--systemd", systemd, "--program", program];
        let ran = home.warden(args.into_iter().chain(more), SOON).await?;
        assert_eq!(ran.code, 0, "{ran:?}");
        let units = root.join("etc/systemd/system");
        let verified = Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(units.join("llama-warden.service"))
            .arg(units.join("llama-warden.socket"))
            .output()?;
        let told = String::from_utf8_lossy(&verified.stderr);
        // An older systemd does not know all settings.
        let newer: &[&str] =
            if systemd == "255" { &["notify-reload", "RestartSteps", "RestartMaxDelaySec"] } else { &[] };
        let ours: Vec<&str> = told
            .lines()
            .filter(|line| line.contains("llama-warden") && !newer.iter().any(|word| line.contains(word)))
            .collect();
        assert!(ours.is_empty(), "{told}");
    }
    Ok(())
}

/// Needs a real systemd and journald, in namespaces.
#[tokio::test]
async fn a_real_systemd_starts_it_on_demand_reloads_it_watches_over_it_and_ends_it_without_cutting_a_stream()
-> Outcome {
    let has_systemd =
        Path::new("/lib/systemd/systemd").exists() && Path::new("/lib/systemd/systemd-journald").exists();
    if !has_systemd || !rustix::process::getuid().is_root() {
        return Ok(());
    }
    let setup = Setup::new()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("it/service/under_systemd.sh");
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let (warden, fake) = (warden_rig::binaries::llama_warden()?, warden_rig::binaries::fake_llama()?);
    let words = [script.into_os_string(), setup.home.path().into(), warden.into(), fake.into(), port.into()];
    let ran = setup.home.run(Path::new("/bin/bash"), words, SOON * 5).await?;
    let told: Vec<&str> = ran.stdout.lines().filter_map(|line| line.strip_prefix("TOLD ")).collect();
    if told.iter().any(|line| line.starts_with("skipped")) {
        return Ok(());
    }
    let wanted = [
        "before inactive",
        "on_demand answered",
        "after active running",
        "status 1 of 1 models ready; 0 requests in flight, 0 waiting",
        "reloaded yes",
        "fed yes",
        "watchdog restarted",
        "children gone",
        "anew answered",
        "in_flight yes",
        "stream whole",
        "stopped inactive success",
        // From both processes.
        "journal 2",
        "journal_of_children 2",
        "uninstalled 0",
    ];
    for (number, wanted) in wanted.into_iter().enumerate() {
        let line = told.get(number).copied().unwrap_or_default();
        assert!(line.starts_with(wanted), "{wanted:?} is missing in {told:#?}\n{ran:?}");
    }
    Ok(())
}
