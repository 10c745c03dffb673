//! `llama-warden canary start|status|stop`: tries another build of llama-server with a model of a running
//! instance.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use reqwest::Method;
use warden_admin::client::AdminClient;
use warden_admin::status::AdminStatus;
use warden_policies::canary::CanaryVerdict;
use warden_policies::{ByteSize, secrets, units};
use warden_supervisor::{CanaryState, CanaryView};

use super::control::{ModelQueryArgs, QueryArgs};
use super::shared::block_on;
use crate::exit::{CommandError, REFUSED_CODE, UNDECIDED_CODE};
use crate::out;

const WATCH_POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Subcommand)]
pub(crate) enum CanaryCommand {
    /// Tries another llama-server with a model: it serves a share of the conversations until a verdict is
    /// reached.
    Start(CanaryStartArgs),
    /// Shows running canaries and the last one of each model, with their verdicts.
    Status(CanaryStatusArgs),
    /// Ends the canary of a model. Requests that it is answering are completed.
    Stop(ModelQueryArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CanaryStartArgs {
    /// Model name or alias.
    model: String,
    /// Build of the store (`llama-warden builds list`), by its id or the beginning of it.
    #[arg(long, value_name = "ID", required_unless_present = "binary", conflicts_with = "binary")]
    build: Option<String>,
    /// Path of a llama-server.
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Share of conversations for the canary, like `10%` or `0.1`. Default: 10%.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    share: Option<f64>,
    /// Ends the canary after this number of requests to it.
    #[arg(long, value_name = "COUNT")]
    requests: Option<u64>,
    /// Ends the canary after this time, like `90m` or `24h`.
    #[arg(long = "for", value_name = "TIME")]
    time: Option<String>,
    /// Slowdown that does not count as worse, like `20%` or `0.2`.
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    slower: Option<f64>,
    #[command(flatten)]
    query: QueryArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CanaryStatusArgs {
    /// Model name or alias. Default: all models that have or had a canary.
    model: Option<String>,
    /// Waits until the canary has ended. Exit code: 0 for as good or better, 3 for worse, 5 for not known.
    #[arg(long, requires = "model")]
    watch: bool,
    #[command(flatten)]
    query: QueryArgs,
}

fn parse_share(text: &str) -> Result<f64, String> {
    let (number, of) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let share = number.trim().parse::<f64>().ok().map(|number| number / of);
    share
        .filter(|share| share.is_finite() && *share >= 0.0)
        .ok_or("write a share like `10%` or `0.1`".to_owned())
}

pub(crate) fn run(command: &CanaryCommand) -> Result<(), CommandError> {
    match command {
        CanaryCommand::Start(args) => start(args),
        CanaryCommand::Status(args) => status(args),
        CanaryCommand::Stop(ModelQueryArgs { model, query }) => {
            show(&query.instance.ask(Method::DELETE, &["models", model, "canary"], &[])?, query.json)
        }
    }
}

fn start(args: &CanaryStartArgs) -> Result<(), CommandError> {
    let mut query: Vec<(&str, String)> = Vec::new();
    if let Some(build) = &args.build {
        query.push(("build", build.clone()));
    }
    if let Some(binary) = &args.binary {
        // Make the path absolute: the instance may have another working directory.
        let path = std::path::absolute(binary).map_err(CommandError::cannot("resolve the path", binary))?;
        let text = path.to_str().ok_or_else(|| {
            CommandError::usage(format!("the path {} is not text", path.display()), "use a path in UTF-8")
        })?;
        query.push(("binary", text.to_owned()));
    }
    query.extend(args.share.map(|share| ("share", share.to_string())));
    query.extend(args.requests.map(|requests| ("requests", requests.to_string())));
    query.extend(args.time.clone().map(|time| ("for", time)));
    query.extend(args.slower.map(|slower| ("slower", slower.to_string())));
    let path = ["models", &args.model, "canary"];
    show(&args.query.instance.ask(Method::POST, &path, &query)?, args.query.json)
}

fn status(args: &CanaryStatusArgs) -> Result<(), CommandError> {
    let QueryArgs { json, instance } = &args.query;
    let Some(model) = &args.model else {
        let status: AdminStatus = instance.ask(Method::GET, &["status"], &[])?;
        let all: Vec<_> = status.fleet.models.iter().filter_map(|model| model.canary.as_ref()).collect();
        if *json {
            return out::print_json(&all);
        }
        if all.is_empty() {
            return out::print_line(
                "no model has or had a canary: `llama-warden canary start MODEL` begins one",
            );
        }
        return all.iter().try_for_each(|view| show(view, false));
    };
    let view = block_on(fetch_canary(&instance.client()?, model, args.watch))??;
    show(&view, *json)?;
    match view.verdict {
        _ if !args.watch => Ok(()),
        CanaryVerdict::BetterOrEqual => Ok(()),
        CanaryVerdict::Worse { .. } => Err(CommandError::Reported { code: REFUSED_CODE }),
        CanaryVerdict::Undecided { .. } => Err(CommandError::Reported { code: UNDECIDED_CODE }),
    }
}

async fn fetch_canary(
    client: &AdminClient,
    model: &str,
    until_end: bool,
) -> Result<CanaryView, CommandError> {
    loop {
        let view: CanaryView = client.json(Method::GET, &["models", model, "canary"]).await?;
        if !until_end || view.state == CanaryState::Ended {
            return Ok(view);
        }
        tokio::time::sleep(WATCH_POLL_INTERVAL).await;
    }
}

fn show(view: &CanaryView, json: bool) -> Result<(), CommandError> {
    if json {
        return out::print_json(view);
    }
    out::print_text(&secrets::redact_text(&canary_text(view)))
}

pub(crate) fn summary_line(view: &CanaryView) -> String {
    let what = format!("{:.0} % of conversations", view.share.unwrap_or_default() * 100.0);
    let verdict = match &view.verdict {
        CanaryVerdict::BetterOrEqual => "as good or better",
        CanaryVerdict::Worse { .. } => "worse",
        CanaryVerdict::Undecided { .. } => "undecided",
    };
    let build = view.build.clone().unwrap_or_else(|| view.binary.display().to_string());
    format!("canary {build} ({what}): {}, {verdict}", view.state.as_str())
}

fn canary_text(view: &CanaryView) -> String {
    let time = units::format_span(Duration::try_from_secs_f64(view.seconds).unwrap_or_default());
    let mut text = format!("{}: {} after {time}\n", view.model, summary_line(view));
    text.extend(view.verdict.words().iter().map(|words| {
        let mark = if view.verdict.is_decided() { "because" } else { "missing" };
        format!("  {mark}: {words}\n")
    }));
    let dash = || "-".to_owned();
    let ms = |ms: Option<f64>| ms.map_or_else(dash, |ms| format!("{ms:.1} ms"));
    let rows = [("its own", &view.report.base), ("canary", &view.report.canary)].map(|(name, arm)| {
        vec![
            name.to_owned(),
            arm.requests.to_string(),
            arm.failures.to_string(),
            arm.deaths.to_string(),
            ms(arm.latency_ms),
            ms(arm.token_ms),
            arm.host_at_ready.map_or_else(dash, |bytes| ByteSize(bytes).to_string()),
            arm.growth.map_or_else(dash, |growth| growth.as_str().to_owned()),
        ]
    });
    let head = ["", "REQUESTS", "FAILURES", "DEATHS", "FIRST BYTE", "PER TOKEN", "FRESH", "GROWTH"];
    text.extend(out::table(head, rows).lines().map(|line| format!("  {line}\n")));
    text
}

#[cfg(test)]
mod tests {
    use warden_policies::canary::{ArmReport, CanaryReport};
    use warden_policies::{ModelName, growth};

    use super::*;

    #[test]
    fn shares_are_numbers_or_percents() {
        assert_eq!(
            (parse_share("10%"), parse_share("0.25"), parse_share("5 %")),
            (Ok(0.1), Ok(0.25), Ok(0.05))
        );
        for wrong in ["much", "-1", "", "%"] {
            assert!(parse_share(wrong).unwrap_err().contains("10%"), "{wrong}");
        }
    }

    #[test]
    fn a_canary_is_told_with_its_reasons_and_both_builds_beside_each_other() {
        let base = ArmReport {
            requests: 900,
            latency_ms: Some(210.4),
            token_ms: Some(21.0),
            host_at_ready: Some(1 << 30),
            growth: Some(growth::GrowthVerdict::Steady),
            ..ArmReport::default()
        };
        let canary =
            ArmReport { requests: 100, failures: 7, deaths: 1, growth: None, ..ArmReport::default() };
        let mut view = CanaryView {
            model: ModelName::new("m"),
            name: ModelName::new("m@canary"),
            state: CanaryState::Ended,
            binary: "/opt/b/llama-server".into(),
            build: Some("0a1b2c".into()),
            share: Some(0.1),
            began_at: "2026-01-02T03:04:05.678Z".into(),
            seconds: 4000.0,
            ended_at: Some("2026-01-02T04:10:45.678Z".into()),
            verdict: CanaryVerdict::worse("it fails more often: 7 of 100 requests, against 0 of 900"),
            report: CanaryReport { base, canary, evidence: Vec::new() },
        };
        let mut all = canary_text(&view);
        (view.state, view.build) = (CanaryState::Running, None);
        view.verdict =
            CanaryVerdict::undecided("requests, to rule out that it fails more often (evidence 3.1 of 20)");
        all.push_str(&canary_text(&view));
        insta::assert_snapshot!(all);
    }
}
