//! Reads from a server's command and environment what is needed to send requests to it.

use warden_policies::server_flags::{last_value, normal_flag};
use warden_policies::warmth::NoFileReason;

use crate::process::regular_file;
use crate::spec::ServerCommand;

/// First API key of the command line, key file or environment; any key is accepted. Blocks for a small file.
pub(crate) fn api_key(command: &ServerCommand) -> Option<String> {
    if !command.kind.is_llama_server() {
        return None;
    }
    let given = flag_values(command, "--api-key").find_map(first_key);
    let of_file = || flag_values(command, "--api-key-file").find_map(|path| key_of_file(command, path));
    given.or_else(of_file).or_else(|| first_key(&variable(command, "LLAMA_API_KEY")?))
}

fn first_key(keys: &str) -> Option<String> {
    keys.split(',').map(str::trim).find(|key| !key.is_empty()).map(str::to_owned)
}

const MAX_KEY_FILE_BYTES: u64 = 1 << 20;

/// Reads the first key of a key file with one key per line.
fn key_of_file(command: &ServerCommand, path: &str) -> Option<String> {
    let path = command.resolve_path(path);
    let text = regular_file::read_text(&path, MAX_KEY_FILE_BYTES).inspect_err(|error| {
        tracing::warn!(
            path = %path.display(), %error,
            "llama-server's file of keys cannot be read; its properties stay unknown"
        );
    });
    text.ok()?.lines().map(str::trim).find(|key| !key.is_empty()).map(str::to_owned)
}

pub(crate) fn has_metrics(command: &ServerCommand) -> bool {
    let on = |value: String| matches!(value.as_str(), "1" | "true" | "on" | "enabled");
    if !command.kind.is_llama_server() {
        return false;
    }
    command.args.iter().any(|arg| normal_flag(arg) == "--metrics")
        || variable(command, "LLAMA_ARG_ENDPOINT_METRICS").is_some_and(on)
}

/// True if the server unloads its model while idle.
pub(crate) fn unloads_when_idle(command: &ServerCommand) -> bool {
    let seconds = last_setting(command, &["--sleep-idle-seconds"], "LLAMA_ARG_SLEEP_IDLE_SECONDS");
    seconds.is_some_and(|seconds| seconds.trim().parse::<i64>().is_ok_and(|seconds| seconds >= 0))
}

/// First build in which `/metrics` neither wakes a sleeping server nor keeps it awake (947fd9bb2).
const FIRST_SLEEP_SAFE_BUILD: u32 = 10_519;

pub(crate) fn may_ask_idle(command: &ServerCommand, build: Option<u32>) -> bool {
    !unloads_when_idle(command) || build.is_some_and(|build| build >= FIRST_SLEEP_SAFE_BUILD)
}

pub(crate) fn batch_size(command: &ServerCommand) -> Option<u64> {
    last_setting(command, &["--batch-size", "-b"], "LLAMA_ARG_BATCH")?.trim().parse().ok()
}

/// Answer limit in tokens for requests without their own limit; `None`: the context limits them.
pub(crate) fn max_answer_tokens(command: &ServerCommand) -> Option<u64> {
    last_setting(command, &["--n-predict", "--predict", "-n"], "LLAMA_ARG_N_PREDICT")?.trim().parse().ok()
}

/// Reason why a process with this command cannot take over conversations: it is no llama-server, has no slots
/// of its own, or unloads its model.
pub fn stays_cold(command: &ServerCommand) -> Option<&'static str> {
    if !command.kind.is_llama_server() {
        return Some("it is no llama-server");
    }
    let variables = ["LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET"];
    let is_router = command.args.iter().any(|arg| normal_flag(arg).starts_with("--models-"))
        || variables.iter().any(|name| variable(command, name).is_some());
    if is_router {
        return Some("it serves several models by processes of its own");
    }
    unloads_when_idle(command).then_some("it gives its slots back while it sleeps")
}

/// Reason in the arguments why another process could not use slot files of this command.
pub fn no_slot_files(command: &ServerCommand) -> Option<NoFileReason> {
    // Slots may have been computed with an adapter that a request chose.
    if command.args.iter().any(|arg| normal_flag(arg).starts_with("--lora")) {
        return Some(NoFileReason::Adapters);
    }
    uses_drafts(command).then_some(NoFileReason::Draft)
}

/// True if the command drafts tokens in a way that has state.
fn uses_drafts(command: &ServerCommand) -> bool {
    const SHORT_FLAGS: [&str; 3] = ["-md", "-hfd", "-hfrd"];
    const LONG_FLAGS: [&str; 4] = ["--model-draft", "--hf-repo-draft", "--spec-", "--mtp"];
    const VARIABLES: [&str; 6] = [
        "LLAMA_ARG_MODEL_DRAFT",
        "LLAMA_ARG_HFD_REPO",
        "LLAMA_ARG_HF_REPO_DRAFT",
        "LLAMA_ARG_SPEC_DRAFT_MODEL",
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        "LLAMA_ARG_SPEC_TYPE",
    ];
    let given = command.args.iter().map(|arg| normal_flag(arg)).any(|arg| {
        SHORT_FLAGS.contains(&arg.as_str()) || LONG_FLAGS.iter().any(|flag| arg.starts_with(flag))
    });
    given || VARIABLES.iter().any(|name| variable(command, name).is_some())
}

/// Last value on the command line, else the value of the variable.
fn last_setting(command: &ServerCommand, flags: &[&str], name: &str) -> Option<String> {
    if !command.kind.is_llama_server() {
        return None;
    }
    last_value(&command.args, flags).map(str::to_owned).or_else(|| variable(command, name))
}

fn flag_values<'a>(command: &'a ServerCommand, flag: &str) -> impl Iterator<Item = &'a str> {
    let pairs = command.args.windows(2).filter(move |pair| normal_flag(&pair[0]) == flag);
    pairs.map(|pair| pair[1].as_str())
}

/// Value of a variable in the process, from its own or the inherited environment.
pub(crate) fn variable(command: &ServerCommand, name: &str) -> Option<String> {
    if command.env_remove.iter().any(|removed| removed == name) {
        return None;
    }
    command.own_variable(name).map(str::to_owned).or_else(|| std::env::var(name).ok())
}

/// llama.cpp's build number, such as 8827 in `b8827-3f545bec`. Numbers up to 1 mean sources without
/// history.
pub(crate) fn build_number(info: &str) -> Option<u32> {
    let digits = info.strip_prefix('b')?.split('-').next()?;
    digits.parse().ok().filter(|number| *number > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ReadyCheck, ServerKind};

    fn command(args: &[&str], env: &[(&str, &str)]) -> ServerCommand {
        ServerCommand {
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            ..ServerCommand::from_binary("/opt/llama-server".into())
        }
    }

    #[test]
    fn the_key_is_found_in_every_spelling_and_in_a_file() {
        let key = |args: &[&str], env: &[(&str, &str)]| api_key(&command(args, env));
        for flag in ["--api-key", "--api_key"] {
            assert_eq!(key(&[flag, "one,two"], &[]).as_deref(), Some("one"));
        }
        assert_eq!(key(&[], &[("LLAMA_API_KEY", "three")]).as_deref(), Some("three"));
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("keys");
        std::fs::write(&file, "\n four \nfive\n").unwrap();
        for flag in ["--api-key-file", "--api_key_file"] {
            assert_eq!(key(&[flag, file.to_str().unwrap()], &[]).as_deref(), Some("four"));
        }
        let mut relative = command(&["--api-key-file", "keys"], &[]);
        relative.directory = Some(directory.path().to_owned());
        assert_eq!(api_key(&relative).as_deref(), Some("four"));
        assert_eq!(key(&["--api-key-file", "/nowhere/at/all"], &[]), None);
        let mut removed = command(&[], &[("LLAMA_API_KEY", "three")]);
        removed.env_remove.push("LLAMA_API_KEY".to_owned());
        assert_eq!(api_key(&removed), None);
    }

    #[test]
    fn flags_of_another_program_mean_nothing_here() {
        let args = ["--metrics", "--api-key", "k", "--sleep-idle-seconds", "9", "-b", "1", "-n", "1"];
        let mut other = command(&args, &[("LLAMA_API_KEY", "k")]);
        assert!(api_key(&other).is_some() && has_metrics(&other) && unloads_when_idle(&other));
        other.kind = ServerKind::OtherProgram(ReadyCheck { path: "/".to_owned(), needs_success: true });
        assert!(api_key(&other).is_none() && !has_metrics(&other) && !unloads_when_idle(&other));
        assert_eq!((batch_size(&other), max_answer_tokens(&other)), (None, None));
        assert!(stays_cold(&other).is_some());
    }

    #[test]
    fn adapters_and_drafts_keep_slots_out_of_files() {
        let of = |args: &[&str], env: &[(&str, &str)]| no_slot_files(&command(args, env));
        assert_eq!(of(&["-m", "x", "--draft-max", "4"], &[]), None);
        for args in [["--lora", "a"], ["--lora_scaled", "a:1"], ["--lora-init-without-apply", "-v"]] {
            assert_eq!(of(&args, &[]), Some(NoFileReason::Adapters), "{args:?}");
        }
        for args in [["-md", "x"], ["--model_draft", "x"], ["--spec-type", "mtp"], ["-hfd", "x"]] {
            assert_eq!(of(&args, &[]), Some(NoFileReason::Draft), "{args:?}");
        }
        assert_eq!(of(&[], &[("LLAMA_ARG_MODEL_DRAFT", "x")]), Some(NoFileReason::Draft));
        assert!(stays_cold(&command(&["--models-dir", "x"], &[])).is_some());
        assert!(stays_cold(&command(&[], &[("LLAMA_ARG_MODELS_DIR", "x")])).is_some());
        assert!(stays_cold(&command(&["--sleep-idle-seconds", "9"], &[])).is_some());
        assert_eq!(stays_cold(&command(&["-m", "x"], &[])), None);
    }

    #[test]
    fn counters_of_a_server_that_sleeps_are_asked_only_where_that_lets_it_sleep() {
        let awake = command(&["--metrics"], &[]);
        assert!(has_metrics(&awake) && may_ask_idle(&awake, None));
        for sleeper in [
            command(&["--sleep-idle-seconds", "60"], &[]),
            command(&["--sleep_idle_seconds", "60"], &[]),
            command(&[], &[("LLAMA_ARG_SLEEP_IDLE_SECONDS", "60")]),
        ] {
            assert!(!may_ask_idle(&sleeper, None) && !may_ask_idle(&sleeper, Some(10_518)));
            assert!(may_ask_idle(&sleeper, Some(10_519)));
        }
        assert!(!unloads_when_idle(&command(&["--sleep-idle-seconds", "-1"], &[])));
        assert_eq!(batch_size(&command(&["-b", "512", "--batch-size", "4096"], &[])), Some(4096));
    }
}
