//! A command that starts llama-server, as it is or in a container: what it comes to as a model.

use crate::config::arguments::{self, Listening};
use crate::exit::Failure;

use super::{Imported, Model, container};

/// A command, taken apart.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) model: Model,
    /// Flags for listening, with their values.
    pub(super) listening: Vec<(&'static str, String, Listening)>,
    /// Where a container was published: the address, if it was named, and the port.
    pub(super) published: Option<(Option<String>, u16)>,
    /// What has no equal, and the nearest thing.
    pub(super) left: Vec<(String, String)>,
}

/// One command as a whole configuration.
pub(super) fn import(words: &[String], from: &str) -> Result<Imported, Failure> {
    let taken = take(words).map_err(|why| {
        Failure::usage(
            format!("{from}: {why}"),
            "give a command that starts llama-server: `llama-server FLAGS`, or `docker run ... IMAGE FLAGS`",
        )
    })?;
    let mut imported = Imported::default();
    let number = |flag: &str, text: &str| {
        text.parse::<u16>().map_err(|_| {
            Failure::usage(format!("{from}: {flag} {text}: this is no port"), "give a number from 0 to 65535")
        })
    };
    for (flag, value, what) in &taken.listening {
        match what {
            Listening::Host => imported.host = Some(value.clone()),
            Listening::Port => imported.port = Some(number(flag, value)?),
            Listening::Certificate => imported.tls_cert = Some(value.clone()),
            Listening::PrivateKey => imported.tls_key = Some(value.clone()),
            Listening::Prefix => imported.api_prefix = Some(value.clone()),
            Listening::Pointless | Listening::Key => {
                imported.left(*flag, "one process listens, and nothing shares its port");
            }
        }
    }
    if let Some((host, port)) = taken.published {
        // Docker publishes on all addresses where none is named.
        imported.host = Some(host.unwrap_or_else(|| "0.0.0.0".to_owned()));
        imported.port = Some(port);
    }
    for (what, nearest) in taken.left {
        imported.left(what, nearest);
    }
    let mut model = taken.model;
    let mut names = arguments::aliases(&model.args).into_iter();
    model.name = names.next().unwrap_or_else(|| name_of(&model));
    model.aliases.extend(names);
    model.preload = true;
    imported.models.push(model);
    Ok(imported)
}

/// By its file, without folder and ending, or its repository.
fn name_of(model: &Model) -> String {
    let file = model.model.as_deref().or_else(|| arguments::model(&model.args));
    let stem = file.and_then(|file| std::path::Path::new(file).file_stem()).and_then(|stem| stem.to_str());
    stem.or_else(|| arguments::remote_model(&model.args)).unwrap_or("default").to_owned()
}

/// Takes a command apart; else, why it starts no llama-server.
pub(super) fn take(words: &[String]) -> Result<Taken, String> {
    let mut taken = Taken::default();
    let mut rest = words;
    // Variables before the command, and what only hands over to it.
    loop {
        match rest {
            [word, more @ ..] if word == "env" || word == "exec" || word == "nohup" => rest = more,
            [word, more @ ..] if is_assignment(word) => {
                let (name, value) = word.split_once('=').unwrap_or_default();
                taken.model.env.push((name.to_owned(), value.to_owned()));
                rest = more;
            }
            [shell, flag, script]
                if is_program(shell, &["sh", "bash"]) && matches!(flag.as_str(), "-c" | "-lc") =>
            {
                let words = shlex::split(script).ok_or("a quote in the shell's command is never closed")?;
                let inner = take(&words)?;
                taken.model.env.extend(inner.model.env.clone());
                let env = std::mem::take(&mut taken.model.env);
                return Ok(Taken { model: Model { env, ..inner.model }, ..inner });
            }
            _ => break,
        }
    }
    let Some((program, args)) = rest.split_first() else { return Err("the command is empty".to_owned()) };
    if let Some(word) =
        rest.iter().find(|word| matches!(word.as_str(), "|" | "||" | "&&" | ";" | ">" | "2>&1"))
    {
        return Err(format!(
            "`{word}` needs a shell: put it into a script that ends in `exec llama-server \"$@\"`"
        ));
    }
    if is_program(program, &["docker", "podman"]) {
        let args = container::take(program, args, &mut taken)?;
        flags(&args, &mut taken);
        return Ok(taken);
    }
    if !serves(program, args) {
        return Err(format!("`{program}` is no llama-server"));
    }
    if program != "llama-server" {
        taken.model.binary = Some(program.clone());
    }
    flags(args, &mut taken);
    Ok(taken)
}

fn is_assignment(word: &str) -> bool {
    let name = word.split_once('=').map_or("", |(name, _)| name);
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

pub(super) fn is_program(word: &str, names: &[&str]) -> bool {
    std::path::Path::new(word)
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| names.contains(&name))
}

/// By its name; else by whether it is given a model as llama-server is, for it may be a script around it.
fn serves(program: &str, args: &[String]) -> bool {
    const OTHERS: [&str; 7] = ["python", "vllm", "uv", "sd-server", "whisper-server", "node", "ollama"];
    let name = std::path::Path::new(program).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let other = OTHERS.iter().any(|other| name.starts_with(other));
    let model = arguments::model(args).or_else(|| arguments::remote_model(args)).is_some();
    name.contains("llama-server") || (!other && model)
}

/// llama-server's own flags: those for listening are taken out, and the model's file is set apart.
fn flags(args: &[String], taken: &mut Taken) {
    let split = arguments::split_listening(args);
    taken.listening = split.taken;
    let mut args = split.args;
    let file = arguments::model(&args).filter(|file| file.starts_with('/')).map(str::to_owned);
    if let Some(file) = file {
        // Only the last one counts; the others say nothing.
        while let Some(at) = args.iter().position(|word| word == "-m" || word == "--model") {
            args.drain(at..(at + 2).min(args.len()));
        }
        taken.model.model = Some(file);
    }
    taken.model.args = args;
}
