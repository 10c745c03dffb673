//! Runs one build: from the source in the work folder to the binary in the store.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use tokio::process::Command;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_patches::{PlannedSet, binary};

use super::log::BuildLog;
use super::work::WorkFolder;
use super::{failure, planning, trial};
use crate::builder::{BuildRequest, Builder, StoredBuild};
use crate::error::{BuilderError, Result, io_error, program_error};
use crate::event::{BuildEvent, BuildPhase};
use crate::plan::{BuildPlan, ComputeBackend, CpuTarget, SHARED_GGML, WORKING_DIRECTORY_SEARCH};
use crate::process::{ChildExit, run_at_priority};
use crate::source::file_sha256;
use crate::store::{BinaryFacts, BuildHost, BuildTimings, PROVENANCE_SCHEMA, Provenance, is_library};
use crate::toolchain::BuildDrivers;
use crate::{clock, machine};

const CMAKE_TARGET: &str = "llama-server";
/// Exit status that a shell reports for a program killed by signal 9.
const KILLED_STATUS: i32 = 128 + 9;
/// Size limit of a compiler cache that the builder installed: several CPU builds, or a few GPU builds.
const COMPILER_CACHE_SIZE: &str = "2G";

pub(super) enum BuildOutcome {
    Built(Box<StoredBuild>),
    /// The web page could not be made, with the reason; the build left nothing behind.
    NoPage(String),
    /// The kernels for repacked weights fail while the others work; the build left nothing behind.
    RepackFails(Box<BuilderError>),
}

pub(super) struct RunningBuild<'a> {
    pub(super) builder: &'a Builder,
    pub(super) request: &'a BuildRequest,
    pub(super) plan: BuildPlan,
    pub(super) drivers: BuildDrivers,
    // Rust drops fields in this order. The work folder must be last, when no child writes into it any more.
    pub(super) log: BuildLog,
    pub(super) work: WorkFolder,
}

impl RunningBuild<'_> {
    pub(super) async fn make(mut self) -> Result<BuildOutcome> {
        let begun = Instant::now();
        self.report(BuildEvent::Phase(BuildPhase::Unpack));
        let (source, found, into) =
            (self.request.source.clone(), self.plan.source.clone(), self.work.source());
        let reporter = self.builder.reporter.clone();
        self.builder.run_blocking(move |cancel| source.write_to(&found, &into, &reporter, &cancel)).await?;
        self.patch().await?;
        self.write_empty_page()?;
        let unpack = begun.elapsed().as_secs_f64();

        if self.plan.makes_page()
            && let Err(why) = self.make_page().await?
        {
            return Ok(BuildOutcome::NoPage(why));
        }

        let begun = Instant::now();
        self.report(BuildEvent::Phase(BuildPhase::Configure));
        self.configure().await?;
        let configure = begun.elapsed().as_secs_f64();

        let begun = Instant::now();
        self.report(BuildEvent::Phase(BuildPhase::Compile));
        self.compile().await?;
        let compile = begun.elapsed().as_secs_f64();

        let begun = Instant::now();
        self.report(BuildEvent::Phase(BuildPhase::Verify));
        let binary = self.work.build().join("bin").join(CMAKE_TARGET);
        let libraries = self.built_libraries()?;
        self.check_markers(std::iter::once(&binary).chain(&libraries).cloned().collect()).await?;
        let timeout = self.request.verify_timeout;
        let verified =
            match trial::verify_binary(self.builder, &self.plan, &binary, timeout, self.work.path()).await {
                Err(error @ BuilderError::Kernel { repacked_alone: true, .. }) => {
                    return Ok(BuildOutcome::RepackFails(Box::new(error)));
                }
                other => other?,
            };
        let verify = begun.elapsed().as_secs_f64();
        if self.plan.makes_page() && verified.measured.web_page == Some(false) {
            self.builder.reporter.note(format!(
                "the web page was made and `/` is none: {} says what cmake did with it",
                self.log.path().display()
            ));
        }

        self.report(BuildEvent::Phase(BuildPhase::Install));
        let timings = BuildTimings { unpack, configure, compile, verify };
        let store = self.builder.store();
        let (plan, drivers) = (self.plan.clone(), self.drivers.clone());
        let install = move |cancel: CancellationToken| {
            let provenance = Provenance {
                schema: PROVENANCE_SCHEMA,
                id: plan.id.clone(),
                built_at: clock::utc_now(),
                fixes: plan.fixes(),
                plan,
                drivers,
                timings,
                binary: file_facts(&binary, &cancel)?,
                libraries: library_facts(&libraries, &cancel)?,
                verified,
                host: BuildHost::current(),
            };
            let binary = store.install(&binary, &provenance)?;
            Ok(StoredBuild { id: provenance.id.clone(), binary, hit: false, provenance })
        };
        let built = self.builder.run_blocking(install).await?;
        self.report(BuildEvent::Installed(built.id.clone()));
        Ok(BuildOutcome::Built(Box::new(built)))
    }

    async fn patch(&self) -> Result<()> {
        if !self.plan.patches.iter().any(PlannedSet::is_applied) {
            return Ok(());
        }
        let (selection, plan, root) = (self.request.patches.clone(), self.plan.clone(), self.work.source());
        let files =
            self.builder.run_blocking(move |_| planning::apply_sets(&selection, &plan, &root)).await?;
        self.builder.reporter.note(format!("patched: {} in {files} files", self.plan.recipe.patch_set));
        Ok(())
    }

    /// Libraries next to the built binary, sorted; none unless the build is for any CPU.
    fn built_libraries(&self) -> Result<Vec<PathBuf>> {
        if self.plan.recipe.arch != CpuTarget::Any {
            return Ok(Vec::new());
        }
        let folder = self.work.build().join("bin");
        let entries = fs::read_dir(&folder).map_err(io_error("reading", &folder))?;
        let paths = entries.map(|entry| Ok(entry.map_err(io_error("reading", &folder))?.path()));
        let mut paths = paths.collect::<Result<Vec<_>>>()?;
        paths.retain(|path| is_library(&path.file_name().unwrap_or_default().to_string_lossy()));
        paths.sort();
        Ok(paths)
    }

    /// Fails if all files lack a fix or a hook that was patched into the source.
    async fn check_markers(&self, built: Vec<PathBuf>) -> Result<()> {
        let plan = self.plan.clone();
        let look = move |cancel: CancellationToken| {
            let all: Vec<(String, &str)> = plan.patches.iter().flat_map(PlannedSet::markers).collect();
            let mut missing: Vec<String> = all.iter().map(|(what, _)| what.clone()).collect();
            for file in &built {
                let sought = all.iter().filter(|(what, _)| missing.contains(what));
                let markers = sought.map(|(what, marker)| (what.as_str(), *marker));
                missing = binary::missing_markers(file, markers, &|| cancel.is_cancelled())?;
            }
            if cancel.is_cancelled() { Err(BuilderError::Cancelled) } else { Ok(missing) }
        };
        match self.builder.run_blocking(look).await? {
            fixes if fixes.is_empty() => Ok(()),
            fixes => Err(BuilderError::Markers { fixes }),
        }
    }

    async fn configure(&mut self) -> Result<()> {
        let mut command = self.command(&self.drivers.cmake.path, self.work.path());
        command.args(["-S", "src", "-B", "build", "-G", "Ninja"]);
        command.arg(path_option("CMAKE_MAKE_PROGRAM", &self.drivers.ninja.path));
        let backend = self.plan.recipe.backend;
        if let Some(toolkit) = &self.plan.toolkit {
            command.args(toolkit.options(backend, &self.plan.compilers.cxx.path));
        }
        command.args(&self.plan.recipe.cmake);
        if self.plan.recipe.arch == CpuTarget::Any {
            self.remove_working_directory_search()?;
            let file = self.work.path().join("shared-ggml.cmake");
            fs::write(&file, SHARED_GGML).map_err(io_error("writing", &file))?;
            command.arg(path_option("CMAKE_PROJECT_ggml_INCLUDE", &file));
        }
        if let Some(launcher) = &self.drivers.launcher {
            self.builder.reporter.note(format!("compiler cache: {}", launcher.display()));
            // ggml finds a ccache in PATH by itself; any other launcher needs these options.
            if self.builder.env.find("ccache").as_ref() != Some(launcher) {
                command.arg(path_option("CMAKE_C_COMPILER_LAUNCHER", launcher));
                command.arg(path_option("CMAKE_CXX_COMPILER_LAUNCHER", launcher));
                if backend == ComputeBackend::Cuda {
                    command.arg(path_option("CMAKE_CUDA_COMPILER_LAUNCHER", launcher));
                }
            }
        }
        self.run("configuring", command, |_| None).await
    }

    fn remove_working_directory_search(&self) -> Result<()> {
        let file = self.work.source().join("ggml/src/ggml-backend-reg.cpp");
        let text = fs::read_to_string(&file).map_err(io_error("reading", &file))?;
        let is_kept = |line: &&str| !WORKING_DIRECTORY_SEARCH.contains(&line.trim());
        let kept: String = text.split_inclusive('\n').filter(is_kept).collect();
        if kept.len() == text.len() {
            self.builder.reporter.note("this llama-server may load a CPU variant from its working directory");
            return Ok(());
        }
        fs::write(&file, kept).map_err(io_error("writing", &file))
    }

    async fn compile(&mut self) -> Result<()> {
        let (jobs, why) = {
            let (request, memory) = (self.request, (self.builder.memory)());
            machine::compiler_jobs(request.jobs, request.needs, self.plan.recipe.backend, memory)
        };
        self.builder.reporter.note(why);
        let mut command = self.command(&self.drivers.ninja.path, &self.work.build());
        command.arg("-j").arg(jobs.to_string()).arg(CMAKE_TARGET).env("NINJA_STATUS", STATUS_FORMAT);
        self.run("compiling", command, |line| {
            let step = parse_step(line)?;
            Some(BuildEvent::Progress { done: step.done, total: step.total, item: step.item })
        })
        .await
    }

    /// Creates a command of this build. The environment selects our compilers, and makes ccache ignore the
    /// work folder's path. git finds no repository except one in the source itself.
    pub(super) fn command(&self, program: &Path, folder: &Path) -> Command {
        let mut command = self.builder.env.command(program);
        command
            .current_dir(folder)
            .env("CC", &self.plan.compilers.c.path)
            .env("CXX", &self.plan.compilers.cxx.path)
            .env("CCACHE_BASEDIR", self.work.path())
            .env("CCACHE_NOHASHDIR", "1")
            .env("GIT_CEILING_DIRECTORIES", self.work.path());
        let cache = &self.builder.dirs.cache;
        if self.drivers.launcher.as_ref().is_some_and(|launcher| launcher.starts_with(cache)) {
            // A service's user may have no home, where ccache puts its files otherwise.
            command.env("CCACHE_DIR", cache.join("ccache")).env("CCACHE_MAXSIZE", COMPILER_CACHE_SIZE);
        }
        if let Some(toolkit) = &self.plan.toolkit {
            command.envs(toolkit.variables(self.plan.recipe.backend));
        }
        command
    }

    pub(super) async fn run(
        &mut self,
        phase: &'static str,
        command: Command,
        event: impl Fn(&str) -> Option<BuildEvent>,
    ) -> Result<()> {
        let shown = format!("{:?}", command.as_std());
        self.log.begin_phase(&shown);
        let (log, reporter) = (&mut self.log, &self.builder.reporter);
        let ended = Box::pin(run_at_priority(command, self.request.priority, &self.builder.cancel, |line| {
            log.push_line(line);
            if let Some(event) = event(line) {
                reporter.report(event);
            }
        }))
        .await;
        self.log.end_phase();
        match ended {
            Ok(ChildExit::Exited(status)) if status.success() => Ok(()),
            Ok(ChildExit::Exited(status)) => {
                Err(phase_error(phase, self.log.output(), status, self.log.path()))
            }
            Ok(ChildExit::Cancelled) => Err(BuilderError::Cancelled),
            Err(error) => Err(program_error(&shown, phase, error.to_string())),
        }
    }

    pub(super) fn report(&self, event: BuildEvent) {
        self.builder.reporter.report(event);
    }
}

fn file_facts(path: &Path, cancel: &CancellationToken) -> Result<BinaryFacts> {
    let size = path.metadata().map_err(io_error("reading", path))?.len();
    Ok(BinaryFacts { size, sha256: file_sha256(path, cancel)? })
}

fn library_facts(paths: &[PathBuf], cancel: &CancellationToken) -> Result<BTreeMap<String, BinaryFacts>> {
    let named = paths.iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, file_facts(path, cancel)?))
    });
    named.collect()
}

fn phase_error(phase: &'static str, output: &str, status: ExitStatus, log: &Path) -> BuilderError {
    use std::os::unix::process::ExitStatusExt;
    let by_signal = status.signal() == Some(rustix::process::Signal::KILL.as_raw());
    let killed = by_signal || status.code() == Some(KILLED_STATUS) || failure::was_killed(output);
    let excerpt = match failure::excerpt(output) {
        text if text.is_empty() => status.to_string(),
        text => text,
    };
    let no_room = killed || failure::ran_out_of_space(output);
    BuilderError::Build { phase, excerpt, log: log.to_owned(), killed, no_room }
}

/// `NINJA_STATUS`, the prefix of progress lines: `[12/206] Building CXX object src/…/llama.cpp.o`.
const STATUS_FORMAT: &str = "[%f/%t] ";

#[derive(Clone, Debug, PartialEq, Eq)]
struct NinjaStep {
    done: u32,
    total: u32,
    item: String,
}

fn parse_step(line: &str) -> Option<NinjaStep> {
    let (counts, what) = line.strip_prefix('[')?.split_once("] ")?;
    let (done, total) = counts.split_once('/')?;
    let (done, total) = (done.trim().parse().ok()?, total.trim().parse().ok()?);
    let last = what.split_whitespace().next_back().unwrap_or_default();
    let name = last.rsplit('/').next().unwrap_or(last);
    let item = name.strip_suffix(".o").unwrap_or(name).to_owned();
    (done <= total).then_some(NinjaStep { done, total, item })
}

fn path_option(name: &str, path: &Path) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(format!("-D{name}="));
    option.push(path);
    option
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_tells_counts_and_the_file() {
        let found =
            parse_step("[12/206] Building CXX object src/CMakeFiles/llama.dir/llama-arch.cpp.o").unwrap();
        assert_eq!(found, NinjaStep { done: 12, total: 206, item: "llama-arch.cpp".into() });
        assert_eq!(
            parse_step("[206/206] Linking CXX executable bin/llama-server").unwrap().item,
            "llama-server"
        );
    }

    #[test]
    fn other_lines_are_no_steps() {
        for line in ["", "[]", "[1/2]", "[x/y] z", "[3/2] z", "src/a.cpp:1:2: error: no", "[info] hello"] {
            assert_eq!(parse_step(line), None, "{line}");
        }
    }
}
