//! Promise: a server that its wrapper moved out of the process group, or left behind, is measured, watched
//! and stopped like any other. If it cannot be measured, llama-warden says so.

use std::path::{Path, PathBuf};

use procfs::process::all_processes;
use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::{ProcessId, children_of};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Fake, Outcome, Trouble, Warden, binaries, wait_for, wait_until};

/// Starts the server in another session, and ends.
const BACKGROUND: &str = "setsid \"$fake\" \"$@\" &\nexit 0";
/// Starts the server in another session, and stays without passing signals on.
const FOREGROUND: &str = "setsid \"$fake\" \"$@\" &\nwait";
/// Starts the server as a daemon, by a child of a child.
pub(crate) const TWICE: &str = "setsid sh -c '\"$0\" \"$@\" & exit 0' \"$fake\" \"$@\"\nexit 0";
/// Leaves the server in the process group, and ends.
const IN_GROUP: &str = "\"$fake\" \"$@\" &\nexit 0";

const OFTEN: &str = "sensors.interval = \"50ms\"";
pub(crate) const MIB: u64 = 1 << 20;

/// A llama-warden whose model is started by a script. If a test fails, remaining servers are killed.
pub(crate) struct Wrapped {
    pub(crate) warden: Warden,
    pub(crate) servers: Servers,
}

pub(crate) struct Servers(pub(crate) PathBuf);

impl Servers {
    /// All servers of this home, by their listening address.
    pub(crate) fn all(&self) -> Vec<ProcessId> {
        let fake = |process: procfs::process::Process| {
            let line = process.cmdline().ok()?;
            let is_fake = Path::new(line.first()?).file_name()? == "fake-llama";
            let script = process.environ().ok()?.remove(std::ffi::OsStr::new("FAKE_LLAMA_SCRIPT"))?;
            (is_fake && Path::new(&script).starts_with(&self.0)).then(|| ProcessId::of(process.pid()))?
        };
        all_processes().into_iter().flatten().flatten().filter_map(fake).collect()
    }

    /// Processes of this home started as `sleep 4321`.
    fn helpers(&self) -> Vec<ProcessId> {
        let all = all_processes().into_iter().flatten().flatten();
        let is_helper = |process: &procfs::process::Process| {
            let environ = process.environ().unwrap_or_default();
            let script = environ.get(std::ffi::OsStr::new("FAKE_LLAMA_SCRIPT"));
            script.is_some_and(|script| Path::new(script).starts_with(&self.0))
                && process.cmdline().is_ok_and(|line| line.contains(&"4321".to_owned()))
        };
        all.filter(is_helper).filter_map(|process| ProcessId::of(process.pid())).collect()
    }

    async fn one_but(&self, old: Option<ProcessId>) -> Result<ProcessId, Trouble> {
        wait_for("one server runs", SOON, async || match self.all().as_slice() {
            [one] if Some(*one) != old => Some(*one),
            _ => None,
        })
        .await
    }

    pub(crate) async fn until_none(&self) -> Outcome {
        wait_until("no server runs", SOON, async || self.all().is_empty()).await
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for server in self.all().into_iter().chain(self.helpers()) {
            server.signal(Signal::KILL);
        }
    }
}

/// A script that runs `body` to start a listening fake, and otherwise the fake itself.
fn wrapper(setup: &Setup, body: &str) -> Result<PathBuf, Trouble> {
    let fake = binaries::fake_llama()?.display().to_string();
    let text = format!(
        "#!/bin/sh\nfake='{fake}'\ncase \"$*\" in *--host*) ;; *) exec \"$fake\" \"$@\";; esac\n{body}\n"
    );
    setup.home.program("wrapper", text)
}

async fn start(body: &str, script: &Value, toml: &str) -> Result<Wrapped, Trouble> {
    start_as(&binaries::llama_warden()?, Setup::new()?, body, script, toml).await
}

/// Starts another program that is llama-warden.
pub(crate) async fn start_as(
    program: &Path,
    setup: Setup,
    body: &str,
    script: &Value,
    toml: &str,
) -> Result<Wrapped, Trouble> {
    let setup = setup.top(OFTEN).fake("m", script, toml)?;
    let wrapper = wrapper(&setup, body)?;
    let fake = format!("binary = '{}'", binaries::fake_llama()?.display());
    let config = setup.config().replace(&fake, &format!("binary = '{}'", wrapper.display()));
    let servers = Servers(setup.home.path().to_owned());
    let file = setup.home.file("warden.toml", config)?;
    let args = ["serve".into(), "--config".into(), file.into()];
    Ok(Wrapped { warden: setup.start_program(program, &args).await?, servers })
}

impl Wrapped {
    async fn backend(&self) -> Result<Value, Trouble> {
        let backends = self.warden.status("m").await?["backends"].clone();
        backends.as_array().and_then(|all| all.first()).cloned().context("no process")
    }

    pub(crate) async fn until_ready(&self, old: Option<ProcessId>) -> Result<ProcessId, Trouble> {
        let server = self.servers.one_but(old).await?;
        wait_until("the model is ready", SOON, async || {
            self.backend().await.is_ok_and(|backend| backend["phase"] == "ready")
        })
        .await?;
        Ok(server)
    }

    pub(crate) async fn until_measured(&self, at_least: u64) -> Outcome {
        wait_until("its memory is measured", SOON, async || {
            let backend = self.backend().await.unwrap_or_default();
            backend["host"]["anon"].as_u64().is_some_and(|bytes| bytes >= at_least)
        })
        .await
    }

    pub(crate) async fn serves(&self, id: &str) -> Outcome {
        let answer = self.warden.http.post(CHAT, &chat(id, "m", "hi", 4, false)).await?.answer()?;
        assert!(answer.is_whole(), "{answer:?}");
        Ok(())
    }
}

async fn is_measured_and_stopped(body: &str, toml: &str) -> Outcome {
    let wrapped = start(body, &json!({"base_mib": 64}), toml).await?;
    until_measured_and_stopped(wrapped).await
}

/// Checks that the server, of 64 MiB, is measured, replaced and stopped.
pub(crate) async fn until_measured_and_stopped(mut wrapped: Wrapped) -> Outcome {
    let old = wrapped.until_ready(None).await?;
    wrapped.until_measured(64 * MIB).await?;
    assert_eq!(wrapped.backend().await?["memory"]["unmeasured"], Value::Null);
    wrapped.serves("old").await?;
    wrapped.warden.restart("m", 1).await?;
    let new = wrapped.until_ready(Some(old)).await?;
    wrapped.until_measured(64 * MIB).await?;
    wrapped.serves("new").await?;
    assert_eq!(wrapped.warden.status("m").await?["crashes"], 0);
    assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
    wrapped.servers.until_none().await?;
    assert!(!new.is_alive());
    Ok(())
}

#[tokio::test]
async fn a_server_left_behind_in_another_session_is_measured_and_stopped() -> Outcome {
    is_measured_and_stopped(BACKGROUND, "").await
}

#[tokio::test]
async fn a_server_in_another_session_whose_wrapper_waits_is_measured_and_stopped() -> Outcome {
    is_measured_and_stopped(FOREGROUND, "").await
}

#[tokio::test]
async fn a_server_that_became_a_daemon_is_measured_and_stopped() -> Outcome {
    is_measured_and_stopped(TWICE, "").await
}

#[tokio::test]
async fn a_server_left_behind_in_its_group_is_measured_and_stopped() -> Outcome {
    is_measured_and_stopped(IN_GROUP, "").await
}

#[tokio::test]
async fn a_server_left_behind_that_listens_on_a_port_is_measured_and_stopped() -> Outcome {
    is_measured_and_stopped(BACKGROUND, "socket = \"tcp\"\n").await
}

#[tokio::test]
async fn a_server_left_behind_that_ignores_sigterm_is_killed() -> Outcome {
    let grace = "lifecycle.stop_grace = \"300ms\"\n";
    for body in [BACKGROUND, FOREGROUND] {
        let mut wrapped = start(body, &json!({"on_term": "ignore"}), grace).await?;
        let old = wrapped.until_ready(None).await?;
        wrapped.warden.restart("m", 1).await?;
        wrapped.until_ready(Some(old)).await?;
        assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
        wrapped.servers.until_none().await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_server_left_behind_that_crashes_is_seen_to_and_replaced() -> Outcome {
    for body in [BACKGROUND, FOREGROUND, TWICE] {
        let wrapped = start(body, &json!({}), "").await?;
        let old = wrapped.until_ready(None).await?;
        let shown =
            (wrapped.backend().await?["pid"].clone(), wrapped.warden.status("m").await?["crashes"].clone());
        assert_eq!(shown, (json!(old.pid), json!(0)), "{body}");
        wait_until("the fake dies", SOON, async || {
            // The runtime's handler ignores the first signal.
            old.signal(Signal::SEGV);
            !old.is_alive()
        })
        .await?;
        wrapped.until_ready(Some(old)).await?;
        assert_eq!(wrapped.warden.status("m").await?["crashes"], 1, "{body}");
        wrapped.serves("after").await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_server_left_behind_goes_along_to_the_next_program_and_is_watched_by_it() -> Outcome {
    for body in [BACKGROUND, FOREGROUND] {
        let mut wrapped = start(body, &json!({"base_mib": 64}), "").await?;
        let old = wrapped.until_ready(None).await?;
        let program = binaries::llama_warden()?;
        let ran = wrapped.warden.cli(&["upgrade", "--to", &program.to_string_lossy()]).await?;
        assert_eq!(ran.code, 0, "{ran:?}");
        wrapped.serves("upgraded").await?;
        wrapped.until_measured(64 * MIB).await?;
        assert_eq!(wrapped.servers.all(), [old]);
        old.signal(Signal::KILL);
        let new = wrapped.until_ready(Some(old)).await?;
        assert_eq!(wrapped.warden.status("m").await?["crashes"], 1, "{body}");
        wrapped.until_measured(64 * MIB).await?;
        wrapped.warden.restart("m", 1).await?;
        wrapped.until_ready(Some(new)).await?;
        wrapped.serves("replaced").await?;
        assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
        wrapped.servers.until_none().await?;
    }
    Ok(())
}

/// A script whose socket leads to an older server.
fn borrowed(other: &Fake, then: &str) -> String {
    let socket = other.directory().join("fake.sock");
    format!(
        "while [ $# -gt 0 ]; do [ \"$1\" = --host ] && ln -s '{}' \"$2\"; shift; done\n{then}",
        socket.display()
    )
}

#[tokio::test]
async fn of_a_server_that_cannot_be_measured_that_is_said_and_no_budget_acts_on_its_wrapper() -> Outcome {
    let other = Fake::start(&json!({}), &[]).await?;
    let tiny = "policy.host.hard = \"64KiB\"\n";
    let wrapped = start(&borrowed(&other, "exec sleep 1000"), &json!({}), tiny).await?;
    let said = |backend: &Value| backend["memory"]["unmeasured"].as_str().unwrap_or_default().to_owned();
    wait_until("it is said", SOON, async || {
        wrapped.backend().await.is_ok_and(|backend| said(&backend).contains("memory is not measured"))
    })
    .await?;
    let pid = wrapped.backend().await?["pid"].clone();
    let table = wrapped.warden.cli(&["status"]).await?;
    assert!(
        table.stdout.contains("the server's memory is not measured, so no memory policy acts on it"),
        "{table:?}"
    );
    // Some readings later.
    let reading = |backend: &Value| backend["memory"]["reading"].as_u64().unwrap_or(0);
    let first = reading(&wrapped.backend().await?);
    wait_until("it is read again", SOON, async || {
        wrapped.backend().await.is_ok_and(|backend| reading(&backend) > first + 5)
    })
    .await?;
    let backend = wrapped.backend().await?;
    assert_eq!((&backend["host"], &backend["pid"]), (&Value::Null, &pid), "{backend}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_is_nobodys_is_not_served_behind_a_wrapper_that_has_ended() -> Outcome {
    let other = Fake::start(&json!({}), &[]).await?;
    let helper = "setsid sleep 1000 &\nexit 0";
    let mut wrapped = start(&borrowed(&other, helper), &json!({}), "").await?;
    wrapped.warden.says("a server that is not its own answers").await?;
    wait_until("the failure says what to do", SOON, async || {
        let status = wrapped.warden.status("m").await.unwrap_or_default();
        status["last_failure"]["message"].as_str().is_some_and(|text| text.contains("exec llama-server"))
    })
    .await?;
    assert!(other.http.get("/health").await?.status.is_success(), "it is left alone");
    assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn helpers_that_a_wrapper_left_behind_end_with_its_server_and_no_zombie_stays() -> Outcome {
    let body = "setsid sleep 4321 &\n(setsid true &)\nexec \"$fake\" \"$@\"";
    let wrapped = start(body, &json!({}), "").await?;
    let old = wrapped.until_ready(None).await?;
    let first =
        wait_for("the helper runs", SOON, async || wrapped.servers.helpers().first().copied()).await?;
    wrapped.warden.restart("m", 1).await?;
    wrapped.until_ready(Some(old)).await?;
    wait_until("the old helper is gone", SOON, async || !first.is_alive()).await?;
    wait_until("no zombie stays", SOON, async || {
        let children = all_processes().into_iter().flatten().flatten().filter_map(|one| one.stat().ok());
        !children.into_iter().any(|stat| stat.ppid == wrapped.warden.kid.pid() && stat.state == 'Z')
    })
    .await?;
    assert!(!children_of(wrapped.warden.kid.pid()).is_empty());
    Ok(())
}
