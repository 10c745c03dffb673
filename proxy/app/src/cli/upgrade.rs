//! `llama-warden upgrade`: replaces a running instance by another program, which takes over its clients and
//! llama-servers.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use reqwest::Method;
use warden_admin::upgrade_order::UpgradeReport;
use warden_policies::defaults::parse_duration;
use warden_policies::units::as_f64;

use super::control::QueryArgs;
use super::shared::block_on;
use crate::exit::CommandError;
use crate::out;

/// Extra time for the other program's version check and start.
const START_MARGIN: Duration = Duration::from_secs(60);
const MAX_ANSWER_TIME: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Args)]
#[command(
    after_help = "No request fails, no stream is cut and no model is reloaded. If the new program does not start, \
                  the old one continues."
)]
pub(crate) struct UpgradeArgs {
    /// Program to continue with. Default: the file now at the path from which the instance was started.
    #[arg(long, value_name = "PROGRAM")]
    to: Option<PathBuf>,
    /// Time limit, including loads in progress (60s).
    #[arg(long, value_name = "TIME")]
    wait: Option<String>,
    #[command(flatten)]
    query: QueryArgs,
}

pub(crate) fn run(args: &UpgradeArgs) -> Result<(), CommandError> {
    let mut query = Vec::new();
    if let Some(to) = &args.to {
        let to = std::path::absolute(to).map_err(CommandError::cannot("use", to))?;
        let text = to.to_str().ok_or_else(|| {
            CommandError::usage(
                format!("the path {} is no text", to.display()),
                "rename the program, or move it",
            )
        })?;
        query.push(("to", text.to_owned()));
    }
    query.extend(args.wait.clone().map(|wait| ("wait", wait)));
    let client = args.query.instance.client()?;
    let asked = client.json_with(Method::POST, &["upgrade"], &query);
    let limit = answer_timeout(args.wait.as_deref());
    let answered = block_on(async { tokio::time::timeout(limit, asked).await })?;
    let upgraded: UpgradeReport = answered.map_err(|_| {
        CommandError::hinted(
            format!("no answer within {} s: it is not known whether the upgrade happens", limit.as_secs()),
            "`llama-warden status` says which version serves, the log what it waits for",
        )
    })??;
    if args.query.json {
        return out::print_json(&upgraded);
    }
    let UpgradeReport { from, to, processes, frozen_ms, program, same, restart_starts } = upgraded;
    let seconds = as_f64(frozen_ms) / 1000.0;
    out::print_line(&format!(
        "upgraded from {from} to {to}: {processes} llama-servers were carried over; decisions paused for \
         {seconds:.1} s, and requests continued"
    ))?;
    if same {
        out::print_line(&format!("note: it is the same program as before, {program}"))?;
    }
    if let Some(other) = restart_starts {
        out::print_line(&format!(
            "note: a restart would start {other} again; have {program} started instead, or put it there"
        ))?;
    }
    Ok(())
}

/// The instance itself refuses an invalid `--wait`.
fn answer_timeout(wait: Option<&str>) -> Duration {
    match wait.map(parse_duration) {
        Some(Ok(wait)) => wait.saturating_add(START_MARGIN),
        // Use the maximum, because this command does not know the instance's configured time.
        Some(Err(_)) | None => MAX_ANSWER_TIME,
    }
}
