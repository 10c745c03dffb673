//! What a running instance says: its status, its metrics, what its processes wrote last, and what their memory did. One that does not answer in time is said
//! not to, because that is what the report may be about.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use warden_policies::secrets;
use warden_supervisor::{ModelState, ModelView};

use super::contents::Contents;
use crate::admin::answer::Status;
use crate::admin::client::Client;
use crate::cli::block_on;
use crate::cli::control::InstanceArgs;
use crate::cli::status::table;
use crate::exit::Failure;

/// How long an answer may take: a healthy instance needs milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// How it begins what an instance did not say in time.
const NO_ANSWER: &str = "no answer";
/// Bytes of the end of one model's output.
const LOG: usize = 256 << 10;
/// Models whose output is asked for, and whose memory: first those that are ill.
const LOGS: usize = 40;
/// Of which stretch of time memory is asked for, and in how many points at most: five minutes each.
const SERIES: [(&str, &str); 2] = [("range", "1d"), ("points", "288")];

/// Asks the instance that is meant, if one runs.
///
/// # Errors
///
/// Several run, and none is named.
pub(super) fn gather(contents: &mut Contents, which: &InstanceArgs) -> Result<Option<Status>, Failure> {
    let client = match which.client() {
        Ok(client) => client,
        // Several: only whoever asks knows which one.
        Err(several @ Failure::Usage { .. }) => return Err(several),
        Err(none) => {
            contents.note(&format!("status, logs: {none}"));
            return Ok(None);
        }
    };
    block_on(ask(contents, &client))
}

async fn ask(contents: &mut Contents, client: &Client) -> Option<Status> {
    let status: serde_json::Value = match in_time(client.json(Method::GET, &["status"])).await {
        Ok(status) => status,
        Err(why) => {
            contents.note(&format!("status, logs: {why}"));
            return None;
        }
    };
    contents.json(
        "status.json",
        "models and processes of the running instance, for programs",
        status.clone(),
    );
    let read: Option<Status> = serde_json::from_value(status).ok();
    match &read {
        Some(status) => {
            contents.text("status.txt", "the same for people", &table(status));
            command_line(contents, status.instance.pid);
            let chosen = chosen(&status.fleet.models);
            logs(contents, client, &chosen).await;
            series(contents, client, &chosen).await;
            if status.fleet.models.len() > LOGS {
                let more = status.fleet.models.len() - LOGS;
                contents.note(&format!("logs, series: those of {more} more models; the ill ones come first"));
            }
        }
        None => contents.note("status.txt: the status is that of another version, and cannot be read"),
    }
    match in_time(client.text(&["metrics"])).await {
        Ok(text) => contents.text("metrics.txt", "counters and gauges of the running instance", &text),
        Err(why) => contents.note(&format!("metrics.txt: {why}")),
    }
    read
}

async fn in_time<T>(asking: impl Future<Output = Result<T, Failure>>) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, asking).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("{NO_ANSWER} within {} s", PATIENCE.as_secs())),
    }
}

/// The models that a report is likely to be about: those that fail, then those that crashed or were replaced most, then those
/// that run.
fn chosen(models: &[Arc<ModelView>]) -> Vec<&ModelView> {
    let mut all: Vec<&ModelView> = models.iter().map(|model| &**model).collect();
    all.sort_by_key(|model| {
        let fails = matches!(model.state, ModelState::Failed | ModelState::Backoff);
        let trouble = model.crashes + model.recycles.iter().map(|(_, times)| times).sum::<u64>();
        let is_ill = fails || model.last_failure.is_some() || model.outage.is_some();
        std::cmp::Reverse((is_ill, trouble, model.state != ModelState::Unloaded))
    });
    all.truncate(LOGS);
    all
}

/// What the memory of each model did within a day.
async fn series(contents: &mut Contents, client: &Client, models: &[&ModelView]) {
    for (number, model) in (1..).zip(models) {
        let name = model.name.as_str();
        let query: Vec<_> = [("model", name)].into_iter().chain(SERIES).collect();
        let query: Vec<_> = query.into_iter().map(|(key, value)| (key, value.to_owned())).collect();
        let asked: Result<serde_json::Value, _> =
            in_time(client.json_with(Method::GET, &["series"], &query)).await;
        match asked {
            Ok(data) => {
                contents.json(&file("series", number, name, "json"), "what a model's memory did", data);
            }
            // Nothing is kept of it, or the version knows no series.
            Err(why) if !why.starts_with(NO_ANSWER) => {}
            Err(why) => return contents.note(&format!("series of {name}, and what comes after it: {why}")),
        }
    }
}

/// A name as a file's. By number, too: two names may look alike as files.
fn file(folder: &str, number: usize, name: &str, end: &str) -> String {
    format!("{folder}/{number:02}-{}.{end}", name.replace('/', "-"))
}

/// What was written by each model's processes, the end of it.
async fn logs(contents: &mut Contents, client: &Client, models: &[&ModelView]) {
    for (number, model) in (1..).zip(models) {
        let name = model.name.as_str();
        let mut lines: Vec<String> = Vec::new();
        let mut size = 0;
        let each = |line: &str, _: Option<serde::de::IgnoredAny>| {
            size += line.len();
            lines.push(line.to_owned());
            Ok(())
        };
        let asked = in_time(client.lines(&["models", name, "logs"], &[], each)).await;
        // Of its beginning only what leaves enough room for its end.
        let mut skip = 0;
        while size > LOG && skip < lines.len() {
            size -= lines[skip].len();
            skip += 1;
        }
        let file = file("logs", number, name, "jsonl");
        contents.lines(
            &file,
            "what the processes of a model wrote last",
            lines[skip..].iter().map(String::as_str),
        );
        if let Err(why) = asked {
            // The others would be waited for as long.
            contents.note(&format!("{file}, and what comes after it: {why}"));
            return;
        }
    }
}

/// How the instance was started, as far as this user may see it.
fn command_line(contents: &mut Contents, pid: u32) {
    // In another namespace the number is that of somebody else's process.
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let is_ours = program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("llama-warden"));
    let Some(bytes) = is_ours.then(|| std::fs::read(format!("/proc/{pid}/cmdline")).ok()).flatten() else {
        return;
    };
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    let line = set(&secrets::arguments(&words)).join(" ");
    contents.text("command.txt", "how the running instance was started", &(line + "\n"));
}

/// Words of ours, without what `--set` sets: that may be anything.
fn set(words: &[String]) -> Vec<String> {
    let mut after = false;
    let word = |word: &String| {
        let value = std::mem::replace(&mut after, word == "--set");
        let setting = if value {
            Some(("", word.as_str()))
        } else {
            word.strip_prefix("--set=").map(|rest| ("--set=", rest))
        };
        match setting.and_then(|(flag, setting)| Some((flag, setting.split_once('=')?.0))) {
            Some((flag, key)) => format!("{flag}{key}={}", secrets::HIDDEN),
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
            set(&words),
            ["warden", "serve", "--set", "defaults.env.HF_TOKEN=***", "--set=a.b=***", "--", "-c", "1=2"]
        );
    }
}
