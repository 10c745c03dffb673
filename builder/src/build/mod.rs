//! Makes a plan true: source in, verified llama-server in the store out.
//!
//! ```text
//!  plan -> in the store? ---yes--> hit
//!            | no
//!            v
//!  check the machine -> lock -> in the store by now? ---yes--> hit
//!                                 | no
//!                                 v
//!  unpack -> patch -> web page -> configure -> compile -> look for markers -> verify -> install
//!                                                             any failure or cancellation: the work folder goes,
//!                                                             the store was not touched
//! ```
//!
//! Nothing here decides what to build (that is the plan) and nothing prints. The log of a build stays under
//! `logs/<BuildId>.log` in the cache folder, also when it succeeds.
//!
//! A web page that cannot be made ends the plan with the page, and the build goes on as the plan without one: what is in the
//! store is what its name says, and the next build tries the page again before it takes that.

mod failure;
mod log;
pub(crate) mod markers;
mod ninja;
mod page;
mod patching;
mod planning;
mod trial;
mod work;

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use tokio::process::Command;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::environment::Environment;
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Phase, Reporter};
use crate::git;
use crate::lock::Lock;
use crate::machine::{self, Needs};
use crate::patch::Selection;
use crate::plan::{ArchWish, Backend, BackendWish, Plan, PlannedSet};
use crate::process::{Ended, run};
use crate::sdist;
use crate::source::{Source, file_sha256};
use crate::store::{Binary, BuildId, Host, Provenance, SCHEMA, Store, Timings};
use crate::toolchain::{self, Drivers};
use log::Log;
use work::Work;

/// The only target that is built.
const TARGET: &str = "llama-server";
/// What a shell reports for a program that signal 9 ended.
const KILLED_STATUS: i32 = 128 + 9;

/// Where things are kept. Both folders are ours alone and are made when they are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    /// What can be made again: sources, tools, work folders, logs.
    pub cache: PathBuf,
    /// What should stay: the store.
    pub data: PathBuf,
}

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where the source is.
    pub source: Source,
    /// What the binary computes on.
    pub backend: BackendWish,
    /// Which machines it is for.
    pub arch: ArchWish,
    /// The patch sets to apply.
    pub patches: Selection,
    /// More options for cmake, as `NAME=VALUE` or `-DNAME=VALUE`.
    pub options: Vec<String>,
    /// Compilers at once; `None`: as many as cores and memory allow.
    pub jobs: Option<usize>,
    /// What the machine must have.
    pub needs: Needs,
    /// How long npm may take for the web page; after that the build goes on without one.
    pub page_timeout: Duration,
    /// How long the new server may take for each start and each answer.
    pub verify_timeout: Duration,
}

/// A build that is in the store.
#[derive(Clone, Debug)]
pub struct Built {
    /// Its name.
    pub id: BuildId,
    /// The llama-server.
    pub binary: PathBuf,
    /// Whether it was there already.
    pub hit: bool,
    /// Its papers.
    pub provenance: Provenance,
}

/// Builds things. Cheap to make; holds no resources between calls.
#[derive(Clone, Debug)]
pub struct Builder {
    /// Where things are kept.
    pub dirs: Dirs,
    /// Where programs are found.
    pub env: Environment,
    /// Says how much memory can be had now without swapping, in bytes; `None` if that is not known, and then nothing is
    /// bounded by it.
    pub memory: fn() -> Option<u64>,
    /// Who is told.
    pub reporter: Reporter,
    /// Ends whatever is running: every child is gone and every work folder removed before the call returns.
    pub cancel: CancellationToken,
}

impl Builder {
    /// The store that it builds into.
    pub fn store(&self) -> Store {
        Store::new(&self.dirs.data)
    }

    /// The pinned llama-cpp-python source archive, from the cache or through pip.
    ///
    /// # Errors
    ///
    /// It is not in the cache and pip cannot fetch it, or its hash is another than the pinned one.
    pub async fn sdist(&self, pin: &sdist::Pin) -> Result<PathBuf> {
        sdist::obtain(pin, &self.dirs.cache, &self.env, &self.reporter, &self.cancel).await
    }

    /// A commit as a source, fetched where that is needed.
    ///
    /// # Errors
    ///
    /// There is no such commit, or it is not here and cannot be fetched.
    pub async fn git(&self, request: &git::Request) -> Result<Source> {
        let git::Obtained { repository, commit } = self.repository(request).await?;
        let (shown, repository) = (repository.shown().to_owned(), repository.path().to_owned());
        Ok(Source::Commit { repository, shown, commit })
    }

    /// The repository with a commit, for ranges and single files; fetched where that is needed.
    ///
    /// # Errors
    ///
    /// There is no such commit, or it is not here and cannot be fetched.
    pub async fn repository(&self, request: &git::Request) -> Result<git::Obtained> {
        git::obtain(request, &self.dirs.cache, &self.reporter, &self.cancel).await
    }

    /// Builds, unless the store has it. Returns within a second if it has.
    ///
    /// # Errors
    ///
    /// The plan cannot be made (see [`Self::plan`]), a program of the build fails, the result does not pass its checks, the disk is
    /// full, or it was cancelled. Nothing is put into the store then.
    pub async fn build(&self, request: &Request) -> Result<Built> {
        let mut page = None;
        loop {
            let plan = self.plan_without(request, page.take()).await?;
            match self.made(request, plan).await? {
                Made::Built(built) => return Ok(*built),
                Made::NoPage(why) => {
                    self.reporter.tell(Event::Note(format!(
                        "the web page cannot be made, and the build goes on without it: {why}; the next build tries again"
                    )));
                    page = Some(why);
                }
            }
        }
    }

    /// Makes a plan true, or finds it in the store.
    async fn made(&self, request: &Request, plan: Plan) -> Result<Made> {
        self.reporter.tell(Event::Planned(Box::new(plan.clone())));
        if let Some(hit) = self.hit(&plan.id) {
            return Ok(Made::Built(Box::new(hit)));
        }
        let folders = [self.dirs.cache.as_path(), &self.dirs.data];
        machine::check(request.needs, plan.recipe.backend, (self.memory)(), &folders)?;
        let drivers = toolchain::drivers(
            &self.env,
            plan.recipe.backend,
            &self.dirs.cache,
            &self.reporter,
            &self.cancel,
        )
        .await?;
        let lock = work::lock_path(&self.dirs.cache, plan.id.as_str());
        let waiting = || self.reporter.tell(Event::Waiting(plan.id.clone()));
        let _lock = Lock::take(&lock, &self.cancel, waiting).await?;
        // Whoever held the lock may have built just this.
        if let Some(hit) = self.hit(&plan.id) {
            return Ok(Made::Built(Box::new(hit)));
        }
        work::sweep(&self.dirs.cache);
        let work = Work::create(&self.dirs.cache, &plan.id)?;
        let log = Log::create(self.dirs.cache.join("logs").join(format!("{}.log", plan.id)))?;
        self.reporter.tell(Event::Log(log.path().to_owned()));
        Making { builder: self, request, plan, drivers, work, log }.make().await
    }

    fn hit(&self, id: &BuildId) -> Option<Built> {
        let store = self.store();
        // A damaged build is no hit: it is built again and replaced.
        let provenance = store.show(id).ok()?;
        let binary = store.binary(id).ok()?;
        self.reporter.tell(Event::Hit(id.clone()));
        Some(Built { id: id.clone(), binary, hit: true, provenance })
    }

    /// Runs blocking work on another thread. It is told to end when we are cancelled, and when nobody waits any
    /// more.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(CancellationToken) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let token = self.cancel.child_token();
        let _guard = token.clone().drop_guard();
        // It can only fail to join when the runtime shuts down.
        spawn_blocking(move || work(token)).await.unwrap_or(Err(Error::Cancelled))
    }
}

/// What became of a plan.
enum Made {
    Built(Box<Built>),
    /// Its web page cannot be made, and why; nothing of it is left.
    NoPage(String),
}

/// One build on its way.
struct Making<'a> {
    builder: &'a Builder,
    request: &'a Request,
    plan: Plan,
    drivers: Drivers,
    // Fields are dropped in this order: the folder goes last, when no child writes into it any more.
    log: Log,
    work: Work,
}

impl Making<'_> {
    async fn make(mut self) -> Result<Made> {
        let begun = Instant::now();
        self.tell(Event::Phase(Phase::Unpack));
        let (source, found, into) =
            (self.request.source.clone(), self.plan.source.clone(), self.work.source());
        let reporter = self.builder.reporter.clone();
        self.builder.blocking(move |cancel| source.place(&found, &into, &reporter, &cancel)).await?;
        self.patch().await?;
        self.stand_in()?;
        let unpack = begun.elapsed();

        if self.plan.makes_page()
            && let Err(why) = self.page().await?
        {
            return Ok(Made::NoPage(why));
        }

        let begun = Instant::now();
        self.tell(Event::Phase(Phase::Configure));
        self.configure().await?;
        let configure = begun.elapsed();

        let begun = Instant::now();
        self.tell(Event::Phase(Phase::Compile));
        self.compile().await?;
        let compile = begun.elapsed();

        let begun = Instant::now();
        self.tell(Event::Phase(Phase::Verify));
        let binary = self.work.build().join("bin").join(TARGET);
        self.look_for_markers(&binary).await?;
        let timeout = self.request.verify_timeout;
        let verified = trial::prove(self.builder, &self.plan, &binary, timeout, self.work.path()).await?;
        let verify = begun.elapsed();
        if self.plan.makes_page() && verified.measured.web_page == Some(false) {
            self.tell(Event::Note(format!(
                "the web page was made and `/` is none: {} says what cmake did with it",
                self.log.path().display()
            )));
        }

        self.tell(Event::Phase(Phase::Install));
        let timings = Timings {
            unpack: unpack.as_secs_f64(),
            configure: configure.as_secs_f64(),
            compile: compile.as_secs_f64(),
            verify: verify.as_secs_f64(),
        };
        let store = self.builder.store();
        let (plan, drivers) = (self.plan.clone(), self.drivers.clone());
        let install = move |cancel: CancellationToken| {
            let size = binary.metadata().map_err(io_error("reading", &binary))?.len();
            let sha256 = file_sha256(&binary, &cancel)?;
            let provenance = Provenance {
                schema: SCHEMA,
                id: plan.id.clone(),
                built_at: clock::now(),
                fixes: plan.fixes(),
                plan,
                drivers,
                timings,
                binary: Binary { size, sha256 },
                verified,
                host: Host::here(),
            };
            let binary = store.install(&binary, &provenance)?;
            Ok(Built { id: provenance.id.clone(), binary, hit: false, provenance })
        };
        let built = self.builder.blocking(install).await?;
        self.tell(Event::Installed(built.id.clone()));
        Ok(Made::Built(Box::new(built)))
    }

    /// Writes the patch sets into the work folder.
    async fn patch(&self) -> Result<()> {
        if !self.plan.patches.iter().any(PlannedSet::applied) {
            return Ok(());
        }
        let (selection, plan, root) = (self.request.patches.clone(), self.plan.clone(), self.work.source());
        let files = self.builder.blocking(move |_| patching::apply(&selection, &plan, &root)).await?;
        self.tell(Event::Note(format!("patched: {} in {files} files", self.plan.recipe.patch_set)));
        Ok(())
    }

    /// Refuses a binary that lacks a fix, or a line of a hook, that was put into its source.
    async fn look_for_markers(&self, binary: &Path) -> Result<()> {
        let (plan, binary) = (self.plan.clone(), binary.to_owned());
        let look = move |cancel: CancellationToken| {
            let all: Vec<(String, &str)> = plan.patches.iter().flat_map(PlannedSet::markers).collect();
            let markers = all.iter().map(|(what, marker)| (what.as_str(), *marker));
            markers::missing(&binary, markers, &cancel)
        };
        match self.builder.blocking(look).await? {
            fixes if fixes.is_empty() => Ok(()),
            fixes => Err(Error::Markers { fixes }),
        }
    }

    async fn configure(&mut self) -> Result<()> {
        let mut command = self.command(&self.drivers.cmake.path, self.work.path());
        command.args(["-S", "src", "-B", "build", "-G", "Ninja"]);
        command.arg(option("CMAKE_MAKE_PROGRAM", &self.drivers.ninja.path));
        let backend = self.plan.recipe.backend;
        if let Some(toolkit) = &self.plan.toolkit {
            command.args(toolkit.options(backend, &self.plan.compilers.cxx.path));
        }
        command.args(&self.plan.recipe.cmake);
        if let Some(launcher) = &self.drivers.launcher {
            self.tell(Event::Note(format!("compiler cache: {}", launcher.display())));
            // ggml finds ccache by itself; the compilers of other parts and sccache need to be told.
            if launcher.ends_with("sccache") {
                command.arg(option("CMAKE_C_COMPILER_LAUNCHER", launcher));
                command.arg(option("CMAKE_CXX_COMPILER_LAUNCHER", launcher));
                if backend == Backend::Cuda {
                    command.arg(option("CMAKE_CUDA_COMPILER_LAUNCHER", launcher));
                }
            }
        }
        self.run("configuring", command, |_| None).await
    }

    async fn compile(&mut self) -> Result<()> {
        let (jobs, why) = {
            let (request, memory) = (self.request, (self.builder.memory)());
            machine::jobs(request.jobs, request.needs, self.plan.recipe.backend, memory)
        };
        self.tell(Event::Note(why));
        let mut command = self.command(&self.drivers.ninja.path, &self.work.build());
        command.arg("-j").arg(jobs.to_string()).arg(TARGET).env("NINJA_STATUS", ninja::STATUS);
        self.run("compiling", command, |line| {
            let step = ninja::step(line)?;
            Some(Event::Progress { done: step.done, total: step.total, item: step.item })
        })
        .await
    }

    /// A command of this build: our compilers, the compiler cache blind for where the work folder is, and no
    /// repository in sight but what is in the source itself.
    fn command(&self, program: &Path, folder: &Path) -> Command {
        let mut command = self.builder.env.command(program);
        command
            .current_dir(folder)
            .env("CC", &self.plan.compilers.c.path)
            .env("CXX", &self.plan.compilers.cxx.path)
            .env("CCACHE_BASEDIR", self.work.path())
            .env("CCACHE_NOHASHDIR", "1")
            .env("GIT_CEILING_DIRECTORIES", self.work.path());
        if let Some(toolkit) = &self.plan.toolkit {
            command.envs(toolkit.variables(self.plan.recipe.backend));
        }
        command
    }

    /// Runs a command into the log and tells the events that its lines stand for.
    async fn run(
        &mut self,
        phase: &'static str,
        command: Command,
        event: impl Fn(&str) -> Option<Event>,
    ) -> Result<()> {
        let shown = format!("{:?}", command.as_std());
        self.log.begin(&shown);
        let (log, reporter) = (&mut self.log, &self.builder.reporter);
        let ended = run(command, &self.builder.cancel, |line| {
            log.line(line);
            if let Some(event) = event(line) {
                reporter.tell(event);
            }
        })
        .await;
        self.log.end();
        match ended {
            Ok(Ended::Exited(status)) if status.success() => Ok(()),
            Ok(Ended::Exited(status)) => Err(failed(phase, self.log.output(), status, self.log.path())),
            Ok(Ended::Cancelled) => Err(Error::Cancelled),
            Err(error) => {
                Err(Error::Program { command: shown, doing: phase.to_owned(), why: error.to_string() })
            }
        }
    }

    fn tell(&self, event: Event) {
        self.builder.reporter.tell(event);
    }
}

fn failed(phase: &'static str, output: &str, status: ExitStatus, log: &Path) -> Error {
    use std::os::unix::process::ExitStatusExt;
    let by_signal = status.signal() == Some(rustix::process::Signal::KILL.as_raw());
    let killed = by_signal || status.code() == Some(KILLED_STATUS) || failure::was_killed(output);
    let excerpt = match failure::excerpt(output) {
        text if text.is_empty() => status.to_string(),
        text => text,
    };
    Error::Build { phase, excerpt, log: log.to_owned(), killed }
}

/// `-DNAME=PATH`.
fn option(name: &str, path: &Path) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(format!("-D{name}="));
    option.push(path);
    option
}

#[cfg(test)]
mod tests;
