//! Imports a command that starts llama-server, directly or in a container, as a model.

use std::path::Path;

use warden_config::arguments::{self, ListeningFlag};

use crate::exit::CommandError;

use super::imported::{ImportedConfig, ImportedModel, is_listed};
use super::{container, shell};

#[derive(Debug, Default)]
pub(super) struct ParsedCommand {
    pub(super) model: ImportedModel,
    pub(super) listening: Vec<(&'static str, String, ListeningFlag)>,
    /// Host address, if given, and port at which a container is published.
    pub(super) published: Option<(Option<String>, u16)>,
    /// Unsupported parts, each with the nearest alternative.
    pub(super) unsupported: Vec<(String, String)>,
}

/// Programs that run the server named in their arguments.
const WRAPPERS: &str = "taskset nice ionice chrt numactl setsid stdbuf time timeout prlimit setarch cgexec schedtool \
    systemd-run toolbox distrobox distrobox-enter flatpak-spawn gamemoderun caffeinate firejail";
/// Those of them that become the program they run, or only wait for it.
const PLAIN_WRAPPERS: &str = "taskset nice ionice chrt numactl stdbuf prlimit";
const CONTAINER_PROGRAMS: [&str; 2] = ["docker", "podman"];
/// Prefixes of programs that never start a llama-server named in their arguments.
const INTERPRETERS: [&str; 3] = ["python", "node", "vllm"];
/// Wrappers that run the server in a container with its own file system.
const INTO_CONTAINERS: [&str; 4] = ["toolbox", "distrobox", "distrobox-enter", "flatpak-spawn"];
const OTHER_USER: &str = "runs it as another user, who cannot use the socket that llama-warden gives it: \
                          run llama-warden as that user";
const OTHER_MACHINE: &str =
    "runs it on another machine: run llama-warden there, and name it here in `[remotes]`";
/// Programs that must not precede the server, each with the reason.
const REFUSED_WRAPPERS: [(&str, &str); 9] = [
    ("sudo", OTHER_USER),
    ("doas", OTHER_USER),
    ("su", OTHER_USER),
    ("runuser", OTHER_USER),
    ("pkexec", OTHER_USER),
    ("ssh", OTHER_MACHINE),
    ("kubectl", OTHER_MACHINE),
    ("wsl", "is a program of Windows: run llama-warden within WSL"),
    ("wsl.exe", "is a program of Windows: run llama-warden within WSL"),
];

pub(super) fn import_command(words: &[String], from: &str) -> Result<ImportedConfig, CommandError> {
    let taken = parse_command(words).map_err(|why| {
        CommandError::usage(
            format!("{from}: {why}"),
            "give a command that starts llama-server: `llama-server FLAGS`, or `docker run ... IMAGE FLAGS`",
        )
    })?;
    if let Some(program) = taken.model.command.other_program.first() {
        return Err(CommandError::usage(
            format!("{from}: `{program}` is no llama-server"),
            "write it as `command` of a model (docs/models.md#other-programs)",
        ));
    }
    let mut imported = ImportedConfig::default();
    import_listening(&taken, &mut imported, from)?;
    for (what, nearest) in taken.unsupported {
        imported.add_unsupported(what, nearest);
    }
    let mut model = taken.model;
    if imported.listener.port.is_none() {
        model.notes.push(
            "it names no port: here it is 8080, where builds of llama-server from late 2026 on take 9931"
                .to_owned(),
        );
    }
    let mut names = arguments::aliases(&model.command.args).into_iter();
    model.name = names.next().unwrap_or_else(|| default_model_name(&model));
    model.aliases.extend(names);
    model.loading.preload = true;
    imported.models.push(model);
    Ok(imported)
}

pub(super) fn import_listening(
    taken: &ParsedCommand,
    imported: &mut ImportedConfig,
    from: &str,
) -> Result<(), CommandError> {
    let number = |flag: &str, text: &str| {
        text.parse::<u16>().map_err(|_| {
            CommandError::usage(
                format!("{from}: {flag} {text}: this is no port"),
                "give a number from 0 to 65535",
            )
        })
    };
    for (flag, value, what) in &taken.listening {
        match what {
            ListeningFlag::Host => imported.listener.host = Some(value.clone()),
            ListeningFlag::Port => imported.listener.port = Some(number(flag, value)?),
            ListeningFlag::Certificate => imported.listener.tls_cert = Some(value.clone()),
            ListeningFlag::PrivateKey => imported.listener.tls_key = Some(value.clone()),
            ListeningFlag::Prefix => imported.listener.api_prefix = Some(value.clone()),
            ListeningFlag::Ignored | ListeningFlag::Key => {
                imported.add_unsupported(*flag, "one process listens, and nothing shares its port");
            }
        }
    }
    if let Some((host, port)) = taken.published.clone() {
        // Without an address, Docker publishes on all addresses.
        imported.listener.host = Some(host.unwrap_or_else(|| "0.0.0.0".to_owned()));
        imported.listener.port = Some(port);
    }
    Ok(())
}

fn default_model_name(model: &ImportedModel) -> String {
    let file = model.model.as_deref().or_else(|| arguments::model_path(&model.command.args));
    let stem = file.and_then(|file| Path::new(file).file_stem()).and_then(|stem| stem.to_str());
    stem.or_else(|| arguments::remote_model(&model.command.args)).unwrap_or("default").to_owned()
}

pub(super) fn parse_command(words: &[String]) -> Result<ParsedCommand, String> {
    let mut taken = ParsedCommand::default();
    let mut rest = words;
    // Consume leading variables, shells, wrappers, and programs like `exec`.
    loop {
        match rest {
            [word, more @ ..] if word == "exec" || is_program(word, &["nohup"]) => rest = more,
            [word, more @ ..] if is_assignment(word) => {
                let (name, value) = word.split_once('=').unwrap_or_default();
                taken.model.command.env.push((name.to_owned(), value.to_owned()));
                rest = more;
            }
            [word, more @ ..] if is_program(word, &["env"]) => rest = parse_env(word, more, &mut taken)?,
            [program, flag, script] if is_shell(program, flag) => {
                return shell::parse_shell_command(&[program, flag], script, taken);
            }
            [program, ..] if !starts_server(rest) && !is_program(program, &CONTAINER_PROGRAMS) => {
                match wrapper_end(rest)? {
                    Some(end) => {
                        if is_program(program, &INTO_CONTAINERS) && starts_server(&rest[end..]) {
                            // Run the container's binary, not this system's.
                            taken.model.command.binary = Some(rest[end].clone());
                        }
                        taken.model.command.wrapper.extend(rest[..end].iter().cloned());
                        rest = &rest[end..];
                    }
                    None => break,
                }
            }
            _ => break,
        }
    }
    let Some((program, args)) = rest.split_first() else { return Err("the command is empty".to_owned()) };
    if let Some(word) = rest.iter().find(|word| shell::is_operator(word)) {
        return Err(format!(
            "`{word}` needs a shell: put it into a script that ends in `exec llama-server \"$@\"`"
        ));
    }
    if is_program(program, &CONTAINER_PROGRAMS) {
        if let Some(wrapper) = taken.model.command.wrapper.first() {
            let words = taken.model.command.wrapper.join(" ");
            taken.unsupported.push((
                format!("`{words}`"),
                format!("`{wrapper}` was put before `{program}`, which no model is started by"),
            ));
            taken.model.command.wrapper.clear();
        }
        let args = container::parse_container_run(program, args, &mut taken)?;
        parse_flags(&args, &mut taken);
        return Ok(taken);
    }
    if let Some((name, why)) = REFUSED_WRAPPERS.iter().find(|(name, _)| is_program(program, &[name])) {
        return Err(format!("`{name}` {why}"));
    }
    let file = arguments::model_path(args).filter(|file| is_gguf(file));
    let names_model = file.or_else(|| arguments::remote_model(args)).is_some();
    // With a model of llama.cpp, the words after the wrapper may be a script around llama-server.
    let is_plain_wrapper = !names_model && is_listed(PLAIN_WRAPPERS, file_name(program));
    if is_listed(WRAPPERS, file_name(program)) && !is_plain_wrapper {
        return Err(format!("`{program}` is not followed by a llama-server"));
    }
    // `llama serve` is llama.cpp's unified program.
    let unified = unified_server_args(rest);
    if unified.is_none() && (is_plain_wrapper || !is_server(program, args)) {
        taken.model.command.other_program = rest.to_vec();
        taken.model.note_windows();
        return Ok(taken);
    }
    if !matches!(program.as_str(), "llama-server" | "llama-server.exe") {
        taken.model.command.binary = Some(program.clone());
    }
    parse_flags(unified.unwrap_or(args), &mut taken);
    Ok(taken)
}

/// Keeps the options of `env` as a wrapper; the caller's loop reads the variables.
fn parse_env<'a>(
    program: &str,
    mut rest: &'a [String],
    taken: &mut ParsedCommand,
) -> Result<&'a [String], String> {
    let mut kept = Vec::new();
    let mut clears = false;
    while let [word, more @ ..] = rest {
        match word.as_str() {
            "-u" | "--unset" | "-C" | "--chdir" => {
                let Some((value, more)) = more.split_first() else {
                    return Err(format!("`env {word}` has no value"));
                };
                kept.extend([word.clone(), value.clone()]);
                rest = more;
            }
            "-S" | "--split-string" => {
                return Err("`env -S` splits its words itself: write them out".to_owned());
            }
            "--" => {
                rest = more;
                break;
            }
            option if option.starts_with('-') => {
                clears |= matches!(option, "-" | "-i" | "--ignore-environment");
                kept.push(word.clone());
                rest = more;
            }
            // `env -i` would clear a variable before it, so keep the variable after it.
            variable if clears && is_assignment(variable) => {
                kept.push(word.clone());
                rest = more;
            }
            _ => break,
        }
    }
    if !kept.is_empty() {
        taken.model.command.wrapper.push(program.to_owned());
        taken.model.command.wrapper.extend(kept);
    }
    Ok(rest)
}

fn is_shell(program: &str, flag: &str) -> bool {
    is_program(program, &["sh", "bash", "dash", "zsh"]) && flag.starts_with('-') && flag.ends_with('c')
}

fn unified_server_args(words: &[String]) -> Option<&[String]> {
    match words {
        [program, command, args @ ..]
            if is_program(program, &["llama", "llama.exe"])
                && matches!(command.as_str(), "serve" | "server") =>
        {
            Some(args)
        }
        _ => None,
    }
}

fn starts_server(words: &[String]) -> bool {
    let named = |word: &String| !word.contains('=') && file_name(word).contains("llama-server");
    unified_server_args(words).is_some() || words.first().is_some_and(named)
}

/// Returns the number of leading words that wrap a server, or the reason why they cannot be kept.
fn wrapper_end(words: &[String]) -> Result<Option<usize>, String> {
    if INTERPRETERS.iter().any(|name| file_name(&words[0]).starts_with(name)) {
        return Ok(None);
    }
    let begins = |at: &usize| {
        let rest = &words[*at..];
        let shell = matches!(rest, [program, flag, _] if is_shell(program, flag));
        shell || is_program(&rest[0], &["env", "docker", "podman"])
    };
    let is_flag = |word: &String| {
        let pair = [word.clone(), String::new()];
        arguments::model_path(&pair).or_else(|| arguments::remote_model(&pair)).is_some()
    };
    // An argument may look like a server's name (`--unit llama-server`), so use the last candidate before the
    // flags.
    let flags = words.iter().position(is_flag).unwrap_or(words.len());
    let is_server = |at: &usize| starts_server(&words[*at..]);
    let found = (1..flags).rev().find(is_server).or_else(|| (1..words.len()).find(is_server));
    let inner = (1..found.unwrap_or(words.len())).find(begins);
    let Some(end) = inner.or(found) else { return Ok(None) };
    for word in &words[..end] {
        if let Some((name, why)) = REFUSED_WRAPPERS.iter().find(|(name, _)| is_program(word, &[name])) {
            return Err(format!("`{name}` {why}"));
        }
    }
    if is_program(&words[0], &["systemd-run"]) && !words[..end].iter().any(|word| word == "--scope") {
        let why = "`systemd-run` makes a service of it, which llama-warden can neither read nor stop: add `--scope`";
        return Err(why.to_owned());
    }
    Ok(Some(end))
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn is_gguf(file: &str) -> bool {
    Path::new(file).extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Accepts Unix and Windows paths.
fn file_name(word: &str) -> &str {
    word.rsplit(['/', '\\']).next().unwrap_or_default()
}

pub(super) fn is_program(word: &str, names: &[&str]) -> bool {
    names.contains(&file_name(word))
}

/// Recognises a server by its name, or by a model flag, because the program may be a script around
/// llama-server.
fn is_server(program: &str, args: &[String]) -> bool {
    const OTHERS: &str = "python vllm uv sd-server whisper-server node ollama flatpak mlx conda npx sglang tabby \
        koboldcpp ds4-server piper kokoro speaches infinity_emb text-embeddings-router";
    let name = file_name(program);
    let other = OTHERS.split_whitespace().any(|other| name.starts_with(other))
        || REFUSED_WRAPPERS.iter().any(|(known, _)| *known == name);
    let model = arguments::model_path(args).or_else(|| arguments::remote_model(args)).is_some();
    name.contains("llama-server") || (!other && model)
}

/// llama-server does not accept `--flag=value`, so split it into two words.
pub(super) fn split_flag_values(args: &[String]) -> Vec<String> {
    let both = |word: &String| {
        let (flag, value) = word.split_once('=').filter(|(flag, _)| flag.starts_with("--"))?;
        flag[2..]
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
            .then(|| [flag.to_owned(), value.to_owned()])
    };
    args.iter().flat_map(|word| both(word).map_or_else(|| vec![word.clone()], Vec::from)).collect()
}

fn parse_flags(args: &[String], taken: &mut ParsedCommand) {
    let split = arguments::split_listening(&split_flag_values(args));
    taken.listening = split.listening;
    let mut args = split.args;
    let file = arguments::model_path(&args).filter(|file| file.starts_with('/')).map(str::to_owned);
    if let Some(file) = file {
        // llama-server uses the last model flag, so drop the others.
        while let Some(at) = args.iter().position(|word| word == "-m" || word == "--model") {
            args.drain(at..(at + 2).min(args.len()));
        }
        taken.model.model = Some(file);
    }
    taken.model.command.args = args;
    taken.model.note_windows();
}
