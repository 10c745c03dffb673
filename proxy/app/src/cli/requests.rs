//! `requests`, `requests cancel`: shows running and recent requests, and cancels one.

use std::time::Duration;

use clap::{Args, Subcommand};
use reqwest::Method;
use warden_admin::client::AdminClient;
use warden_admin::requests::{CancelReport, RequestList, milliseconds_text, timing_text};
use warden_gateway::RequestView;
use warden_policies::secrets;

use super::control::{InstanceArgs, QueryArgs};
use super::shared::block_on;
use crate::exit::CommandError;
use crate::out;

const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RequestsArgs {
    #[command(subcommand)]
    command: Option<RequestsCommand>,
    /// Shows only requests for this model, by its name or an alias.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Shows only requests in this state: `in_flight`, `ended`, `queued`, `loading`, `prefill`,
    /// `generating` and others.
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    /// Maximum number of requests to show.
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    /// Refreshes the table every second.
    #[arg(long, short, conflicts_with = "json")]
    follow: bool,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RequestsCommand {
    /// Cancels a request: its client gets an error, and its slot is freed as if the client had disconnected.
    Cancel(RequestsCancelArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RequestsCancelArgs {
    /// Id of the request: the `X-Request-Id` of the answer, as in the access log.
    id: String,
    /// Number of the request (see `requests --json`), if clients used the same id for several.
    #[arg(long, value_name = "NUMBER")]
    number: Option<u64>,
    #[command(flatten)]
    query: QueryArgs,
}

pub(crate) fn run(args: &RequestsArgs) -> Result<(), CommandError> {
    match &args.command {
        Some(RequestsCommand::Cancel(args)) => cancel(args),
        None => {
            let client = args.instance.client()?;
            block_on(show_requests(&client, args))?
        }
    }
}

async fn show_requests(client: &AdminClient, args: &RequestsArgs) -> Result<(), CommandError> {
    let given = [
        ("model", args.model.clone()),
        ("state", args.state.clone()),
        ("limit", args.limit.map(|limit| limit.to_string())),
    ];
    let query: Vec<_> = given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    loop {
        let list: RequestList = client.json_with(Method::GET, &["requests"], &query).await?;
        if args.json {
            return out::print_json(&list);
        }
        let text = secrets::redact_text(&table(&list));
        if !args.follow {
            return out::print_text(&text);
        }
        out::refresh_screen(&text)?;
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}

fn cancel(args: &RequestsCancelArgs) -> Result<(), CommandError> {
    let query: Vec<_> = args.number.map(|number| ("number", number.to_string())).into_iter().collect();
    let path = ["requests", &args.id, "cancel"];
    let told: CancelReport = args.query.instance.ask(Method::POST, &path, &query)?;
    if args.query.json {
        return out::print_json(&told);
    }
    let again = if told.again { "was being cancelled already" } else { "is being cancelled" };
    let model = told.cancelled.model.as_ref().map(|model| format!(" of `{model}`")).unwrap_or_default();
    let state = told.cancelled.state.as_str();
    out::print_line(&secrets::redact_text(&format!(
        "the request {}{model} {again} ({state})",
        told.cancelled.id
    )))
}

fn row(one: &RequestView) -> Vec<String> {
    let dash = || "-".to_owned();
    let state = match (&one.outcome, one.status) {
        (Some(outcome), Some(status)) => format!("{outcome} {status}"),
        _ if one.cancelled => format!("{}, cancelled", one.state.as_str()),
        _ => one.state.as_str().to_owned(),
    };
    vec![
        one.id.clone(),
        one.model.as_ref().map_or_else(dash, ToString::to_string),
        state,
        milliseconds_text(one.total_ms),
        milliseconds_text(one.queued_ms),
        timing_text(one.prefill_ms, one.prompt_tokens),
        timing_text(one.generating_ms, one.output_tokens),
        one.generation.map_or_else(dash, |generation| generation.to_string()),
        one.route.clone(),
        one.key.as_ref().map_or_else(|| one.peer.clone(), |key| format!("{key} {}", one.peer)),
    ]
}

fn table(list: &RequestList) -> String {
    let head =
        ["ID", "MODEL", "STATE", "TOOK", "QUEUED", "PROMPT", "ANSWER", "GENERATION", "ROUTE", "CLIENT"];
    let mut text = if list.requests.is_empty() {
        "no such request is in flight, or has ended lately\n".to_owned()
    } else {
        out::table(head, list.requests.iter().map(row))
    };
    text.extend([format!("{} in flight", list.in_flight)]);
    if list.left_out > 0 {
        text.extend([format!("; {} more are not shown (`--limit`)", list.left_out)]);
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use warden_gateway::RequestState;

    use super::*;
    use crate::request_fixture::request;

    #[test]
    fn requests_are_a_table_with_what_each_has_cost_so_far() {
        let queued = RequestView {
            generation: None,
            prefill_ms: None,
            generating_ms: None,
            prompt_tokens: 0,
            output_tokens: 0,
            total_ms: 734_000.0,
            queued_ms: 733_900.0,
            ..request("9f86d081884c7d659a2feaa0c55ad015", RequestState::Loading)
        };
        let told = RequestView { cancelled: true, key: None, ..request("told", RequestState::Generating) };
        let requests = vec![queued, told, request("done", RequestState::Ended)];
        let some = table(&RequestList { in_flight: 2, requests, left_out: 4 });
        insta::assert_snapshot!(some + "\n" + &table(&RequestList::default()));
    }
}
