//! `llama-warden completions SHELL` and `llama-warden man DIR`: completion scripts and manual pages,
//! generated from the same description as `--help`.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _, ValueEnum};
use clap_complete::Shell;

use super::CommandLine;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete for.
    #[arg(value_enum)]
    shell: CompletionShell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages, one per command. Created if missing.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// The command line without values of the environment, which generated pages must not show.
fn command_without_env() -> clap::Command {
    fn quiet(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(quiet)
    }
    quiet(CommandLine::command())
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), CommandError> {
    let shell = match args.shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command_without_env(), "llama-warden", &mut text);
    out::print_text(&String::from_utf8_lossy(&text))
}

pub(crate) fn man(args: &ManArgs) -> Result<(), CommandError> {
    let folder = &args.folder;
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command_without_env(), folder));
    written.map_err(|error| {
        CommandError::hinted(
            format!("cannot write the pages to {}: {error}", folder.display()),
            "name a folder that we may write to",
        )
    })?;
    out::print_line(&format!(
        "pages are in {}: `man -l {}`",
        folder.display(),
        folder.join("llama-warden.1").display()
    ))
}
