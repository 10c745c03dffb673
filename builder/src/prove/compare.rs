//! Compares an unpatched and a patched server by the same requests, with all fixes off and with each fix on.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, timeout};
use warden_patches::SetFix;
use warden_patches::prove::{ProofStep, StepResult};
use warden_patches::set::VariableKind;

use super::channel::{RECLAIM_ALL, ReclaimFile, parse_counters};
use super::questions;
use crate::builder::Builder;
use crate::environment::{private_folder, short_temporary_folder};
use crate::error::{BuilderError, Result, io_error};
use crate::sample_model;
use crate::verify::{ServerAddress, TestBench, TestServer, TrialSettings, wait_until_healthy};

const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Default time for a part to claim its block of the file, and then to answer.
pub const PART_TIMEOUT: Duration = Duration::from_secs(60);

/// Two builds of the same source tree.
#[derive(Clone, Debug)]
pub struct BuildPair<'a> {
    /// Path of the unpatched llama-server.
    pub plain: &'a Path,
    /// Path of the patched llama-server.
    pub patched: &'a Path,
    /// Fixes in the patched server.
    pub fixes: Vec<&'a SetFix>,
    /// Both servers compute on a GPU of this machine.
    pub gpu: bool,
    /// Path of compute-sanitizer, if it is to be used.
    pub sanitizer: Option<PathBuf>,
    /// Time limit for each start and for each round of requests.
    pub limit: Duration,
    /// Time limit for each output of a fix. [`PART_TIMEOUT`] suffices on any machine.
    pub patience: Duration,
}

/// Compares both servers and returns one result per step.
///
/// # Errors
/// Fails if a file cannot be written, or on cancellation; failed steps are no errors.
pub async fn compare_builds(builder: &Builder, pair: &BuildPair<'_>) -> Result<Vec<ProofStep>> {
    let folder = private_folder("llama-warden-prove-", short_temporary_folder())?;
    let model = folder.path().join("sample.gguf");
    sample_model::write(&model, &sample_model::SampleModelOptions::default())
        .map_err(io_error("writing", &model))?;
    let rounds = BuildComparison { builder, pair, folder: folder.path() };
    let place = if pair.gpu { "on the GPU" } else { "on the CPU" };
    let step = |text: &str, how, said: String| ProofStep::new(format!("{text}, {place}"), how, said);
    let plain = match rounds.run_round("plain", pair.plain, &[], None).await? {
        Ok(round) => round,
        Err(text) => return Ok(vec![step("the plain server answers", StepResult::Failed, text)]),
    };
    if let Ok(again) = rounds.run_round("again", pair.plain, &[], None).await?
        && let Some(differ) = questions::first_difference(&plain.answers, &again.answers)
    {
        let text = format!("the plain server itself does not answer twice the same way: {differ}");
        return Ok(vec![step("answers can be compared", StepResult::NotShown, text)]);
    }
    let mut all = Vec::new();
    let off = rounds.run_round("off", pair.patched, &[], None).await?;
    let (mut how, mut text) = plain.compare_with(&off);
    let mut output = off.iter().flat_map(|off| off.output.lines());
    if let Some(line) = output.find(|line| line.starts_with("llama-warden:")) {
        how = StepResult::Failed;
        text = format!("it logs with every fix off: {line}");
    }
    all.push(step("with every fix off it answers as the plain server", how, text));
    for fix in &pair.fixes {
        let variables = rounds.variables(fix, &fix.id)?;
        let round = rounds.run_round(&fix.id, pair.patched, &variables, None).await?;
        let (mut how, text) = plain.compare_with(&round);
        let mut text = vec![text];
        if let Ok(round) = &round {
            if !fix.marker.is_empty() && !round.output.contains(&fix.marker) {
                how = StepResult::Failed;
                text.push(format!("it does not say `{}`", fix.marker));
            }
            for (good, said) in &round.observations {
                how = if *good { how } else { StepResult::Failed };
                text.push(said.clone());
            }
        }
        let title = format!("with {} on it answers as the plain server", fix.id);
        all.push(step(&title, how, text.join("; ")));
    }
    if pair.gpu {
        all.push(rounds.run_memcheck(&plain).await?);
    }
    Ok(all)
}

type RoundResult = std::result::Result<ServerRound, String>;

struct ServerRound {
    answers: Vec<Value>,
    output: String,
    /// Observations besides the answers; `true` marks an expected one.
    observations: Vec<(bool, String)>,
}

impl ServerRound {
    fn compare_with(&self, other: &RoundResult) -> (StepResult, String) {
        match other {
            Err(text) => (StepResult::Failed, text.clone()),
            Ok(other) => match questions::first_difference(&self.answers, &other.answers) {
                Some(differ) => (StepResult::Failed, differ),
                None => (StepResult::Shown, format!("{} of {}", other.answers.len(), self.answers.len())),
            },
        }
    }
}

struct BuildComparison<'a> {
    builder: &'a Builder,
    pair: &'a BuildPair<'a>,
    folder: &'a Path,
}

impl BuildComparison<'_> {
    /// Variables that enable a fix: its defaults, and paths of our files. `file` is the stem of the paths.
    fn variables(&self, fix: &SetFix, file: &str) -> Result<Vec<(String, String)>> {
        let mut all = Vec::new();
        for (number, variable) in fix.variables.iter().enumerate() {
            let value = match (&variable.default, variable.kind) {
                (Some(value), _) => value.to_string(),
                (None, VariableKind::Flag) if number == 0 => "1".to_owned(),
                (None, VariableKind::Path) => {
                    let path = self.folder.join(format!("{file}.file"));
                    if variable.name == RECLAIM_VARIABLE {
                        drop(ReclaimFile::create(&path).map_err(io_error("creating", &path))?);
                    }
                    path.to_string_lossy().into_owned()
                }
                (None, _) => continue,
            };
            all.push((variable.name.clone(), value));
        }
        Ok(all)
    }

    /// Starts a server, sends the requests, checks its fixes' reports, and stops the server. `inside`: the
    /// server's path if `binary` is a tool that runs it; the tool reports only if the server exits normally.
    async fn run_round(
        &self,
        name: &str,
        binary: &Path,
        variables: &[(String, String)],
        inside: Option<&Path>,
    ) -> Result<RoundResult> {
        let mut server = match self.start_server(name, binary, variables).await? {
            Ok(server) => server,
            Err(why) => return Ok(Err(why)),
        };
        let door = server.address();
        let asked: std::result::Result<_, String> = tokio::select! {
            biased;
            () = self.builder.cancel.cancelled() => return Err(BuilderError::Cancelled),
            asked = self.observe(&door, variables) => asked,
            () = server.wait_for_exit() => Err("the server ended".to_owned()),
        };
        let died = if asked.is_err() { server.crash_reason().await.0 } else { None };
        if let Some(program) = inside {
            server.terminate_inside(program, self.pair.patience).await;
        }
        server.stop().await;
        let output = server.output();
        Ok(match asked {
            Ok((answers, observations)) => Ok(ServerRound { answers, output, observations }),
            Err(why) => Err(died.unwrap_or(why)),
        })
    }

    /// Starts a server with these variables; the inner error is the reason why the server did not start.
    async fn start_server(
        &self,
        name: &str,
        binary: &Path,
        variables: &[(String, String)],
    ) -> Result<std::result::Result<TestServer, String>> {
        let trial = TrialSettings {
            timeout: self.pair.limit,
            gpu: self.pair.gpu,
            hide_gpus: !self.pair.gpu,
            libraries: None,
            variables: variables.to_vec(),
        };
        let flags = ["-m", "sample.gguf", "-t", "1", "-c", "1024", "-np", "1", "--cache-ram", "0"];
        let mut last = String::new();
        // Older servers lack Unix sockets and some flags.
        for (unix, flags) in [(true, &flags[..]), (false, &flags[..8])] {
            let bench = TestBench { binary, folder: self.folder, trial: &trial, unix };
            let mut server = TestServer::start(&bench, &format!("{name}-{unix}"), flags).await?;
            if self.is_ready(&mut server).await? {
                return Ok(Ok(server));
            }
            last = server.last_lines();
            server.stop().await;
        }
        Ok(Err(format!("it did not come up: {last}")))
    }

    async fn observe(
        &self,
        door: &ServerAddress,
        variables: &[(String, String)],
    ) -> std::result::Result<(Vec<Value>, Vec<(bool, String)>), String> {
        let answers = timeout(self.pair.limit, questions::collect_answers(door)).await;
        let answers = answers.unwrap_or_else(|_| Err(format!("no answer within {:?}", self.pair.limit)))?;
        let mut seen = Vec::new();
        for (name, value) in variables {
            match name.as_str() {
                REPORT_VARIABLE => seen.push(self.check_report(Path::new(value)).await),
                RECLAIM_VARIABLE => {
                    seen.extend(self.check_reclaim(Path::new(value)).await);
                    let again = timeout(self.pair.limit, questions::collect_answers(door)).await;
                    let same = again.is_ok_and(|again| {
                        again.is_ok_and(|again| questions::first_difference(&answers, &again).is_none())
                    });
                    let which = if same { "the same" } else { "other" };
                    seen.push((same, format!("{which} answers afterwards")));
                }
                _ => {}
            }
        }
        Ok((answers, seen))
    }

    async fn is_ready(&self, server: &mut TestServer) -> Result<bool> {
        let door = server.address();
        tokio::select! {
            biased;
            () = self.builder.cancel.cancelled() => Err(BuilderError::Cancelled),
            ready = timeout(self.pair.limit, wait_until_healthy(&door)) => Ok(matches!(ready, Ok(Ok(())))),
            () = server.wait_for_exit() => Ok(false),
        }
    }

    /// Waits until a report counts a computation; returns false if none is counted in time.
    async fn check_report(&self, file: &Path) -> (bool, String) {
        let until = Instant::now() + self.pair.patience;
        loop {
            let counters = fs::read(file).ok().and_then(|file| parse_counters(&file)).unwrap_or_default();
            if counters.computes > 0 || Instant::now() > until {
                let text = format!(
                    "the report counts {} computations, {} graphs, {} bytes of pools",
                    counters.computes, counters.graphs, counters.pool_bytes
                );
                return (counters.computes > 0, text);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn check_reclaim(&self, file: &Path) -> Vec<(bool, String)> {
        let opened = fs::File::options().read(true).write(true).open(file).map(ReclaimFile::from_file);
        let Ok(channel) = opened else { return vec![(false, "its file is gone".to_owned())] };
        // Each fix with [`RECLAIM_VARIABLE`] has a part in the server. A part claims its block shortly
        // after its first computation, and ignores earlier requests.
        let reads = |fix: &&SetFix| fix.variables.iter().any(|variable| variable.name == RECLAIM_VARIABLE);
        let all = self.pair.fixes.iter().filter(|fix| reads(fix)).count();
        let until = Instant::now() + self.pair.patience;
        while channel.count_parts() < all {
            if Instant::now() > until {
                let text = format!("{} of {all} parts accept requests", channel.count_parts());
                return vec![(false, text)];
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        if let Err(error) = channel.request(1, RECLAIM_ALL, 30_000) {
            return vec![(false, format!("it cannot be asked: {error}"))];
        }
        let until = Instant::now() + self.pair.patience;
        let answers = loop {
            let answers = channel.answers(1);
            if answers.len() >= all || (!answers.is_empty() && Instant::now() > until) {
                break answers;
            }
            if Instant::now() > until {
                return vec![(false, "nobody answered".to_owned())];
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        let told = answers.iter().map(|answer| {
            let part = if answer.cuda { "the CUDA part" } else { "llama-server's part" };
            let text = if answer.done {
                format!("{part} gave back {} bytes", answer.bytes)
            } else {
                format!("{part} could not")
            };
            (answer.done, text)
        });
        told.collect()
    }

    async fn run_memcheck(&self, plain: &ServerRound) -> Result<ProofStep> {
        let step = |how, text: String| {
            let what = "compute-sanitizer's memcheck finds nothing, with all fixes on".to_owned();
            Ok(ProofStep::new(what, how, text))
        };
        let Some(tool) = &self.pair.sanitizer else {
            let text = "compute-sanitizer is not here (it comes with the CUDA toolkit)".to_owned();
            return step(StepResult::NotShown, text);
        };
        let mut variables: Vec<(String, String)> = Vec::new();
        for fix in &self.pair.fixes {
            for (name, value) in self.variables(fix, &format!("{}-watched", fix.id))? {
                if !variables.iter().any(|(own, _)| *own == name) {
                    variables.push((name, value));
                }
            }
        }
        let (round, log) = self.run_watched("watched", tool, self.pair.patched, &variables).await?;
        let round = match round {
            Err(text) => return step(StepResult::Failed, text),
            Ok(round) => round,
        };
        // An unexpected observation fails the step: for example, the tool did not check a fix that was idle.
        let idle = round.observations.iter().find(|(good, _)| !good).map(|(_, text)| text.clone());
        let mut note = "";
        let mut wrong = idle;
        if let Some(differ) = questions::first_difference(&plain.answers, &round.answers) {
            // A slow tool may make the server compute in other batches, which changes the last digits. Run
            // the unpatched server under the tool, too: if its answers also differ, answers are not compared.
            let (under, _) = self.run_watched("watched-plain", tool, self.pair.plain, &[]).await?;
            let other = under
                .is_ok_and(|under| questions::first_difference(&plain.answers, &under.answers).is_some());
            if other {
                note = "; answers were not compared: the plain server's are others under it, too";
            } else {
                wrong = wrong.or(Some(differ));
            }
        }
        if let Some(text) = wrong {
            return step(StepResult::Failed, text);
        }
        let told = fs::read_to_string(&log).unwrap_or_default();
        let line = told.lines().rev().find(|line| line.contains("ERROR SUMMARY:"));
        let text = line.map_or("the tool wrote no summary", |line| line.trim_start_matches(['=', ' ']));
        let how = match line {
            Some(line) if line.contains("ERROR SUMMARY: 0 errors") => StepResult::Shown,
            Some(_) => StepResult::Failed,
            None => StepResult::NotShown,
        };
        step(how, format!("{text}{note}"))
    }

    async fn run_watched(
        &self,
        name: &str,
        tool: &Path,
        program: &Path,
        variables: &[(String, String)],
    ) -> Result<(RoundResult, PathBuf)> {
        let wrapper = self.folder.join(name);
        // compute-sanitizer counts the errors in the last line of its log. The count excludes leaked handles
        // and failed CUDA calls, some of which ggml expects.
        let log = self.folder.join(format!("{name}.memcheck"));
        let text = format!(
            "#!/bin/sh\nexec '{}' --tool memcheck --report-api-errors no --log-file '{}' '{}' \"$@\"\n",
            tool.display(),
            log.display(),
            program.display()
        );
        fs::write(&wrapper, text).map_err(io_error("writing", &wrapper))?;
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o700))
            .map_err(io_error("writing", &wrapper))?;
        Ok((self.run_round(name, &wrapper, variables, Some(program)).await?, log))
    }
}

const REPORT_VARIABLE: &str = "LLAMA_WARDEN_REPORT";
const RECLAIM_VARIABLE: &str = "LLAMA_WARDEN_RECLAIM";
