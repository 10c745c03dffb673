//! The outside world as a model's task sees it: processes, their answers to probes, memory. A trait, so that the task can
//! be tested with scripted processes and a paused clock; [`Host`] is the real one.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use warden_policies::sample::HostMemory;
use warden_sensors::Report;

use crate::child::{Child, Exit};
use crate::directories;
use crate::error::SpawnError;
use crate::lines;
use crate::log::Stream;
use crate::nursery::{NurseryHandle, SpawnRequest};
use crate::report::Source;
use crate::spec::Command;

/// Takes each line of a child's output.
pub(crate) type Sink = Arc<dyn Fn(Stream, String) + Send + Sync>;

/// What a probe found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// Ready for requests.
    Ready,
    /// It answers, and is not ready.
    Loading,
    /// No answer.
    Lost,
}

/// What `/props` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Props {
    /// Requests that it evaluates at a time.
    pub(crate) slots: Option<u32>,
    /// Context length in tokens.
    pub(crate) n_ctx: Option<u64>,
}

/// What a reading found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Host memory of its group; `None` if it cannot be read.
    pub(crate) host: Option<HostMemory>,
    /// Its report of its GPU memory; `None` if there is none.
    pub(crate) report: Option<Report>,
}

/// One child.
pub(crate) trait Process: Send + Sync + Debug {
    fn pid(&self) -> u32;
    /// SIGTERM to the group.
    fn terminate(&self);
    /// SIGKILL to the group.
    fn kill(&self);
    /// Its end, after all its output went to the sink.
    fn wait(&self) -> BoxFuture<'_, Exit>;
    /// One probe, answered within the time given or lost.
    fn probe(&self, timeout: Duration) -> BoxFuture<'_, Health>;
    /// Its properties; `None` fields where it does not say.
    fn props(&self, timeout: Duration) -> BoxFuture<'_, Props>;
    /// What it holds now.
    fn sample(&self) -> BoxFuture<'_, Sample>;
}

/// Where children come from.
pub(crate) trait World: Send + Sync + Debug {
    /// Creates a child that will listen on `socket`.
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        longest_line: usize,
        sink: Sink,
    ) -> BoxFuture<'_, Result<Arc<dyn Process>, SpawnError>>;
    /// Memory that new processes can take, in bytes; `None` if it cannot be read.
    fn available(&self) -> Option<u64>;
    /// Whether the machine has a GPU, whose memory we cannot judge.
    fn has_gpu(&self) -> bool;
}

/// This host.
#[derive(Debug)]
pub(crate) struct Host {
    nursery: NurseryHandle,
}

impl Host {
    pub(crate) fn new(nursery: NurseryHandle) -> Self {
        Self { nursery }
    }
}

impl World for Host {
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        longest_line: usize,
        sink: Sink,
    ) -> BoxFuture<'_, Result<Arc<dyn Process>, SpawnError>> {
        Box::pin(async move {
            let key = api_key(&request.command);
            let report = Source::of(&request.command, &socket);
            restore_directory(&socket);
            let child = self.nursery.spawn(request).await?;
            let mut readers = JoinSet::new();
            if let Some((stdout, stderr)) = child.take_output() {
                let (to_out, to_err) = (Arc::clone(&sink), sink);
                readers.spawn(lines::read(stdout, longest_line, move |line| to_out(Stream::Stdout, line)));
                readers.spawn(lines::read(stderr, longest_line, move |line| to_err(Stream::Stderr, line)));
            }
            let http = client(&socket);
            let readers = tokio::sync::Mutex::new(readers);
            Ok(Arc::new(HostProcess { child, readers, http, key, report }) as Arc<dyn Process>)
        })
    }

    fn available(&self) -> Option<u64> {
        let totals = warden_sensors::host_totals();
        totals
            .inspect_err(|error| tracing::warn!(%error, "memory unknown"))
            .ok()
            .map(|totals| totals.available)
    }

    fn has_gpu(&self) -> bool {
        let numbered = |directory: &str, prefix: &str| {
            std::fs::read_dir(directory).is_ok_and(|entries| {
                entries.filter_map(Result::ok).any(|entry| {
                    let name = entry.file_name();
                    let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
                    number.is_some_and(|number| number.parse::<u32>().is_ok())
                })
            })
        };
        numbered("/dev", "nvidia")
            || ["/dev/kfd", "/dev/dxg"].iter().any(|path| Path::new(path).exists())
            || numbered("/dev/dri", "renderD")
    }
}

/// Makes the socket's directory again if it is gone: the end of a login session takes `/run/user/UID` away, and cleaners
/// of `/tmp` know no mercy. Without it no process could ever start again.
fn restore_directory(socket: &Path) {
    let Some(directory) = socket.parent().filter(|directory| !directory.exists()) else { return };
    tracing::warn!(directory = %directory.display(), "the directory for sockets was removed; making it again");
    if let Err(error) = directories::make_private(directory) {
        // The child says so too, in words that end in a failure which callers are told.
        tracing::error!(directory = %directory.display(), %error, "cannot make the directory for sockets");
    }
}

/// The first key that the command line or the environment gives llama-server: `/props` asks for one.
fn api_key(command: &Command) -> Option<String> {
    let keys = command
        .args
        .iter()
        .position(|arg| arg == "--api-key")
        .and_then(|at| command.args.get(at + 1))
        .cloned();
    let given = |name: &str| command.env.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let keys = keys.or_else(|| given("LLAMA_API_KEY")).or_else(|| std::env::var("LLAMA_API_KEY").ok())?;
    keys.split(',').next().map(str::to_owned).filter(|key| !key.is_empty())
}

/// No pool: llama-server closes an idle connection after 5 s, and probes are further apart than a pool would help.
fn client(socket: &Path) -> Option<reqwest::Client> {
    let builder = reqwest::Client::builder()
        .unix_socket(socket)
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .pool_max_idle_per_host(0);
    builder.build().inspect_err(|error| tracing::error!(%error, "cannot make a client for probes")).ok()
}

#[derive(Debug)]
struct HostProcess {
    child: Child,
    readers: tokio::sync::Mutex<JoinSet<()>>,
    http: Option<reqwest::Client>,
    key: Option<String>,
    report: Option<Source>,
}

impl HostProcess {
    async fn get(&self, path: &str, timeout: Duration) -> Option<reqwest::Response> {
        let mut request = self.http.as_ref()?.get(format!("http://backend{path}")).timeout(timeout);
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        request.send().await.inspect_err(|error| tracing::trace!(path, %error, "probe lost")).ok()
    }
}

/// The longest time that the rest of a dead child's output is waited for: only a process that left the group can still
/// hold the pipe.
const LAST_WORDS: Duration = Duration::from_millis(500);

impl Process for HostProcess {
    fn pid(&self) -> u32 {
        self.child.pid()
    }

    fn terminate(&self) {
        self.child.terminate();
    }

    fn kill(&self) {
        self.child.kill();
    }

    fn wait(&self) -> BoxFuture<'_, Exit> {
        Box::pin(async {
            let exit = self.child.wait().await;
            let mut readers = self.readers.lock().await;
            let rest = async { while readers.join_next().await.is_some() {} };
            if tokio::time::timeout(LAST_WORDS, rest).await.is_err() {
                readers.abort_all();
            }
            exit
        })
    }

    fn probe(&self, timeout: Duration) -> BoxFuture<'_, Health> {
        Box::pin(async move {
            match self.get("/health", timeout).await {
                Some(answer) if answer.status() == reqwest::StatusCode::OK => Health::Ready,
                Some(_) => Health::Loading,
                None => Health::Lost,
            }
        })
    }

    fn props(&self, timeout: Duration) -> BoxFuture<'_, Props> {
        Box::pin(async move {
            let Some(answer) = self.get("/props", timeout).await else { return Props::default() };
            let Ok(json) = answer.json::<serde_json::Value>().await else { return Props::default() };
            let slots = json["total_slots"].as_u64().and_then(|slots| u32::try_from(slots).ok());
            Props {
                slots: slots.filter(|slots| *slots > 0),
                n_ctx: json["default_generation_settings"]["n_ctx"].as_u64().or(json["n_ctx"].as_u64()),
            }
        })
    }

    fn sample(&self) -> BoxFuture<'_, Sample> {
        let (pid, source) = (self.child.pid(), self.report.clone());
        Box::pin(async move {
            let read = move || {
                let host = warden_sensors::host_memory(pid);
                Sample {
                    host: host.inspect_err(|error| tracing::debug!(%error, "memory unknown")).ok(),
                    report: source.and_then(|source| source.read(pid)),
                }
            };
            // Some small reads, and on a kernel without `children` files a walk over /proc: not for a runtime thread.
            tokio::task::spawn_blocking(read).await.unwrap_or_default()
        })
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
