//! Data of a running instance: status, metrics, last output of its processes, and their memory. A note names
//! an instance that does not answer in time.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use warden_admin::client::AdminClient;
use warden_admin::error::AdminError;
use warden_admin::status::AdminStatus;
use warden_policies::secrets;
use warden_supervisor::{ModelState, ModelView};

use super::contents::ReportContents;
use crate::cli::control::InstanceArgs;
use crate::cli::shared::block_on;
use crate::cli::status::status_table;
use crate::exit::CommandError;

/// A healthy instance needs milliseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const NO_ANSWER_PREFIX: &str = "no answer";
const LOG_TAIL_BYTES: usize = 256 << 10;
/// Limits the models whose output and memory are collected; failing models come first.
const MAX_LOGGED_MODELS: usize = 40;

/// Returns an error if several instances run and the user selected none.
pub(super) fn gather_instance(
    contents: &mut ReportContents,
    which: &InstanceArgs,
) -> Result<Option<AdminStatus>, CommandError> {
    let client = match which.client() {
        Ok(client) => client,
        Err(several @ CommandError::Usage { .. }) => return Err(several),
        Err(none) => {
            contents.add_note(&format!("status, logs: {none}"));
            return Ok(None);
        }
    };
    block_on(query_instance(contents, &client))
}

async fn query_instance(contents: &mut ReportContents, client: &AdminClient) -> Option<AdminStatus> {
    let status: serde_json::Value = match with_timeout(client.json(Method::GET, &["status"])).await {
        Ok(status) => status,
        Err(why) => {
            contents.add_note(&format!("status, logs: {why}"));
            return None;
        }
    };
    contents.add_json(
        "status.json",
        "models and processes of the running instance, for programs",
        status.clone(),
    );
    let read: Option<AdminStatus> = serde_json::from_value(status).ok();
    match &read {
        Some(status) => {
            contents.add_text("status.txt", "the same for people", &status_table(status));
            add_command_line(contents, status.instance.pid);
            let chosen = models_by_relevance(&status.fleet.models);
            add_logs(contents, client, &chosen).await;
            add_series(contents, client, &chosen).await;
            if status.fleet.models.len() > MAX_LOGGED_MODELS {
                let more = status.fleet.models.len() - MAX_LOGGED_MODELS;
                contents
                    .add_note(&format!("logs, series: those of {more} more models; the ill ones come first"));
            }
        }
        None => contents.add_note("status.txt: the status is that of another version, and cannot be read"),
    }
    match with_timeout(client.text(&["metrics"])).await {
        Ok(text) => contents.add_text("metrics.txt", "counters and gauges of the running instance", &text),
        Err(why) => contents.add_note(&format!("metrics.txt: {why}")),
    }
    read
}

async fn with_timeout<T>(asking: impl Future<Output = Result<T, AdminError>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_TIMEOUT, asking).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("{NO_ANSWER_PREFIX} within {} s", ANSWER_TIMEOUT.as_secs())),
    }
}

/// Orders failing models first, then those with most crashes or replacements, then running ones.
fn models_by_relevance(models: &[Arc<ModelView>]) -> Vec<&ModelView> {
    let mut all: Vec<&ModelView> = models.iter().map(|model| &**model).collect();
    all.sort_by_key(|model| {
        let fails = matches!(model.state, ModelState::Failed | ModelState::Backoff);
        let trouble = model.crashes + model.recycles.iter().map(|(_, times)| times).sum::<u64>();
        let is_ill = fails || model.last_failure.is_some() || model.outage.is_some();
        std::cmp::Reverse((is_ill, trouble, model.state != ModelState::Unloaded))
    });
    all.truncate(MAX_LOGGED_MODELS);
    all
}

async fn add_series(contents: &mut ReportContents, client: &AdminClient, models: &[&ModelView]) {
    for (number, model) in (1..).zip(models) {
        let name = model.name.as_str();
        // A day of points, each of five minutes.
        let query = [("model", name), ("range", "1d"), ("points", "288")];
        let query = query.map(|(key, value)| (key, value.to_owned()));
        let asked: Result<serde_json::Value, _> =
            with_timeout(client.json_with(Method::GET, &["series"], &query)).await;
        match asked {
            Ok(data) => {
                contents.add_json(
                    &model_file_name("series", number, name, "json"),
                    "what a model's memory did",
                    data,
                );
            }
            // The model has no series, or the instance's version has none.
            Err(why) if !why.starts_with(NO_ANSWER_PREFIX) => {}
            Err(why) => {
                return contents.add_note(&format!("series of {name}, and what comes after it: {why}"));
            }
        }
    }
}

/// The number keeps file names distinct.
fn model_file_name(folder: &str, number: usize, name: &str, end: &str) -> String {
    format!("{folder}/{number:02}-{}.{end}", name.replace('/', "-"))
}

async fn add_logs(contents: &mut ReportContents, client: &AdminClient, models: &[&ModelView]) {
    for (number, model) in (1..).zip(models) {
        let name = model.name.as_str();
        let mut lines: Vec<String> = Vec::new();
        let mut size = 0;
        let each = |line: &str, _: Option<serde::de::IgnoredAny>| {
            size += line.len();
            lines.push(line.to_owned());
            Ok(())
        };
        let asked = with_timeout(client.lines(&["models", name, "logs"], &[], each)).await;
        let mut skip = 0;
        while size > LOG_TAIL_BYTES && skip < lines.len() {
            size -= lines[skip].len();
            skip += 1;
        }
        let file = model_file_name("logs", number, name, "jsonl");
        contents.add_lines(
            &file,
            "what the processes of a model wrote last",
            lines[skip..].iter().map(String::as_str),
        );
        if let Err(why) = asked {
            // Stop here, because the other models would time out, too.
            contents.add_note(&format!("{file}, and what comes after it: {why}"));
            return;
        }
    }
}

fn add_command_line(contents: &mut ReportContents, pid: u32) {
    // In another PID namespace, this PID may be another process.
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let is_ours = program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("llama-warden"));
    let Some(bytes) = is_ours.then(|| std::fs::read(format!("/proc/{pid}/cmdline")).ok()).flatten() else {
        return;
    };
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    let line = hide_set_values(&secrets::redact_arguments(&words)).join(" ");
    contents.add_text("command.txt", "how the running instance was started", &(line + "\n"));
}

/// Values of `--set` may be secret.
fn hide_set_values(words: &[String]) -> Vec<String> {
    let mut after = false;
    let word = |word: &String| {
        let value = std::mem::replace(&mut after, word == "--set");
        let setting = if value {
            Some(("", word.as_str()))
        } else {
            word.strip_prefix("--set=").map(|rest| ("--set=", rest))
        };
        match setting.and_then(|(flag, setting)| Some((flag, setting.split_once('=')?.0))) {
            Some((flag, key)) => format!("{flag}{key}={}", secrets::REDACTED),
            None => word.clone(),
        }
    };
    words.iter().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_on_the_command_line_is_named_and_not_shown() {
        let words =
            ["warden", "serve", "--set", "defaults.env.HF_TOKEN=hush", "--set=a.b=c", "--", "-c", "1=2"];
        let words: Vec<String> = words.map(str::to_owned).to_vec();
        assert_eq!(
            hide_set_values(&words),
            ["warden", "serve", "--set", "defaults.env.HF_TOKEN=***", "--set=a.b=***", "--", "-c", "1=2"]
        );
    }
}
