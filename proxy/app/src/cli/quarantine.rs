//! `quarantine list`, `quarantine release`: lists and releases requests that may have killed their server.

use std::sync::Arc;

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::json;
use warden_supervisor::ModelView;

use super::block_on;
use super::control::InstanceArgs;
use crate::admin::answer::AdminStatus;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Subcommand)]
pub(crate) enum QuarantineCommand {
    /// Lists refused or suspected requests, by their fingerprints.
    List(QuarantineListArgs),
    /// Releases requests, so that they are served like others again.
    Release(QuarantineReleaseArgs),
}

#[derive(Debug, Args)]
pub(crate) struct QuarantineListArgs {
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct QuarantineReleaseArgs {
    /// Model, or fingerprint of one request (at least eight digits of it). Default: all requests.
    #[arg(value_name = "MODEL|FINGERPRINT")]
    which: Option<String>,
    #[command(flatten)]
    instance: InstanceArgs,
}

pub(crate) fn run(command: &QuarantineCommand) -> Result<(), CommandError> {
    match command {
        QuarantineCommand::List(args) => list(args),
        QuarantineCommand::Release(args) => release(args),
    }
}

fn list(args: &QuarantineListArgs) -> Result<(), CommandError> {
    let status: AdminStatus = block_on(args.instance.client()?.json(Method::GET, &["status"]))??;
    let models = &status.fleet.models;
    if args.json {
        let all = models.iter().map(|model| (model.name.to_string(), json!(model.quarantine)));
        return out::print_json(&serde_json::Value::Object(all.collect()));
    }
    out::print_text(&table(models))
}

fn table(models: &[Arc<ModelView>]) -> String {
    let head = ["MODEL", "FINGERPRINT", "STATE", "DEATHS", "REFUSED", "TIME LEFT"].map(str::to_owned);
    let mut rows = vec![head.to_vec()];
    for model in models {
        for known in &model.quarantine.requests {
            let state = if known.refused { "refused" } else { "suspected" };
            rows.push(vec![
                model.name.to_string(),
                known.fingerprint.to_string(),
                state.to_owned(),
                known.deaths.to_string(),
                known.refusals.to_string(),
                format!("{} s", known.left_s),
            ]);
        }
    }
    if rows.len() == 1 {
        return "no request is refused or suspected\n".to_owned();
    }
    out::format_table(&rows)
}

fn release(args: &QuarantineReleaseArgs) -> Result<(), CommandError> {
    #[derive(serde::Deserialize)]
    struct ReleaseAnswer {
        released: usize,
    }
    let mut segments = vec!["quarantine", "release"];
    segments.extend(args.which.as_deref());
    let answer: ReleaseAnswer = block_on(args.instance.client()?.json(Method::POST, &segments))??;
    out::print_line(&format!("{} request(s) released", answer.released))
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;
    use warden_policies::quarantine::{QuarantinedRequest, RequestFingerprint};
    use warden_supervisor::{ModelState, QuarantineView};

    use super::*;

    #[test]
    fn what_is_known_is_listed_with_how_long_it_lasts() {
        let known = |print, refused| QuarantinedRequest {
            fingerprint: RequestFingerprint(print),
            refused,
            left_s: 90,
            deaths: 2,
            refusals: 3,
        };
        let requests = vec![known(0xabc, true), known(0xdef, false)];
        let model = ModelView {
            state: ModelState::Loaded,
            was_ready: true,
            quarantine: QuarantineView { requests, quarantined: 1, refusals: 3 },
            ..ModelView::unloaded(ModelName::new("m"))
        };
        insta::assert_snapshot!(table(&[Arc::new(model)]) + "\n" + &table(&[]));
    }
}
