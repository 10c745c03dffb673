//! `llama-warden report`: packs the data for a bug report into one archive.
//!
//! Bug reports are needed most when something is broken, so the command also works without a responding
//! instance or a readable configuration. Notes in the archive name the missing parts.

mod contents;
mod here;
mod live;

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;
use warden_admin::clock;
use warden_config::machine::HostMachine;
use warden_policies::ByteSize;

use self::contents::{ReportCleaner, ReportContents};
use super::control::InstanceArgs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// File to write, or a folder for it. Default: a new file in the current folder, with the time in its
    /// name.
    #[arg(long, value_name = "PATH")]
    out: Option<PathBuf>,
    /// Writes without asking; required without a terminal.
    #[arg(long, short)]
    yes: bool,
    /// Only lists the contents.
    #[arg(long, conflicts_with = "yes")]
    list: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

pub(crate) fn run(args: &ReportArgs) -> Result<(), CommandError> {
    let asks = io::stdin().is_terminal() && out::stderr_is_terminal();
    if !args.list && !args.yes && !asks {
        return Err(CommandError::usage(
            "report: there is no terminal here to ask whether it may be written",
            "use `--list` to see what would be in it, and `--yes` to write it",
        ));
    }
    let machine = HostMachine::read();
    let path = archive_path(args.out.as_deref(), &machine.cwd);
    // Check the path first: gathering takes a moment.
    if !args.list {
        contents::check_free(&path)?;
    }
    let contents = gather_contents(args, &machine)?;
    let archive = contents::pack_archive(&contents)?;
    let size = ByteSize(archive.len() as u64);
    if args.list {
        return out::print_text(&format!("{}{size} as an archive; nothing was written\n", contents.table()));
    }
    out::error_text(&contents.table());
    if !args.yes && !ask_consent(&format!("Write {} ({size})? [y/N] ", path.display()))? {
        return out::print_line("nothing was written");
    }
    contents::write_archive(&path, &archive)?;
    out::print_line(&format!("{} ({size}): look through it before you send it", path.display()))?;
    out::print_line(
        "Attach it to an issue in llama-warden's repository; docs/operating.md lists what else to report.",
    )
}

fn gather_contents(args: &ReportArgs, machine: &HostMachine) -> Result<ReportContents, CommandError> {
    let loaded = args.instance.load(machine);
    let mut contents = ReportContents::new(ReportCleaner::for_machine(loaded.as_ref().ok(), machine));
    let dirs = loaded.as_ref().ok().and_then(|loaded| loaded.dirs(machine).ok());
    let state = dirs.as_ref().map(|dirs| dirs.state.clone()).or_else(|| machine.state_dir());
    here::gather_machine(&mut contents, loaded.as_ref(), machine);
    let status = live::gather_instance(&mut contents, &args.instance)?;
    let ledger = status.as_ref().map(|status| PathBuf::from(&status.instance.ledger));
    // The instance may use another state directory than this command's configuration.
    let state = ledger.as_deref().and_then(Path::parent).map(Path::to_owned).or(state);
    match state {
        Some(state) => here::gather_files(&mut contents, &state),
        None => contents.add_note("state: there is no home directory to look in; set `paths.state_dir`"),
    }
    let data = status.as_ref().map(|status| PathBuf::from(&status.instance.data_dir));
    let data = data.filter(|data| data.is_absolute()).or_else(|| dirs.map(|dirs| dirs.data));
    if let Some(data) = data {
        here::add_builds(&mut contents, &data, status.as_ref());
    }
    contents.finish();
    Ok(contents)
}

fn archive_path(out: Option<&Path>, cwd: &Path) -> PathBuf {
    let stamp: String = clock::now_text().chars().filter(char::is_ascii_alphanumeric).take(15).collect();
    let name = format!("llama-warden-report-{stamp}.tar.gz");
    match out.map(|out| cwd.join(out)) {
        None => cwd.join(name),
        Some(folder) if folder.is_dir() => folder.join(name),
        Some(file) => file,
    }
}

fn ask_consent(question: &str) -> Result<bool, CommandError> {
    out::error_text(question);
    io::stderr().flush().map_err(|_| CommandError::Pipe)?;
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| CommandError::failed(format!("cannot read an answer: {error}")))?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests;
