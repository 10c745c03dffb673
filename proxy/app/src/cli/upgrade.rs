//! `llama-warden upgrade`: another program takes the place of a running instance, with its clients and its llama-servers.

use std::path::PathBuf;

use clap::Args;
use reqwest::Method;
use warden_policies::units::exact;

use super::block_on;
use super::control::InstanceArgs;
use crate::exit::Failure;
use crate::out;
use crate::serve::upgrade::order::Upgraded;

/// What `upgrade` takes.
#[derive(Debug, Args)]
#[command(
    after_help = "No request fails, no stream is cut and no model is loaded anew. If the new program does not come up, the old one goes on."
)]
pub(crate) struct UpgradeArgs {
    /// The program to go on with. Default: what lies at the instance's own path now.
    #[arg(long, value_name = "PROGRAM")]
    to: Option<PathBuf>,
    /// How long it may take, loads that are under way included (60s).
    #[arg(long, value_name = "TIME")]
    wait: Option<String>,
    /// JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

pub(crate) fn run(args: &UpgradeArgs) -> Result<(), Failure> {
    let mut query = Vec::new();
    if let Some(to) = &args.to {
        let to = std::path::absolute(to)
            .map_err(|error| Failure::failed(format!("cannot use {}: {error}", to.display())))?;
        let text = to.to_str().ok_or_else(|| {
            Failure::usage(format!("the path {} is no text", to.display()), "rename the program, or move it")
        })?;
        query.push(("to", text.to_owned()));
    }
    query.extend(args.wait.clone().map(|wait| ("wait", wait)));
    let client = args.instance.client()?;
    let upgraded: Upgraded = block_on(client.json_with(Method::POST, &["upgrade"], &query))??;
    if args.json {
        return out::json(&upgraded);
    }
    let Upgraded { from, to, processes, frozen_ms } = upgraded;
    let seconds = exact(frozen_ms) / 1000.0;
    out::line(&format!(
        "upgraded from {from} to {to}: {processes} llama-servers went along; nothing was decided for {seconds:.1} s, and requests went on"
    ))
}
