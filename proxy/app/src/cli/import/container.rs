//! Imports `docker run` and `podman run`: converts container options to settings of a plain process.

use warden_config::arguments;

use super::command::{ParsedCommand, is_program, split_flag_values};
use super::yaml::{inherited_note, is_inherited};

/// Options without a value that mean nothing outside a container.
const IGNORED_SWITCHES: [&str; 9] =
    ["--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--init", "--replace"];
/// Options with a value that mean nothing outside a container.
const IGNORED_OPTIONS: [&str; 8] =
    ["--name", "--ipc", "--shm-size", "--pull", "--platform", "--hostname", "-h", "--restart"];
const OTHER_SWITCHES: [&str; 5] = ["--privileged", "--read-only", "-P", "--publish-all", "--no-healthcheck"];

/// Returns the flags for llama-server, with the host's paths in place of container paths.
pub(super) fn parse_container_run(
    program: &str,
    words: &[String],
    taken: &mut ParsedCommand,
) -> Result<Vec<String>, String> {
    let Some(run) = words.iter().position(|word| word == "run") else {
        return Err(format!("`{program}` is not told to `run` anything"));
    };
    let mut mounts: Vec<(String, String)> = Vec::new();
    let mut words = words[run + 1..].iter();
    let mut is_server = false;
    let image = loop {
        let Some(word) = words.next() else { return Err(format!("`{program} run` names no image")) };
        if !word.starts_with('-') {
            break word;
        }
        let clustered =
            word.len() > 2 && !word.starts_with("--") && word[1..].chars().all(|c| "dit".contains(c));
        if clustered {
            continue;
        }
        let (option, value) = match word.split_once('=') {
            Some((option, value)) if word.starts_with("--") => (option, value.to_owned()),
            _ if IGNORED_SWITCHES.contains(&word.as_str()) || OTHER_SWITCHES.contains(&word.as_str()) => {
                (word.as_str(), String::new())
            }
            _ => {
                let value = words.next().ok_or_else(|| format!("`{program} run`: {word} has no value"))?;
                (word.as_str(), value.clone())
            }
        };
        if option == "--entrypoint" {
            is_server = value.contains("llama-server");
        } else {
            import_option(program, option, value, &mut mounts, taken);
        }
    };
    let mut args = split_flag_values(&words.cloned().collect::<Vec<_>>());
    if args.first().is_some_and(|word| is_program(word, &["llama-server"]) || word == "--server") {
        args.remove(0);
    } else if !is_server && !image.contains("llama") {
        return Err(format!("the image `{image}` is not known to be one of llama-server"));
    }
    let by_variable =
        |(name, _): &(String, String)| matches!(name.as_str(), "LLAMA_ARG_MODEL" | "LLAMA_ARG_HF_REPO");
    let names_model = arguments::model_path(&args).or_else(|| arguments::remote_model(&args)).is_some()
        || taken.model.command.env.iter().any(by_variable);
    if !names_model {
        return Err(format!(
            "no model is given to the image `{image}`: it starts its server by a script of its own"
        ));
    }
    taken
        .model
        .notes
        .push(format!("ran in a container of {image}; now a llama-server of this machine is started"));
    // Match the longest mount first, because a mount may lie within another.
    mounts.sort_by_key(|(inside, _)| std::cmp::Reverse(inside.len()));
    let there = |word: &String| host_path(word, &mounts);
    taken.model.command.directory = taken.model.command.directory.as_ref().map(there);
    for (_, value) in &mut taken.model.command.env {
        *value = host_path(value, &mounts);
    }
    Ok(args.iter().map(there).collect())
}

fn import_option(
    program: &str,
    option: &str,
    value: String,
    mounts: &mut Vec<(String, String)>,
    taken: &mut ParsedCommand,
) {
    match option {
        "-v" | "--volume" => parse_volume(&value, mounts, taken),
        "--mount" => parse_mount(&value, mounts, taken),
        "-e" | "--env" => match value.split_once('=') {
            Some((name, value)) if !is_inherited(name, value) => {
                taken.model.command.env.push((name.to_owned(), value.to_owned()));
            }
            Some((name, _)) => taken.model.notes.push(inherited_note(name)),
            None => taken.model.notes.push(inherited_note(&value)),
        },
        "-p" | "--publish" => taken.published = parse_published_port(&value).or(taken.published.take()),
        "--gpus" => import_gpus(&value, taken),
        "-w" | "--workdir" => taken.model.command.directory = Some(value),
        _ if IGNORED_SWITCHES.contains(&option) || IGNORED_OPTIONS.contains(&option) => {}
        _ => {
            let value = if value.is_empty() { value } else { format!(" {value}") };
            taken.unsupported.push((
                format!("`{program} run {option}{value}`"),
                "llama-warden starts the process itself, without a container".to_owned(),
            ));
        }
    }
}

fn host_path(word: &str, mounts: &[(String, String)]) -> String {
    let found = mounts.iter().find_map(|(inside, host)| {
        let rest = word.strip_prefix(inside.as_str())?;
        (rest.is_empty() || rest.starts_with('/')).then(|| format!("{host}{rest}"))
    });
    found.unwrap_or_else(|| word.to_owned())
}

fn add_mount(host: &str, inside: &str, mounts: &mut Vec<(String, String)>, taken: &mut ParsedCommand) {
    if host.starts_with(['/', '.', '~', '$']) {
        mounts.push((inside.trim_end_matches('/').to_owned(), host.trim_end_matches('/').to_owned()));
    } else {
        taken.unsupported.push((
            format!("the volume `{host}` at {inside}"),
            "paths in it are left as the container has them; write where its files are on this machine"
                .to_owned(),
        ));
    }
}

fn parse_volume(value: &str, mounts: &mut Vec<(String, String)>, taken: &mut ParsedCommand) {
    let mut parts = value.split(':');
    if let (Some(host), Some(inside)) = (parts.next(), parts.next()) {
        add_mount(host, inside, mounts, taken);
    }
}

fn parse_mount(value: &str, mounts: &mut Vec<(String, String)>, taken: &mut ParsedCommand) {
    let part = |names: &[&str]| {
        value
            .split(',')
            .find_map(|part| part.split_once('=').filter(|(name, _)| names.contains(name)).map(|(_, is)| is))
    };
    if let (Some(host), Some(inside)) = (part(&["source", "src"]), part(&["target", "dst", "destination"])) {
        add_mount(host, inside, mounts, taken);
    }
}

/// Parses `8080:8080` or `127.0.0.1:8080:8080`.
fn parse_published_port(value: &str) -> Option<(Option<String>, u16)> {
    let parts: Vec<&str> = value.rsplitn(3, ':').collect();
    match parts[..] {
        [_, host] => Some((None, host.parse().ok()?)),
        [_, host, address] => Some((Some(address.to_owned()), host.parse().ok()?)),
        _ => None,
    }
}

/// A process sees all GPUs anyway; `device=0,1` becomes the driver's variable for visible devices.
fn import_gpus(value: &str, taken: &mut ParsedCommand) {
    let value = value.trim_matches('"');
    if let Some(devices) = value.strip_prefix("device=") {
        taken.model.command.env.push(("CUDA_VISIBLE_DEVICES".to_owned(), devices.to_owned()));
    } else if value != "all" {
        let nearest = "name the devices: `env.CUDA_VISIBLE_DEVICES = \"0\"`";
        taken.unsupported.push((format!("`--gpus {value}`"), nearest.to_owned()));
    }
}
