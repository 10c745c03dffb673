//! Instance under test: its models, the socket held for it, and its processes.

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use rustix::io::FdFlags;
use serde_json::json;
use warden_rig::process::{ProcessId, children_of};
use warden_rig::real::llama_server;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, binaries};

/// Two replicas that are always loaded, a leaking model, and three models of which two are loaded at a time.
pub(crate) const MODELS: [&str; 5] = ["steady", "leaky", "guest-a", "guest-b", "guest-c"];

/// Trained weights on a real llama-server, if available.
pub(crate) const TRAINED: &str = "trained";

/// Passes the socket as descriptor 3 and becomes llama-warden, as systemd does.
const HELD: &str = r#"
import os, sys
held = int(sys.argv[1])
if held != 3:
    os.dup2(held, 3)
    os.close(held)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_FDNAMES="public", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"#;

const PYTHON: &str = "/usr/bin/python3";

/// Short backoffs, and frequent events.
const TOP: &str = "log.level = \"warn\"\nlog.children = false\nsensors.interval = \"500ms\"\n\
    server.shutdown_deadline = \"60s\"\nloading.max_loaded = 5\n\
    internal.lifecycle.breaker_failures = 1000000\ninternal.lifecycle.failures_told = 1000\n\
    internal.loading.turn_least = \"300ms\"\ninternal.loading.noted = \"300ms\"\n";

const EACH: &str = "on_death = \"continue\"\nqueue.wait = \"55s\"\nlifecycle.backoff_first = \"20ms\"\n\
    lifecycle.backoff_cap = \"100ms\"\nlifecycle.crash_cap = \"100ms\"\nlifecycle.drain_deadline = \"60s\"\n\
    lifecycle.stop_grace = \"2s\"\n";

/// Budget that the leak reaches every hundred requests.
const BUDGET: &str = "policy.host.soft = \"48MiB\"\npolicy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\n\
    policy.quiet_within = \"200ms\"\npolicy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

fn args(context: u32) -> String {
    format!(
        "args = [\"-np\", \"4\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\", {}\n",
        last_args(context)
    )
}

fn last_args(context: u32) -> String {
    format!("\"-c\", \"{context}\"]")
}

/// One thread, so that the fakes have a core as well.
fn trained_lines(server: &Path, weights: &Path) -> String {
    format!(
        "binary = '{}'\nmodel = '{}'\npreload = true\npin = true\n{EACH}args = [\"-np\", \"2\", \"-t\", \"1\", {}\n",
        server.display(),
        weights.display(),
        last_args(1024)
    )
}

pub(crate) struct Instance {
    warden: Warden,
    listener: TcpListener,
    pub(crate) starts: usize,
    context: u32,
    models: Vec<&'static str>,
}

impl Instance {
    /// `weights` are those of [`TRAINED`].
    pub(crate) async fn start(weights: Option<&Path>) -> Result<Self, Trouble> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        rustix::io::fcntl_setfd(&listener, FdFlags::empty())?;
        let mut setup = Setup::new()?.top(TOP);
        let pace = json!({"ms_per_token": 20, "load_ms": 60});
        let leaks = json!({"ms_per_token": 20, "load_ms": 60, "leak_kib_per_request": 512});
        for name in MODELS {
            let (script, more) = match name {
                "steady" => (&pace, "replicas = 2\nreplace = \"overlap\"\npin = true\n"),
                "leaky" => (&leaks, BUDGET),
                _ => (&pace, "preload = false\n"),
            };
            let pin = if name == "leaky" { "pin = true\n" } else { "" };
            setup = setup.fake(name, script, &format!("{}{EACH}{pin}{more}", args(1024)))?;
        }
        let mut models = MODELS.to_vec();
        if let Some(weights) = weights {
            setup = setup.model(TRAINED, &trained_lines(&llama_server().await?, weights));
            models.push(TRAINED);
        }
        let args = words(&setup, &listener, 1024)?;
        let warden = setup.start_program(Path::new(PYTHON), &args).await?;
        warden.until_ready(if weights.is_some() { 4 } else { 3 }).await?;
        Ok(Self { warden, listener, starts: 1, context: 1024, models })
    }

    pub(crate) fn models(&self) -> &[&'static str] {
        &self.models
    }

    pub(crate) fn has_trained(&self) -> bool {
        self.models.contains(&TRAINED)
    }

    pub(crate) fn warden(&self) -> &Warden {
        &self.warden
    }

    pub(crate) fn warden_mut(&mut self) -> &mut Warden {
        &mut self.warden
    }

    pub(crate) fn http(&self) -> Http {
        self.warden.http.clone()
    }

    /// llama-warden's processes; the first keeps its PID.
    pub(crate) fn programs(&self) -> Vec<ProcessId> {
        let root = self.warden.kid.pid();
        let others = children_of(root).into_iter().filter(|child| child.http().is_none());
        ProcessId::of(root).into_iter().chain(others).collect()
    }

    /// Changes the context size of all models, and so their command, which replaces them.
    pub(crate) fn change(&mut self) -> Outcome {
        self.context = 3072 - self.context;
        let config = configuration(&self.warden.setup, self.context);
        self.warden.reload(&config)
    }

    /// Ends the instance as a service manager does, and starts it again on the same socket.
    pub(crate) async fn anew(&mut self) -> Outcome {
        let code = self.warden.terminate(SOON * 3).await?;
        if code != 0 {
            return Err(Trouble::new(format!("it ended with {code}: {}", self.warden.kid.output())));
        }
        let args = words(&self.warden.setup, &self.listener, self.context)?;
        self.starts += 1;
        self.warden.start_anew(Path::new(PYTHON), &args).await
    }

    /// Ends the instance, and checks that nothing is left behind.
    pub(crate) async fn end(&mut self) -> Outcome {
        let backends = self.warden.backends();
        let code = self.warden.terminate(SOON).await?;
        Warden::until_gone(&backends, SOON).await?;
        let panicked = self.warden.kid.output().contains("panicked");
        (code == 0 && !panicked).then_some(()).context(format!(
            "exit code {code}, a panic: {panicked}; its output: {}",
            self.warden.kid.output()
        ))
    }
}

fn configuration(setup: &Setup, context: u32) -> String {
    setup.config().replace(&last_args(1024), &last_args(context))
}

/// Returns the command that becomes llama-warden with the socket.
fn words(setup: &Setup, listener: &TcpListener, context: u32) -> Result<Vec<OsString>, Trouble> {
    let config = setup.home.file("warden.toml", configuration(setup, context))?;
    let held = OsString::from(listener.as_raw_fd().to_string());
    let program = binaries::llama_warden()?.into();
    Ok(vec!["-c".into(), HELD.into(), held, program, "serve".into(), "--config".into(), config.into()])
}
