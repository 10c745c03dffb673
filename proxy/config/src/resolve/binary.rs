//! Finds the llama-server of each model, and checks that it is one.
//!
//! Each binary is run once: `BINARY --version` must print the version of llama.cpp within a time limit.
//! This takes 10 ms, and reports a broken binary as a configuration error instead of exit code 127 at the
//! first request.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_patches::mitigation::BuildFacts;
use warden_policies::modes::CancelMode;
use warden_policies::own_variables::is_own_variable;
use warden_policies::server_flags::FlagList;
use warden_policies::{ModelName, ServerFacts};
use warden_supervisor::ServerCommand;

use super::cancel;
use super::mitigations::{MitigatedCommand, MitigationChecker, ModelMitigations};
use super::model::with_access_variables;
use super::other_program::OTHER_PROGRAM_FACTS;
use super::resolved::ResolvedConfig;
use super::server_facts::{self, ServerKnowledge, slot_files_in, unix_sockets_in};
use super::start_switches;
pub use super::store::BinaryChoice;
use super::store::{FindBuild, StoreBuild, find_build};
use crate::arguments;
use crate::machine::{HostMachine, is_executable};
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems};

const ALIAS_VARIABLE: &str = "LLAMA_ARG_ALIAS";

/// A llama-server that was found: a build in the store with its provenance, or any other file.
#[derive(Clone, Debug, PartialEq)]
enum FoundBinary {
    Built(StoreBuild),
    Foreign(PathBuf),
}

impl FoundBinary {
    fn path(&self) -> &Path {
        match self {
            Self::Built(build) => &build.facts.binary,
            Self::Foreign(path) => path,
        }
    }
}

/// Finds the binaries of all models, among them builds of the store, runs each once, and checks the models'
/// mitigations against them.
///
/// # Errors
/// A binary is missing, is not a llama-server, or does not support the mitigations of its model.
pub async fn fill_from_store(
    resolved: &mut ResolvedConfig,
    machine: &HostMachine,
) -> Result<(), ConfigProblems> {
    let (data, cache) = (resolved.dirs.data.clone(), resolved.dirs.cache.clone());
    let other = resolved.other_store.clone();
    let builds = |id: Option<&str>| match (find_build(&data, id)?, &other) {
        (None, Some(other)) if id.is_some() => find_build(other, id),
        (found, _) => Ok(found),
    };
    let timeout = resolved.settings.child.version_timeout;
    let search = BinarySearch { machine, builds: &builds, cache: &cache, timeout };
    let mut problems = Vec::new();
    let mut known: HashMap<(BinaryChoice, ServerCommand), Option<(BuildFacts, ServerKnowledge)>> =
        HashMap::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut judge = MitigationChecker::default();
    let drop_in = resolved.fleet.any_name;
    for (spec, model) in resolved.fleet.models.iter_mut().zip(&mut resolved.models) {
        if !spec.command.kind.is_llama_server() {
            match search.find_program(&model.choice, runs_elsewhere(&spec.command), &model.choice_place) {
                Ok(program) => spec.command.binary = program,
                Err(problem) => problems.push(problem),
            }
            spec.facts = OTHER_PROGRAM_FACTS;
            continue;
        }
        let asked = query_command(&spec.command);
        let key = (model.choice.clone(), asked.clone());
        if !known.contains_key(&key) {
            let tried = search.query(&model.choice, asked, &model.choice_place).await;
            let facts = tried.map_err(|problem| problems.push(problem)).ok();
            known.insert(key.clone(), facts);
        }
        let Some(Some((facts, behaves))) = known.get(&key) else { continue };
        let name = spec.name.clone();
        let mitigations = &model.mitigations;
        let command = judge.check(name.as_str(), mitigations, facts, &mut problems, &mut resolved.warnings);
        let flags = behaves.flags.as_deref();
        spec.command.binary.clone_from(&facts.binary);
        let command = command.respelled(flags);
        set_command(&mut spec.command, &name, command, mitigations, facts, model.cancel, drop_in);
        spec.start.switches =
            start_switches::find_switches(name.as_str(), mitigations, facts, flags, drop_in);
        spec.facts = ServerFacts {
            slot_files: behaves.slot_files,
            ..server_facts::server_facts(behaves.measured, &spec.command, cores)
        };
        model.build = Some(facts.clone());
        model.flags.clone_from(&behaves.flags);
        if let Some(new) = &behaves.unmeasured
            && !resolved.unmeasured.contains(new)
        {
            resolved.unmeasured.push(new.clone());
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigProblems(problems)) }
}

fn set_command(
    own: &mut ServerCommand,
    name: &ModelName,
    command: MitigatedCommand,
    mitigations: &ModelMitigations,
    facts: &BuildFacts,
    cancel: CancelMode,
    drop_in: bool,
) {
    own.args = command.args;
    own.env = command.env;
    own.env_remove = with_access_variables(command.env_remove, drop_in);
    own.env.extend(cancel::cancel_fix_variable(cancel, facts, mitigations, &own.env));
    let is_named = own.env.iter().any(|(name, _)| name == ALIAS_VARIABLE)
        || (std::env::var_os(ALIAS_VARIABLE).is_some()
            && own.env_remove.iter().all(|name| name != ALIAS_VARIABLE));
    // In drop-in mode no alias is added, so that the process gets the user's arguments unchanged.
    arguments::put_alias(&mut own.args, name.as_str(), is_named || drop_in);
}

/// A model's command with other mitigations than the configured ones.
#[derive(Clone, Debug, PartialEq)]
pub struct AlternativeCommand {
    /// The command with these mitigations.
    pub command: ServerCommand,
    /// Notes about the list of mitigations: omitted, overruled and ineffective items.
    pub notes: Vec<String>,
    /// Description of each item's effect.
    pub descriptions: Vec<String>,
}

/// A checked llama-server.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedBinary {
    /// Path of the binary.
    pub binary: PathBuf,
    /// Id of the build; `None` if the binary is not in the store.
    pub build: Option<String>,
    /// Facts recorded for the build or measured.
    pub facts: ServerFacts,
}

/// Finds llama-servers, and runs them.
pub struct BinarySearch<'a> {
    /// Machine whose PATH is searched.
    pub machine: &'a HostMachine,
    /// Finds builds in the store.
    pub builds: FindBuild<'a>,
    /// Directory with cached measurements.
    pub cache: &'a Path,
    /// Time limit of each run.
    pub timeout: Duration,
}

impl BinarySearch<'_> {
    /// Finds a llama-server and checks that it is one.
    ///
    /// # Errors
    /// The file or build does not exist, or is not a llama-server.
    pub async fn check(&self, choice: &BinaryChoice) -> Result<CheckedBinary, String> {
        let told = |problem: ConfigProblem| {
            let hint = problem.hint.clone().map(|hint| format!("; {hint}")).unwrap_or_default();
            format!("{}{hint}", problem.message)
        };
        let found = self.find(choice, false, &ConfigPlace::Nowhere).map_err(told)?;
        let binary = found.path().to_owned();
        let nothing = ServerCommand::from_binary(binary.clone());
        let version = self.try_version(&nothing, &ConfigPlace::Nowhere).await.map_err(told)?;
        let ServerKnowledge { measured, slot_files, .. } =
            self.known_behaviour(&found, &nothing, &version).await;
        let build = match (&found, choice) {
            (FoundBinary::Built(_), BinaryChoice::Build(id)) => {
                let names = binary.ancestors().filter_map(|path| path.file_name()?.to_str());
                let whole = names.into_iter().find(|name| name.starts_with(id.as_str()));
                Some(whole.unwrap_or(id).to_owned())
            }
            _ => None,
        };
        // Leave facts that depend on a model's flags at their defaults.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut facts = ServerFacts { slot_files, ..server_facts::server_facts(measured, &nothing, cores) };
        if facts.http_threads != Some(ServerFacts::THREADS_ON_DEMAND) {
            // The number of threads may depend on flags, which are unknown here; `None` is the safe answer.
            facts.http_threads = None;
        }
        Ok(CheckedBinary { binary, build, facts })
    }

    async fn query(
        &self,
        choice: &BinaryChoice,
        asked: ServerCommand,
        place: &ConfigPlace,
    ) -> Result<(BuildFacts, ServerKnowledge), ConfigProblem> {
        let found = self.find(choice, runs_elsewhere(&asked), place)?;
        let asked = ServerCommand { binary: found.path().to_owned(), ..asked };
        let version = self.try_version(&asked, place).await?;
        let behaves = self.known_behaviour(&found, &asked, &version).await;
        let facts = match found {
            FoundBinary::Built(build) => build.facts,
            FoundBinary::Foreign(path) => BuildFacts::from_binary(&path, &version),
        };
        Ok((facts, behaves))
    }

    /// Collects the known behaviour of a server: from provenance, earlier measurements, or `--help`.
    async fn known_behaviour(
        &self,
        found: &FoundBinary,
        asked: &ServerCommand,
        version: &str,
    ) -> ServerKnowledge {
        // Without a complete answer in time, the flags stay unknown.
        let help = tokio::time::timeout(self.timeout, query_program(asked, "--help")).await;
        let help = help.ok().and_then(Result::ok);
        let mut known = match found {
            FoundBinary::Built(build) => {
                ServerKnowledge::from_build(build.measured, self.cache, &build.facts.binary, version)
            }
            FoundBinary::Foreign(path) => {
                let mut known = ServerKnowledge::recall_foreign(self.cache, path, version);
                if known.measured.unix_sockets.is_none() {
                    known.measured.unix_sockets = help.as_deref().and_then(unix_sockets_in);
                }
                known
            }
        };
        known.slot_files = help.as_deref().and_then(slot_files_in);
        known.flags = help.as_deref().and_then(FlagList::parse).map(Arc::new);
        known
    }

    /// Finds the chosen binary. With `elsewhere`, a bare name is kept, because it is resolved in another
    /// system.
    fn find(
        &self,
        choice: &BinaryChoice,
        elsewhere: bool,
        place: &ConfigPlace,
    ) -> Result<FoundBinary, ConfigProblem> {
        let fail =
            |message: String, hint: &str| Err(ConfigProblem::new(place.clone(), message).with_hint(hint));
        let store =
            |id: Option<&str>| (self.builds)(id).map_err(|error| ConfigProblem::new(place.clone(), error));
        match choice {
            BinaryChoice::Path(path) => Ok(FoundBinary::Foreign(path.clone())),
            BinaryChoice::InPath(name) if elsewhere => Ok(FoundBinary::Foreign(name.clone())),
            BinaryChoice::InPath(name) => match self.machine.find_in_path(&name.to_string_lossy()) {
                Some(path) => Ok(FoundBinary::Foreign(path)),
                None => fail(
                    format!("there is no program `{}` in PATH", name.display()),
                    "give the path of a llama-server, or build one with `llama-warden build`",
                ),
            },
            BinaryChoice::Build(id) => match store(Some(id))? {
                Some(build) => Ok(FoundBinary::Built(build)),
                None => fail(
                    format!("there is no build `{id}` in the store"),
                    "`llama-warden builds list` shows them",
                ),
            },
            BinaryChoice::Newest => match (store(None)?, self.machine.find_in_path("llama-server")) {
                (Some(build), _) => Ok(FoundBinary::Built(build)),
                (None, Some(path)) => Ok(FoundBinary::Foreign(path)),
                (None, None) => fail(
                    "there is no llama-server: no build in the store, and none in PATH".to_owned(),
                    "build one with `llama-warden build`, or set `binary`",
                ),
            },
        }
    }

    /// Finds the program of a `command`, which is not run before its model starts.
    fn find_program(
        &self,
        choice: &BinaryChoice,
        elsewhere: bool,
        place: &ConfigPlace,
    ) -> Result<PathBuf, ConfigProblem> {
        let fail =
            |message: String, hint: &str| Err(ConfigProblem::new(place.clone(), message).with_hint(hint));
        let found = self.find(choice, elsewhere, place);
        let found = found.map_err(|why| why.with_hint("install it, or begin `command` with its path"))?;
        let path = found.path().to_owned();
        let shown = path.display();
        if !elsewhere && !path.exists() {
            return fail(format!("there is no file {shown}"), "begin `command` with the path of a program");
        }
        if !elsewhere && !is_executable(&path) {
            let hint = "`chmod +x` it, or begin `command` with another program";
            return fail(format!("{shown} is not an executable file"), hint);
        }
        Ok(path)
    }

    /// Runs `--version`. Returns its output if the binary is a llama-server.
    async fn try_version(&self, asked: &ServerCommand, place: &ConfigPlace) -> Result<String, ConfigProblem> {
        let fail =
            |message: String, hint: &str| Err(ConfigProblem::new(place.clone(), message).with_hint(hint));
        let path = asked.binary.as_path();
        let shown = path.display();
        let hint = "give the path of a llama-server, or build one with `llama-warden build`";
        let elsewhere = runs_elsewhere(asked);
        if !elsewhere && !path.exists() {
            return fail(format!("there is no file {shown}"), hint);
        }
        if !elsewhere && !is_executable(path) {
            let hint = "`chmod +x` it, or choose another file";
            return fail(format!("{shown} is not an executable file"), hint);
        }
        if path.canonicalize().ok() == self.machine.exe {
            return fail(format!("{shown} is llama-warden itself, not a llama-server"), hint);
        }
        let words = asked.program_words();
        let shown = words.join(OsStr::new(" "));
        let shown = shown.display();
        let timeout = self.timeout;
        let text = match tokio::time::timeout(timeout, query_program(asked, "--version")).await {
            Err(_) => {
                let message = format!("{shown} --version did not answer within {timeout:?}");
                return fail(message, "is it a llama-server?");
            }
            Ok(Err(error)) => return fail(format!("{shown} cannot be run: {error}"), hint),
            Ok(Ok(text)) => text,
        };
        if is_llama(&text) {
            return Ok(text);
        }
        let said = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("nothing").trim();
        if text.contains("error while loading shared libraries") {
            let hint = "install the library, or build with `llama-warden build`";
            return fail(format!("{shown} cannot start: {said}"), hint);
        }
        fail(format!("{shown} is not a llama-server: `--version` said `{said}`"), hint)
    }
}

impl ResolvedConfig {
    /// Returns the command of the model at index `model` with another list of mitigations. The binaries must
    /// have been filled in before.
    ///
    /// # Errors
    /// A mitigation is unknown, or cannot be used with this build.
    pub fn alternative(
        &self,
        model: usize,
        list: &[String],
        judge: &mut MitigationChecker,
    ) -> Result<AlternativeCommand, String> {
        let Some((spec, own)) = self.fleet.models.get(model).zip(self.models.get(model)) else {
            return Err("there is no such model".to_owned());
        };
        let Some(facts) = &own.build else { return Err("its llama-server is not known".to_owned()) };
        let (mitigations, mut notes) = own.mitigations.with_list(list)?;
        let flags = own.flags.as_deref();
        let name = spec.name.as_str();
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let done = judge.check(name, &mitigations, facts, &mut problems, &mut warnings).respelled(flags);
        let prefix = format!("model `{name}`: ");
        let bare = |problem: ConfigProblem| {
            problem.message.strip_prefix(&prefix).map_or(problem.message.clone(), str::to_owned)
        };
        if let Some(problem) = problems.into_iter().next() {
            let hint = problem.hint.clone().map(|hint| format!("; {hint}")).unwrap_or_default();
            return Err(format!("{}{hint}", bare(problem)));
        }
        notes.extend(warnings.into_iter().map(bare));
        let mut command = spec.command.clone();
        set_command(&mut command, &spec.name, done, &mitigations, facts, own.cancel, self.fleet.any_name);
        Ok(AlternativeCommand { command, notes, descriptions: mitigations.describe_effects() })
    }
}

/// Programs that run their arguments in another system, in which paths of this system do not exist.
const CONTAINER_WRAPPERS: [&str; 7] =
    ["toolbox", "distrobox", "distrobox-enter", "flatpak-spawn", "podman", "docker", "lxc"];

/// Returns true if the wrapper of a command runs the command in another system.
fn runs_elsewhere(command: &ServerCommand) -> bool {
    let program = command.wrapper.first().and_then(|word| Path::new(word).file_name()?.to_str());
    program.is_some_and(|name| CONTAINER_WRAPPERS.contains(&name))
}

/// Includes the wrapper, which may prepare the environment, and the model's `LD_*` variables.
pub(crate) fn query_command(own: &ServerCommand) -> ServerCommand {
    let env = own.env.iter().filter(|(name, _)| name.starts_with("LD_")).cloned().collect();
    ServerCommand { wrapper: own.wrapper.clone(), env, ..ServerCommand::from_binary(own.binary.clone()) }
}

/// Runs a program with one flag; returns what it writes to stdout and stderr.
///
/// A freshly written file may be "busy" (`ETXTBSY`) for a moment: a child forked by another thread holds a
/// copy of the open file until its exec. After this error, retries for at most [`BUSY_RETRY_LIMIT`].
pub(crate) async fn query_program(asked: &ServerCommand, flag: &str) -> io::Result<String> {
    let given_up = Instant::now() + BUSY_RETRY_LIMIT;
    loop {
        let mut words = asked.program_words().into_iter();
        let mut command = tokio::process::Command::new(words.next().unwrap_or_default());
        command.envs(asked.env.iter().map(|(name, value)| (name, value)));
        // Use a separate process group, so that Ctrl-C in the terminal does not interrupt the program.
        command.args(words).arg(flag).stdin(Stdio::null()).process_group(0).kill_on_drop(true);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(is_own_variable) {
                command.env_remove(name);
            }
        }
        match command.output().await {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && Instant::now() < given_up => {
                tokio::time::sleep(BUSY_POLL).await;
            }
            Err(error) => return Err(error),
            Ok(output) => {
                let text = [output.stdout, output.stderr].concat();
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
}

/// A forked child executes its program within milliseconds; copying a program takes a second.
const BUSY_RETRY_LIMIT: Duration = Duration::from_secs(2);
const BUSY_POLL: Duration = Duration::from_millis(5);

/// Returns true for the output of llama.cpp, which prints `version: 1234 (abcdef)` and `built with ...`.
fn is_llama(version: &str) -> bool {
    version.lines().any(|line| line.trim_start().starts_with("version:"))
}

#[cfg(test)]
mod tests {
    use warden_builder::ServerBehaviour;

    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn search(machine: &HostMachine, timeout: Duration) -> BinarySearch<'_> {
        BinarySearch { machine, builds: &|_| Ok(None), cache: Path::new(""), timeout }
    }

    async fn tried(path: &Path, timeout: Duration) -> Result<(), String> {
        let asked = ServerCommand::from_binary(path.to_owned());
        let found = search(&HostMachine::read(), timeout).try_version(&asked, &ConfigPlace::Nowhere).await;
        found
            .map(drop)
            .map_err(|problem| format!("{} | {}", problem.message, problem.hint.unwrap_or_default()))
    }

    #[tokio::test]
    async fn a_binary_counts_when_it_answers_like_llama_cpp() {
        let dir = tempfile::tempdir().unwrap();
        let wait = Duration::from_secs(20);
        let good = script(dir.path(), "good", "echo 'version: 1 (abc)' >&2");
        assert_eq!(tried(&good, wait).await, Ok(()));
        let other = script(dir.path(), "other", "echo hello");
        assert!(
            tried(&other, wait).await.unwrap_err().contains("not a llama-server: `--version` said `hello`")
        );
        let slow = script(dir.path(), "slow", "exec sleep 60");
        assert!(tried(&slow, Duration::from_millis(50)).await.unwrap_err().contains("did not answer"));
        let missing = tried(&dir.path().join("missing"), wait).await.unwrap_err();
        assert!(missing.contains("there is no file") && missing.contains("llama-warden build"), "{missing}");
        std::fs::write(dir.path().join("text"), "x").unwrap();
        assert!(tried(&dir.path().join("text"), wait).await.unwrap_err().contains("not an executable file"));
    }

    #[tokio::test]
    async fn a_binary_is_asked_through_its_wrapper_and_with_the_variables_of_the_loader() {
        let dir = tempfile::tempdir().unwrap();
        let needy = "[ \"$NEEDED$LD_FOUND\" = 12 ] || { echo 'error while loading shared libraries'; exit 1; }\n\
                     echo \"version: 1 ($1)\"";
        let binary = script(dir.path(), "needy", needy);
        let own = ServerCommand {
            wrapper: ["env", "NEEDED=1"].map(str::to_owned).to_vec(),
            env: vec![("LD_FOUND".to_owned(), "2".to_owned()), ("OTHER".to_owned(), "3".to_owned())],
            ..ServerCommand::from_binary(binary.clone())
        };
        let asked = ServerCommand { binary: binary.clone(), ..query_command(&own) };
        let (wait, machine) = (Duration::from_secs(20), HostMachine::read());
        let search = search(&machine, wait);
        let told = search.try_version(&asked, &ConfigPlace::Nowhere).await;
        assert_eq!(told.unwrap(), "version: 1 (--version)\n");
        let gone = ServerCommand { wrapper: vec!["no-such-wrapper".to_owned()], ..asked.clone() };
        let told = search.try_version(&gone, &ConfigPlace::Nowhere).await.unwrap_err();
        assert!(
            told.message.contains("no-such-wrapper") && told.message.contains("cannot be run"),
            "{told:?}"
        );
        // A container has another file of that name, or none.
        let wrapper = script(dir.path(), "toolbox", "[ $3 = llama-server ] && echo 'version: 2 (in)'");
        let words = [wrapper.to_str().unwrap(), "run", "-c"].map(str::to_owned).to_vec();
        let asked = ServerCommand { wrapper: words, ..ServerCommand::from_binary("llama-server".into()) };
        let choice = BinaryChoice::InPath("llama-server".into());
        let found = search.find(&choice, runs_elsewhere(&asked), &ConfigPlace::Nowhere).unwrap();
        assert_eq!(found.path(), Path::new("llama-server"));
        assert!(search.try_version(&asked, &ConfigPlace::Nowhere).await.is_ok());
    }

    #[tokio::test]
    async fn the_one_program_of_llama_cpp_is_asked_as_a_server() {
        let dir = tempfile::tempdir().unwrap();
        let body = "[ \"$1\" = serve ] && echo \"version: 0.2.0 ($2)\" || echo 'Usage: llama <command>'";
        let asked = ServerCommand::from_binary(script(dir.path(), "llama", body));
        assert_eq!(query_program(&asked, "--help").await.unwrap(), "version: 0.2.0 (--help)\n");
    }

    #[tokio::test]
    async fn a_binary_that_is_being_written_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = script(dir.path(), "new", "echo 'version: 1 (abc)'");
        let asked = ServerCommand::from_binary(path.clone());
        let writer = std::fs::File::options().append(true).open(&path).unwrap();
        // `biased` polls in order: the file is open at the first attempt, and closed at the next ones.
        let (told, ()) = tokio::join!(biased; query_program(&asked, "--version"), async { drop(writer) });
        assert_eq!(told.unwrap(), "version: 1 (abc)\n");
    }

    #[test]
    fn with_no_choice_the_newest_build_comes_before_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let in_path = script(dir.path(), "llama-server", "");
        let mut machine = HostMachine::read();
        machine.env = vec![("PATH".into(), dir.path().into())];
        let find = |built: Option<StoreBuild>| {
            let builds = move |_: Option<&str>| Ok(built.clone());
            let search = BinarySearch { builds: &builds, ..search(&machine, Duration::ZERO) };
            search.find(&BinaryChoice::Newest, false, &ConfigPlace::Nowhere).unwrap()
        };
        let facts = BuildFacts { binary: "/store/x".into(), number: None, provenance: None };
        let built = StoreBuild { facts, measured: ServerBehaviour::default() };
        assert_eq!(find(Some(built.clone())), FoundBinary::Built(built));
        assert_eq!(find(None), FoundBinary::Foreign(in_path.clone()));
        machine.exe = in_path.canonicalize().ok();
        let search = search(&machine, Duration::ZERO);
        let error = search.find(&BinaryChoice::Newest, false, &ConfigPlace::Nowhere).unwrap_err();
        assert!(error.hint.is_some_and(|hint| hint.contains("llama-warden build")));
    }
}
