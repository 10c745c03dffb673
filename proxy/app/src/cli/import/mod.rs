//! `llama-warden import`: converts the configuration of another program to a `warden.toml`.
//!
//! The module of each source turns text into an [`ImportedConfig`]; `write` turns that into TOML. Only this
//! module reads and writes files. The end of the file and standard error list the settings without an
//! equivalent.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use warden_config::machine::HostMachine;
use warden_policies::secrets;
use warden_supervisor::regular_file;

use crate::exit::CommandError;
use crate::out;

mod command;
mod container;
mod imported;
mod listing;
mod llama_swap;
mod ollama;
mod other_program;
mod peers;
mod preset;
mod router;
mod routing;
mod shell;
mod write;
mod yaml;

use self::imported::{EnvLookup, ImportedConfig};

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// File to read, or with `--from ollama` the directory of its models.
    file: Option<PathBuf>,
    /// Writes to this new file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Format of the file. Default: guessed.
    #[arg(long, value_enum)]
    from: Option<ImportFormat>,
    /// Command line: `llama-server FLAGS`, or `docker run ... IMAGE FLAGS`.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImportFormat {
    /// Configuration of llama-swap, in YAML.
    LlamaSwap,
    /// File for `llama-server --models-preset`, in INI.
    Preset,
    /// Models that Ollama has on this machine.
    Ollama,
    /// Command line of llama-server, or of docker or podman that runs it.
    Command,
}

pub(crate) fn run(args: &ImportArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let env = |name: &str| machine.var(name).map(|value| value.to_string_lossy().into_owned());
    let (from, imported) = read_source(args, &env)?;
    imported.check_names(&from)?;
    let is_empty = imported.models.is_empty() && imported.remotes.is_empty() && imported.folders.is_empty();
    if is_empty && imported.unmatched.is_empty() {
        return Err(CommandError::usage(
            format!("{from}: there is no model in it"),
            "see docs/import.md for what can be read",
        ));
    }
    let text = write::render_config(&imported, &from);
    match &args.output {
        Some(path) => create_output(path, &text)?,
        None => out::print_text(&text)?,
    }
    print_summary(&imported);
    Ok(())
}

fn print_summary(imported: &ImportedConfig) {
    let models = out::count_noun(imported.models.len() + imported.remotes.len(), "model");
    out::error_line(&format!("{models} imported, {} left without an equal", imported.unmatched.len()));
    for left in &imported.unmatched {
        out::error_line(&secrets::redact_text(&format!("  {}", left.describe(MAX_SHOWN_MODELS))));
    }
}

/// Limits the models that standard error names for one setting; the file names all.
const MAX_SHOWN_MODELS: usize = 3;

/// Never overwrites an existing file.
fn create_output(path: &Path, text: &str) -> Result<(), CommandError> {
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => CommandError::usage(
            format!("{} is there already, and nothing is overwritten", path.display()),
            "name another file with `-o`, or move that one away",
        ),
        _ => CommandError::hinted(
            format!("cannot write {}: {error}", path.display()),
            "name a file that you may write to",
        ),
    };
    // Private mode: arguments and variables may contain keys.
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(options.write(true).create_new(true), 0o600);
    let mut file = options.open(path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)
}

/// In bytes. The largest known file has some hundred KiB.
const MAX_IMPORT_BYTES: u64 = 16 << 20;

fn read_source(args: &ImportArgs, env: EnvLookup<'_>) -> Result<(String, ImportedConfig), CommandError> {
    let hint =
        "name a file, or write the command after `--`: `llama-warden import -- llama-server -m model.gguf`";
    if !args.command.is_empty() {
        if args.file.is_some() || args.from.is_some_and(|from| from != ImportFormat::Command) {
            return Err(CommandError::usage("both a file and a command are given", "give one of them"));
        }
        let from = "the command line".to_owned();
        return Ok((from.clone(), command_or_router(&args.command, &from)?));
    }
    if args.from == Some(ImportFormat::Ollama) || args.file.as_deref().is_some_and(Path::is_dir) {
        let dir = ollama::models_folder(args.file.as_deref(), env)?;
        return Ok((dir.display().to_string(), ollama::import_ollama(&dir)?));
    }
    let path = args.file.as_deref().ok_or_else(|| CommandError::usage("there is nothing to import", hint))?;
    let from = path.display().to_string();
    let text = read_file(path, hint)?;
    let imported = match args.from.unwrap_or_else(|| guess_format(path, &text)) {
        ImportFormat::LlamaSwap => llama_swap::import_llama_swap(&text, &from, env)?,
        ImportFormat::Preset => preset::import_preset(&text, &from)?,
        ImportFormat::Command | ImportFormat::Ollama => {
            command_or_router(&shell::split_words(&text, &from)?, &from)?
        }
    };
    Ok((from, imported))
}

/// Accepts pipes, too: `import <(docker inspect …)`.
fn read_file(path: &Path, hint: &str) -> Result<String, CommandError> {
    let read = std::fs::File::open(path).and_then(|file| regular_file::read_bounded(file, MAX_IMPORT_BYTES));
    let text = read.and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other));
    text.map_err(|error| CommandError::usage(format!("cannot read {}: {error}", path.display()), hint))
}

fn command_or_router(words: &[String], from: &str) -> Result<ImportedConfig, CommandError> {
    let read = |file: &str| read_file(Path::new(file), "run the import where the command is run");
    match router::import_router(words, from, &read)? {
        Some(imported) => Ok(imported),
        None => command::import_command(words, from),
    }
}

fn guess_format(path: &Path, text: &str) -> ImportFormat {
    match path.extension().and_then(|end| end.to_str()) {
        Some("yaml" | "yml") => return ImportFormat::LlamaSwap,
        Some("ini") => return ImportFormat::Preset,
        Some("sh") => return ImportFormat::Command,
        _ => {}
    }
    let told = |line: &&str| !line.is_empty() && !line.starts_with(['#', ';']);
    let first = text.lines().map(str::trim).find(told).unwrap_or_default();
    let key = first.split(['=', ' ']).next().unwrap_or_default();
    if first.starts_with('[')
        || (first.contains('=') && !first.contains("llama-server") && !key.contains(':'))
    {
        ImportFormat::Preset
    } else if text.lines().any(|line| line.trim_end() == "models:") || key.ends_with(':') {
        ImportFormat::LlamaSwap
    } else {
        ImportFormat::Command
    }
}

#[cfg(fuzzing)]
pub(crate) fn import_each_format(text: &str) -> [Result<String, CommandError>; 3] {
    let written = |imported: Result<ImportedConfig, CommandError>| {
        let imported = imported?;
        imported.check_names("x")?;
        Ok(write::render_config(&imported, "x"))
    };
    [
        written(llama_swap::import_llama_swap(text, "x", &|_| None)),
        written(preset::import_preset(text, "x")),
        written(shell::split_words(text, "x").and_then(|words| command::import_command(&words, "x"))),
    ]
}

#[cfg(test)]
mod mutated_tests;
#[cfg(test)]
mod tests;
